"""Files of a data set, whether it lies unpacked in a folder, in a zip archive, or is a single file.

Readers ask a `Source` for files by name and never learn which of the three it is. Nothing is ever unpacked to disk.
"""

import fnmatch
import hashlib
import json
import os
import re
import threading
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fairhead.errors import InputError
from fairhead.store import refuse_pipe

if TYPE_CHECKING:
    import pandas as pd

ON_ERROR = ("raise", "skip")
# What taking an item apart raises where it is not as its authors promise.
MALFORMED = (LookupError, TypeError, ValueError, AttributeError, SyntaxError)
PICTURES = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_CLUTTER = ("__MACOSX", ".DS_Store", "Thumbs.db")


def mend_or_skip(what: str = "it") -> str:
    """What to do about a broken item."""
    skip = "--data-option on_error=skip; in Python on_error='skip'"
    return f"mend or remove {what}, or go on without {what} ({skip})"


@dataclass
class Skips:
    """What a reader left out, and why: reason -> names.

    `drop` is for what a data set's own rules leave out (duplicates, undecided labels); `error` is for what is broken,
    and raises unless the caller asked for `on_error="skip"`.
    """

    on_error: str = "raise"
    _names: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise InputError(f"on_error is {self.on_error!r}; it must be 'raise' or 'skip'")

    def drop(self, reason: str, name: str) -> None:
        """Count a name that the rules of the data set leave out."""
        self._names.setdefault(reason, []).append(name)

    def error(self, reason: str, name: str, message: str) -> None:
        """Raise `message`, or count the name under `reason` where errors are to be skipped."""
        self.errors(reason, [name], message)

    def errors(self, reason: str, names: Sequence[str], message: str) -> None:
        """Raise `message`, or count all names under `reason` where errors are to be skipped."""
        if self.on_error == "raise":
            raise InputError(f"{message}: {mend_or_skip('it' if len(names) == 1 else 'them')}")
        for name in names:
            self.drop(reason, name)

    def malformed(self, where: str, key: str, problem: Exception) -> None:
        """Raise, or count, an item that is not as its authors describe it."""
        what = repr(problem)
        if isinstance(problem, KeyError):
            what = f"it has no {problem}"
        elif isinstance(problem, ValueError) and str(problem):
            what = str(problem)
        self.error("not as published", key, f"{where}: {key} is not as published: {what}")

    def found(self) -> dict[str, tuple[str, ...]]:
        """Reason -> names, as a data set reports it."""
        return {reason: tuple(names) for reason, names in self._names.items()}


