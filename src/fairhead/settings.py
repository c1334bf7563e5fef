"""Settings as dataclasses: their types say which values are allowed and how the command line calls them.

`momentum: Share = 0.1` is a number from 0 to 1; `check_settings` holds values to it. `Annotated[Count, Option("--n")]`
names the option of the command line that sets it, which `fairhead.cli.options` makes of the field. A search of
hyper-parameters draws a setting from its `Prior`, where a method declares one.
"""

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from numbers import Integral, Real
from os import PathLike
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Protocol, Union, get_args, get_origin, get_type_hints

from fairhead.errors import InputError


@dataclass(frozen=True)
class Range:
    """The numbers from `low` (or above it, where `above` says so) to `high` (or below it, where `below` says so)."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        enough = self.low < value if self.above else self.low <= value
        return enough and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        low, high = (f"{end:,.0f}" if 1e4 <= end < math.inf else f"{end:g}" for end in (self.low, self.high))
        if self.above and self.below:
            return f"between {low} and {high}"
        if self.high == math.inf:
            return f"above {low}" if self.above else f"of at least {low}"
        return f"above {low}, up to {high}" if self.above else f"from {low} to {high}"


@dataclass(frozen=True)
class Option:
    """How the command line offers a setting; its help is the line of the field in the docstring's `Attributes`."""

    flag: str = ""  # such as "--n-boot"; empty for the field's own name with hyphens
    metavar: str | None = None  # what stands for its value in the help; None leaves that to the type
    panel: str | None = None  # heading that it is listed under; None for that of its settings class
    also: str = ""  # another flag for the same, which the help does not show
    hidden: bool = False  # True for an option that works and that the help does not list
    shown: bool = True  # False for a setting that only Python has


PYTHON_ONLY = Option(shown=False)
_SHOWN = 200  # characters of a value in a message
_LIST = "a list, each entry "
LARGEST = 1e30  # of all numbers: larger ones do not fit into the 32 bits that models compute in

Count = Annotated[int, Range(1)]
WholeNumber = Annotated[int, Range(0)]
Positive = Annotated[float, Range(0, above=True)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(0, 1, above=True)]
# NumPy and torch take no larger one.
Seed = Annotated[int, Range(0, 2**32 - 1)]
# Of every command that makes intervals or p-values: fewer draws give neither.
Replicates = Annotated[int, Range(100)]
Level = Annotated[float, Range(0, 1, above=True, below=True)]


def check_settings(kind: type | Callable[..., Any], values: Mapping[str, Any], what: str) -> None:
    """Hold the values of a dataclass's fields, or of a function's arguments, to the types that it declares for them.

    Names that it does not declare are left alone. The message says `what` the settings are of.

    Example:
        >>> @dataclass
        ... class Settings:
        ...     momentum: Share = 0.1
        >>> check_settings(Settings, {"momentum": 0.5}, "example")
        >>> check_settings(Settings, {"momentum": 2}, "example")
        Traceback (most recent call last):
        fairhead.errors.InputError: example: momentum is 2; expected a number from 0 to 1
    """
    hints = get_type_hints(kind, include_extras=True)
    for name, value in values.items():
        hint = hints.get(name, Any)
        if get_origin(hint) is not ClassVar and not _fits(value, hint):
            large = isinstance(value, int | float) and abs(value) > LARGEST
            shown = repr(value)
            shown = shown if len(shown) <= _SHOWN and "\n" not in shown else f"a {type(value).__name__}"
            raise InputError(f"{what}: {name} is {shown}; expected {_expected(hint)}{', at most 1e30' * large}")


def check_config(config: Any) -> None:
    """`check_settings` of all that a dataclass holds; anything else is its author's own concern."""
    if is_dataclass(config):
        values = {setting.name: getattr(config, setting.name) for setting in fields(config)}
        check_settings(type(config), values, type(config).__name__)


