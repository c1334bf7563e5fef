"""What audits and comparisons share on the page: rows of figures beside a forest, and lists of undefined ones."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from fairhead.report import wording
from fairhead.report.forest import Forest
from fairhead.report.wording import metric_name

Figure = Mapping[str, Any]  # an estimate or a difference, as in the JSON form of an audit or a comparison
T = TypeVar("T")


class Cell(NamedTuple):
    """A figure, what stands below it in small type, and a CSS class."""

    text: str
    note: str = ""
    look: str = ""


class Row(NamedTuple):
    """A line of a panel: names and figures. Its drawn cell is in the panel's forest, at the same index."""

    name: str
    note: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Panel:
    """Rows that share an axis."""

    caption: str
    forest: Forest
    rows: tuple[Row, ...]


class Undefined(NamedTuple):
    """Figures of one subject that have no value, for one reason."""

    names: tuple[str, ...]
    subject: str
    reason: str


def distinct(values: Iterable[T]) -> list[T]:
    """Return the values without repeats, in the order in which they first came.

    Example:
        >>> distinct("abca")
        ['a', 'b', 'c']
    """
    return list(dict.fromkeys(values))


def undefined(named: Iterable[tuple[str, str, Figure]]) -> tuple[Undefined, ...]:
    """List the figures without a value, those of one subject with one reason together.

    Args:
        named: (subject, name of the figure, figure) of each.

    Example:
        >>> gap = {"value": None, "undefined": "dark has 3 rows"}
        >>> undefined([("by shade", "EOp", gap), ("by shade", "EOd", gap)])
        (Undefined(names=('EOp', 'EOd'), subject='by shade', reason='dark has 3 rows'),)
    """
    together: dict[tuple[str, str], list[str]] = {}
    for subject, name, figure in named:
        if figure["value"] is None:
            together.setdefault((subject, figure["undefined"]), []).append(name)
    return tuple(Undefined(tuple(names), *of) for of, names in together.items())


def by(group_by: str | None) -> str:
    """Say what a figure is split by.

    Example:
        >>> by("race"), by(None)
        ('by race', 'overall')
    """
    return "overall" if group_by is None else f"by {group_by}"


def undefined_figures(figures: Sequence[Figure]) -> tuple[Undefined, ...]:
    """List the estimates or differences without a value."""
    return undefined((by(f["group_by"]), metric_name(f["metric"]), f) for f in figures)


def level(provenance: Mapping[str, Any]) -> str:
    """Return the level of the intervals in words: as the provenance or an entry of it says, or 95 %.

    Example:
        >>> level({"audit": {"level": 0.9}}).replace(wording.THIN_SPACE, " ")
        '90 %'
    """
    places = [provenance, *(entry for entry in provenance.values() if isinstance(entry, Mapping))]
    share = next((place["level"] for place in places if isinstance(place.get("level"), float)), 0.95)
    return f"{share * 100:g}{wording.THIN_SPACE}%"
