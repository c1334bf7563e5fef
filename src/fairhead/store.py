"""Writing that survives a kill: a lock on a folder, files and folders that appear whole or not at all, and journals.

A full disk and a folder that cannot be written are one `InputError` and leave nothing half-written. Imports no torch.
"""

import csv
import json
import logging
import os
import shutil
import tempfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self
from zipfile import BadZipFile

from fairhead.errors import InputError

if TYPE_CHECKING:
    from numpy.typing import NDArray

LOCK = ".lock"
_PARTS = ".[0-9]*.part.*"  # what `whole_file` writes to
_OF_COMMANDS = {
    "run.json": "mitigate",
    "headmap.json": "locate",
    "groups.csv": "discover",
    "attention.json": "attention",
}
_log = logging.getLogger(__name__)
PathLike = str | os.PathLike[str]


@contextmanager
def writing(path: PathLike, hint: str = "") -> Iterator[None]:
    """Turn a failure to write into one line about the path; `hint` says what else could be done."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        if isinstance(error, FileNotFoundError) and not Path(path).absolute().parent.exists():
            reason = f"there is no folder {Path(path).parent}"
        raise InputError(f"{path} cannot be written: {reason}{f'; {hint}' if hint else ''}") from error


def refuse_pipe(path: PathLike) -> None:
    """Refuse a named pipe: opening one waits for a writer, perhaps for ever. Pipes of a shell have a writer."""
    try:
        found = not os.fspath(path).startswith(("/dev/", "/proc/")) and Path(path).is_fifo()
    except (OSError, ValueError):  # no path at all
        return
    if found:
        raise InputError(f"{path} is a named pipe; expected a file or a folder")


@contextmanager
def reading(path: PathLike, malformed: str) -> Iterator[None]:
    """Turn a failure to read into one line about the path; `malformed` says what a file that can be read is not.

    Example:
        >>> with reading("table.csv", "is not a table of numbers"):
        ...     float("x")
        Traceback (most recent call last):
            ...
        fairhead.errors.InputError: table.csv is not a table of numbers (could not convert string to float: 'x')
    """
    refuse_pipe(path)
    try:
        yield
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, csv.Error) as error:
        raise InputError(f"{path} {malformed} ({' '.join(str(error).split())})") from None
    except (KeyError, TypeError, IndexError, AttributeError, EOFError, BadZipFile, zlib.error, RecursionError):
        raise InputError(f"{path} {malformed}") from None


def read_arrays(path: PathLike, *names: str) -> "dict[str, NDArray[Any]]":
    """Arrays of an .npz file, none of them pickled."""
    import numpy as np

    # Opened here: of a file that is cut short, numpy would leave it open.
    with reading(path, f"is not an .npz file with the arrays {', '.join(names)}"), open(path, "rb") as file:
        try:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                raise KeyError
            return {name: found[name] for name in names}
        except (ValueError, RuntimeError):  # numpy advises to unpickle; a way of packing that is not known
            raise KeyError from None


def yaml_value(text: str) -> Any:
    """What YAML text says, never code; anything else is a ValueError of one line.

    Example:
        >>> yaml_value("{a: [1, 2]}")
        {'a': [1, 2]}
    """
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("lists in lists without end") from None


def made_folder(path: PathLike, hint: str = "give another folder") -> Path:
    """A folder to write to, made where it is not there, and tried: better before hours of work than after them."""
    folder = Path(path)
    with writing(folder, hint):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    return folder


def refuse_others(folder: PathLike, own: str) -> None:
    """Refuse a folder that holds what another command wrote: both write records and a report, by the same names.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "headmap.json").write_text("{}")
        ...     refuse_others(folder, "headmap.json")
    """
    for file, command in _OF_COMMANDS.items():
        if file != own and (Path(folder) / file).is_file():
            raise InputError(f"{folder} holds the results of fairhead {command} ({file}): give another folder")


@contextmanager
def locked(folder: PathLike, *, hint: str = "", wait: bool = False, name: str = LOCK) -> Iterator[Path]:
    """Keep other runs from writing to a folder, which is made where it is not there.

    The system releases the lock when the process ends, however it ends. The same thread may lock a folder again. If
    another run is writing there, that is an error with a `hint` of what to do; or `wait` for it to end. The file called
    `name` stays: removing it would let two others lock files of the same name.
    """
    from filelock import FileLock, Timeout

    folder = made_folder(folder)
    lock = FileLock(folder / name, is_singleton=True)
    with writing(folder, "give another folder"):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            told = f"another run is writing to {str(folder)!r}"
            if not wait:
                raise InputError(f"{told}: wait for it, or give another folder {hint}".rstrip()) from None
            _log.warning("%s: waiting for it", told)
            lock.acquire()
    try:
        for part in (*folder.glob(_PARTS), *folder.glob(f"*/{_PARTS}")) if name == LOCK else ():
            # A folder below with a lock of its own is another run's, which clears it away itself.
            if not _runs(int(part.name.split(".")[1])) and (part.parent == folder or not (part.parent / name).exists()):
                part.unlink(missing_ok=True)
        yield folder
    finally:
        lock.release()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True


@contextmanager
def whole_file(path: PathLike) -> Iterator[Path]:
    """A path to write to; when that is done it becomes the file `path`, which is whole or what it was before.

    A link stays one: the file that it points to is written. What is no file, such as /dev/stdout, gets the bytes.
    """
    path = Path(path)
    device = path.parent == Path("/dev") or (path.exists() and not path.is_file() and not path.is_dir())
    target = path if device else Path(os.path.realpath(path))
    folder = Path(tempfile.gettempdir()) if device else target.parent
    part = folder / f".{os.getpid()}.part.{path.name}"  # the suffixes stay: writers go by them
    with writing(path):
        try:
            yield part
            if device:
                with target.open("ab") as handle:
                    handle.write(part.read_bytes())
            else:
                _sync(part)
                os.replace(part, target)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def write_text(path: PathLike, text: str) -> None:
    """Write a text file, whole or not at all."""
    with whole_file(path) as part:
        part.write_text(text, encoding="utf-8", newline="\n")


def write_json(path: PathLike, content: Any) -> None:
    """Write JSON, whole or not at all; what JSON has no form for becomes text, and NaN is refused."""
    write_text(path, json_text(content) + "\n")


def json_text(content: Any, encoding: str = "utf-8") -> str:
    """JSON as it is written; what the encoding lacks, such as half a surrogate pair, is escaped."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, indent=1, default=str)
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return json.dumps(content, allow_nan=False, indent=1, default=str)
    return text


