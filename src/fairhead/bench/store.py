"""Results on disk: one line a cell in results.jsonl, its records in records.zip. Imports no torch.

Two files whatever the size of the grid (and an empty one, by which writers keep apart). A line is added when its
records are safe, so that whatever kills the run, all that is listed is there; the cells in flight are run again.
"""

import json
import os
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from fairhead.errors import InputError
from fairhead.records import Records


class Store:
    """The results of a grid in one folder.

    Example:
        >>> import tempfile
        >>> store = Store(tempfile.mkdtemp())
        >>> records = Records.from_arrays(["n", "y"], ["n", "n"], groups={"sex": ["f", "m"]}, id=["1", "2"])
        >>> store.add({"cell": "d/b/erm/0", "fingerprint": "ab", "status": "done", "classes": ["n", "y"]}, records)
        >>> row = Store(store.folder).rows()[0]
        >>> row["cell"], store.records(row).prediction.values().tolist()
        ('d/b/erm/0', ['n', 'n'])
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        self._rows = self.folder / "results.jsonl"
        self._archive = self.folder / "records.zip"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other runs from writing here at the same time: each would lose what the other adds.

        Raises:
            InputError: another run does so now (the system lets go when that ends, however it ends), or the folder
                cannot be written.
        """
        try:
            import fcntl
        except ModuleNotFoundError:  # Windows: nobody keeps watch
            yield
            return
        # A file, not the folder: network file systems lock what is open for writing. It stays: removing it would let
        # two others lock files of the same name.
        try:
            file = (self.folder / ".lock").open("ab")
        except OSError as error:
            raise _unwritable(self.folder, error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"another run is writing to {str(self.folder)!r}: wait for it, or give another folder and put both "
                    "together with --take-in"
                ) from None
            except OSError:  # a file system without locks
                pass
            yield

    def add(self, row: Mapping[str, Any], records: Records | None = None) -> None:
        """Keep the result of one cell; records first, then the line that vouches for them."""
        if records is not None:
            self._add_member(_member(row), records.to_frame().to_csv(index=False, lineterminator="\n"))
        line = json.dumps(row, ensure_ascii=False, allow_nan=False, default=str) + "\n"
        with self._rows.open("a+b") as file:
            # A line that a kill cut short must not swallow this one.
            if file.tell() and not self._ends_well():
                file.write(b"\n")
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """The latest row of every cell and settings whose records are there, failed ones too, in the file's order."""
        members = self._members()
        latest: dict[tuple[str, str], dict[str, Any]] = {}
        for row in self._lines():
            if row.get("status") == "failed" or _member(row) in members:
                latest[row["cell"], row["fingerprint"]] = row
        return list(latest.values())

    def records(self, row: Mapping[str, Any]) -> Records:
        """The records of a row."""
        import pandas as pd

        with zipfile.ZipFile(self._archive) as archive:
            text = archive.read(_member(row))
        # All of it as text: a class called "NA" or "1" stays what it is.
        frame = pd.read_csv(BytesIO(text), dtype=str, keep_default_na=False)
        scores = [name for name in frame.columns if name == "score" or name.startswith("score:")]
        fixed = ("id", "label", "prediction", "cluster", "weight")
        table = frame[scores].to_numpy(dtype=np.float64) if scores else None
        return Records.from_arrays(
            frame["label"].to_numpy(),
            frame["prediction"].to_numpy(),
            scores=None if table is None else table[:, 0] if len(scores) == 1 else table,
            groups={name: frame[name].to_numpy() for name in frame.columns if name not in (*fixed, *scores)},
            id=frame["id"].to_numpy(),
            cluster=frame["cluster"].to_numpy() if "cluster" in frame.columns else None,
            classes=row["classes"],
        )

    def take_in(self, other: "Store") -> int:
        """Copy the finished cells of another folder that are not here yet; return how many."""
        with self.alone():
            here = {(row["cell"], row["fingerprint"]) for row in self.rows() if has_result(row)}
            new = [row for row in other.rows() if has_result(row) and (row["cell"], row["fingerprint"]) not in here]
            for row in new:
                self.add(row, other.records(row) if row["status"] == "done" else None)
        return len(new)

    def _add_member(self, name: str, text: str) -> None:
        """Add to a copy of the archive, then rename it: a kill leaves the old archive or the new one."""
        beside = self._archive.with_suffix(".part")
        beside.unlink(missing_ok=True)
        members = self._members()
        if members and name not in members:
            shutil.copyfile(self._archive, beside)
        with zipfile.ZipFile(beside, "a", zipfile.ZIP_DEFLATED) as archive:
            if name in members:  # of a run whose line is gone: this one's line must not vouch for them
                with zipfile.ZipFile(self._archive) as before:
                    for other in sorted(members - {name}):
                        archive.writestr(other, before.read(other))
            archive.writestr(name, text)
        os.replace(beside, self._archive)

    def _members(self) -> frozenset[str]:
        if not self._archive.exists():
            return frozenset()
        with zipfile.ZipFile(self._archive) as archive:
            return frozenset(archive.namelist())

    def _ends_well(self) -> bool:
        with self._rows.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def _lines(self) -> Iterable[dict[str, Any]]:
        if not self._rows.exists():
            return
        for line in self._rows.read_bytes().splitlines():
            try:
                row = json.loads(line)
            except ValueError:  # cut short by a kill
                continue
            if isinstance(row, dict) and "cell" in row:
                yield row


def _unwritable(folder: Path, error: OSError) -> InputError:
    return InputError(f"cannot write to {str(folder)!r}: {error.strerror}; give another folder")


def has_result(row: Mapping[str, Any]) -> bool:
    """Whether a row's cell need not run again: a loss that is not finite is the result of a trial, and would be again.

    Example:
        >>> has_result({"status": "done"}), has_result({"status": "failed"})
        (True, False)
    """
    return row["status"] == "done" or bool(row.get("diverged"))


def _member(row: Mapping[str, Any]) -> str:
    """Where a row's records are: the name of its cell, and the fingerprint of its settings."""
    return f"{row['cell']}.{row['fingerprint']}.csv"
