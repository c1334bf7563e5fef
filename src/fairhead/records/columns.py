"""From raw values to the checked columns of `Records`: codes and levels, missing values, classes, scores, weights.

Every source (arrays, data frames, files in chunks) goes through this one path, so they all follow the same rules:

- Whole floats are integers (1.0 is 1), and True is 1. Text is stripped of surrounding blanks, and composed ("é" is the
  same however it was typed, and a line break is a space).
- In files that hold text only (CSV, TSV) a column is numbers if all of its values are, `true`/`false` if all are, and
  text otherwise.
- Blank, NaN and `nan` are missing. `NA`, `N/A`, `None` and `null` are missing only in a column of a text file whose
  other values are all numbers or true/false: in a column of names, "None" may well be a religion.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fairhead.errors import InputError, did_you_mean
from fairhead.records import Column, composed

# A column with more distinct values than this is an identifier or a measurement, not a class or a group.
MAX_LEVELS = 10_000

_NOT_A_NUMBER = {"", "nan", "<na>"}
_NO_ANSWER = {"na", "n/a", "#n/a", "none", "null"}
_BOOLEANS = {"true": True, "false": False}
# Pairs of words that say which class is the positive one: the second.
_POSITIVE = {
    *(("no", "yes"), ("n", "y"), ("nein", "ja"), ("n", "j"), ("non", "oui"), ("no", "si"), ("no", "sí")),
    *(("false", "true"), ("falsch", "wahr"), ("0", "1"), ("-", "+"), ("negative", "positive"), ("neg", "pos")),
    *(("negativ", "positiv"), ("bad", "good"), ("schlecht", "gut"), ("wrong", "right"), ("fail", "pass")),
    *(("failed", "passed"), ("absent", "present"), ("normal", "toxic"), ("ham", "spam"), ("benign", "malignant")),
}
_INTEGER = re.compile(r"[+-]?\d+")
_ZERO_FIRST = re.compile(r"[+-]?0\d+$")
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class Encoder:
    """Turns the values of one column, chunk after chunk, into small integer codes.

    Example:
        >>> encoder = Encoder("race")
        >>> encoder.add(["white", "black"])
        >>> encoder.add(["black", None])
        >>> encoder.finish()
        Column(codes=array([ 1,  0,  0, -1], dtype=int8), levels=('black', 'white'))
    """

    def __init__(self, name: str, max_levels: int | None = MAX_LEVELS) -> None:
        self.name = name
        self.max_levels = max_levels
        self._index: dict[Any, int] = {}
        self._chunks: list[NDArray[np.integer]] = []

    def add(self, values: Any) -> None:
        """Append values of shape [m]: a list, an array, a Series, or what has codes already (levels in any order)."""
        codes: NDArray[np.integer]
        uniques: Iterable[Any]
        if isinstance(values, Column):
            codes, uniques = values.codes, values.levels
        elif isinstance(values, pd.Series) and isinstance(values.dtype, pd.CategoricalDtype):
            codes, uniques = values.cat.codes.to_numpy(), values.cat.categories
        else:
            codes, uniques = _factorize(one_dimensional(values, self.name), self.name)
        index = self._index
        # One more entry than there are levels: code −1 (missing) picks the last.
        new = np.array([*(index.setdefault(value, len(index)) for value in uniques), -1], dtype=np.int32)
        if self.max_levels is not None and len(index) > self.max_levels:
            raise InputError(
                f"{self.name} has more than {self.max_levels:,} distinct values, like an id or a measurement; "
                "expected a class or group column: choose another column, or bin this one first"
            )
        self._chunks.append(translate(codes, new.astype(_small_integer(len(index)))))

    def is_mixed(self) -> bool:
        """Whether some values are numbers and others are text that no number or "missing" can be read from."""
        kinds = {isinstance(value, str) for value in self._index}
        return len(kinds) == 2 and any(isinstance(v, str) for v in tidy_levels(list(self._index), text_only=True))

    def finish(self, text_only: bool = False) -> Column:
        """All chunks as one column; `text_only` says that the source could not say number or text, so find out."""
        codes = np.concatenate(self._chunks) if self._chunks else np.zeros(0, dtype=np.int8)
        values = tidy_levels(list(self._index), text_only)
        if not text_only:
            # A categorical of pandas may have levels that no row has.
            used = np.bincount(codes[codes >= 0], minlength=len(values))
            values = [value if used[i] else None for i, value in enumerate(values)]
        levels = sorted({value for value in values if value is not None})
        place = {value: i for i, value in enumerate(levels)}
        new = np.array([-1 if v is None else place[v] for v in values] + [-1], dtype=_small_integer(len(levels)))
        return Column(translate(codes, new), tuple(levels))


def _factorize(values: Any, name: str) -> tuple[NDArray[np.integer], Any]:
    """Codes of shape [n], −1 where missing, and the distinct values they stand for."""
    if isinstance(values.dtype, np.dtype) and values.dtype.kind in "iu" and len(values):  # pandas' own may hold NA
        numbers = np.asarray(values)
        low, high = int(numbers.min()), int(numbers.max())
        if high - low < 256:
            # Most classes and groups: no need to hash.
            seen = np.flatnonzero(np.bincount(numbers - low if low else numbers))
            return np.searchsorted(seen, numbers - low) if len(seen) <= high - low else numbers - low, seen + low
    try:
        return pd.factorize(values)
    except TypeError:
        raise InputError(f"{name} holds lists or objects; expected one number or text per row") from None


def one_dimensional(values: Any, name: str) -> Any:
    """Values as a Series, extension array or array of shape [n]; lists keep the types of their items."""
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        array = np.empty(len(values), dtype=object)
        array[:] = list(values)
        return array
    if isinstance(values, np.ma.MaskedArray):
        hidden, values = np.ma.getmaskarray(values), values.data.astype(object)
        values[hidden] = None
    if not isinstance(values, pd.Series | pd.api.extensions.ExtensionArray):
        values = np.asarray(values)
    if values.ndim != 1:
        raise InputError(f"{name} has shape {list(values.shape)}; expected one value per row, shape [n]")
    return values


def tidy_levels(raw: list[Any], text_only: bool = False) -> list[Any]:
    """The distinct raw values as bool, int, float or str, all of one kind; None where the value means "missing".

    Example:
        >>> tidy_levels(["1", "0.0", "NA", " "], text_only=True)
        [1, 0, None, None]
        >>> tidy_levels(["none", "christian", ""], text_only=True)
        ['none', 'christian', None]
    """
    values = [composed(plain(value)) for value in raw]
    if text_only:
        values = [None if v is None else str(v) for v in values]
        answers = [v for v in values if v is not None and v.lower() not in _NO_ANSWER]
        # "01" is a name, such as the code of a region: as a number it would lose its zero, and become one with "1".
        names = any(_ZERO_FIRST.match(v) for v in answers)
        for parse in (as_number, as_boolean):
            if answers and not names and all(parse(v) is not None for v in answers):
                return [None if v is None else parse(v) for v in values]
        return values
    if any(isinstance(v, str) for v in values):
        return [None if v is None else str(v) for v in values]
    return values


def plain(value: Any) -> Any:
    """One raw value as bool, int, float or stripped str; None if it is missing."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        if math.isnan(value):
            return None
        return int(value) if value.is_integer() else value
    if isinstance(value, bool | int):
        return value
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    text = str(value).strip()
    return None if text.lower() in _NOT_A_NUMBER else text