@contextmanager
def whole_folder(path: PathLike, progress: str | None = None) -> Iterator[Path]:
    """An empty folder to fill; when that is done it takes the place of the folder `path`, whatever was there.

    Where a run may go on from what another one wrote before it was stopped, `progress` names the file that says how far
    it came: with this file in it, the folder is kept and given to the next run, which removes the file at the end.
    Readers of `path` call `settled` first: a kill during the exchange leaves the old folder under another name.
    """
    path = Path(path)
    part, old = path.with_name(f"{path.name}.part"), path.with_name(f"{path.name}.old")

    def clear() -> None:
        if progress is None or not (part / progress).is_file():
            shutil.rmtree(part, ignore_errors=True)

    with writing(path):
        clear()
        try:
            part.mkdir(parents=True, exist_ok=progress is not None)
            yield part
            for file in part.rglob("*"):
                _sync(file)
            if settled(path).exists():
                path.rename(old)
            part.rename(path)
            shutil.rmtree(old, ignore_errors=True)
        finally:
            clear()


def settled(path: PathLike) -> Path:
    """The folder that `whole_folder` wrote, put back under its name where a kill came while it was replaced."""
    path = Path(path)
    old = path.with_name(f"{path.name}.old")
    if old.is_dir():
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(path)
    return path


@contextmanager
def filling(folder: PathLike) -> Iterator[Path]:
    """A folder to write a model to, whose files are then moved into `folder`, to what else is there.

    Its configuration is moved last: without it a folder is no model, so that half of one never looks whole.
    """
    folder = made_folder(folder)
    beside = folder / ".saving"
    with writing(folder):
        shutil.rmtree(beside, ignore_errors=True)
        try:
            beside.mkdir()
            yield beside
            for file in sorted(beside.iterdir(), key=lambda file: file.name == "config.json"):
                _sync(file)
                file.replace(folder / file.name)
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def _sync(file: Path) -> None:
    """Have the system put a file on disk: a rename must not come before what it renames."""
    if file.is_file():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def append_lines(path: PathLike, rows: Iterable[Mapping[str, Any]], allow_nan: bool = False) -> None:
    """Add JSON lines to a file; they are on disk when this returns. A last line that a kill cut short is dropped.

    A file that cannot be written has the lines that it had.
    """
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=allow_nan, default=str) for row in rows]
    content = "".join(f"{line}\n" for line in lines).encode(errors="surrogatepass")
    with writing(path), open(path, "a+b", buffering=0) as file:
        end = _end_of_lines(file)
        file.truncate(end)
        try:
            while content:
                content = content[file.write(content) :]
            os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            if not end:
                os.unlink(path)
            raise


def _end_of_lines(file: Any) -> int:
    """Where the last whole line ends."""
    end: int = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - (1 << 16))
        file.seek(start)
        found = int(file.read(end - start).rfind(b"\n"))
        if found >= 0:
            return start + found + 1
        end = start
    return 0


def whole_lines(path: PathLike) -> list[str]:
    """The lines of a file to which `append_lines` adds, without one that was cut short; none where there is no file."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    return content[: content.rfind(b"\n") + 1].decode(errors="surrogatepass").split("\n")[:-1]


@dataclass
class LineJournal(ABC):
    """A file to which a run adds what it has made, a line each, and from which it goes on after it was killed.

    The first line has the settings that a result depends on besides its texts: a file of other settings is refused. A
    kind of result is a subclass that names its `schema`, says `what` the lines hold and takes them up (`take`). One run
    at a time has it open.
    """

    schema: ClassVar[str]
    what: ClassVar[str]

    path: Path
    settings: Mapping[str, Any]

    @abstractmethod
    def take(self, row: Mapping[str, Any]) -> None:
        """Take up a line of the file."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(locked(self.path.parent, name=f".{self.path.name}{LOCK}"))
            with writing(self.path):
                lines = whole_lines(self.path)
            for number, line in enumerate(lines, start=1):
                self._take(number, line)
            self.write([] if lines else [{"schema": self.schema, "settings": dict(self.settings)}])
            self._lock = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._lock.close()

    def write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines; they are on disk when this returns."""
        append_lines(self.path, lines, allow_nan=True)

    def _take(self, number: int, line: str) -> None:
        try:
            row = json.loads(line)
            if number > 1:
                return self.take(row)
            if row.get("schema") != self.schema:
                raise InputError(f"{self.path}: is not a file of {self.what} ({self.schema}); choose another name")
            there, ours = row["settings"], json.loads(json.dumps(dict(self.settings)))
            for key in sorted({*there, *ours}):
                if there.get(key) != ours.get(key):
                    raise InputError(
                        f"{self.path}: its {self.what} were made with {key} {there.get(key)!r}, not {ours.get(key)!r}; "
                        "remove the file or choose another name"
                    )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{self.path}, line {number}: is not a line of {self.what}; remove the file") from None