def _fits(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        ranges = [extra for extra in arguments[1:] if isinstance(extra, Range)]
        return _fits(value, arguments[0]) and all(value in within for within in ranges)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple and arguments[1:] == (...,):
        return isinstance(value, tuple | list) and len(value) > 0 and all(_fits(one, arguments[0]) for one in value)
    if origin in (Mapping, dict):
        return isinstance(value, Mapping) and all(
            _fits(key, arguments[0]) and _fits(one, arguments[1]) for key, one in value.items()
        )
    if origin is Sequence:  # one name stands for a list of one, as readers take it
        if isinstance(value, str):
            return arguments[0] is str
        several = isinstance(value, Collection) and not isinstance(value, Mapping | bytes)
        return several and all(_fits(one, arguments[0]) for one in value)
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool) and -LARGEST <= value <= LARGEST  # type: ignore[operator]
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if hint in (bool, str, NoneType):
        return isinstance(value, hint)
    # A path, a function, or something else that no file or command line can give.
    return isinstance(value, origin) if isinstance(origin, type) else True


def _expected(hint: Any) -> str:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        ranges = " and ".join(str(extra) for extra in arguments[1:] if isinstance(extra, Range))
        return f"{_expected(arguments[0])} {ranges}"
    if origin in (Union, UnionType):
        ways = [*dict.fromkeys(_expected(one) for one in arguments)]
        several = [way for way in ways if way.removeprefix(_LIST) in ways and way.startswith(_LIST)]
        return " or ".join([*(way for way in ways if way not in several), *["a list of those"][: len(several)]])
    if origin is Literal:
        return " or ".join(str(one) for one in arguments)
    if origin in (Mapping, dict):
        return f"names, each with {_expected(arguments[1])}"
    if origin in (tuple, Sequence):
        return f"{_LIST}{_expected(arguments[0])}"
    names = {
        Any: "a value",
        float: "a number",
        int: "a whole number",
        bool: "true or false",
        str: "text",
        NoneType: "nothing",
    }
    return names.get(hint, "a path" if origin is PathLike else "a function")


class Prior(Protocol):
    """A distribution of one option."""

    def draw(self, chance: random.Random, epochs: int) -> Any:
        """One value; `epochs` are those of the plan, which some options are shares of."""

    def __str__(self) -> str: ...


@dataclass(frozen=True)
class Uniform:
    """Evenly between two numbers."""

    low: float
    high: float

    def draw(self, chance: random.Random, epochs: int) -> float:
        """One number, to three digits."""
        return rounded(chance.uniform(self.low, self.high))

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


@dataclass(frozen=True)
class LogUniform:
    """10 to a power that is drawn evenly between two."""

    low: float
    high: float
    whole: bool = False  # round to a whole number

    def draw(self, chance: random.Random, epochs: int) -> float:
        """One number, to three digits."""
        value = 10 ** chance.uniform(self.low, self.high)
        return round(value) if self.whole else rounded(value)

    def __str__(self) -> str:
        return f"10^({self.low:g} to {self.high:g})"


@dataclass(frozen=True)
class Choice:
    """One of a few values, evenly."""

    values: tuple[Any, ...]

    def draw(self, chance: random.Random, epochs: int) -> Any:
        """One value."""
        return chance.choice(self.values)

    def __str__(self) -> str:
        return " or ".join(f"{value:g}" for value in self.values)


@dataclass(frozen=True)
class ShareOfEpochs:
    """A whole number of epochs, an evenly drawn share of the plan's, at least one."""

    low: float
    high: float

    def draw(self, chance: random.Random, epochs: int) -> int:
        """A number of epochs."""
        return max(1, round(chance.uniform(self.low, self.high) * epochs))

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g} of the epochs"


@dataclass(frozen=True)
class ListOf:
    """A list with one drawn value, for options that hold several."""

    prior: LogUniform

    def draw(self, chance: random.Random, epochs: int) -> tuple[float, ...]:
        """One value in a tuple."""
        return (self.prior.draw(chance, epochs),)

    def __str__(self) -> str:
        return str(self.prior)


def rounded(value: float) -> float:
    """To three digits: a configuration that can be written down."""
    return float(f"{value:.3g}")
