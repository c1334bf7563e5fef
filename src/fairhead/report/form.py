"""Reports as JSON: `plain` makes JSON values of what a report holds, `build` makes dataclasses of JSON values.

The types of a dataclass's fields define its JSON form, so a section checks only what types cannot express. The forms of
audits and comparisons are here, because sections, terminal tables and legal forms all read them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from math import isfinite
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from fairhead.errors import InputError, check_known, did_you_mean
from fairhead.report.wording import metric_name
from fairhead.settings import Range
from fairhead.stats import Curves, Difference, Estimate, GroupRow


@dataclass(frozen=True)
class Must:
    """A condition beyond the type and its range, as in `Annotated[str, Must(...)]`.

    Attributes:
        hold: whether a JSON value meets it.
        else_say: what is wrong where it does not, after the name of the place; "{value!r}" shows what was found.
    """

    hold: Callable[[Any], bool]
    else_say: str


def is_head(pair: Any) -> bool:
    """Whether a JSON value is [layer, head]."""
    return isinstance(pair, list) and len(pair) == 2 and all(type(k) is int and k >= 0 for k in pair)


def _is_grid(rows: Any) -> bool:
    lengths = {len(row) if isinstance(row, list) else -1 for row in rows} if isinstance(rows, list) else {-1}
    return len(lengths) == 1 and min(lengths) >= 1


IS_GRID = Must(_is_grid, "is not a grid; expected one list a row, all of the same length (≥ 1)")
Head = Annotated[Sequence[int], Must(is_head, "is {value!r}; expected [layer, head], both counted from 0")]
Grid = Annotated[Sequence[Sequence[float | None]], IS_GRID]  # [layers][heads]
PictureAddress = Annotated[
    str,
    Must(
        lambda text: isinstance(text, str) and text.startswith(("data:image/jpeg;base64,", "data:image/png;base64,")),
        "is not a picture; expected a data: address with JPEG or PNG",
    ),
]


@dataclass(frozen=True)
class AuditFigures:
    """What an audit found, as its JSON form holds it."""

    schema: ClassVar[str] = "fairhead.audit/1"

    estimates: tuple[Estimate, ...]  # overall figures first, then those of each group column
    by_group: tuple[GroupRow, ...]  # the figures of each group of each column
    provenance: Mapping[str, Any]  # where the rows came from, and the options of the audit
    curves: tuple[Curves, ...] = ()  # thresholds, ROC and calibration of each group column, where there is one score

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the audit."""
        found: Mapping[str, Any] = self.provenance.get("audit", {})
        return found

    @property
    def level(self) -> float:
        """Of the intervals."""
        return float(self.options.get("level", 0.95))

    def groups(self) -> dict[str, list[GroupRow]]:
        """The groups of each column and intersection."""
        found: dict[str, list[GroupRow]] = {}
        for row in self.by_group:
            found.setdefault(row.group_by, []).append(row)
        return found

    def definitions(self) -> dict[str, str]:
        """Full name of each metric -> its definition."""
        found = ((e.metric, e.detail.get("definition")) for e in self.estimates)
        return {metric_name(metric): str(definition) for metric, definition in found if definition}


@dataclass(frozen=True)
class ComparisonFigures:
    """What a comparison found, as its JSON form holds it."""

    schema: ClassVar[str] = "fairhead.comparison/1"

    differences: tuple[Difference, ...]  # one for each metric and group column, b minus a
    a: AuditFigures  # of the first predictions, on the rows that both have
    b: AuditFigures  # of the second
    provenance: Mapping[str, Any]  # where both came from, how they were joined, and the options
    # Changes of signed differences between two groups, of the rates behind the headline metrics
    pairs: tuple[Difference, ...] = ()

    @property
    def level(self) -> float:
        """Of the intervals."""
        return float(self.provenance.get("level", 0.95))


