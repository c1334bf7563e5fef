"""HTML from templates: every string is escaped, and no name from data turns the words around it. Tables and forests.

Charts here have no fixed width. Horizontal positions are percentages and everything else is in CSS pixels, so text
keeps its size from a phone to a print, and colours are CSS classes, so they follow the page into dark mode.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from math import ceil, floor, log10
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from fairhead.report.wording import Scale, plain_value

# Overrides, embeddings and isolates of the direction of writing. Letters of right-to-left scripts need none of them.
_TURNS = re.compile("[\u202a-\u202e\u2066-\u2069]")


def short(value: float) -> str:
    """Write a number of a drawing with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


@dataclass(frozen=True)
class Axis:
    """A horizontal axis: where a value lies between the left (0 %) and the right end (100 %)."""

    low: float  # the value at the left end
    high: float  # the value at the right end
    ticks: tuple[float, ...]  # round values in between, ends not necessarily included

    @classmethod
    def over(cls, values: Iterable[float], pad: float = 0.04, parts: int = 4) -> "Axis":
        """Return an axis that holds all values, with a little room; equal values get a window around them."""
        values = list(values) or [0.0]
        low, high = min(values), max(values)
        # A difference of rounding errors is none: its axis would have unreadable tick labels.
        equal = high - low <= 1e-9 * max(1.0, abs(low), abs(high))
        room = (abs(high) / 2 if abs(high) > 1e-6 else 0.01) if equal else (high - low) * pad
        low, high = low - room, high + room
        # The nearest of 1, 2 and 5 times a power of ten that gives no more parts than asked for.
        rough, power = (high - low) / parts, 10.0 ** floor(log10((high - low) / parts))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * (1 - 1e-9))
        first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
        # Multiply the integer: repeated addition would give ticks such as 0.30000000000000004.
        return cls(low, high, tuple(round(k * step, 12) for k in range(first, last + 1)))

    def fraction(self, value: float) -> float:
        """Return the position in percent of the width, kept inside the axis."""
        return 100 * min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))

    def at(self, value: float) -> str:
        """Return the position as an SVG length."""
        return f"{short(self.fraction(value))}%"


def fill(template: str, **names: Any) -> Markup:
    """Fill one of the report's templates."""
    return Markup(_environment().get_template(template).render(**names))


def part(macro: str, *values: Any) -> Markup:
    """Call a macro of parts.html, such as `forest_table`."""
    return getattr(_environment().get_template("parts.html").module, macro)(*values)


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fairhead.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = files("fairhead.report").joinpath("templates/page.js").read_text("utf-8")
    environment.filters["paragraphs"] = lambda text: [part for part in text.split("\n\n") if part.strip()]
    environment.filters["plain"] = plain_value
    environment.filters["short"] = short
    environment.filters["numbers"] = lambda values: " ".join(f"{value:.6g}" for value in values)
    # Ids within a section, `id="block-1"`, become those of the page; quotation marks from data are escaped.
    environment.filters["anchored"] = lambda drawn, i: Markup(
        str(drawn).replace(' id="block-', f' id="section-{i}-block-')
    )
    environment.globals["script"] = Markup(script)
    environment.globals["script_hash"] = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.globals["style"] = Markup(files("fairhead.report").joinpath("templates/style.css").read_text("utf-8"))
    return environment


def in_reading_order(page: str) -> str:
    r"""A page on which no name from data turns the words around it: characters that would do so are written out.

    Example:
        >>> in_reading_order("by \u202eegnaro: 3 points")
        'by \\u202eegnaro: 3 points'
    """
    return _TURNS.sub(lambda found: found[0].encode("unicode_escape").decode(), page)


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    note: str = ""  # below it or behind it, in small type
    look: str = ""  # CSS class
    words: str = ""  # what a pointer over it shows
    order: float | None = None  # by which the column is sorted
    drawn: Markup = Markup()


class Row(NamedTuple):
    """A row of a table of groups or of methods."""

    name: str
    cells: Sequence[Cell]
    reference: bool = False  # a group that the others are seen against, a method that uses groups
    note: str = ""  # beside the name, in small type
    n: int = 0


class Table(NamedTuple):
    """A table of groups or of methods."""

    columns: Sequence[Cell]
    rows: Sequence[Row]
    caption: str = ""
    headings: Sequence[Markup] = ()  # the axis of each column, where it is drawn


class Mark(NamedTuple):
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
    """A forest plot: a table whose second column is drawn, each row as a small SVG on the same axis."""

    caption: str
    marks: Sequence[Mark]
    heading: Markup  # the axis
    rows: Sequence[Markup]  # the drawing of each mark


def forest(
    marks: Sequence[Mark],  # the figures, top to bottom
    scale: Scale,  # how the axis is labelled; its digits follow from the ticks
    ideal: float | None,  # where the line of an even model goes; None for no line
    hold: Sequence[float] = (),  # values that the axis holds whatever the figures are
    limit: float | None = None,  # where a second line goes, such as the 0.8 of the four-fifths rule; None for no line
    parts: int = 4,  # of the axis between ticks, about
    caption: str = "",
) -> Forest:
    """Draw figures on one axis."""
    held = [*hold, ideal, limit, *(x for mark in marks for x in (mark.value, mark.low, mark.high, *mark.detectable))]
    axis = Axis.over((x for x in held if x is not None), parts=parts)
    rows = [part("forest_row", axis, mark, ideal, limit) for mark in marks]
    return Forest(caption, marks, part("forest_axis", axis, tick_scale(axis, scale), ideal, limit), rows)


def tick_scale(axis: Axis, scale: Scale) -> Scale:
    """Return `scale` with just the digits that tell the ticks of `axis` apart."""
    step = (axis.ticks[1] - axis.ticks[0]) * scale.factor if len(axis.ticks) > 1 else 1.0
    return Scale(scale.factor, max(0, -floor(log10(step) + 1e-9)), scale.unit if scale.unit == "%" else "")


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
