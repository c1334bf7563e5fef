"""Conditions on rows, as `--where` takes them: a small language of comparisons, read here and never run as code.

    condition  = comparisons joined by and, or, not and parentheses
    comparison = COLUMN (= != < <= > >=) VALUE
               | COLUMN [not] between VALUE and VALUE
               | COLUMN [not] in (VALUE, VALUE, ...)
               | COLUMN is [not] missing

A column whose name holds blanks or signs stands in [square brackets], such a value in quotation marks. Columns of
numbers are compared as numbers, all others as text, so that dates written 2013-01-31 can be ordered too. A missing
value satisfies no comparison, nor its contrary.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.records import composed
from fairhead.records.columns import Coded, as_boolean, as_number

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
_DEEPEST = 50  # parentheses and nots within each other
_HOW = "a condition looks like this: age between 18 and 65 and race in (White, Black)"


class Answer(NamedTuple):
    """Of n rows, which meet a condition and which do not, each of shape [n]; neither where a value is missing."""

    yes: NDArray[np.bool_]
    no: NDArray[np.bool_]


Columns = Mapping[str, Coded]
Condition = Callable[[Columns], Answer]


@dataclass(frozen=True)
class Where:
    """A condition on rows.

    Attributes:
        text: as it was written.
        columns: the columns that it names.
        condition: the answer for rows.

    Example:
        >>> where = Where.parse("days between -30 and 30 and not charge = O")
        >>> where.columns
        ('days', 'charge')
        >>> days, charge = Coded(np.array([0, 1, -1]), (12, 31)), Coded(np.array([0, 0, 0]), ("F",))
        >>> where.rows({"days": days, "charge": charge}).tolist()
        [True, False, False]
    """

    text: str
    columns: tuple[str, ...]
    condition: Condition

    @classmethod
    def parse(cls, text: str) -> "Where":
        """Read a condition.

        Raises:
            InputError: it is not one; the message shows where.
        """
        parser = _Parser(text)
        condition = parser.either()
        if parser.peek() is not None:
            parser.refuse("and, or, or the end")
        return cls(text, tuple(dict.fromkeys(parser.columns)), condition)

    def rows(self, columns: Columns) -> NDArray[np.bool_]:
        """Which rows to keep, shape [n].

        Raises:
            InputError: a column cannot be compared in this way.
        """
        return self.condition(columns).yes


class _Token(NamedTuple):
    kind: str  # "column", "text", "sign" or "word"
    text: str  # without brackets or quotation marks
    place: int


class _Parser:
    """Reads a condition from left to right, one method for each rule of the grammar."""

    def __init__(self, text: str) -> None:
        self.text, self.columns = text, list[str]()
        self._tokens, self._next, self._depth = list[_Token](), 0, 0
        place = 0
        while text[place:].strip():
            found = _TOKEN.match(text, place)
            if found is None or found.lastgroup is None:
                raise InputError(f"--where {text!r} cannot be read from {text[place:].strip()!r} on; {_HOW}")
            kind, word = found.lastgroup, found[found.lastgroup]
            bare = word[1:-1] if kind in ("column", "text") else word
            self._tokens.append(_Token(kind, bare, found.start(kind)))
            place = found.end()

    def peek(self) -> _Token | None:
        """The next token, if there is one."""
        return self._tokens[self._next] if self._next < len(self._tokens) else None

    def refuse(self, expected: str) -> None:
        """Say what was found where something else was expected."""
        token = self.peek()
        found = "it ends there" if token is None else f"found {self.text[token.place :]!r}"
        raise InputError(f"--where {self.text!r}: expected {expected}, {found}; {_HOW}")

    def _take(self, *words: str) -> str | None:
        """The next token if it is one of these words or signs, in any case."""
        token = self.peek()
        if token is None or token.kind not in ("word", "sign") or token.text.lower() not in words:
            return None
        self._next += 1
        return token.text.lower()

    def _need(self, word: str) -> None:
        if self._take(word) is None:
            self.refuse(repr(word))

    def either(self) -> Condition:
        """Conditions joined by or."""
        parts = [self._all()]
        while self._take("or"):
            parts.append(self._all())
        return parts[0] if len(parts) == 1 else lambda columns: _any([part(columns) for part in parts])

    def _all(self) -> Condition:
        parts = [self._one()]
        while self._take("and"):
            parts.append(self._one())
        # All of them hold where it is not so that one of them does not.
        return parts[0] if len(parts) == 1 else lambda columns: _not(_any([_not(part(columns)) for part in parts]))

    def _one(self) -> Condition:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise InputError(f"--where has more than {_DEEPEST} conditions within each other; write a simpler one")
        if self._take("not"):
            inner = self._one()
            found: Condition = lambda columns: _not(inner(columns))  # noqa: E731
        elif self._take("("):
            found = self.either()
            self._need(")")
        else:
            found = self._comparison()
        self._depth -= 1
        return found

    def _comparison(self) -> Condition:
        token = self.peek()
        if token is None or token.kind not in ("column", "word"):
            self.refuse("a column")
        assert token is not None
        self._next += 1
        name = token.text
        self.columns.append(name)
        if self._take("is"):
            wanted = self._take("not") is None
            self._need("missing")
            return _is_missing(name, wanted)
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
        else:
            sign = None if turned else self._take(*_SIGNS)
            if sign is None:
                self.refuse("between or in" if turned else f"one of {' '.join(_SIGNS)} between in is")
            found = _compared(name, [(str(sign), self._value())], all)
        return (lambda columns: _not(found(columns))) if turned else found

    def _value(self) -> str:
        token = self.peek()
        if token is None or token.kind not in ("text", "word"):
            self.refuse("a value")
        assert token is not None
        self._next += 1
        return token.text


def _not(answer: Answer) -> Answer:
    return Answer(answer.no, answer.yes)


def _any(answers: Sequence[Answer]) -> Answer:
    yes = np.logical_or.reduce([answer.yes for answer in answers])
    return Answer(yes, np.logical_and.reduce([answer.no for answer in answers]))


def _is_missing(name: str, wanted: bool) -> Condition:
    def condition(columns: Columns) -> Answer:
        missing = columns[name].is_missing()
        return Answer(missing == wanted, missing != wanted)

    return condition


def _compared(name: str, tests: Sequence[tuple[str, str]], join: Callable[[Any], bool]) -> Condition:
    """Comparisons of one column with values, (sign, value) each, of which all or any must hold."""

    def condition(columns: Columns) -> Answer:
        column = columns[name]
        ready = [(_SIGNS[sign], *_alike(name, column.levels, sign, value)) for sign, value in tests]
        # Each distinct value is looked at once; code −1, missing, picks the last entry.
        holds = [join(sign(read(level), value) for sign, read, value in ready) for level in column.levels]
        return Answer(np.array([*holds, False])[column.codes], np.array([*(not h for h in holds), False])[column.codes])

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
    if number is not None and sign not in ("=", "==", "!=", "<>"):
        word = next((level for level in levels if as_number(str(level)) is None), levels[0])
        raise InputError(
            f"--where compares {name!r} with the number {value}, but that column holds text: {word!r}, ..."
        )
    return str, composed(value)