def plain(value: Any, where: str) -> Any:
    """Copy into dicts, lists, strings, finite numbers, booleans and None; refuse everything else by its place.

    Objects with a `to_dict` and other dataclasses become dicts; a dataclass's fields at their defaults are left out.
    """
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, str):
        # A lone surrogate, left by a reader of broken text, could not be written to a file.
        return value.encode("utf-8", "replace").decode("utf-8")
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if not isfinite(value):
            raise InputError(f"{where} is {value}, which JSON cannot hold; use None for a value that is undefined")
        return float(value)
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    elif is_dataclass(value) and not isinstance(value, type):
        value = json_of(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise InputError(f"{where} has the key {key!r}, which is {_kind_of(key)}; expected a string")
        return {plain(key, where): plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise InputError(f"{where} is {_kind_of(value)}; expected JSON values (dict, list, string, number, boolean, None)")


def json_of(made: Any) -> dict[str, Any]:
    """The dict of a dataclass: its schema or kind, then the fields that are not at their defaults."""
    marks = {name: getattr(made, name) for name in ("schema", "kind") if isinstance(getattr(made, name, None), str)}
    given = {f.name: (getattr(made, f.name), _default(f)) for f in fields(made)}
    # By type first: arrays do not say in one word whether they equal something.
    return marks | {
        name: value for name, (value, usual) in given.items() if type(value) is not type(usual) or value != usual
    }


def build(hint: Any, value: Any, where: str) -> Any:
    """Return a JSON value as the type that `hint` says: dataclasses from dicts, tuples from lists, the rest as it is.

    A dataclass with a `schema` is built only from a dict of that schema; its `check(where)`, if it has one, is called.
    None stands for the default of a field that has one, and keys that are no fields are left alone.
    """
    if hint in (str, int, float, bool):
        return _expect(value, hint, where)
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        for must in (extra for extra in inside[1:] if isinstance(extra, Must)):
            if not must.hold(value):
                raise InputError(f"{where} {must.else_say.format(value=value)}")
        made = build(next((extra for extra in inside[1:] if isinstance(extra, type)), inside[0]), value, where)
        for within in (extra for extra in inside[1:] if isinstance(extra, Range)):
            if made not in within:
                raise InputError(f"{where} is {made}; expected a number {within}")
        return made
    if hint is Any:
        return value
    if origin in (Union, UnionType):
        (one,) = (kind for kind in inside if kind is not NoneType)
        return None if value is None else build(one, value, where)
    if origin is Literal:
        _expect(value, str, where)
        return one_of(value, inside, where)
    if origin in (Sequence, tuple):
        _expect(value, list, where)
        return tuple(build(inside[0], one, f"{where}[{i}]") for i, one in enumerate(value))
    if origin is Mapping:
        _expect(value, dict, where)
        return {key: build(inside[1], one, f"{where}.{key}") for key, one in value.items()}
    if hasattr(hint, "from_json"):
        return hint.from_json(value, where)
    return build_dataclass(hint, value, where)


def build_dataclass(kind: Any, value: Any, where: str) -> Any:
    """`build` of a dataclass, whatever its own `from_json` would do."""
    hints, schema = _hints(kind), getattr(kind, "schema", None)
    if schema is not None:
        found = build(str, take(value, "schema", where), f"{where}.schema")
        if found != schema:
            raise InputError(f"{where}.schema is {found!r}; this version of fairhead reads {schema!r}")
    given = {}
    for f in fields(kind):
        if _default(f) is MISSING:
            given[f.name] = build(hints[f.name], take(value, f.name, where), f"{where}.{f.name}")
        elif isinstance(value, dict) and value.get(f.name) is not None:
            given[f.name] = build(hints[f.name], value[f.name], f"{where}.{f.name}")
    made = kind(**given)
    if "undefined" in hints and made.value is None and not made.undefined:
        raise InputError(f"{where} has no value and no reason; say in 'undefined' why it is undefined")
    if hasattr(made, "check"):
        made.check(where)
    return made


def one_of(value: str, known: Sequence[str], where: str) -> str:
    """Return `value` if it is known, or say what is."""
    check_known(value, known, f"{where} is {value!r}; expected one of")
    return value


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _default(field: Any) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def take(holder: Any, key: str, where: str) -> Any:
    """Return `holder[key]`, or say that it is missing."""
    if not isinstance(holder, dict):
        raise InputError(f"{where} is {_kind_of(holder)}; expected a dict with {key!r}")
    if key not in holder:
        raise InputError(f"{where} has no {key!r}; add it.{did_you_mean(key, list(holder))}")
    return holder[key]


def _expect(value: Any, kind: type, where: str) -> Any:
    admitted = (int, float) if kind is float else kind
    if not isinstance(value, admitted) or (kind in (int, float) and isinstance(value, bool)):
        raise InputError(f"{where} is {_kind_of(value)}; expected {_kind_of(kind())}")
    return value


def _kind_of(value: Any) -> str:
    names = {dict: "a dict", list: "a list", str: "a string", float: "a number", int: "an integer", bool: "a boolean"}
    return "None" if value is None else names.get(type(value), f"a {type(value).__name__}")
