"""Files of records: CSV, TSV, JSONL and Parquet. They are read in chunks, and only the columns that are needed."""

import codecs
import csv
import hashlib
import io
import json
import lzma
import os
import re
import shutil
import stat
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pandas as pd

from fairhead.errors import InputError
from fairhead.records import Records
from fairhead.records.csv_files import (
    BLOCK,
    CHUNK,
    PACKED,
    Chunk,
    Source,
    as_utf8,
    check_text,
    csv_source,
    open_binary,
)
from fairhead.records.layout import Layout, number_repeated, ragged
from fairhead.store import refuse_pipe, whole_file

FORMATS = {".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl"}
FORMATS |= {".parquet": "parquet", ".pq": "parquet"}
STDIN = "standard input"
NO_PYARROW = 'Parquet needs pyarrow, which is not installed; pip install "fairhead[parquet]"'


def values_of(source: Source, names: Sequence[str]) -> dict[str, Sequence[Any]]:
    """The values of some columns as they are: all of them text, where the format cannot tell numbers from it."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pd.errors.DtypeWarning)  # of the other columns
        for chunk in source.chunks(Layout(names[0], groups=tuple(names[1:])), names, True):
            for name, parts in found.items():
                parts.append(chunk[name].tolist() if hasattr(chunk[name], "tolist") else chunk[name])
    return {name: parts[0] if len(parts) == 1 else list(chain(*parts)) for name, parts in found.items()}


@contextmanager
def open_source(table: Any, encoding: str | None = None, decimal: str | None = None) -> Iterator[Source]:
    """Open a data frame, a file by its suffix, or CSV on standard input for "-".

    What is wrong with a file becomes an `InputError`. Text of another encoding than UTF-8, and a decimal sign other
    than the point, are read where they are named.
    """
    if not isinstance(table, str | os.PathLike):
        if encoding or decimal:
            raise InputError("an encoding and a decimal sign are for files; a data frame has been read already")
        yield _frame(table)
        return
    with _on_disk(table) as (file, name), _file_errors(name), ThreadPoolExecutor(1) as pool, ExitStack() as scratch:
        if stat.S_ISDIR(file.stat().st_mode):
            raise IsADirectoryError
        kind = file_format(name)
        if (encoding and kind == "parquet") or (decimal and kind not in ("csv", "tsv")):
            raise InputError(f"{name}: an encoding is for text and a decimal sign for CSV and TSV; leave them out")
        if decimal not in (None, ".", ","):
            raise InputError(f"the decimal sign is {decimal!r}; expected a comma or a point")
        more = {"decimal": decimal} if decimal else {}
        read = file if encoding is None else scratch.enter_context(_recoded(file, name, encoding))
        source = _READERS[kind](read, name, **more)
        # Hashing lets other threads run, so it costs little while the file is being parsed.
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
            f"{name}: the suffix {''.join(suffixes[-2:]) or '(none)'} is not known; expected .csv, .tsv, .jsonl (each "
            "also with .gz, .bz2 or .xz) or .parquet; save a sheet of a workbook as CSV"
        )
    return kind


@contextmanager
def _on_disk(path: str | os.PathLike[str]) -> Iterator[tuple[Path, str]]:
    """The file and its name; standard input is copied to a temporary file first, since it is read twice."""
    if str(path) != "-":
        refuse_pipe(path)
        yield Path(path), str(path)
        return
    if sys.stdin is None:
        raise InputError("standard input is closed: give a file instead of -")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "stdin.csv")
        with file.open("wb") as handle:
            shutil.copyfileobj(sys.stdin.buffer, handle)
        yield file, STDIN


@contextmanager
def _recoded(file: Path, name: str, encoding: str) -> Iterator[Path]:
    """A copy of a text file as UTF-8, unpacked."""
    try:
        codecs.lookup(encoding)
    except LookupError:
        raise InputError(f"the encoding {encoding!r} is not known; cp1252, latin-1 and utf-16 are examples") from None
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy.csv")
        with io.TextIOWrapper(open_binary(file, name), encoding, newline="") as text, copy.open("wb") as handle:
            while part := text.read(BLOCK):
                handle.write(part.encode())
        yield copy


@contextmanager
def _file_errors(name: str) -> Iterator[None]:
    """Turn what the operating system and the parsers say into one line about the file."""
    try:
        yield
    except InputError:
        raise
    except FileNotFoundError:
        fetch = "; it is an address: download the file and give its path" if "://" in name else ""
        raise InputError(f"{name}: there is no such file{fetch}") from None
    except IsADirectoryError:
        raise InputError(f"{name} is a directory; expected a file") from None
    except PermissionError:
        raise InputError(f"{name}: no permission to read it") from None
    except UnicodeDecodeError as error:
        if error.encoding.replace("-", "").lower() != "utf8":
            raise InputError(f"{name} is not {error.encoding} text ({error.reason}); name another encoding") from None
        raise InputError(f"{name} is not UTF-8 text ({error.reason}); {as_utf8(name, 'cp1252')}") from None
    except UnicodeError as error:
        raise InputError(f"{name}: {error}; name another encoding") from None
    except csv.Error as error:
        raise InputError(f"{name}: {error}; is a line end or a quotation mark missing?") from None
    except pd.errors.ParserError as error:
        raise InputError(f"{name}: {_parser_message(str(error))}") from None
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise InputError(f"{name} cannot be read: {error}") from None


def _parser_message(message: str) -> str:
    if found := re.search(r"Expected (\d+) fields in line (\d+), saw (\d+)", message):
        return ragged(int(found[2]), int(found[3]), int(found[1]))
    if found := re.search(r"EOF inside string starting at row (\d+)", message):
        return f"a quotation mark opened in row {int(found[1])} is never closed"
    return message.removeprefix("Error tokenizing data. C error: ")


def _jsonl(file: Path, name: str) -> Source:
    """One JSON object a line; its columns are the keys of all of them, and `outer.inner` of objects in objects."""
    check_text(file, name)

    def objects() -> Iterator[dict[str, Any]]:
        with open_binary(file, name) as handle:
            for number, line in enumerate(handle, start=1):
                if not line.strip():
                    continue
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError) as error:  # lists in lists without end
                    raise InputError(f"{name}: line {number:,} is not JSON ({error})") from None
                if not isinstance(found, dict):
                    raise InputError(f"{name}: line {number:,} is not a JSON object; expected {{...}}")
                yield found

    def chunks(layout: Layout, as_text: Collection[str], careful: bool) -> Iterator[Chunk]:
        rows = objects()
        while block := list(islice(rows, CHUNK // 4)):
            yield {column: [_field(row, column) for row in block] for column in layout.columns}

    seen: dict[str, None] = {}
    for row in objects():
        if not row.keys() <= seen.keys() or any(isinstance(value, dict) for value in row.values()):
            seen |= dict.fromkeys(_fields(row))
    return Source(name, list(seen), chunks)


def _fields(row: Mapping[str, Any], outer: str = "") -> Iterator[str]:
    """The keys of an object, each followed by those of the object that it holds: `body`, `body.text`."""
    for key, value in row.items():
        yield outer + key
        if isinstance(value, dict):
            yield from _fields(value, f"{outer}{key}.")


def _field(row: Mapping[str, Any], name: str) -> Any:
    """The value of a key that `_fields` gives; None where it is not there."""
    if name in row or "." not in name:
        return row.get(name)
    parts = name.split(".")
    for k in range(1, len(parts)):
        inner = row.get(".".join(parts[:k]))
        found = _field(inner, ".".join(parts[k:])) if isinstance(inner, dict) else None
        if found is not None:  # a key may hold a point itself
            return found
    return None


def _parquet(file: Path, name: str) -> Source:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise InputError(f"{name}: {NO_PYARROW}") from None
    try:
        schema = pq.read_schema(file)
        paths = {".".join(path): path for path in _arrow_fields(schema)} | {name: (name,) for name in schema.names}
    except pa.ArrowException as error:
        raise InputError(f"{name} is not a Parquet file: {str(error).partition('.')[0]}") from None

    def chunks(layout: Layout, as_text: Collection[str], careful: bool) -> Iterator[Chunk]:
        try:
            with pq.ParquetFile(file) as opened:
                for batch in opened.iter_batches(batch_size=CHUNK, columns=list(layout.columns)):
                    batch.validate(full=True)  # text that is not UTF-8 would be found too late
                    # What pandas had as an index is a column here, and whole numbers beside missing ones stay exact.
                    exact = {"integer_object_nulls": True}
                    yield {c: _arrow_field(batch, paths[c]).to_pandas(**exact) for c in layout.columns}
        except pa.ArrowException as error:
            raise InputError(f"{name} is a damaged Parquet file: {error}") from None

    twice = [name for name in dict.fromkeys(schema.names) if schema.names.count(name) > 1]
    return Source(name, [*paths, *twice], chunks)


def _arrow_fields(fields: Iterable[Any], outer: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of each column, followed by those of the columns within it."""
    for field in fields:
        yield (*outer, field.name)
        if hasattr(field.type, "fields"):  # a structure
            yield from _arrow_fields(field.type.fields, (*outer, field.name))


