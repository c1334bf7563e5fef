"""Files of records: CSV, TSV, JSONL and Parquet, read in chunks and only the columns that are needed."""

import csv
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.records import Layout, Records
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
        chunks: for a layout, data frames that hold at least the columns of the layout; with `as_text`, nothing
            but scores and weights is parsed as numbers.
        text_only: whether the format cannot tell numbers from text.
        provenance: makes the entries that say where the rows came from.
    """

    name: str
    columns: Sequence[str]
    chunks: Callable[[Layout, bool], Iterator[pd.DataFrame]]
    text_only: bool = False
    provenance: Callable[[], Mapping[str, Any]] = dict


def collect(source: Source, layout: Layout, as_text: bool = False) -> Parts:
    """Read all chunks of a source into the parts of records."""
    label = Encoder(f"label {layout.label!r}")
    prediction = Encoder(f"prediction {layout.prediction!r}")
    groups = {name: Encoder(f"group {name!r}") for name in layout.groups}
    numbers: dict[str, list[NDArray[np.float64]]] = {n: [] for n in (*layout.score, layout.weight) if n is not None}
    ids: dict[str, list[NDArray[Any]]] = {n: [] for n in (layout.id, layout.cluster) if n is not None}
    with warnings.catch_warnings():
        # A column of ids that is part number, part text: dealt with below.
        warnings.simplefilter("ignore", pd.errors.DtypeWarning)
        for chunk in source.chunks(layout, as_text):
            label.add(chunk[layout.label])
            if layout.prediction is not None:
                prediction.add(chunk[layout.prediction])
            for name, encoder in groups.items():
                encoder.add(chunk[name])
            for name, values in numbers.items():
                values.append(as_floats(chunk[name], f"column {name!r}"))
            for name, values in ids.items():
                values.append(np.asarray(chunk[name]))
    if source.text_only and not as_text:
        # A column that looked like numbers at first and is text after all: "007" must not have become 7 on the way.
        kinds = {values.dtype.kind for chunks in ids.values() for values in chunks}
        if not kinds <= {"i", "u"} or any(e.is_mixed() for e in (label, prediction, *groups.values())):
            return collect(source, layout, as_text=True)
    found = {name: _joined(values, float) for name, values in numbers.items()}
    keys = {name: _joined(values, object) for name, values in ids.items()}
    return Parts(
        label=label.finish(source.text_only),
        prediction=None if layout.prediction is None else prediction.finish(source.text_only),
        scores=np.column_stack([found[name] for name in layout.score]) if layout.score else None,
        groups={name: encoder.finish(source.text_only) for name, encoder in groups.items()},
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
        source = {"csv": _csv, "tsv": _csv, "jsonl": _jsonl, "parquet": _parquet}[file_format(name)](file, name)
        # Hashing lets other threads run, so it costs next to nothing while the file is being parsed.
        digest = pool.submit(_sha256, file)
        yield replace(source, provenance=lambda: {"path": name, "sha256": digest.result()})


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


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


def _csv(file: Path, name: str) -> Source:
    """CSV and TSV: a header, then rows. In .csv files the header tells whether , ; tab or | separates."""
    head = _check_text(file, name)
    first_line = head.partition(b"\n")[0]
    separator = "\t" if file_format(name) == "tsv" else max(",;\t|", key=lambda s: first_line.count(s.encode()))
    with io.TextIOWrapper(_open_binary(file), encoding="utf-8-sig", newline="") as text:
        rows = list(islice((row for row in csv.reader(text, delimiter=separator) if row), 2))
    if len(rows) < 2:
        raise InputError(f"{name} has a header but no rows; at least one row is expected")
    columns, first = [cell.strip() for cell in rows[0]], rows[1]
    if len(first) > len(columns):
        raise InputError(f"{name}: {_ragged(2, len(first), len(columns))}")

    def chunks(layout: Layout, as_text: bool) -> Iterator[pd.DataFrame]:
        even = _is_even(file, name, separator, len(columns))
        place = {wanted: columns.index(wanted) for wanted in layout.columns}
        numbers = {place[n] for n in (*layout.score, layout.weight) if n is not None}
        ids = {place[n] for n in (layout.id, layout.cluster) if n is not None}
        classes = {place[n] for n in (layout.label, layout.prediction, *layout.groups) if n is not None}
        # As categories each distinct value is looked at only once.
        dtypes: dict[int, Any] = dict.fromkeys(classes, "category")
        if as_text:
            dtypes = dict.fromkeys(classes | ids, object)
        missing: dict[Any, Sequence[str]] = dict.fromkeys(numbers - classes, _NO_NUMBER)
        missing |= dict.fromkeys(ids - classes, ("",))
        reader = pd.read_csv(
            file,
            sep=separator,
            header=0,
            # Numbered, since a header may hold a name twice.
            names=range(len(columns)),
            # Told to skip columns, pandas no longer minds lines that are too long, hence only for even files.
            usecols=sorted(place.values()) if even else None,
            dtype=dtypes,
            keep_default_na=False,
            na_values=missing,
            chunksize=CHUNK if even else CHUNK // 4,
            encoding="utf-8",
        )
        with reader:
            for chunk in reader:
                yield chunk[list(place.values())].set_axis(list(place), axis="columns")

    return Source(name, columns, chunks, text_only=True)


def _is_even(file: Path, name: str, separator: str, width: int) -> bool:
    """Whether every line is known to have `width` fields; a line that has not is an error.

    Without quotation marks, the separators and line ends alone must make a regular pattern. With them only a parser
    can tell, and False is returned; so it is for packed files.
    """
    if file.suffix.lower() in PACKED:
        return False
    sign = separator.encode()
    line_pattern = sign * (width - 1) + b"\n"
    other = bytes(set(range(256)) - set(sign + b'\n"'))
    rest = b""
    with file.open("rb") as handle:
        while block := handle.read(1 << 18):
            signs = rest + block.translate(None, other)
            lines = len(signs) // width
            if signs[: lines * width] != line_pattern * lines:
                break
            rest = signs[lines * width :]
        else:
            if rest in (b"", line_pattern[:-1]):
                return True
        handle.seek(0)
        for number, line in enumerate(handle, start=1):
            if b'"' in line:
                return False
            if line.count(sign) != width - 1 and line.strip():
                raise InputError(f"{name}: {_ragged(number, line.count(sign) + 1, width)}")
    return True


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

    def chunks(layout: Layout, as_text: bool) -> Iterator[pd.DataFrame]:
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

    def chunks(layout: Layout, as_text: bool) -> Iterator[pd.DataFrame]:
        with pq.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=CHUNK, columns=list(layout.columns)):
                yield batch.to_pandas()

    return Source(name, columns, chunks)


def write(records: Records, path: str | os.PathLike[str]) -> None:
    """Write records in the format of the suffix; the file appears whole or not at all."""
    file, kind = Path(path), file_format(str(path))
    part = file.with_name(f".{file.name}.part")
    with output_errors(file):
        try:
            _WRITERS[kind](records, part, file.suffix.lower())
            os.replace(part, file)
        finally:
            part.unlink(missing_ok=True)


@contextmanager
def output_errors(file: Path) -> Iterator[None]:
    """Turn a failure to write into one line about the file."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"{file} cannot be written: there is no folder {file.parent}") from None
    except OSError as error:
        raise InputError(f"{file} cannot be written: {error.strerror or error}") from None


