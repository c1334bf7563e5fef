"""The folder of a grid's results: one line per cell in results.jsonl, and one file of records. Imports no torch.

A line is added when its records are safe, so that whatever kills the run, all that is listed is there; the cells in
flight are run again.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from fairhead.errors import InputError
from fairhead.records import Records
from fairhead.store import append_lines, locked, made_folder, reading, whole_file, whole_lines

Row = Mapping[str, Any]


class Store:
    """The results of a grid in one folder."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = made_folder(folder)
        self._rows = self.folder / "results.jsonl"
        self._records = self.folder / "records"

    def alone(self) -> AbstractContextManager[Path]:
        """Keep other runs from writing here at the same time: each would lose what the other adds."""
        return locked(self.folder, hint="and put both together with --take-in")

    def add(self, row: Row, records: Records | None = None) -> None:
        """Keep the result of one cell; records first, then the line that vouches for them."""
        if records is not None:
            made_folder(self._records)
            with whole_file(self._file(row)) as part:
                records.to_frame().to_csv(part, index=False, lineterminator="\n", compression="gzip")
        append_lines(self._rows, [row])

    def rows(self) -> list[dict[str, Any]]:
        """The latest row of every cell and settings whose records are there, failed ones too, in the file's order."""
        with reading(self._rows, "is not a file of results: remove it"):
            lines = whole_lines(self._rows)
        latest: dict[tuple[str, str], dict[str, Any]] = {}
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError:  # cut short by a kill
                continue
            if isinstance(row, dict) and "cell" in row:
                self.need(row, ("fingerprint", "status"), f", line {number}")
                if row["status"] == "failed" or self._file(row).exists():
                    latest[row["cell"], row["fingerprint"]] = row
        return list(latest.values())

    def records(self, row: Row) -> Records:
        """The records of a row."""
        import pandas as pd

        file = self._file(row)
        with reading(file, f"does not hold the records of {row['cell']} whole: remove it, and the cell is run again"):
            # All of it as text: a class called "NA" or "1" stays what it is.
            frame = pd.read_csv(file, dtype=str, keep_default_na=False)
            frame[["id", "label", "prediction"]]
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

    def _file(self, row: Row) -> Path:
        # ~ can be in no name of a grid, so that two cells never have one file.
        return self._records / f"{row['cell']}.{row['fingerprint']}.csv.gz".replace("/", "~")

    def need(self, row: Row, fields: Iterable[str], where: str = "") -> None:
        """Refuse a row that lacks a field."""
        for field in fields:
            if field not in row:
                cell = f"the result of {row['cell']} lacks {field!r}"
                raise InputError(f"{self._rows}{where}: {cell}: remove its line, and the cell is run again")

    def reading(self, row: Row) -> AbstractContextManager[None]:
        """What goes wrong in the block with a row that may be anything is an `InputError` that names it."""
        return reading(self._rows, f"has an odd result of {row['cell']}: remove its line, and the cell is run again")


def has_result(row: Row) -> bool:
    """Whether a row's cell need not run again: a loss that is not finite is the result of a trial, and would be again.

    Example:
        >>> has_result({"status": "done"}), has_result({"status": "failed"})
        (True, False)
    """
    return row["status"] == "done" or bool(row.get("diverged"))
