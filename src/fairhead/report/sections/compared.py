"""A paired comparison on the page: differences as a forest, which way is better, and whether it went there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from markupsafe import Markup

from fairhead.report.forest import Cell, Mark, Panel, forest, level, undefined
from fairhead.report.markup import fill
from fairhead.report.sections import Section
from fairhead.report.sections.audited import AuditFigures
from fairhead.report.sections.changes import LOOKS
from fairhead.report.wording import (
    GROUPS_MOVED,
    Scale,
    by,
    count,
    is_share,
    metric_name,
    p_value,
    said_of_difference,
    scale_of,
)
from fairhead.stats import Difference

if TYPE_CHECKING:
    from rich.console import Console


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
        return tuple(_panel(chosen) for chosen in kinds if chosen)

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


def _panel(differences: Sequence[Difference]) -> Panel:
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