class Source:
    """The files under a folder or in a zip archive, or one single file, under relative names with forward slashes.

    Safe to share between threads, to pickle and to fork: an archive is opened again in each process. Where a table
    lists the `names` of the files, the folder is not searched.
    """

    def __init__(self, path: str | os.PathLike[str], names: Sequence[str] | None = None) -> None:
        self.path = Path(path).expanduser()
        self._lock = threading.Lock()
        self._archive: zipfile.ZipFile | None = None
        self._archive_process = -1
        try:
            self.is_file = not self.path.is_dir()
            if self.is_file and self.path.exists() and not self.path.is_file():
                raise InputError(f"{self.path}: is neither a file nor a folder")
            self.is_archive = self.is_file and zipfile.is_zipfile(self.path)
            if names is None and self.is_archive:
                names = self._list_archive()
            elif names is None and self.is_file:
                self.path.open("rb").close()
                names = [self.path.name]
            elif names is None:
                names = self._list_folder()
        except FileNotFoundError:
            raise InputError(f"{self.path}: there is no such file or folder") from None
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror or error}") from None
        if self.is_file and not self.is_archive and self.path.suffix.lower() == ".zip":
            raise InputError(f"{self.path}: is called .zip but is not a complete zip archive; download it again")
        self.names: tuple[str, ...] = tuple(sorted(names))

    def __repr__(self) -> str:
        return f"Source({str(self.path)!r}, {len(self.names)} files)"

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_archive", "_archive_process")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock(), _archive=None, _archive_process=-1)

    def _list_folder(self) -> list[str]:
        def unreadable(error: OSError) -> None:
            raise error

        names, seen = [], set()
        # Links are followed, as large data sets often are links; a folder that is met again is a loop of links.
        for folder, folders, files in os.walk(self.path, onerror=unreadable, followlinks=True):
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:
                folders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            folders[:] = sorted(f for f in folders if not _is_clutter(f))
            relative = Path(folder).relative_to(self.path).as_posix()
            prefix = "" if relative == "." else f"{relative}/"
            names += [prefix + file for file in files if not _is_clutter(file)]
        return names

    def _list_archive(self) -> list[str]:
        names = []
        for info in self._open_archive().infolist():
            # What was stored, not info.filename: that is cut at a NUL and has its separators changed.
            stored = info.orig_filename.replace("\\", "/")
            if ".." in stored.split("/") or stored.startswith("/") or stored[1:2] == ":" or "\0" in stored:
                raise InputError(
                    f"{self.path}: member {info.orig_filename!r} points outside the archive; "
                    "this is not the published file, do not unpack it"
                )
            # `is_dir` breaks on a name that is empty.
            if info.filename and info.filename[-1] != "/" and not any(map(_is_clutter, info.filename.split("/"))):
                names.append(info.filename)
        return names

    def _open_archive(self) -> zipfile.ZipFile:
        # A forked child shares the file position with its parent, so each process opens its own handle.
        with self._lock:
            if self._archive is None or self._archive_process != os.getpid():
                try:
                    self._archive = zipfile.ZipFile(self.path)
                except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
                    raise InputError(f"{self.path}: damaged zip archive ({error}); download it again") from None
                self._archive_process = os.getpid()
            return self._archive

    def where(self, name: str) -> str:
        """How an error message names a file."""
        if self.is_archive:
            return f"{self.path}: {name}"
        return str(self.path if self.is_file else self.path / name)

    def read(self, name: str) -> bytes:
        """The bytes of one file."""
        try:
            if self.is_archive:
                archive = self._open_archive()
                self._refuse_size(name, archive.getinfo(name).file_size)
                return archive.read(name)
            place = self.path if self.is_file else self.path / name
            refuse_pipe(place)
            self._refuse_size(name, place.stat().st_size)
            return place.read_bytes()
        except (KeyError, FileNotFoundError):
            raise InputError(f"{self.where(name)}: there is no such file") from None
        except (zipfile.BadZipFile, zlib.error, EOFError, UnicodeDecodeError) as error:
            raise InputError(f"{self.where(name)}: damaged in the archive ({error}); download it again") from None
        except (RuntimeError, NotImplementedError) as error:
            raise InputError(
                f"{self.where(name)}: cannot be read from the archive ({error}); unpack it first"
            ) from None
        except OSError as error:
            raise InputError(f"{self.where(name)}: cannot be read: {error.strerror or error}") from None

    def length(self, name: str) -> int:
        """How many bytes a file has; 0 where that is not known."""
        try:
            archive = self._open_archive() if self.is_archive else None
            return archive.getinfo(name).file_size if archive else (self.path / name).stat().st_size
        except (KeyError, OSError):
            return 0

    def _refuse_size(self, name: str, size: int) -> None:
        """A file is read whole, and its text and what is parsed of it take their room beside it."""
        if size > os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4:
            raise InputError(f"{self.where(name)}: has {size / 1e9:,.1f} GB, more than this machine can read at once")

    def matching(self, *patterns: str) -> list[str]:
        """Names whose last part matches one of the patterns; a single file matches every pattern."""
        if self.is_file and not self.is_archive:
            return list(self.names)
        fits = re.compile("|".join(map(fnmatch.translate, patterns))).match
        return [name for name in self.names if fits(base_name(name))]

    def find(self, file: str, data_set: str = "the data set") -> str:
        """The name of the one file called `file`, at whatever depth; the shallowest where there are several."""
        found = sorted(self.matching(file), key=lambda n: (n.count("/"), n))
        if not found:
            raise self.missing(f"a file {file}", data_set)
        if len(found) > 1 and found[0].count("/") == found[1].count("/"):
            raise InputError(f"{self.path}: both {found[0]} and {found[1]} are here; give the folder of one of them")
        return found[0]

    def missing(self, expected: str, data_set: str) -> InputError:
        """The error for a folder or archive that does not hold what a reader needs."""
        tops = sorted({n.split("/")[0] + ("/" if "/" in n else "") for n in self.names})
        seen = ", ".join(tops[:6]) + (", ..." if len(tops) > 6 else "") if tops else "nothing"
        kind, n = "archive" if self.is_archive else "file" if self.is_file else "folder", len(self.names)
        return InputError(
            f"{self.path}: {data_set} needs {expected}; this {kind} holds {n} file{'s'[: n != 1]}: {seen}"
        )

    def text(self, name: str) -> str:
        """A UTF-8 text file; a byte order mark is dropped."""
        try:
            return self.read(name).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise InputError(f"{self.where(name)}: is not UTF-8 text (byte {error.start})") from None

    def json(self, name: str) -> Any:
        """A JSON document."""
        try:
            return json.loads(self.text(name))
        except json.JSONDecodeError as error:
            raise InputError(
                f"{self.where(name)}: is not complete JSON: {error.msg} (line {error.lineno}, "
                f"column {error.colno}); download it again"
            ) from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists without end
            raise InputError(f"{self.where(name)}: is not JSON that can be read ({error}); download it again") from None

    def jsonl(self, name: str, skips: Skips) -> "Iterator[Line]":
        """The objects of a JSON-lines file with their line numbers."""
        # Not splitlines(): U+2028 and its like may stand inside a JSON string.
        for number, line in enumerate(self.text(name).split("\n"), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                problem = None if isinstance(row, dict) else f"expected an object, found {type(row).__name__}"
            except json.JSONDecodeError as error:
                problem = error.msg
            except (ValueError, RecursionError) as error:
                problem = str(error)
            if problem:
                where = f"{self.where(name)}, line {number}"
                skips.error("not complete JSON", f"{name}:{number}", f"{where}: is not complete JSON: {problem}")
            else:
                yield Line(number, row)


def stamp_of(files: Iterable[str | os.PathLike[str]], *names: str) -> str:
    """Changes when one of the files does, by its size and its time; `names` are what else it is to depend on."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{os.fspath(file)}\0".encode(errors="surrogateescape"))
        with suppress(OSError):
            status = os.stat(file)
            digest.update(f"{status.st_size}\0{status.st_mtime_ns}\0".encode())
    for name in names:
        digest.update(f"{name}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def files_below(path: str | os.PathLike[str]) -> list[Path]:
    """The file itself, or all files of a folder and its folders, in order; none where nothing is there."""
    root = Path(path).expanduser()
    found = [root] if root.is_file() else (Path(folder, file) for folder, _, files in os.walk(root) for file in files)
    return sorted(file for file in found if file.is_file())  # and no pipe


def content_of(path: str | os.PathLike[str]) -> str | None:
    """A digest of the content of a file, a folder or a zip archive, whatever its path; None if it is unknown.

    Members of an archive count by their checksums, pictures in a folder by their names and sizes, all else by content.
    """
    files = files_below(path)
    try:
        return _content(os.fspath(path), stamp_of(files)) if files else None
    except (OSError, zipfile.BadZipFile):
        return None


@lru_cache(maxsize=64)
def _content(path: str, _stamp: str) -> str:
    root, digest = Path(path).expanduser(), hashlib.blake2b(digest_size=16)
    for file in files_below(root):
        digest.update(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}\0".encode(errors="surrogateescape"))
        if file != root and file.suffix.lower() in PICTURES:
            continue
        with file.open("rb") as opened:
            if not zipfile.is_zipfile(opened):
                opened.seek(0)
                digest.update(hashlib.file_digest(opened, "blake2b").digest())
                continue
            with zipfile.ZipFile(opened) as archive:
                for info in archive.infolist():
                    what = f"{info.filename}\0{info.CRC}\0{info.file_size}\0"
                    digest.update(what.encode(errors="surrogateescape"))
    return digest.hexdigest()


def base_name(name: str) -> str:
    """The last part of a name; pathlib would take seconds over the 202 599 names of CelebA."""
    return name.rpartition("/")[2]


def table_of(text: str, where: str, problem: str, **options: Any) -> "pd.DataFrame":
    """What `pandas.read_csv` reads from a text; where it cannot, the `problem` with the file is named."""
    import pandas as pd  # here: it takes longer to load than many a data set to read

    try:
        return pd.read_csv(StringIO(text), **options)
    except (ValueError, pd.errors.ParserError) as error:
        raise InputError(f"{where}: {problem}: {error}") from None


def text_field(row: Mapping[str, Any], key: str) -> str:
    """A field that must be text."""
    if not isinstance(row[key], str):
        raise TypeError(f"{key!r} should be text, found {row[key]!r}")
    return str(row[key])


def texts_field(row: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A field that must be a list of texts."""
    if not isinstance(row[key], list) or not all(isinstance(text, str) for text in row[key]):
        raise TypeError(f"{key!r} should be a list of texts, found {row[key]!r}")
    return tuple(row[key])


class Line(NamedTuple):
    """One object of a JSON-lines file."""

    number: int
    row: dict[str, Any]


def _is_clutter(part: str) -> bool:
    return part in _CLUTTER or part.startswith("._")
