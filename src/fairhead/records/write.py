"""Writing files of records: CSV, TSV, JSONL and Parquet."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd

from fairhead.errors import InputError
from fairhead.records import Records
from fairhead.records.source import CHUNK, PACKED
from fairhead.records.table_files import NO_PYARROW, file_format
from fairhead.store import whole_file


def write(records: Records, path: str | os.PathLike[str]) -> None:
    """Write records in the format of the suffix; the file appears whole or not at all."""
    file, kind = Path(path), file_format(str(path))
    with whole_file(file) as part:
        _WRITERS[kind](records, part, file.suffix.lower())


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
