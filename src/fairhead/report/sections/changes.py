"""Before and after on the page: paired changes as forests, a comparison of two audits, and the matrix of spill-over."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import expm1
from typing import Any, ClassVar, Literal, NamedTuple, Self

from markupsafe import Markup
from rich.console import Console

from fairhead.errors import InputError
from fairhead.report.form import ComparisonFigures
from fairhead.report.markup import Cell, Forest, Mark, fill, forest, undefined
from fairhead.report.sections import Section
from fairhead.report.terminal_tables import show_comparison
from fairhead.report.wording import (
    GROUPS_MOVED,
    ROWS_MOVED,
    Scale,
    by,
    count,
    decimals,
    is_share,
    level,
    metric_name,
    p_value,
    said_of_difference,
)
from fairhead.stats import OUTCOMES, Difference, Outcome

_ROUNDING = 1e-9
# Outcome -> the look of its mark and its word. Only "not significant" is a hollow dot.
LOOKS = {"better": "better", "worse": "worse", "changed": "clear", "not significant": "vague"}
_GLYPHS = {"better": "✓", "worse": "!", "changed": "↷"}
_LEANING = {"nearer": ("lean-better", "nearer to"), "further": ("lean-worse", "further from")}


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

    @classmethod
    def of(cls, found: Difference, unit: Any, **more: Any) -> Self:
        """A paired difference, with `more` that this kind of change has."""
        same = ("value", "low", "high", "p", "p_adjusted", "mde", "n", "outcome", "undefined")
        return cls(before=found.a, after=found.b, unit=unit, **{key: getattr(found, key) for key in same}, **more)

    def check(self, where: str) -> None:
        """Undefined means that there is no value, and nothing else does."""
        if (self.outcome == "undefined") != (self.value is None):
            found = f"{where}.outcome is {self.outcome!r}"
            raise InputError(f"{found}; expected 'undefined' where there is no value and only there")

    def shown(self, key: str) -> float | None:
        """One of its figures; a ratio's, which is a logarithm, as a part of the first figure."""
        value = getattr(self, key)
        return expm1(value) if value is not None and self.unit == "ratio" else value

    def written(self) -> "WrittenChange":
        """Shares in percent, ratios in percent of the first, with the digits that the interval deserves."""
        value, low, high, mde = map(self.shown, ("value", "low", "high", "mde"))
        factor = 1.0 if self.unit == "number" else 100.0
        # An interval of rounding errors is none: it would ask for digits that say nothing.
        spread = None if low is None or high is None or high - low < _ROUNDING else (high - low) / 2 * factor
        digits = decimals(None if value is None else value * factor, spread=spread)
        moved = both = Scale(factor, digits, "%" if self.unit == "ratio" else "")
        if self.unit == "share":
            both = Scale(100.0, max(1, min(2, digits)), "%")
        elif self.unit == "ratio" or not self.value:  # where nothing moved, the difference has no digits to lend
            both = Scale(1.0, decimals(self.before, self.after))
        return WrittenChange(
            "" if self.before is None else both.write(self.before),
            "" if self.after is None else both.write(self.after),
            "" if value is None else moved.write(value, signed=True),
            moved.interval(low, high, signed=True),
            "" if mde is None else moved.write(mde),
        )


class WrittenChange(NamedTuple):
    """A change in words and figures; empty strings where something is undefined."""

    before: str
    after: str
    difference: str
    interval: str
    detectable: str


@dataclass(frozen=True, kw_only=True)
class NamedChange(Change):
    """A row: its name, a note below it, which way is better, and what is said where that is not the outcome."""

    name: str
    note: str = ""
    better: str = ""
    said: str = ""


@dataclass(frozen=True, kw_only=True)
class ChangePanel:
    """Changes that share an axis."""

    caption: str
    changes: Sequence[NamedChange]

    def drawn(self) -> Forest | None:
        """The changes that have a value, as a forest plot."""
        marks = []
        changes = [change for change in self.changes if change.value is not None]
        for change in changes:
            made, word = change.written(), change.outcome
            cells = (
                Cell(f"{made.before} → {made.after}"),
                Cell(made.difference, made.interval),
                Cell(made.detectable),
                Cell(p_value(change.p), p_value(change.p_adjusted)),
                Cell(change.said or word, change.better, LOOKS[word]),
            )
            value, low, high, mde = map(change.shown, ("value", "low", "high", "mde"))
            assert value is not None
            ticks, words = () if mde is None else (-mde, mde), f"{change.name}: {made.difference}, {word}"
            marks.append(Mark(value, low, high, ticks, LOOKS[word], words, change.name, change.note, cells))
        if not marks:
            return None
        unit = changes[0].unit
        scale = Scale(1.0 if unit == "number" else 100.0, unit="%" if unit == "ratio" else "")
        return forest(marks, scale, ideal=0.0, caption=self.caption)


def _outcomes(words: Sequence[str]) -> str:
    """How many there are of each."""
    return ", ".join(f"{count(words.count(word))} {word}" for word in OUTCOMES if word in words)


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
        subject = Markup("Against <bdi>{}</bdi>, on the same items").format(self.base)
        alone = "smallest detectable, were it the only figure"
        both, at = "Before → after", level(self.level)
        return _draw(self.panels, at, subject, both, "change", alone, self.definitions)


