"""Reading files of records: CSV, TSV, JSONL and Parquet, in chunks, and only the columns that are needed."""

import csv
import hashlib
import io
import json
import lzma
import mmap
import os
import re
import shutil
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.records import Layout
from fairhead.records_build import Parts
from fairhead.records_columns import Coded, Encoder, as_floats

FORMATS = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
FORMATS |= {".parquet": "parquet", ".pq": "parquet"}
PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}

STDIN = "standard input"
NO_PYARROW = 'Parquet needs pyarrow, which is not installed; pip install "fairhead[parquet]"'

# Rows read at a time: enough to be fast, few enough to keep memory small.
CHUNK = 1 << 18

# Values that mean "missing" in a column of numbers, beside those that are no number anyway.
_NO_NUMBER = ["", "nan", "NaN", "NAN", "NA", "N/A", "n/a", "#N/A", "None", "null", "NULL", "<NA>"]


@dataclass(frozen=True)
class Source:
    """A table that can be walked through in chunks.

    Attributes:
        name: what messages call it.
        columns: the names of its columns.
        chunks: for a layout, data frames that hold at least the columns of the layout; those named in the
            second argument are not to be parsed as numbers.
        text_only: whether the format cannot tell numbers from text.
        provenance: makes the entries that say where the rows came from.
    """

    name: str
    columns: Sequence[str]
    chunks: Callable[[Layout, Collection[str]], Iterator[pd.DataFrame]]
    text_only: bool = False
    provenance: Callable[[], Mapping[str, Any]] = dict


def collect(source: Source, layout: Layout, as_text: Collection[str] = ()) -> Parts:
    """Read all chunks of a source into the parts of records."""
    encoders = {name: Encoder(f"column {name!r}") for name in layout.groups}
    encoders[layout.label] = Encoder(f"label {layout.label!r}")
    if layout.prediction is not None:
        encoders[layout.prediction] = Encoder(f"prediction {layout.prediction!r}")
    numbers: dict[str, list[NDArray[np.float64]]] = {n: [] for n in (*layout.score, layout.weight) if n is not None}
    ids: dict[str, list[NDArray[Any]]] = {n: [] for n in (layout.id, layout.cluster) if n is not None}
    with warnings.catch_warnings():
        # A column of ids that is part number, part text: dealt with below.
        warnings.simplefilter("ignore", pd.errors.DtypeWarning)
        for chunk in source.chunks(layout, as_text):
            for name, encoder in encoders.items():
                encoder.add(chunk[name])
            for name, values in numbers.items():
                values.append(as_floats(chunk[name], f"column {name!r}"))
            for name, values in ids.items():
                values.append(np.asarray(chunk[name]))
    if source.text_only:
        # A column that looked like numbers at first and is text after all: "007" must not have become 7 on the way.
        mixed = {name for name, chunks in ids.items() if not {values.dtype.kind for values in chunks} <= {"i", "u"}}
        mixed |= {name for name, encoder in encoders.items() if encoder.is_mixed()}
        if not mixed <= set(as_text):
            return collect(source, layout, mixed | set(as_text))
    coded = {name: encoder.finish(source.text_only) for name, encoder in encoders.items()}
    found = {name: _joined(values, float) for name, values in numbers.items()}
    keys = {name: _joined(values, object) for name, values in ids.items()}
    return Parts(
        label=coded[layout.label],
        prediction=None if layout.prediction is None else coded[layout.prediction],
        scores=np.column_stack([found[name] for name in layout.score]) if layout.score else None,
        groups={name: coded[name] for name in layout.groups},
        id=None if layout.id is None else keys[layout.id],
        cluster=None if layout.cluster is None else _coded(keys[layout.cluster], layout.cluster),
        weight=None if layout.weight is None else found[layout.weight],
    )


def _joined(chunks: list[NDArray[Any]], empty: type) -> NDArray[Any]:
    return np.concatenate(chunks) if chunks else np.zeros(0, dtype=empty)


def _coded(values: NDArray[Any], name: str) -> Coded:
    """Clusters may be as many as rows, so integers take a way without Python objects."""
    if values.dtype.kind in "iu":
        levels, codes = np.unique(values, return_inverse=True)
        return Coded(codes.astype(np.int32), tuple(levels.tolist()))
    encoder = Encoder(f"cluster {name!r}", max_levels=None)
    encoder.add(values)
    return encoder.finish()


