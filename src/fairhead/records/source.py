"""A table that can be walked through in chunks, and what all readers of text files share."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fairhead.errors import InputError
from fairhead.records import Layout

PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}

# How packed files begin, and what their names should end in.
_MARKS = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz"}

# Values of some rows by column: what `Encoder.add` and `as_floats` take.
Chunk = Mapping[str, Any]

# Rows read at a time: enough to be fast, few enough to keep memory small.
CHUNK = 1 << 18


class NotPlain(Exception):
    """A file is not as plain as it began: it has to be read anew, with care."""


@dataclass(frozen=True)
class Source:
    """A table that can be walked through in chunks.

    Attributes:
        name: what messages call it.
        columns: the names of its columns.
        chunks: for a layout, its columns, some rows at a time; those named in the second argument are not to be
            parsed as numbers.
        text_only: whether the format cannot tell numbers from text.
        provenance: makes the entries that say where the rows came from.
        with_care: `chunks` for a file with which these raise `NotPlain`.
    """

    name: str
    columns: Sequence[str]
    chunks: Callable[[Layout, Collection[str]], Iterator[Chunk]]
    text_only: bool = False
    provenance: Callable[[], Mapping[str, Any]] = dict
    with_care: Callable[[Layout, Collection[str]], Iterator[Chunk]] | None = None


def open_binary(file: Path) -> Any:
    """The file as bytes, unpacked."""
    packing = PACKED.get(file.suffix.lower())
    return file.open("rb") if packing is None else import_module(packing).open(file, "rb")


def check_text(file: Path, name: str) -> bytes:
    """The first bytes of a text file; an empty or a binary one is refused."""
    with open_binary(file) as handle:
        head = handle.read(1 << 16)
    if not head.strip():
        raise InputError(f"{name} is empty; a header and at least one row are expected")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{name} is UTF-16 text; save it as UTF-8")
    for mark, suffix in _MARKS.items():
        if head.startswith(mark):
            raise InputError(f"{name} is packed; unpack it, or let its name end in {suffix}")
    if b"\0" in head:
        raise InputError(f"{name} is not text (it holds NUL bytes); CSV, TSV or JSONL as UTF-8 is expected")
    return bytes(head)