def as_number(text: str) -> int | float | None:
    """The number that a text is, if it is one."""
    if _INTEGER.fullmatch(text):
        return int(text)
    if not _FLOAT.fullmatch(text):
        return None
    value = float(text)
    return int(value) if value.is_integer() else value


def as_boolean(text: str) -> bool | None:
    """What "true" and "false" stand for, in any case."""
    return _BOOLEANS.get(text.lower())


def _small_integer(n_levels: int) -> type[np.signedinteger[Any]]:
    """The smallest type for codes −1 … n_levels − 1."""
    return np.int8 if n_levels <= 128 else np.int16 if n_levels <= 32_768 else np.int32


def as_floats(values: Any, name: str, before: int = 0) -> NDArray[np.float64]:
    """Numbers of shape [n], NaN where missing; anything else is an error that shows it, and its row after `before`."""
    values = np.asarray(one_dimensional(values, name))
    if values.dtype == np.float64:
        return values
    try:
        return np.asarray(pd.to_numeric(values), dtype=np.float64)
    except (TypeError, ValueError):
        pass
    numbers = np.asarray(pd.to_numeric(values, errors="coerce"), dtype=np.float64)
    bad = np.isnan(numbers) & ~np.asarray(pd.isna(values))
    bad &= np.array([not isinstance(v, str) or v.strip().lower() not in _NOT_A_NUMBER | _NO_ANSWER for v in values])
    if bad.any():
        row = int(bad.argmax())
        hint = ""
        if isinstance(values[row], str) and re.fullmatch(r"\s*-?\d*,\d+\s*", values[row]):
            point = values[row].strip().replace(",", ".")
            hint = (
                f", with a decimal point: {point}; or name the comma (--decimal , in an audit; in Python decimal=',')"
            )
        raise InputError(f"{name} holds {values[row]!r} in row {before + row + 1:,}; expected numbers{hint}")
    return numbers