@contextmanager
def open_source(path: str | os.PathLike[str]) -> Iterator[Source]:
    """Open a file by its suffix, or CSV on standard input for "-"; what is wrong with it becomes an `InputError`."""
    with _on_disk(path) as (file, name), _file_errors(name), ThreadPoolExecutor(1) as pool:
        kind = file_format(name)
        lines = None
        if kind in ("csv", "tsv"):
            source, lines = _csv(file, name, kind)
        else:
            source = _jsonl(file, name) if kind == "jsonl" else _parquet(file, name)
        # Hashing and most of parsing let other threads run, so the scan costs little while the file is being parsed.
        scan = pool.submit(_scan, file, lines)
        try:
            yield replace(source, provenance=lambda: {"path": name, "sha256": scan.result().sha256})
        except InputError:
            # A line with too many fields may look like anything; say so first.
            scan.result().check(name)
            raise
        scan.result().check(name)


def file_format(name: str) -> str:
    """The format that a file name stands for: "csv", "tsv", "jsonl" or "parquet".

    Example:
        >>> file_format("preds.csv.gz")
        'csv'
    """
    if name == STDIN:
        return "csv"
    suffixes = Path(name.lower()).suffixes
    packed = bool(suffixes) and suffixes[-1] in PACKED
    suffix = "".join(suffixes[-2:-1] if packed else suffixes[-1:])
    kind = FORMATS.get(suffix)
    if kind is None or (packed and kind == "parquet"):
        raise InputError(
            f"{name}: the suffix {''.join(suffixes[-2:]) or '(none)'} is not known; .csv, .tsv, .jsonl (each also with "
            ".gz, .bz2 or .xz) or .parquet is expected"
        )
    return kind


@contextmanager
def _on_disk(path: str | os.PathLike[str]) -> Iterator[tuple[Path, str]]:
    """The file and its name; standard input is copied to a temporary file first, since it is read twice."""
    if str(path) != "-":
        yield Path(path), str(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "stdin.csv")
        with file.open("wb") as handle:
            shutil.copyfileobj(sys.stdin.buffer, handle)
        yield file, STDIN


@contextmanager
def _file_errors(name: str) -> Iterator[None]:
    """Turn what the operating system and the parsers say into one line about the file."""
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(f"{name}: there is no such file") from None
    except IsADirectoryError:
        raise InputError(f"{name} is a directory; a file is expected") from None
    except PermissionError:
        raise InputError(f"{name}: no permission to read it") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text ({error.reason}); save it as UTF-8") from None
    except pd.errors.ParserError as error:
        raise InputError(f"{name}: {_parser_message(str(error))}") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise InputError(f"{name} cannot be read: {error}") from None


def _parser_message(message: str) -> str:
    if found := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", message):
        return _ragged(int(found[2]), int(found[3]), int(found[1]))
    if found := re.search(r"EOF inside string starting at row (\d+)", message):
        return f"a quotation mark opened in row {int(found[1])} is never closed"
    return message.removeprefix("Error tokenizing data. C error: ")


def _ragged(line: int, found: int, expected: int) -> str:
    return (
        f"line {line:,} has {found} fields where the header has {expected}; text that holds the separator must be "
        "in quotation marks"
    )


def _open_binary(file: Path) -> Any:
    """The file as bytes, unpacked."""
    packing = PACKED.get(file.suffix.lower())
    return file.open("rb") if packing is None else import_module(packing).open(file, "rb")


def _check_text(file: Path, name: str) -> bytes:
    """The first bytes of a text file; an empty or a binary one is refused."""
    with _open_binary(file) as handle:
        head = handle.read(1 << 16)
    if not head.strip():
        raise InputError(f"{name} is empty; a header and at least one row are expected")
    if b"\0" in head:
        raise InputError(f"{name} is not text (it holds NUL bytes); CSV, TSV or JSONL as UTF-8 is expected")
    return bytes(head)


class _Lines(NamedTuple):
    """What the lines of a CSV file without quotation marks must look like."""

    separator: str
    width: int


