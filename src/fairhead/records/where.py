"""Conditions on rows, as `--where` takes them: a small language of comparisons, read here and never run as code.

    condition  = comparisons joined by and, or, not and parentheses
    comparison = COLUMN (= != < <= > >=) VALUE
               | COLUMN [not] between VALUE and VALUE
               | COLUMN [not] in (VALUE, VALUE, ...)
               | COLUMN is [not] missing

A column whose name holds blanks or signs stands in [square brackets], such a value in quotation marks. Columns of
numbers are compared as numbers, all others as text, so that dates written 2013-01-31 can be ordered too; dates whose
order as text is not that of time, such as 31.01.2013, are refused. A missing value satisfies no comparison, nor its
contrary.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.records import Column, composed
from fairhead.records.columns import as_boolean, as_number

_TOKEN = re.compile(
    r"""\s*(?:(?P<column>\[[^\]]+\])|(?P<text>'[^']*'|"[^"]*")|(?P<sign><=|>=|==|!=|<>|[<>=(),])|(?P<word>[^\s()<>=!,'"\[\]]+))"""
)
_SIGNS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<>": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_DATE = re.compile(r"\d{1,4}([./-])\d{1,2}\1\d{1,4}(?!\d)")
_ORDERED_DATES = re.compile(r"0000([./-])00(?:\1)00")  # with a 0 for each digit
_DEEPEST = 50  # parentheses and nots within each other
_HOW = "a condition looks like this: age between 18 and 65 and race in (White, Black)"


# Of n rows, 1 where a condition is met, −1 where it is not, and 0 where a value is missing: "or" is the maximum, "and"
# the minimum, and "not" the negative.
Answer = NDArray[np.int8]
Columns = Mapping[str, Column]
Condition = Callable[[Columns], Answer]


@dataclass(frozen=True)
class Where:
    """A condition on rows.

    Example:
        >>> where = Where.parse("days between -30 and 30 and not charge = O")
        >>> where.columns
        ('days', 'charge')
        >>> days, charge = Column(np.array([0, 1, -1]), (12, 31)), Column(np.array([0, 0, 0]), ("F",))
        >>> where.rows({"days": days, "charge": charge}).tolist()
        [True, False, False]
    """

    text: str  # as it was written
    columns: tuple[str, ...]  # those that it names
    condition: Condition

    @classmethod
    def parse(cls, text: str) -> "Where":
        """Read a condition; the error shows where it cannot be read."""
        parser = _Parser(text)
        condition = parser.either()
        if parser.next is not None:
            parser.refuse("and, or, or the end")
        return cls(text, tuple(dict.fromkeys(parser.columns)), condition)

    def rows(self, columns: Columns) -> NDArray[np.bool_]:
        """Which rows to keep, shape [n]; a column that cannot be compared in this way is refused."""
        return self.condition(columns) > 0


class _Token(NamedTuple):
    kind: str  # "column", "text", "sign" or "word"
    text: str  # without brackets or quotation marks
    place: int