def classes_of(
    label: Column, prediction: Column | None, given: Sequence[Any] | None, names: tuple[str, str]
) -> tuple[Any, ...]:
    """The classes of the task: those given; else 0 and 1 if nothing else occurs; else the levels of the label."""
    label_name, prediction_name = names
    columns = {label_name: label.levels, prediction_name: () if prediction is None else prediction.levels}
    for name, levels in columns.items():
        if fractions := [v for v in levels if isinstance(v, float)]:
            hint = "; is this a score? Then use --score (score=...)" if name == prediction_name else ""
            raise InputError(f"{name} holds fractions such as {fractions[0]}; expected classes{hint}")
    kinds = [("text" if isinstance(levels[0], str) else "numbers", levels) for levels in columns.values() if levels]
    if len({kind for kind, _ in kinds}) > 1:
        (one, labels), (other, predicted) = kinds
        raise InputError(
            f"{label_name} holds {one} ({show(labels)}) but {prediction_name} holds {other} ({show(predicted)}); both "
            "must name the same classes in the same way"
        )
    classes, every = label.levels, [level for levels in columns.values() for level in levels]
    if given is not None:
        classes = tuple(composed(plain(value)) for value in given)
        if len(set(classes)) != len(classes):
            raise InputError(f"the classes given hold one twice: {show(classes)}")
    elif len(classes) < 2 and {*every} <= {0, 1}:
        classes = (False, True) if isinstance([*every, 0][0], bool) else (0, 1)
    for name, levels in columns.items():
        if strange := [level for level in levels if level not in classes]:
            raise InputError(
                f"{name} holds {show(strange)}, which {'is' if len(strange) == 1 else 'are'} not among the classes "
                f"{show(classes)}{'' if given is not None else f' of {label_name}'}; make the two columns agree, "
                "or name all classes (--class, once for each; classes=[...])"
            )
    if len(classes) < 2:
        raise InputError(f"{label_name} holds one class only, {show(classes)}; expected at least two")
    return classes


def known_positive(classes: tuple[str, str]) -> str | None:
    """The positive one of two classes, where their names say it: "ja" of ja and nein, "toxic" of toxic and not toxic.

    Example:
        >>> known_positive(("ja", "nein")), known_positive(("approved", "denied"))
        ('ja', None)
    """
    for negative, positive in (classes, classes[::-1]):
        no, yes = negative.lower(), positive.lower()
        if (no, yes) in _POSITIVE or re.fullmatch(rf"(not?|non|un|nicht)[ _-]?{re.escape(yes)}", no):
            return positive
    return None


def find_class(positive: Any, classes: tuple[Any, ...]) -> Any:
    """The class that a user means by `positive`: itself, or the one that reads the same ("1" for 1)."""
    for c in classes:
        if c == positive or str(c) == composed(str(positive)):
            return c
    names = [str(c) for c in classes]
    raise InputError(
        f"the positive class {positive!r} is not among the classes {show(classes)}.{did_you_mean(str(positive), names)}"
    )


