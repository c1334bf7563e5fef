"""Reading CSV and TSV: in parallel where lines are plain, and never with a line that has too many or too few fields.

Plain are lines without quotation marks and with as many fields as the header has: then every separator ends a field.
numpy splits these several times quicker than a parser that walks byte by byte. Fields of classes become codes, by their
bytes; fields of numbers become floats, rounded correctly. What is not plain is left to pandas, never guessed.
"""

import csv
import io
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.records import Column, keep_freed_memory
from fairhead.records.layout import Layout, number_repeated, ragged

PACKED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}
# How packed files begin, and what their names should end in.
_MARKS = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\0": ".xz"}

# Values of some rows by column: what `Encoder.add` and `as_floats` take.
Chunk = Mapping[str, Any]

# Rows read at a time: enough to be fast, few enough to keep memory small.
CHUNK = 1 << 18
# Bytes. A longer line is no row of a table: read on, it would fill the memory.
LONGEST_LINE = 64_000_000
# Bytes that one thread parses at a time, at most and at least; and those read where lines are taken one by one.
BLOCK, _LEAST_BLOCK, _BUFFER = 1 << 21, 1 << 19, 1 << 16
MAX_THREADS = 4

# Values that mean "missing" in a column of numbers.
_NO_NUMBER = ("", "nan", "NaN", "NAN", "NA", "N/A", "n/a", "#N/A", "None", "null", "NULL", "<NA>")
_NO_NUMBER_BYTES = frozenset(word.encode() for word in _NO_NUMBER)

# Of plain lines.
Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]
Places = NDArray[np.intp]
_WORD = 8  # bytes
_LONGEST = 64  # bytes of a class name
_PAD = bytes(_LONGEST + _WORD)  # fields are read as whole words, which may reach beyond the end
_NEWLINE, _RETURN, _DOT, _ZERO = b"\n\r.0"
# _MASK[k] keeps the first k bytes of a word.
_MASK = np.array([(1 << 8 * k) - 1 for k in range(_WORD + 1)], dtype=np.uint64)
_ODD = np.uint64(0x9E3779B97F4A7C15)
_MOST_DIGITS = 19  # after the point; 10^19 fits in 64 bits
_EXACT = 14  # up to 9.99… with so many digits, a number is a quotient of two exact floats, and so rounded correctly
_SCALES = (8, _EXACT, 18, _MOST_DIGITS)
# With a mantissa of 64 bits, as on x86, any 19 digits are exact; elsewhere numbers so long are left to pandas.
_LONG_DOUBLE = np.finfo(np.longdouble).nmant >= 63
_NUMBER = re.compile(rb" *[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)? *")


class NotPlain(Exception):
    """A file is not as plain as it began: it has to be read anew, with care."""


@dataclass(frozen=True)
class Source:
    """A table that can be walked through in chunks."""

    name: str  # what messages call it
    columns: Sequence[str]  # the names of its columns
    # For a layout, its columns, some rows at a time. Those named in the second argument are not to be parsed as
    # numbers; the third is True after `NotPlain` was raised.
    chunks: Callable[[Layout, Collection[str], bool], Iterator[Chunk]]
    text_only: bool = False  # whether the format cannot tell numbers from text
    provenance: Callable[[], Mapping[str, Any]] = dict  # makes the entries that say where the rows came from