def _csv(file: Path, name: str, kind: str) -> tuple[Source, _Lines | None]:
    """CSV and TSV: a header, then rows. In .csv files the header tells whether , ; tab or | separates."""
    first_line = _check_text(file, name).partition(b"\n")[0]
    separator = "\t" if kind == "tsv" else max(",;\t|", key=lambda sign: first_line.count(sign.encode()))
    with io.TextIOWrapper(_open_binary(file), encoding="utf-8-sig", newline="") as text:
        rows = list(islice((row for row in csv.reader(text, delimiter=separator) if row), 2))
    if len(rows) < 2:
        raise InputError(f"{name} has a header but no rows; at least one row is expected")
    columns, first = [cell.strip() for cell in rows[0]], rows[1]
    if len(first) > len(columns):
        raise InputError(f"{name}: {_ragged(2, len(first), len(columns))}")
    lines = _Lines(separator, len(columns)) if _is_plain(file) else None

    def chunks(layout: Layout, as_text: Collection[str]) -> Iterator[pd.DataFrame]:
        place = {wanted: columns.index(wanted) for wanted in layout.columns}
        numbers = {place[n] for n in (*layout.score, layout.weight) if n is not None}
        ids = {place[n] for n in (layout.id, layout.cluster) if n is not None}
        classes = {place[n] for n in (layout.label, layout.prediction, *layout.groups) if n is not None}
        # As categories each distinct value is looked at only once.
        dtypes: dict[int, Any] = dict.fromkeys(classes, "category")
        dtypes |= dict.fromkeys((place[column] for column in as_text), object)
        missing: dict[Any, Sequence[str]] = dict.fromkeys(numbers - classes, _NO_NUMBER)
        missing |= dict.fromkeys(ids - classes, ("",))
        reader = pd.read_csv(
            file,
            sep=separator,
            header=0,
            # Numbered, since a header may hold a name twice.
            names=range(len(columns)),
            # Told to skip columns, pandas no longer minds lines that are too long: then `_scan` must look at them.
            usecols=sorted(place.values()) if lines else None,
            dtype=dtypes,
            keep_default_na=False,
            na_values=missing,
            chunksize=CHUNK if lines else CHUNK // 4,
            encoding="utf-8",
        )
        with reader:
            for chunk in reader:
                yield chunk[list(place.values())].set_axis(list(place), axis="columns")

    return Source(name, columns, chunks, text_only=True), lines


def _is_plain(file: Path) -> bool:
    """Whether a text file is neither packed nor holds a quotation mark, so that every line end ends a row."""
    if file.suffix.lower() in PACKED:
        return False
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(b'"') < 0


class _Scan(NamedTuple):
    """What one pass over the bytes of a file shows: its hash and its first uneven line, if the lines were looked at."""

    sha256: str
    uneven: tuple[int, int, int] | None

    def check(self, name: str) -> None:
        if self.uneven is not None:
            raise InputError(f"{name}: {_ragged(*self.uneven)}") from None


def _scan(file: Path, lines: _Lines | None) -> _Scan:
    """Hash a file and, given `lines`, see whether each has as many fields as the header."""
    if lines is None:
        with file.open("rb") as handle:
            return _Scan(hashlib.file_digest(handle, "sha256").hexdigest(), None)
    sign, width = lines.separator.encode(), lines.width
    # Separators and line ends alone must make a regular pattern.
    pattern = sign * (width - 1) + b"\n"
    other = bytes(set(range(256)) - set(sign + b"\n"))
    digest, even, rest = hashlib.sha256(), True, b""
    with file.open("rb") as handle:
        while block := handle.read(1 << 18):
            digest.update(block)
            signs = rest + block.translate(None, other)
            rows = len(signs) // width
            even = even and signs[: rows * width] == pattern * rows
            rest = signs[rows * width :]
    even = even and rest in (b"", pattern[:-1])
    return _Scan(digest.hexdigest(), None if even else _uneven_line(file, sign, width))


def _uneven_line(file: Path, sign: bytes, width: int) -> tuple[int, int, int] | None:
    """Line number, fields found and fields expected of the first line that is neither blank nor even."""
    with file.open("rb") as handle:
        for number, line in enumerate(handle, start=1):
            if line.count(sign) != width - 1 and line.strip():
                return number, line.count(sign) + 1, width
    return None


def _jsonl(file: Path, name: str) -> Source:
    """One JSON object a line; its columns are the keys seen in the first hundred lines."""
    _check_text(file, name)

    def objects() -> Iterator[dict[str, Any]]:
        with _open_binary(file) as handle:
            for number, line in enumerate(handle, start=1):
                if not line.strip():
                    continue
                try:
                    found = json.loads(line)
                except ValueError as error:
                    raise InputError(f"{name}: line {number:,} is not JSON ({error})") from None
                if not isinstance(found, dict):
                    raise InputError(f"{name}: line {number:,} is not a JSON object; {{...}} is expected")
                yield found

    def chunks(layout: Layout, as_text: Collection[str]) -> Iterator[pd.DataFrame]:
        rows = objects()
        while block := list(islice(rows, CHUNK // 4)):
            columns = {column: [row.get(column) for row in block] for column in layout.columns}
            yield pd.DataFrame(columns, dtype=object)

    seen = dict.fromkeys(key for row in islice(objects(), 100) for key in row)
    return Source(name, list(seen), chunks)


def _parquet(file: Path, name: str) -> Source:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise InputError(f"{name}: {NO_PYARROW}") from None
    try:
        columns = pq.read_schema(file).names
    except pa.ArrowInvalid as error:
        raise InputError(f"{name} is not a Parquet file: {str(error).partition('.')[0]}") from None

    def chunks(layout: Layout, as_text: Collection[str]) -> Iterator[pd.DataFrame]:
        with pq.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=CHUNK, columns=list(layout.columns)):
                yield batch.to_pandas()

    return Source(name, columns, chunks)