def _frames(records: Records) -> Iterator[pd.DataFrame]:
    for start in range(0, len(records), CHUNK):
        yield records.take(slice(start, start + CHUNK)).to_frame()


def _create_text(part: Path, suffix: str) -> Any:
    packing = PACKED.get(suffix)
    create = open if packing is None else import_module(packing).open
    return create(part, "wt", encoding="utf-8", newline="")


def _write_table(records: Records, part: Path, suffix: str, separator: str = ",") -> None:
    with _create_text(part, suffix) as text:
        for i, frame in enumerate(_frames(records)):
            frame.to_csv(text, sep=separator, index=False, header=i == 0, lineterminator="\n")


def _write_jsonl(records: Records, part: Path, suffix: str) -> None:
    with _create_text(part, suffix) as text:
        for frame in _frames(records):
            names = list(frame)
            for row in zip(*(frame[name].tolist() for name in names), strict=True):
                text.write(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n")


def _write_parquet(records: Records, part: Path, suffix: str) -> None:
    try:
        records.to_frame().to_parquet(part, engine="pyarrow", index=False)
    except ImportError:
        raise InputError(NO_PYARROW) from None


_WRITERS: Mapping[str, Callable[[Records, Path, str], None]] = {
    "csv": _write_table,
    "tsv": partial(_write_table, separator="\t"),
    "jsonl": _write_jsonl,
    "parquet": _write_parquet,
}