class _Parser:
    """Reads a condition from left to right, one method for each rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text, self.columns = text, list[str]()
        self._tokens, self._depth = list[_Token](), 0
        place = 0
        while text[place:].strip():
            found = _TOKEN.match(text, place)
            if found is None or found.lastgroup is None:
                raise InputError(f"--where {text!r} cannot be read from {text[place:].strip()!r} on; {_HOW}")
            kind, word = found.lastgroup, found[found.lastgroup]
            bare = word[1:-1] if kind in ("column", "text") else word
            self._tokens.append(_Token(kind, bare, found.start(kind)))
            place = found.end()
        self._tokens.reverse()  # the next one is the last

    @property
    def next(self) -> _Token | None:
        """The next token, if there is one."""
        return self._tokens[-1] if self._tokens else None

    def refuse(self, expected: str) -> NoReturn:
        """Say what was found where something else was expected."""
        found = "it ends there" if self.next is None else f"found {self.text[self.next.place :]!r}"
        raise InputError(f"--where {self.text!r}: expected {expected}, {found}; {_HOW}")

    def _take(self, *words: str) -> str | None:
        """The next token if it is one of these words or signs, in any case."""
        token = self.next
        if token is None or token.kind not in ("word", "sign") or token.text.lower() not in words:
            return None
        return self._tokens.pop().text.lower()

    def _need(self, word: str) -> None:
        if self._take(word) is None:
            self.refuse(repr(word))

    def _name(self, kind: str, expected: str) -> str:
        """The next token, a word or of this kind."""
        if self.next is None or self.next.kind not in (kind, "word"):
            self.refuse(expected)
        return self._tokens.pop().text

    def _value(self) -> str:
        return self._name("text", "a value")

    def either(self) -> Condition:
        """Conditions joined by or."""
        parts = [self._all()]
        while self._take("or"):
            parts.append(self._all())
        return lambda columns: np.maximum.reduce([part(columns) for part in parts])

    def _all(self) -> Condition:
        parts = [self._one()]
        while self._take("and"):
            parts.append(self._one())
        return lambda columns: np.minimum.reduce([part(columns) for part in parts])

    def _one(self) -> Condition:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise InputError(f"--where has more than {_DEEPEST} conditions within each other; write a simpler one")
        if self._take("not"):
            found = _negated(self._one())
        elif self._take("("):
            found = self.either()
            self._need(")")
        else:
            found = self._comparison()
        self._depth -= 1
        return found

    def _comparison(self) -> Condition:
        name = self._name("column", "a column")
        self.columns.append(name)
        if self._take("is"):
            wanted = self._take("not") is None
            self._need("missing")
            return lambda columns: np.where((columns[name].codes < 0) == wanted, 1, -1).astype(np.int8)
        turned = self._take("not") is not None
        if self._take("between"):
            low = self._value()
            self._need("and")
            found = _compared(name, [(">=", low), ("<=", self._value())], all)
        elif self._take("in"):
            self._need("(")
            values = [self._value()]
            while self._take(","):
                values.append(self._value())
            self._need(")")
            found = _compared(name, [("=", value) for value in values], any)
        elif turned:
            self.refuse("between or in")
        elif sign := self._take(*_SIGNS):
            found = _compared(name, [(sign, self._value())], all)
        else:
            self.refuse(f"one of {' '.join(_SIGNS)} between in is")
        return _negated(found) if turned else found


def _negated(condition: Condition) -> Condition:
    return lambda columns: -condition(columns)


def _compared(name: str, tests: Sequence[tuple[str, str]], join: Callable[[Any], bool]) -> Condition:
    """Comparisons of one column with values, (sign, value) each, of which all or any must hold."""

    def condition(columns: Columns) -> Answer:
        column = columns[name]
        ready = [(_SIGNS[sign], *_alike(name, column.levels, sign, value)) for sign, value in tests]
        # Each distinct value is looked at once; code −1, missing, picks the last entry.
        holds = [join(sign(read(level), value) for sign, read, value in ready) for level in column.levels]
        return np.array([*(1 if met else -1 for met in holds), 0], dtype=np.int8)[column.codes]

    return condition


def _alike(name: str, levels: Sequence[Any], sign: str, value: str) -> tuple[Callable[[Any], Any], Any]:
    """How to read the levels of a column, and the value that they are compared with, as one kind: numbers or text."""
    number = as_number(value)
    if not any(isinstance(level, str) for level in levels):
        number = as_boolean(value) if number is None else number
        if number is None and levels:
            raise InputError(
                f"--where compares {name!r} with {value!r}, but that column holds numbers: {levels[0]!r}, ..."
            )
        return (lambda level: level), number
    if sign in ("=", "==", "!=", "<>"):
        return str, composed(value)
    if number is not None:
        word = next((level for level in levels if as_number(str(level)) is None), levels[0])
        raise InputError(
            f"--where compares {name!r} with the number {value}, but that column holds text: {word!r}, ..."
        )
    dates = {re.sub(r"\d", "0", found[0]): found[0] for text in (*levels, value) if (found := _DATE.match(str(text)))}
    if len(dates) > 1 or any(_ORDERED_DATES.fullmatch(shape) is None for shape in dates):
        raise InputError(
            f"--where orders {name!r} by dates written {', '.join(sorted(dates.values()))}; as text these are "
            "not in the order of time: write them all as 2025-01-31, in the file and in the condition"
        )
    return str, composed(value)
