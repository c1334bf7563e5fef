"""Before and after on the page: paired changes as forests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import expm1
from typing import Any, ClassVar, Literal, NamedTuple

from markupsafe import Markup

from fairhead.errors import InputError
from fairhead.report.forest import Cell, Mark, Panel, forest, level, undefined
from fairhead.report.markup import fill
from fairhead.report.sections import Section
from fairhead.report.wording import Scale, count, decimals, p_value
from fairhead.stats import OUTCOMES, Outcome

_ROUNDING = 1e-9
# Outcome -> the look of its mark and its word. Only "not significant" is a hollow dot.
LOOKS = {"better": "better", "worse": "worse", "changed": "clear", "not significant": "vague"}


@dataclass(frozen=True, kw_only=True)
class Change:
    """A figure before and after. A ratio's value, interval and smallest detectable change are logarithms."""

    before: float | None
    after: float | None
    value: float | None
    low: float | None
    high: float | None
    p: float | None
    p_adjusted: float | None
    mde: float | None
    n: int
    unit: Literal["share", "number", "ratio"]
    outcome: Outcome
    undefined: str | None = None

    def check(self, where: str) -> None:
        """Undefined means that there is no value, and nothing else does."""
        if (self.outcome == "undefined") != (self.value is None):
            found = f"{where}.outcome is {self.outcome!r}"
            raise InputError(f"{found}; expected 'undefined' where there is no value and only there")


@dataclass(frozen=True, kw_only=True)
class NamedChange(Change):
    """A row: its name, a note below it, and which way is better."""

    name: str
    note: str = ""
    better: str = ""


@dataclass(frozen=True, kw_only=True)
class ChangePanel:
    """Changes that share an axis."""

    caption: str
    changes: Sequence[NamedChange]


@dataclass(frozen=True, kw_only=True)
class Changes(Section):
    """Paired changes."""

    kind: ClassVar[str] = "changes"

    base: str  # what they are held against
    level: float  # of the intervals
    panels: Sequence[ChangePanel]  # changes that share an axis
    # Name of a figure -> what it is; drawn below the panels
    definitions: Mapping[str, str] = field(default_factory=dict)

    def draw(self) -> Markup:
        """The changes, panel by panel."""
        columns = (
            "Before → after",
            f"Change and {level({'level': self.level})} interval",
            "Smallest detectable",
            "p and adjusted p",
            "Outcome",
        )
        words = [change.outcome for panel in self.panels for change in panel.changes if change.value is not None]
        panels = ((panel.caption, [c for c in panel.changes if c.value is not None]) for panel in self.panels)
        return fill(
            "changes.html",
            section=self,
            columns=columns,
            panels=[_panel(caption, changes) for caption, changes in panels if changes],
            undefined=undefined((panel.caption, c.name, c) for panel in self.panels for c in panel.changes),
            summary=", ".join(f"{count(words.count(word))} {word}" for word in OUTCOMES if word in words),
        )


def _panel(caption: str, changes: Sequence[NamedChange]) -> Panel:
    marks = []
    for change in changes:
        made, unit, word = written(vars(change)), change.unit, change.outcome
        cells = (
            Cell(f"{made.before} → {made.after}"),
            Cell(made.difference, made.interval),
            Cell(made.detectable),
            Cell(p_value(change.p), p_value(change.p_adjusted)),
            Cell(word, change.better, LOOKS[word]),
        )
        value, low, high, mde = (_shown(x, unit) for x in (change.value, change.low, change.high, change.mde))
        assert value is not None
        ticks = () if mde is None else (-mde, mde)
        words = f"{change.name}: {made.difference}, {word}"
        marks.append(Mark(value, low, high, ticks, LOOKS[word], words, change.name, change.note, cells))
    unit = changes[0].unit
    drawn = forest(marks, Scale(1.0 if unit == "number" else 100.0, unit="%" if unit == "ratio" else ""), ideal=0.0)
    return Panel(caption, drawn, marks)


class WrittenChange(NamedTuple):
    """A change in words and figures; empty strings where something is undefined."""

    before: str
    after: str
    difference: str
    interval: str
    detectable: str


def written(change: Mapping[str, Any]) -> WrittenChange:
    """Write a change (shares in percent, ratios in percent of the first) with the digits that its interval deserves."""
    unit = change["unit"]
    moved, both = _difference_scale(change), _level_scale(change)
    value, low, high, mde = (_shown(change[key], unit) for key in ("value", "low", "high", "mde"))
    return WrittenChange(
        "" if change["before"] is None else both.write(change["before"]),
        "" if change["after"] is None else both.write(change["after"]),
        "" if value is None else moved.write(value, signed=True),
        moved.interval(low, high, signed=True),
        "" if mde is None else moved.write(mde),
    )


def _shown(value: float | None, unit: str) -> float | None:
    """Ratios come as logarithms and are shown as a part of the first figure."""
    return expm1(value) if value is not None and unit == "ratio" else value


def _difference_scale(change: Mapping[str, Any]) -> Scale:
    unit = change["unit"]
    value, low, high = (_shown(change[key], unit) for key in ("value", "low", "high"))
    factor = 1.0 if unit == "number" else 100.0
    # An interval of rounding errors is none: it would ask for digits that say nothing.
    spread = None if low is None or high is None or high - low < _ROUNDING else (high - low) / 2 * factor
    digits = decimals(None if value is None else value * factor, spread=spread)
    return Scale(factor, digits, "%" if unit == "ratio" else "")


def _level_scale(change: Mapping[str, Any]) -> Scale:
    if change["unit"] == "share":
        return Scale(100.0, max(1, min(2, _difference_scale(change).digits)), "%")
    # Where nothing moved, the difference has no digits to lend.
    if change["unit"] == "ratio" or not change["value"]:
        return Scale(1.0, decimals(change["before"], change["after"]))
    return _difference_scale(change)