def _draw(
    given: Sequence[ChangePanel],
    at: str,  # level of the intervals
    subject: Markup,
    both: str,  # heading of the figures before and after
    noun: str,  # what a row is
    detectable: str,  # what the legend says of the smallest one
    definitions: Mapping[str, str],
) -> Markup:
    """Panels of changes with their legend."""
    changes = [(panel.caption, change.name, change) for panel in given for change in panel.changes]
    return fill(
        "changes.html",
        columns=(both, f"{noun.capitalize()} and {at} interval", "Smallest detectable", "p and adjusted p", "Outcome"),
        panels=[panel for panel in (panel.drawn() for panel in given) if panel is not None],
        undefined=undefined(changes),
        summary=_outcomes([change.outcome for _, _, change in changes if change.value is not None]),
        subject=subject,
        noun=noun,
        detectable=detectable,
        definitions=definitions,
    )


@dataclass(frozen=True, kw_only=True)
class Compared(Section):
    """A comparison of two sets of predictions."""

    kind: ClassVar[str] = "comparison"

    a_name: str  # the first
    b_name: str  # the second
    comparison: ComparisonFigures

    def draw(self) -> Markup:
        """The differences b − a with the direction that is better for each."""
        rows = "on the same rows" if self.comparison.provenance.get("paired", True) else "different rows"
        subject = Markup("<bdi>{}</bdi> minus <bdi>{}</bdi>, {}").format(self.b_name, self.a_name, rows)
        both, at = f"{self.a_name} → {self.b_name}", level(self.comparison.level)
        return _draw(self.panels(), at, subject, both, "difference", "smallest detectable", {})

    def panels(self) -> list[ChangePanel]:
        """Shares, and differences on other scales."""
        shares, others = (
            [d for d in self.comparison.differences if is_share(d.metric) == share] for share in (True, False)
        )
        return [
            ChangePanel(caption="Percentage points", changes=[_named(d, "share") for d in shares]),
            ChangePanel(caption="Other scales", changes=[_named(d, "number") for d in others]),
        ]

    def show(self, console: Console) -> None:
        """Which is which, and its tables."""
        console.print(f"A = {self.a_name}, B = {self.b_name}", style="bold", markup=False, highlight=False)
        show_comparison(console, self.comparison)

    def metric_definitions(self) -> Mapping[str, str]:
        """Definitions of the metrics of both audits."""
        return self.comparison.a.definitions() | self.comparison.b.definitions()

    def origin(self) -> Mapping[str, Any]:
        """The provenance of the comparison."""
        return self.comparison.provenance


def _named(d: Difference, unit: str) -> NamedChange:
    said = said_of_difference(d)
    return NamedChange.of(
        d,
        unit,
        name=metric_name(d.metric),
        note=by(d.group_by),
        better=d.better_way and f"{d.better_way} is better",
        said=said if said in (GROUPS_MOVED, ROWS_MOVED) else "",
    )


@dataclass(frozen=True, kw_only=True)
class CategoryChange(Change):
    """A cell: whether the run was trained on this axis, and whether it moved "nearer" to even or "further" from it."""

    targeted: bool
    direction: str | None


@dataclass(frozen=True, kw_only=True)
class Category:
    """A row: a category of a benchmark, with a cell for each run."""

    benchmark: str
    category: str
    cells: Sequence[CategoryChange]


@dataclass(frozen=True, kw_only=True)
class Spillover(Section):
    """The matrix: one row a category, one column a run."""

    kind: ClassVar[str] = "spillover"

    columns: Sequence[str]
    rows: Sequence[Category]

    def check(self, where: str) -> None:
        """Each row has one cell a column."""
        for i, row in enumerate(self.rows):
            if len(row.cells) != len(self.columns):
                found = f"{where}.rows[{i}] has {len(row.cells)} cells"
                raise InputError(f"{found}; expected one a column, {len(self.columns)}")

    def draw(self) -> Markup:
        """The matrix, and what each run adds up to."""
        runs = [[row.cells[i] for row in self.rows] for i in range(len(self.columns))]
        return fill(
            "spillover.html",
            section=self,
            cells=[[_drawn(row, cell) for cell in row.cells] for row in self.rows],
            any_targeted=any(cell.targeted for cells in runs for cell in cells),
            summaries=[_summary(name, cells) for name, cells in zip(self.columns, runs, strict=True)],
        )


def _drawn(row: Category, cell: CategoryChange) -> Cell:
    if cell.value is None:
        return Cell("–", look="none", words=f"undefined: {cell.undefined}")
    made, word = cell.written(), cell.outcome
    leaning, where = _LEANING.get(cell.direction or "", ("", "as far as before from"))
    look = word if word in ("better", "worse") else "clear" if word == "changed" else leaning
    words = (
        f"{row.benchmark}, {row.category}: {made.before} → {made.after}, {where} even; "
        f"{made.difference} ({made.interval}), n = {count(cell.n)}: {word}"
    )
    return Cell(made.difference, _GLYPHS.get(word, ""), look, words)


def _summary(name: str, cells: Sequence[CategoryChange]) -> str:
    parts: list[str] = []
    for targeted, words in ((True, "targeted"), (False, "untargeted")):
        chosen = [c for c in cells if c.targeted == targeted and c.value is not None]
        if chosen:
            told = _outcomes([c.outcome for c in chosen])
            further = sum(c.direction == "further" for c in chosen)
            of = "of" if not parts else "Of"
            parts.append(f"{of} {len(chosen)} {words} categories {told}; {further} lie further from even than before")
    return f"{name}: {'. '.join(parts)}."