class _Lines(io.RawIOBase):
    """Bytes whose lines come to an end."""

    def __init__(self, file: Path, name: str) -> None:
        packing = PACKED.get(file.suffix.lower())
        self._handle: Any = file.open("rb", buffering=0) if packing is None else import_module(packing).open(file, "rb")
        self._name, self._length = name, 0  # of the line that is under way

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = int(self._handle.readinto(buffer))
        self._length += count
        for some in (buffer[max(0, count - _BUFFER // 64) : count], buffer[:count]):  # a line often ends near the end
            if (end := bytes(some).rfind(b"\n")) >= 0:
                self._length = len(some) - end - 1
                break
        if self._length > LONGEST_LINE:
            raise InputError(
                f"{self._name}: a line of more than {LONGEST_LINE / 1e6:g} million bytes is no row of a table; is a "
                "line end missing?"
            )
        return count

    def close(self) -> None:
        self._handle.close()
        super().close()


def open_binary(file: Path, name: str) -> io.BufferedReader:
    """The file as bytes, unpacked; a line without end is refused."""
    return io.BufferedReader(_Lines(file, name), _BUFFER)


def check_text(file: Path, name: str) -> bytes:
    """The first bytes of a text file; an empty or a binary one is refused."""
    with open_binary(file, name) as handle:
        head = handle.read(_BUFFER)
    if not head.strip():
        raise InputError(f"{name} is empty; expected a header and at least one row")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InputError(f"{name} is UTF-16 text; {as_utf8(name, 'utf-16')}")
    for mark, suffix in _MARKS.items():
        if head.startswith(mark):
            raise InputError(f"{name} is packed; unpack it, or let its name end in {suffix}")
    if b"\0" in head:
        raise InputError(f"{name} is not text (it holds NUL bytes); expected CSV, TSV or JSONL as UTF-8")
    return bytes(head)


def as_utf8(name: str, encoding: str) -> str:
    """What to do with a file of another encoding."""
    return (
        f"save it as UTF-8 (iconv -f {encoding} -t utf-8 '{name}' > new.csv); the audit alone can read it as it is: "
        f"--encoding {encoding} (in Python encoding={encoding!r})"
    )


def csv_source(file: Path, name: str, separator: str | None = None, decimal: str = ".") -> Source:
    """CSV and TSV: a header, then rows. Unless it is given, the header tells whether , ; tab or | separates."""
    head = check_text(file, name)
    first_line = head.lstrip().partition(b"\n")[0]
    separator = separator or max(",;\t|", key=lambda sign: first_line.count(sign.encode()))
    with io.TextIOWrapper(open_binary(file, name), encoding="utf-8-sig", newline="") as text:
        lines = list(islice((row for row in csv.reader(text, delimiter=separator) if row), 100))
    if len(lines) < 2:
        raise InputError(f"{name} has a header but no rows; expected at least one row")
    columns = number_repeated([cell.strip() for cell in lines[0]])
    if len(lines[1]) > len(columns):
        raise InputError(f"{name}: {ragged(2, len(lines[1]), len(columns))}")
    # Neither packed nor with a quotation mark, so that every line end ends a row: as far as the beginning shows.
    plain = file.suffix.lower() not in PACKED and b'"' not in head and b"\n" in head
    return Source(name, columns, _Csv(file, name, separator, columns, decimal, plain).chunks, text_only=True)


@dataclass(frozen=True)
class _Csv:
    """A file of CSV, whose columns go by their numbers here."""

    file: Path
    name: str
    separator: str
    columns: Sequence[str]
    decimal: str  # the sign within numbers
    plain: bool

    def chunks(self, layout: Layout, as_text: Collection[str], careful: bool) -> Iterator[Chunk]:
        place = {wanted: self.columns.index(wanted) for wanted in layout.columns}
        numbers, ids, classes = ({place[n] for n in names} for names in (layout.numbers, layout.ids, layout.classes))
        texts = classes | {place[column] for column in as_text}
        missing: dict[int, Sequence[str]] = dict.fromkeys(numbers - classes, _NO_NUMBER)
        missing |= dict.fromkeys(ids - classes, ("",))
        options = {
            "sep": self.separator,
            "names": range(len(self.columns)),
            "dtype": dict.fromkeys(texts, object),  # categories would make one number of "01" and "1"
            "keep_default_na": False,
            "na_values": missing,
            "na_filter": bool(missing),
            "encoding": "utf-8",
            "decimal": self.decimal,
        }
        if careful or not self.plain:
            found = self._serial(options)
        else:
            quick = not numbers & classes and not ids and self.decimal == "."
            found = self._parallel(classes, numbers, ids, options, quick)
        for columns in found:
            yield {wanted: columns[j] for wanted, j in place.items()}

    def _serial(self, options: Mapping[str, Any]) -> Iterator[Any]:
        """All columns, since pandas minds lines that are too long only if it is not told to skip some."""
        with (
            open_binary(self.file, self.name) as handle,
            pd.read_csv(handle, header=0, chunksize=CHUNK // 4, **options) as reader,
        ):
            yield from reader

    def _parallel(
        self, classes: set[int], numbers: set[int], ids: set[int], options: Mapping[str, Any], quick: bool
    ) -> Iterator[Any]:
        """Blocks of whole lines, parsed by several threads and given out in order; by numpy where that is quick."""
        sign, width, wanted = self.separator.encode(), len(self.columns), sorted(classes | numbers | ids)

        def parse(block: bytes, offset: int) -> Any:
            if b'"' in block:
                raise NotPlain
            if quick and (found := split_lines(block, sign, width, classes, numbers, _NO_NUMBER_BYTES)):
                return found
            # Told which columns to read, pandas no longer minds lines that are too long; so count, line by line: what
            # one has too many, another may have too few.
            signs = np.frombuffer(block, dtype=np.uint8)
            ends = np.flatnonzero(signs == ord("\n"))
            if np.any(np.diff(np.cumsum(signs == sign[0], dtype=np.int64)[ends], prepend=0) != width - 1):
                self._refuse_uneven(block, offset)  # unless those are blank
            return pd.read_csv(io.BytesIO(block), header=None, usecols=wanted, low_memory=False, **options)

        keep_freed_memory()
        threads = min(MAX_THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads) as pool:
            waiting: deque[Future[Any]] = deque()
            for block, offset in self._blocks(threads):
                waiting.append(pool.submit(parse, block, offset))
                # No more blocks in memory than keep the threads busy.
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def _blocks(self, threads: int) -> Iterator[tuple[bytes, int]]:
        """Whole lines after the header, and where in the file they begin."""
        size = self.file.stat().st_size
        n_blocks = threads * -(-size // (threads * BLOCK))  # in each turn every thread has as much to do
        step = min(BLOCK, max(_LEAST_BLOCK, -(-size // n_blocks)))
        with open_binary(self.file, self.name) as handle:
            offset, line = 0, b""
            while not line.strip():
                line = handle.readline()
                offset += len(line)
            while text := handle.read(step) + handle.readline():
                if not text.isspace():
                    yield text if text.endswith(b"\n") else text + b"\n", offset
                offset += len(text)

    def _refuse_uneven(self, block: bytes, offset: int) -> None:
        """Name the first line of a block that is neither blank nor has as many fields as the header, if any."""
        sign, width = self.separator.encode(), len(self.columns)
        for number, line in enumerate(block.split(b"\n"), start=1):
            if line.count(sign) != width - 1 and line.strip():
                with self.file.open("rb") as handle:
                    before = handle.read(offset).count(b"\n")
                raise InputError(f"{self.name}: {ragged(before + number, line.count(sign) + 1, width)}")


class Fields(NamedTuple):
    """Where the fields of one column are: the number of their first byte and their length, both of shape [n]."""

    start: Places
    length: Places


def split_lines(
    lines: bytes,  # UTF-8, each line with its end
    separator: bytes,  # one byte
    width: int,  # fields of every line
    classes: Collection[int],  # columns to read as classes
    numbers: Collection[int],  # columns to read as numbers
    missing: frozenset[bytes],  # what stands for a missing number
) -> dict[int, Column | NDArray[np.float64]] | None:
    r"""The columns of whole lines, by number; None where pandas has to read them."""
    if width < 2 or b"\0" in lines:
        return None
    if not lines.isascii():
        lines.decode("utf-8")  # an error here is one about the file
    text = np.frombuffer(lines + _PAD, dtype=np.uint8)
    newline = text == _NEWLINE
    n_lines = np.count_nonzero(newline)
    signs = np.flatnonzero(newline | (text == separator[0]))
    if len(signs) != n_lines * width:
        return None
    ends = signs.reshape(n_lines, width)
    last = np.ascontiguousarray(ends[:, -1])
    if not newline[last].all():
        return None
    n_returns = np.count_nonzero(text == _RETURN) if b"\r" in lines else 0
    if n_returns and (n_returns != n_lines or not (text[last - 1] == _RETURN).all()):
        return None

    def fields(column: int) -> Fields:
        start = ends[:, column - 1] + 1 if column else np.concatenate([[0], last[:-1] + 1])
        length = ends[:, column] - start
        return Fields(start, length - 1 if n_returns and column == width - 1 else length)

    found: dict[int, Column | NDArray[np.float64]] = {}
    for column in (*classes, *numbers):
        read = _classes(text, fields(column)) if column in classes else _numbers(text, fields(column), missing)
        if read is None:
            return None
        found[column] = read
    return found


def _words(text: Bytes, at: Places, length: Places, less: int = 0) -> Words:
    """Up to eight bytes from each place on, first byte lowest, their bits less those of `less`; 0 beyond the length."""
    words: Words = np.ndarray(len(text) - _WORD + 1, dtype="<u8", buffer=text, strides=(1,))[at]
    words ^= np.uint64(less)
    words &= _MASK.take(np.clip(length, 0, _WORD))  # quicker than an index
    return words


def _classes(text: Bytes, fields: Fields) -> Column | None:
    start, length = fields
    shortest, longest = int(length.min()), int(length.max())
    if shortest == longest == 1:
        return _single_bytes(text[start])
    if longest > _LONGEST:
        return None
    words = [_words(text, start + i, length - i) for i in range(0, max(longest, 1), _WORD)]
    key = words[0]
    for word in words[1:]:
        key = key * _ODD ^ word
    codes, distinct = pd.factorize(key)
    if len(words) == 1:
        names = [int(value).to_bytes(_WORD, "little").rstrip(b"\0") for value in distinct]
    else:
        first = np.empty(len(distinct), dtype=np.intp)
        first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)
        if not all((word == word[first][codes]).all() for word in words):
            return None  # two names have the same key
        names = [text[s : s + n].tobytes() for s, n in zip(start[first], length[first], strict=True)]
    return Column(codes.astype(np.int32), tuple(name.decode("utf-8") for name in names))


def _single_bytes(byte: Bytes) -> Column:
    low, high = int(byte.min()), int(byte.max())
    above = byte != low
    if np.array_equal(above, byte == high) or low == high:  # 0 and 1, most often
        return Column(above.view(np.int8), (chr(low), chr(high)) if low < high else (chr(low),))
    seen = np.flatnonzero(np.bincount(byte, minlength=256))
    code = np.zeros(256, dtype=np.int16)
    code[seen] = np.arange(len(seen))
    return Column(code.take(byte), tuple(map(chr, seen)))


def _numbers(text: Bytes, fields: Fields, missing: frozenset[bytes]) -> NDArray[np.float64] | None:
    """Numbers such as 0.25, or one digit; those of another form must be few, since they are read one by one."""
    start, length = fields
    lead = text[start] - np.uint8(_ZERO)  # what is below "0" becomes large
    plain = (lead < 10) & (((length > 2) & (text[start + 1] == _DOT)) | (length == 1))
    digits = np.where(plain, np.maximum(length - 2, 0), 0)
    plain &= digits <= _MOST_DIGITS
    digits = np.minimum(digits, _MOST_DIGITS)
    # So many digits as are there are read, in words; "1.5" is 15 over 10 then.
    scale = next(s for s in _SCALES if s >= digits.max())
    if scale > _EXACT and not _LONG_DOUBLE:
        return None
    whole: Words = np.zeros(len(start), dtype=np.uint64)
    for i in range(0, scale, _WORD):
        word = _words(text, start + (2 + i), digits - i, less=0x3030303030303030)
        plain &= ((word + np.uint64(0x7676767676767676)) | word) & np.uint64(0x8080808080808080) == 0
        kept = min(_WORD, scale - i)
        whole = whole * np.uint64(10**kept) + _eight_digits(word) // np.uint64(10 ** (_WORD - kept))
    ones = lead.astype(np.uint64)
    if scale == _MOST_DIGITS:  # no room for a tenth of them
        plain &= (ones == 0) | (whole == 0)
    else:
        whole += ones * np.uint64(10**scale)
    if scale <= _EXACT:
        numbers = whole.astype(np.float64) / 10.0**scale
    else:
        longer = whole.astype(np.longdouble) / np.longdouble(10**scale)
        numbers = longer.astype(np.float64)
        # Halfway between two floats after one rounding: which of them is nearer only the digits themselves tell.
        plain &= 2 * np.abs(longer - numbers) != np.spacing(numbers)
    if scale == _MOST_DIGITS:
        numbers += ones
    odd = np.flatnonzero(~plain)
    if len(odd) > 100 + len(start) // 50:
        return None
    for row in odd:
        field = text[start[row] : start[row] + length[row]].tobytes()
        if field in missing:
            numbers[row] = np.nan
        elif _NUMBER.fullmatch(field):
            numbers[row] = float(field)
        else:
            return None
    return numbers


def _eight_digits(word: Words) -> Words:
    """The number that the bytes of a word, each 0 to 9 and the first the highest, make in base ten."""
    pairs = word * np.uint64(10) + (word >> np.uint64(8))
    low = np.uint64(0x000000FF000000FF)
    high_part = (pairs & low) * np.uint64(0x000F424000000064)
    return (high_part + ((pairs >> np.uint64(16)) & low) * np.uint64(0x0000271000000001)) >> np.uint64(32)
