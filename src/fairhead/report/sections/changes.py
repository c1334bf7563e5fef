"""Before and after on the page: paired changes as forests, a comparison of two audits, and the matrix of spill-over."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import expm1
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from markupsafe import Markup

from fairhead.errors import InputError
from fairhead.report.forest import Cell, Mark, Panel, forest, level, undefined
from fairhead.report.markup import fill
from fairhead.report.sections import Section
from fairhead.report.sections.audited import AuditFigures
from fairhead.report.wording import (
    GROUPS_MOVED,
    Scale,
    by,
    count,
    decimals,
    is_share,
    metric_name,
    p_value,
    said_of_difference,
    scale_of,
)
from fairhead.stats import OUTCOMES, Difference, Outcome

if TYPE_CHECKING:
    from rich.console import Console

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


@dataclass(frozen=True, kw_only=True)
class ComparisonFigures:
    """The JSON form of a comparison."""

    schema: ClassVar[str] = "fairhead.comparison/1"

    provenance: Mapping[str, Any]
    differences: Sequence[Difference]
    a: AuditFigures
    b: AuditFigures
    pairs: Sequence[Difference] = ()


@dataclass(frozen=True, kw_only=True)
class Compared(Section):
    """A comparison of two sets of predictions."""

    kind: ClassVar[str] = "comparison"

    a_name: str  # the first
    b_name: str  # the second
    comparison: Annotated[Any, ComparisonFigures]  # the comparison, or its JSON form

    def draw(self) -> Markup:
        """The differences b − a with the direction that is better for each."""
        columns = (
            f"{self.a_name} → {self.b_name}",
            f"Difference and {level(self.comparison.provenance)} interval",
            "Smallest detectable",
            "p and adjusted p",
            "Outcome",
        )
        differences: Sequence[Difference] = self.comparison.differences
        missing = undefined((by(d.group_by), metric_name(d.metric), d) for d in differences)
        return fill("comparison.html", section=self, columns=columns, undefined=missing)

    def panels(self) -> tuple[Panel, ...]:
        """The differences that are defined, shares apart from the rest."""
        defined = [d for d in self.comparison.differences if d.value is not None]
        kinds = [[d for d in defined if is_share(d.metric) == share] for share in (True, False)]
        return tuple(_difference_panel(chosen) for chosen in kinds if chosen)

    def summary(self) -> str:
        """How many differences have which outcome."""
        words: list[str] = [d.outcome for d in self.comparison.differences if d.value is not None]
        return ", ".join(f"{count(words.count(word))} {word}" for word in LOOKS if word in words)

    def show(self, console: "Console") -> None:
        """Which is which, and its tables."""
        from fairhead.report.terminal import show_comparison

        console.print(f"A = {self.a_name}, B = {self.b_name}", style="bold", markup=False, highlight=False)
        show_comparison(console, self.comparison)

    def metric_definitions(self) -> Mapping[str, str]:
        """Those of both audits' metrics."""
        return self.comparison.a.definitions() | self.comparison.b.definitions()

    def origin(self) -> Mapping[str, Any]:
        """That of the comparison."""
        return self.comparison.provenance


def _difference_panel(differences: Sequence[Difference]) -> Panel:
    marks = []
    for d in differences:
        assert d.value is not None
        points = scale_of(d.metric, d.value, d.low, d.high, difference=True)
        # The caption of the panel says the unit once.
        bare, absolute = Scale(points.factor, points.digits), Scale(points.factor, points.digits, points.unit and "%")
        value, interval = bare.write(d.value, signed=True), bare.interval(d.low, d.high, signed=True)
        word, direction, said = d.outcome, d.better_way, said_of_difference(d)
        cells = (
            Cell("" if d.a is None or d.b is None else f"{bare.write(d.a)} → {absolute.write(d.b)}"),
            Cell(value, interval),
            Cell("" if d.mde is None else bare.write(d.mde)),
            Cell(p_value(d.p), p_value(d.p_adjusted)),
            Cell(said if said == GROUPS_MOVED else word, direction and f"{direction} is better", LOOKS[word]),
        )
        name, of = metric_name(d.metric), by(d.group_by)
        ticks, words = () if d.mde is None else (-d.mde, d.mde), f"{name}, {of}: {value}, {word}"
        marks.append(Mark(d.value, d.low, d.high, ticks, LOOKS[word], words, name, of, cells))
    share = is_share(differences[0].metric)
    drawn = forest(marks, Scale(100.0 if share else 1.0), ideal=0.0)
    return Panel("Percentage points" if share else "Other scales", drawn, marks)


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


class _Drawn(NamedTuple):
    """A cell on the page."""

    text: str
    glyph: str
    look: str
    tip: str
    targeted: bool


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


def _drawn(row: Category, cell: CategoryChange) -> _Drawn:
    if cell.value is None:
        return _Drawn("–", "", "none", f"undefined: {cell.undefined}", cell.targeted)
    made, word = written(vars(cell)), cell.outcome
    leaning, where = _LEANING.get(cell.direction or "", ("", "as far as before from"))
    look = word if word in ("better", "worse") else "clear" if word == "changed" else leaning
    tip = (
        f"{row.benchmark}, {row.category}: {made.before} → {made.after}, {where} even; "
        f"{made.difference} ({made.interval}), n = {count(cell.n)}: {word}"
    )
    return _Drawn(made.difference, _GLYPHS.get(word, ""), look, tip, cell.targeted)


def _summary(name: str, cells: Sequence[CategoryChange]) -> str:
    parts: list[str] = []
    for targeted, words in ((True, "targeted"), (False, "untargeted")):
        chosen = [c for c in cells if c.targeted == targeted and c.value is not None]
        if chosen:
            outcomes = [c.outcome for c in chosen]
            told = ", ".join(f"{outcomes.count(w)} {w}" for w in OUTCOMES if w in outcomes)
            further = sum(c.direction == "further" for c in chosen)
            of = "of" if not parts else "Of"
            parts.append(f"{of} {len(chosen)} {words} categories {told}; {further} lie further from even than before")
    return f"{name}: {'. '.join(parts)}."
