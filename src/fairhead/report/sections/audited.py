"""An audit on the page: for each group column its groups against a reference, its gaps, and all rates as a heat map."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

from markupsafe import Markup

from fairhead.report.forest import Cell, Mark, Panel, Undefined, forest, level, undefined
from fairhead.report.form import one_of
from fairhead.report.group_tables import (
    FOREST_COLUMNS,
    Drawing,
    HeatMap,
    Table,
    draw_calibration,
    draw_roc,
    group_forest,
    group_heat_map,
)
from fairhead.report.markup import fill
from fairhead.report.sections import Section
from fairhead.report.wording import (
    CROSS,
    FOUR_FIFTHS,
    Scale,
    by,
    count,
    is_finding,
    is_share,
    main_rates,
    metric_name,
    scale_of,
)
from fairhead.stats import Curves, Estimate, GroupRow

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class AuditFigures:
    """The JSON form of an audit."""

    schema: ClassVar[str] = "fairhead.audit/1"

    provenance: Mapping[str, Any]
    estimates: Sequence[Estimate]
    by_group: Sequence[GroupRow]
    curves: Sequence[Curves] = ()

    def definitions(self) -> dict[str, str]:
        """Full name of each metric -> its definition."""
        found = ((e.metric, e.detail.get("definition")) for e in self.estimates)
        return {metric_name(metric): str(definition) for metric, definition in found if definition}


@dataclass(frozen=True, kw_only=True)
class Audited(Section):
    """An audit."""

    kind: ClassVar[str] = "audit"

    name: str  # whose predictions were audited
    audit: Annotated[Any, AuditFigures]  # the audit, or its JSON form
    rates: Sequence[str] = ()  # which rates of groups to show first
    first: str | None = None  # which group column to show first

    def check(self, where: str) -> None:
        """The rates are among those of the audit."""
        known = list(dict.fromkeys(name for row in self.audit.by_group for name in row.rates))
        for i, name in enumerate(self.rates):
            one_of(name, known, f"{where}.rates[{i}]")

    def draw(self) -> Markup:
        """Overall figures in a line, then one block for each group column."""
        overall, *blocks = self.blocks()
        return fill(
            "audit.html",
            name=self.name,
            overall=overall,
            blocks=blocks,
            used=_threshold(self.audit.provenance),
            least=self.audit.provenance.get("audit", {}).get("min_cell", 10),
            count=count,
        )

    def contents(self) -> Sequence[str]:
        """One entry a group column."""
        return [block.heading for block in self.blocks()[1:]]

    def show(self, console: "Console") -> None:
        """Its tables."""
        from fairhead.report.terminal import show_audit

        show_audit(console, self.audit, self.rates)

    def metric_definitions(self) -> Mapping[str, str]:
        """Those of the audit's metrics."""
        return self.audit.definitions()

    def origin(self) -> Mapping[str, Any]:
        """That of the audit."""
        return self.audit.provenance

    def blocks(self) -> "list[Block]":
        """What is drawn of all rows, and of each group column."""
        audit: AuditFigures = self.audit
        options = audit.provenance.get("audit", {})
        references, least = options.get("reference", {}), options.get("min_cell", 10)
        columns = (f"Value and {level(audit.provenance)} interval", "Smallest detectable", "n")
        order = dict.fromkeys([None, *(e.group_by for e in audit.estimates), *(r.group_by for r in audit.by_group)])
        blocks = []
        for group_by in sorted(order, key=lambda name: (name is not None, name != self.first)):
            estimates = [e for e in audit.estimates if e.group_by == group_by]
            groups = [row for row in audit.by_group if row.group_by == group_by]
            reference = references.get(group_by)
            known = list(dict.fromkeys(name for row in groups for name in row.rates))
            curves = next((c for c in audit.curves if c.group_by == group_by), None)
            rates = list(self.rates) or main_rates(known, FOREST_COLUMNS)
            blocks.append(
                Block(
                    "Overall" if group_by is None else f"By {group_by}",
                    columns,
                    _panels(estimates, options.get("level", 0.95)),
                    undefined((by(e.group_by), metric_name(e.metric), e) for e in estimates),
                    _said(estimates, "excluded"),
                    _said(estimates, "unstable"),
                    reference,
                    group_forest(groups, rates, reference) if groups else None,
                    group_heat_map(groups, reference) if groups else None,
                    curves,
                    () if curves is None else (draw_roc(curves, least), draw_calibration(curves)),
                    undefined(
                        (row.group, metric_name(name), rate) for row in groups for name, rate in row.rates.items()
                    ),
                )
            )
        return blocks