def _arrow_field(batch: Any, path: Sequence[str]) -> Any:
    import pyarrow.compute as pc

    column = batch.column(path[0])
    return pc.struct_field(column, list(path[1:])) if path[1:] else column


_READERS: Mapping[str, Callable[..., Source]] = {
    "csv": csv_source,
    "tsv": partial(csv_source, separator="\t"),
    "jsonl": _jsonl,
    "parquet": _parquet,
}


def _frame(data: Any) -> Source:
    """Columns of a frame, read without importing the library that made it."""
    kind = f"{type(data).__module__.partition('.')[0]}.{type(data).__name__}"
    if kind == "polars.LazyFrame":
        return _frame(data.collect())
    column: Callable[[str], Any]  # from a name to its values, as `Encoder.add` and `as_floats` take them
    if kind == "pandas.DataFrame":
        called, names = "the data frame", number_repeated([str(name) for name in data.columns])
        column = lambda name: data.iloc[:, names.index(name)]  # noqa: E731
    elif kind == "polars.DataFrame":
        called, names, column = "the polars frame", list(data.columns), lambda name: _polars(data.get_column(name))
    elif kind in ("pyarrow.Table", "pyarrow.RecordBatch"):
        called, names, exact = "the Arrow table", number_repeated(data.schema.names), {"integer_object_nulls": True}
        column = lambda name: data.column(names.index(name)).to_pandas(**exact)  # noqa: E731
    elif kind == "datasets.Dataset":
        called, names, column = "the data set", list(data.column_names), lambda name: _of_dataset(data, name)
    elif isinstance(data, Mapping) and not hasattr(data, "column_names"):
        by_name = {str(name): values for name, values in data.items()}
        called, names, column = "the columns", list(by_name), by_name.__getitem__
    else:
        if kind == "fairhead.Dataset":
            raise InputError("a Dataset holds no predictions: give fairhead.predict(model, data)")
        raise InputError(
            f"{type(data).__name__} is not a table; expected a path, a pandas or polars DataFrame, an Arrow table, a "
            "datasets.Dataset or arrays by column name"
        )
    return Source(called, names, lambda layout, *_: iter([{name: column(name) for name in layout.columns}]))


