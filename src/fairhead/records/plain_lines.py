"""Splitting plain lines of CSV into columns with numpy, several times quicker than a parser that walks byte by byte.

Plain are lines without quotation marks and with as many fields as the header has: then every separator ends a field.
Fields of classes become codes, by their bytes; fields of numbers become floats, rounded correctly. What is not plain
is left to pandas: the functions here return None then, and never guess.
"""

import re
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fairhead.records import Column

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


def _words(text: Bytes, at: Places) -> Words:
    """The eight bytes from each place on, first byte lowest."""
    return np.ndarray(len(text) - _WORD + 1, dtype="<u8", buffer=text, strides=(1,))[at]


def _classes(text: Bytes, fields: Fields) -> Column | None:
    start, length = fields
    shortest, longest = int(length.min()), int(length.max())
    if shortest == longest == 1:
        return _single_bytes(text[start])
    if longest > _LONGEST:
        return None
    words = [_words(text, start + i) & _MASK[np.clip(length - i, 0, _WORD)] for i in range(0, max(longest, 1), _WORD)]
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
        word = (_words(text, start + 2 + i) ^ np.uint64(0x3030303030303030)) & _MASK[np.clip(digits - i, 0, _WORD)]
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