class Block(NamedTuple):
    """Everything about one group column, or about no group: overall figures."""

    heading: str
    columns: tuple[str, ...]  # headings of the figures
    panels: tuple[Panel, ...]  # of the figures that have a value
    undefined: tuple[Undefined, ...]  # the others
    left_out: tuple[str, ...]  # groups too small to enter some gap, in words
    thin: tuple[str, ...]  # groups that entered with few rows, in words
    reference: str | None  # the group that the others are seen against
    groups: Table | None  # the main rates of each group, drawn
    heat: HeatMap | None  # all rates of each group
    curves: Curves | None  # each group at other thresholds
    drawings: tuple[Drawing, ...]  # curves of groups
    undefined_rates: tuple[Undefined, ...]

    @property
    def crossed(self) -> bool:
        """Whether its groups are intersections."""
        return CROSS in self.heading

    @property
    def shares(self) -> bool:
        """Whether its groups have rates, which colours can show, and not errors of numbers."""
        return self.heat is not None and bool(self.heat.bar)

    @property
    def summary(self) -> str:
        """The first figures, for a block that is folded."""
        rows = [row for panel in self.panels for row in panel.rows if row.look != "level"]
        return "; ".join(f"{row.name} {row.cells[0].text} ({row.cells[0].note})" for row in rows[:3])


def _said(estimates: Sequence[Estimate], key: str) -> tuple[str, ...]:
    """Collect the sentences that the details of defined figures hold under `key`."""
    found = [e.detail.get(key) for e in estimates if e.value is not None]
    return tuple(dict.fromkeys(str(words) for listed in found if isinstance(listed, list) for words in listed))


def _threshold(provenance: Mapping[str, Any]) -> float | None:
    """The threshold that made the predictions, where one did."""
    rule = str(provenance.get("audit", {}).get("prediction") or "")
    return float(rule.removeprefix("score >= ")) if rule.startswith("score >= ") else None


class _Kind(NamedTuple):
    """What decides which figures share an axis."""

    ideal: float | None  # None for levels: that accuracy is not perfect is no finding about evenness
    share: bool

    @classmethod
    def of(cls, estimate: Estimate) -> "_Kind":
        share = is_share(estimate.metric)
        level_of_something = estimate.group_by is None or (share and estimate.ideal == 1)
        return cls(None if level_of_something else estimate.ideal, share)

    @property
    def caption(self) -> str:
        noun = "Levels" if self.ideal is None else "Gaps" if self.ideal == 0 else "Ratios"
        scale = " in points" if noun == "Gaps" else ""
        scale = scale if self.share or noun == "Ratios" else " on other scales"
        return noun + scale + ("" if self.ideal is None else f", ideal {self.ideal:g}")


def _panels(estimates: Sequence[Estimate], level: float) -> tuple[Panel, ...]:
    kinds: dict[_Kind, list[Estimate]] = {}
    for e in estimates:
        if e.value is not None:
            kinds.setdefault(_Kind.of(e), []).append(e)
    order = sorted(kinds, key=lambda kind: (kind.ideal is None, kind.ideal or 0.0, not kind.share))
    return tuple(_panel(kinds[kind], kind, level) for kind in order)


def _panel(estimates: Sequence[Estimate], kind: _Kind, level: float) -> Panel:
    marks = []
    for e in estimates:
        assert e.value is not None
        scale = scale_of(e.metric, e.value, e.low, e.high, difference=kind.ideal == 0)
        value, interval = scale.write(e.value), scale.interval(e.low, e.high)
        cells = (Cell(value, interval), Cell("" if e.mde is None else scale.write(e.mde)), Cell(count(e.n)))
        name = metric_name(e.metric)
        words = f"{name}: {value}" + (f", interval {interval}" if interval else "")
        ticks, look = _detectable(e, kind.ideal), _look(e, kind.ideal, level)
        marks.append(Mark(e.value, e.low, e.high, ticks, look, words, name, _note(e, name), cells))
    # A level has no ideal to be seen against, so it is seen against the whole of 0 to 1.
    hold = (0.0, 1.0) if kind.ideal is None else ()
    scale = Scale(100.0, unit="" if kind.ideal == 0 else "%") if kind.share else Scale()
    limit = FOUR_FIFTHS if any(e.metric == "impact_ratio" for e in estimates) else None
    return Panel(kind.caption, forest(marks, scale, kind.ideal, hold, limit), marks)


def _note(estimate: Estimate, name: str) -> str:
    """The metric's short name where the row shows a long one, the groups that make the figure, and their class."""
    metric, label = estimate.metric, estimate.detail.get("class")
    short = metric if len(metric) <= 3 and metric not in name else ""
    groups = " vs ".join(str(group) for group in estimate.groups[:2])
    return " · ".join(part for part in (short, groups, "" if label is None else f"class {label}") if part)


def _look(estimate: Estimate, ideal: float | None, level: float) -> str:
    if ideal is None:
        return "level"
    low, high, alone = estimate.low, estimate.high, "p_adjusted" in estimate.detail and not is_finding(estimate, level)
    return "vague" if low is None or high is None or low <= ideal <= high or alone else "clear"


def _detectable(estimate: Estimate, ideal: float | None) -> tuple[float, ...]:
    """One tick, on the side of the ideal where the figure lies."""
    if estimate.mde is None or estimate.value is None or ideal is None:
        return ()
    # On the ideal itself the side follows from the scale: gaps grow from 0, ratios fall from 1.
    below = estimate.value < ideal or (estimate.value == ideal and ideal > 0)
    return (ideal - estimate.mde if below else ideal + estimate.mde,)