def _polars(series: Any) -> Any:
    """A column of polars; what may hold nulls stays a list, in which whole numbers stay whole."""
    return series.to_numpy() if series.dtype.is_numeric() and not series.null_count() else series.to_list()


def _of_dataset(data: Any, name: str) -> Any:
    """A column of `datasets`, decoded when asked for; numbers that it has names for are the names."""
    values, names = data[name], getattr((data.features or {}).get(name), "names", None)
    return values if names is None else [names[v] if v is not None and v >= 0 else None for v in values]


def write(records: Records | pd.DataFrame, path: str | os.PathLike[str]) -> None:
    """Write records, or a frame, in the format of the suffix; the file appears whole or not at all."""
    file, kind = Path(path), file_format(str(path))
    with whole_file(file) as part:
        if kind == "parquet":
            _write_parquet(records if isinstance(records, pd.DataFrame) else records.to_frame(), part)
            return
        packing = PACKED.get(file.suffix.lower())
        create = open if packing is None else import_module(packing).open
        with create(part, "wt", encoding="utf-8", newline="") as text:
            for start in range(0, len(records), CHUNK):
                rows = slice(start, start + CHUNK)
                frame = records.iloc[rows] if isinstance(records, pd.DataFrame) else records.take(rows).to_frame()
                if kind == "jsonl":
                    for row in zip(*(frame[name].tolist() for name in frame), strict=True):
                        text.write(json.dumps(dict(zip(frame, row, strict=True)), ensure_ascii=False) + "\n")
                else:
                    sign = "\t" if kind == "tsv" else ","
                    frame.to_csv(text, sep=sign, index=False, header=start == 0, lineterminator="\n")


def _write_parquet(frame: pd.DataFrame, part: Path) -> None:
    try:
        try:
            frame.to_parquet(part, engine="pyarrow", index=False)
        except OverflowError:  # whole numbers of more than 64 bits: as text
            large = [name for name in frame if frame[name].dtype == object]
            frame.astype(dict.fromkeys(large, str)).to_parquet(part, engine="pyarrow", index=False)
    except ImportError:
        raise InputError(NO_PYARROW) from None