def recode(column: Column, classes: tuple[Any, ...]) -> NDArray[np.integer]:
    """The codes of a column of shape [n], in terms of the classes; a level that is not among them counts as the first.

    Such levels are there only where a positive class stands against the rest: then the first is "not <positive>".
    """
    place = {value: i for i, value in enumerate(classes)}
    new = np.array([place.get(v, 0) for v in column.levels] + [-1], dtype=_small_integer(len(classes)))
    return translate(column.codes, new)


def translate(codes: NDArray[np.integer], new: NDArray[np.integer]) -> NDArray[np.integer]:
    """`new[codes]`, shape [n]; the last entry of `new`, −1, is for the code −1. Almost free where nothing changes."""
    if np.array_equal(new[:-1], np.arange(len(new) - 1)):
        return codes.astype(new.dtype, copy=False)
    return new.take(codes)


def check_scores(scores: NDArray[np.float64], names: Sequence[str]) -> None:
    """Refuse scores of shape [n, k] outside [0, 1]; NaN is for `missing_rows` to count."""
    for column, name in zip(scores.T, names, strict=True):
        if found := _where((column < 0) | (column > 1), column):
            raise InputError(
                f"{name} lies outside [0, 1] in {found}; "
                "expected probabilities: apply a sigmoid or softmax to logits, or, for one score on another scale, "
                "give the threshold of the positive class (--threshold)"
            )


def check_weight(weight: NDArray[np.float64], name: str) -> None:
    """Refuse negative and infinite weights and weights that are all 0; NaN is for `missing_rows` to count."""
    if found := _where((weight < 0) | np.isinf(weight), weight):
        raise InputError(f"{name} is negative or infinite in {found}; expected weights of at least 0")
    if len(weight) and not np.nansum(weight) > 0:
        raise InputError(f"{name} is 0 in all rows; expected at least one weight above 0")


def _where(bad: NDArray[np.bool_], values: NDArray[np.float64]) -> str:
    """How many rows are bad and the first of them; empty where none is."""
    count, row = int(bad.sum()), int(bad.argmax()) if len(bad) else 0
    return f"{count:,} row{'s' * (count > 1)} (first: {values[row]:g} in row {row + 1})" if count else ""


def missing_rows(
    columns: Mapping[str, NDArray[np.bool_]], groups: Collection[str], drop: bool
) -> tuple[NDArray[np.bool_] | None, dict[str, int]]:
    """Which rows to keep (None: all) and the number of missing values by column; refused unless `drop`.

    Rows that lack nothing but groups are kept.
    """
    counts = {name: int(np.count_nonzero(mask)) for name, mask in columns.items()}
    counts = {name: count for name, count in counts.items() if count}
    if not counts:
        return None, {}
    if not drop:
        first = {name: int(columns[name].argmax()) + 1 for name in counts}
        parts = ", ".join(f"{name} {count:,} (first in row {first[name]:,})" for name, count in counts.items())
        raise InputError(f"blank or NaN values: {parts}; use --drop-missing (drop_missing=True) to leave them out")
    masks = [columns[name] for name in counts if name not in groups]
    if not masks:
        return None, counts
    missing = np.logical_or.reduce(masks)
    if missing.all():
        raise InputError(f"no row is left after dropping blank or NaN values: {counts}")
    return ~missing, counts


def show(values: Iterable[Any], limit: int = 6) -> str:
    """A short list for messages."""
    items = list(values)
    more = f", … ({len(items)} in all)" if len(items) > limit else ""
    return ", ".join(repr(item) for item in items[:limit]) + more


def same_length(lengths: Mapping[str, int]) -> int:
    """The common number of rows, or an error that lists the lengths; no rows at all is an error too."""
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name} {n:,}" for name, n in lengths.items())
        raise InputError(f"expected columns of one length, found {found} rows")
    n = next(iter(lengths.values()))
    if n == 0:
        raise InputError("there are no rows; expected at least one")
    return n
