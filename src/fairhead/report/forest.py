"""Forest plots: one row a figure, its interval against a shared axis, and the ideal as one line through all rows.

A forest here is a table whose second column is drawn. Each row is a small SVG on the same axis; the cells are
pushed together, so the lines join up. Names and figures stay text that wraps, scrolls, prints and can be copied.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import Any, NamedTuple

from markupsafe import Markup

from fairhead.report.markup import Axis, part
from fairhead.report.wording import THIN_SPACE, Scale


class Cell(NamedTuple):
    """A figure, what stands below it in small type, and a CSS class."""

    text: str
    note: str = ""
    look: str = ""


@dataclass(frozen=True)
class Mark:
    """One figure in a forest: a row of its table."""

    value: float  # the point estimate
    low: float | None  # lower end of its interval, or None
    high: float | None  # upper end, or None
    detectable: tuple[float, ...]  # where the smallest detectable effect lies: one tick on each side that matters
    look: str  # CSS class: "clear", "vague", "level", "better" or "worse". All but "vague" are filled dots.
    description: str  # the row in words, for screen readers and as a tooltip
    name: str = ""  # what stands at the beginning of the row
    note: str = ""  # below the name, in small type
    cells: tuple[Cell, ...] = ()  # the figures that follow the drawing


class Forest(NamedTuple):
    """Drawn cells of a forest plot: one for the heading, one for each row."""

    heading: Markup
    rows: tuple[Markup, ...]


def forest(
    marks: Sequence[Mark],  # the figures, top to bottom
    scale: Scale,  # how the axis is labelled; its digits follow from the ticks
    ideal: float | None,  # where the line of an even model goes; None for no line
    hold: Sequence[float] = (),  # values that the axis holds whatever the figures are
    limit: float | None = None,  # where a second line goes, such as the 0.8 of the four-fifths rule; None for no line
    parts: int = 4,  # of the axis between ticks, about
) -> Forest:
    """Draw the cells of a forest plot on one axis."""
    held = [*hold, ideal, limit, *(x for mark in marks for x in (mark.value, mark.low, mark.high, *mark.detectable))]
    axis = Axis.over((x for x in held if x is not None), parts=parts)
    heading = part("forest_axis", axis, tick_scale(axis, scale), ideal, limit)
    return Forest(heading, tuple(part("forest_row", axis, mark, ideal, limit) for mark in marks))


def tick_scale(axis: Axis, scale: Scale) -> Scale:
    """Return `scale` with just the digits that tell the ticks of `axis` apart."""
    step = (axis.ticks[1] - axis.ticks[0]) * scale.factor if len(axis.ticks) > 1 else 1.0
    return Scale(scale.factor, max(0, -floor(log10(step) + 1e-9)), scale.unit if scale.unit == "%" else "")


class Panel(NamedTuple):
    """Rows that share an axis, and their drawings."""

    caption: str
    forest: Forest
    rows: Sequence[Mark]


class Undefined(NamedTuple):
    """Figures of one subject that have no value, for one reason."""

    names: tuple[str, ...]
    subject: str
    reason: str


def undefined(named: Iterable[tuple[str, str, Any]]) -> tuple[Undefined, ...]:
    """List the figures without a value, (subject, name, figure) each; those of one subject with one reason together."""
    together: dict[tuple[str, str], list[str]] = {}
    for subject, name, figure in named:
        if figure.value is None:
            together.setdefault((subject, figure.undefined), []).append(name)
    return tuple(Undefined(tuple(names), *of) for of, names in together.items())


def level(provenance: Mapping[str, Any]) -> str:
    """Return the level of the intervals in words: as the provenance or an entry of it says, or 95 %."""
    places = [provenance, *(entry for entry in provenance.values() if isinstance(entry, Mapping))]
    share = next((place["level"] for place in places if isinstance(place.get("level"), float)), 0.95)
    return f"{share * 100:g}{THIN_SPACE}%"
