"""An audit on the page: for each group column its groups against a reference, its gaps, and all rates as a heat map."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import copysign, hypot
from typing import Any, ClassVar, NamedTuple

from markupsafe import Markup
from rich.console import Console

from fairhead.report.form import AuditFigures, one_of
from fairhead.report.markup import Cell, Forest, Mark, Row, Table, fill, forest, undefined
from fairhead.report.sections import Section
from fairhead.report.sections.headmap import colour_bar, colour_class
from fairhead.report.terminal_tables import show_audit
from fairhead.report.wording import (
    CROSS,
    FOUR_FIFTHS,
    Scale,
    by,
    count,
    is_finding,
    is_share,
    level,
    main_rates,
    metric_name,
    scale_of,
)
from fairhead.stats import Curves, Estimate, GroupRow

# Columns that a page holds: of drawings, and of a heat map.
_FOREST_COLUMNS, _HEAT_COLUMNS = 5, 12
_PALE = 0.1  # no colour is strong for a difference as small as this
_MOST_LINES = 6  # more could not be distinguished in one drawing


@dataclass(frozen=True, kw_only=True)
class Audited(Section):
    """An audit."""

    kind: ClassVar[str] = "audit"

    name: str  # whose predictions were audited
    audit: AuditFigures
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
        return fill("audit.html", name=self.name, overall=overall, blocks=blocks, count=count)

    def contents(self) -> Sequence[str]:
        """One entry a group column."""
        return [f"By {group_by}" for group_by in self._columns()]

    def show(self, console: Console) -> None:
        """Print the tables of the audit."""
        if self.text:  # one of several audits
            console.print(f"\n{self.title}: {self.text}", markup=False, highlight=False)
        show_audit(console, self.audit, self.rates)

    def metric_definitions(self) -> Mapping[str, str]:
        """Definitions of the audit's metrics."""
        return self.audit.definitions()

    def origin(self) -> Mapping[str, Any]:
        """The provenance of the audit."""
        return self.audit.provenance

    def blocks(self) -> "list[Block]":
        """What is drawn of all rows, and of each group column."""
        return [Block(self.audit, group_by, self.rates) for group_by in (None, *self._columns())]

    def _columns(self) -> list[str]:
        columns = dict.fromkeys([*(e.group_by for e in self.audit.estimates), *self.audit.groups()])
        return sorted((name for name in columns if name is not None), key=lambda name: name != self.first)


class Block:
    """Everything about one group column, or about no group: overall figures."""

    def __init__(self, audit: AuditFigures, group_by: str | None, rates: Sequence[str]) -> None:
        options = audit.options
        estimates = [e for e in audit.estimates if e.group_by == group_by]
        groups = audit.groups().get(group_by or "", [])
        known = list(dict.fromkeys(name for row in groups for name in row.rates))
        of_groups = [(row.group, metric_name(name), rate) for row in groups for name, rate in row.rates.items()]

        self.heading = "Overall" if group_by is None else f"By {group_by}"
        self.columns = (f"Value and {level(audit.level)} interval", "Smallest detectable", "n")
        self.panels = _panels(estimates, audit.level)
        self.undefined = undefined((by(group_by), metric_name(e.metric), e) for e in estimates)
        self.left_out, self.thin = (_said(estimates, key) for key in ("excluded", "unstable"))
        self.reference = options.get("reference", {}).get(group_by)  # the group that the others are seen against
        self.groups = self.heat = None
        if groups:
            self.groups = group_forest(groups, rates or main_rates(known, _FOREST_COLUMNS), self.reference)
            self.heat = group_heat_map(groups, self.reference)
        self.undefined_rates = undefined(of_groups)
        self.curves = next((c for c in audit.curves if c.group_by == group_by), None)
        if self.curves is not None:
            self.least = options.get("min_cell", 10)
            rule = str(options.get("prediction") or "")  # where a threshold made the predictions, it is shown first
            used = float(rule.removeprefix("score >= ")) if rule.startswith("score >= ") else None
            self.start = self.curves.start(used)
            self.drawings = (draw_roc(self.curves, self.least), draw_calibration(self.curves))

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
        marks = [mark for panel in self.panels for mark in panel.marks if mark.look != "level"]
        return "; ".join(f"{mark.name} {mark.cells[0].text} ({mark.cells[0].note})" for mark in marks[:3])


def _said(estimates: Sequence[Estimate], key: str) -> list[str]:
    """Collect the sentences that the details of defined figures hold under `key`."""
    found = [e.detail.get(key) for e in estimates if e.value is not None]
    return list(dict.fromkeys(str(words) for listed in found if isinstance(listed, list) for words in listed))


def _panels(estimates: Sequence[Estimate], level: float) -> list[Forest]:
    """Figures that share an axis together: those with one ideal, on one scale."""
    kinds: dict[tuple[float | None, bool], list[Estimate]] = {}
    for e in estimates:
        if e.value is not None:
            share = is_share(e.metric)
            # That accuracy is not perfect is no finding about evenness: a level has no ideal.
            is_level = e.group_by is None or (share and e.ideal == 1)
            kinds.setdefault((None if is_level else e.ideal, share), []).append(e)
    order = sorted(kinds, key=lambda kind: (kind[0] is None, kind[0] or 0.0, not kind[1]))
    return [_panel(kinds[kind], *kind, level) for kind in order]


def _panel(estimates: Sequence[Estimate], ideal: float | None, share: bool, level: float) -> Forest:
    marks = []
    for e in estimates:
        assert e.value is not None
        scale = scale_of(e.metric, e.value, e.low, e.high, difference=ideal == 0)
        value, interval = scale.write(e.value), scale.interval(e.low, e.high)
        cells = (Cell(value, interval), Cell("" if e.mde is None else scale.write(e.mde)), Cell(count(e.n)))
        name = metric_name(e.metric)
        words = f"{name}: {value}" + (f", interval {interval}" if interval else "")
        ticks, look = _detectable(e, ideal), _look(e, ideal, level)
        marks.append(Mark(e.value, e.low, e.high, ticks, look, words, name, _note(e, name), cells))
    # A level has no ideal to be seen against, so it is seen against the whole of 0 to 1.
    hold = (0.0, 1.0) if ideal is None else ()
    scale = Scale(100.0, unit="" if ideal == 0 else "%") if share else Scale()
    limit = FOUR_FIFTHS if any(e.metric == "impact_ratio" for e in estimates) else None
    noun = "Levels" if ideal is None else "Gaps" if ideal == 0 else "Ratios"
    on = "" if noun == "Ratios" else " on other scales" if not share else " in points" if noun == "Gaps" else ""
    return forest(marks, scale, ideal, hold, limit, caption=noun + on + ("" if ideal is None else f", ideal {ideal:g}"))


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


def group_forest(groups: Sequence[GroupRow], rates: Sequence[str], reference: str | None) -> Table:
    """One drawing a group and rate: its value and interval, and a line where the reference group's value is."""
    columns, headings = [], []
    against = _reference(groups, reference)
    for name in rates:
        known = [rate for group in groups if (rate := group.rates.get(name)) and rate.value is not None]
        other = against.get(name)
        scale, line = Scale(100.0 if is_share(name) else 1.0), None if other is None else other.value
        drawn = forest([_mark(rate, other) for rate in known], scale, line, parts=3)
        rows, cells = iter(drawn.rows), [_cell(group, name) for group in groups]
        columns.append([cell if cell.order is None else cell._replace(drawn=next(rows)) for cell in cells])
        headings.append(drawn.heading)
    return _table(groups, rates, reference, columns, headings)


def _reference(groups: Sequence[GroupRow], reference: str | None) -> Mapping[str, Estimate]:
    """The rates of the group that the others are seen against."""
    return next((group.rates for group in groups if group.group == reference), {})


class HeatMap(NamedTuple):
    """Every rate of every group, coloured by how much of its difference from the reference group is certain."""

    tables: Sequence[Table]
    bar: Markup


def group_heat_map(groups: Sequence[GroupRow], reference: str | None) -> HeatMap:
    """Tables of at most `_HEAT_COLUMNS` rates each, and what their colours mean."""
    names = list(dict.fromkeys(name for group in groups for name in group.rates))
    against = _reference(groups, reference)
    steps = {
        (group.group, name): step
        for group in groups
        for name in names
        if (is_share(name) or name.partition("[")[0] in ("AUC", "Brier"))  # on one scale, which colours can stand for
        and (step := _certain(group.rates.get(name), against.get(name))) is not None
    }
    largest = max([_PALE, *(abs(step) for step in steps.values())])

    def cell(group: GroupRow, name: str) -> Cell:
        step = steps.get((group.group, name))
        look = "none" if step is None else colour_class(step, largest)
        return _cell(group, name, against.get(name))._replace(look=look)

    parts = [names[start : start + _HEAT_COLUMNS] for start in range(0, len(names), _HEAT_COLUMNS)]
    tables = [_table(groups, some, reference, [[cell(g, name) for g in groups] for name in some]) for some in parts]
    return HeatMap(tables, colour_bar(-largest, largest, 100.0) if steps else Markup())


def _table(
    groups: Sequence[GroupRow],
    rates: Sequence[str],
    reference: str | None,
    columns: Sequence[Sequence[Cell]],  # one a rate
    headings: Sequence[Markup] = (),
) -> Table:
    cells = zip(*columns, strict=True) if columns else ([] for _ in groups)
    rows = [Row(g.group, row, g.group == reference, n=g.n) for g, row in zip(groups, cells, strict=True)]
    return Table([Cell(metric_name(name)) for name in rates], rows, headings=headings)


def _certain(rate: Estimate | None, reference: Estimate | None) -> float | None:
    """The end nearer to 0 of the interval of a rate's difference from the reference's; 0 where it holds 0."""
    if rate is None or reference is None or rate.value is None or reference.value is None:
        return None
    step = rate.value - reference.value
    own, other = (rate.low, reference.high) if step > 0 else (rate.high, reference.low)
    noise = 0.0 if own is None or other is None else hypot(rate.value - own, reference.value - other)
    return copysign(max(0.0, abs(step) - noise), step)


def _cell(group: GroupRow, name: str, reference: Estimate | None = None) -> Cell:
    rate = group.rates.get(name)
    if rate is None or rate.value is None:
        reason = "not computed" if rate is None else rate.undefined
        return Cell("–", words=f"{metric_name(name)} undefined: {reason}")
    scale = scale_of(rate.metric, rate.value, rate.low, rate.high)
    value, interval = scale.write(rate.value), scale.interval(rate.low, rate.high)
    words = f"{group.group}, {metric_name(name)}: {value}" + (f", {interval}" if interval else "")
    if reference is not None and reference.value is not None:
        step = rate.value - reference.value
        words += f"; {scale_of(name, step, difference=True).write(step, signed=True)} against the reference"
    # As narrow as can be; the words say more.
    short = Scale(scale.factor, min(scale.digits, 3 if scale.factor == 1 else 1 if rate.value >= 0.01 else 2))
    ends = ""
    if rate.low is not None and rate.high is not None:
        shorter = Scale(scale.factor, min(short.digits, 2))
        # An en dash before a minus could not be read.
        ends = f"{shorter.number(rate.low)}{'–' if rate.low >= 0 else ' to '}{shorter.number(rate.high)}"
    return Cell(short.number(rate.value), ends, words=f"{words}; n {count(rate.n)}", order=rate.value)


def _mark(rate: Estimate, reference: Estimate | None) -> Mark:
    """Filled where the intervals of the group and of the reference have nothing in common."""
    assert rate.value is not None
    own, other = rate.span, None if reference is None else reference.span
    apart = own is not None and other is not None and (own.low > other.high or own.high < other.low)
    scale = scale_of(rate.metric, rate.value, rate.low, rate.high)
    words = f"{scale.write(rate.value)}, interval {scale.interval(rate.low, rate.high)}"
    return Mark(rate.value, rate.low, rate.high, (), "clear" if apart else "vague", words)


class Drawing(NamedTuple):
    """Curves of the largest groups on one square."""

    title: str
    across: str  # what the horizontal axis is
    up: str  # what the vertical axis is
    lines: Mapping[str, str]  # group -> points as SVG has them, on 100 × 100 with the origin at the upper left
    left_out: int


def draw_roc(curves: Curves, least: int) -> Drawing:
    """True against false positive rates of the largest groups, with at least so many rows of either label."""
    lines = {}
    for group in curves.groups:
        if min(group.positives, group.negatives) >= max(least, 1):
            both = zip(group.false_positives, group.true_positives, strict=True)
            pairs = [(false / group.negatives, true / group.positives) for false, true in both]
            lines[group.group] = [(1.0, 1.0), *pairs, (0.0, 0.0)]
    return _drawing("ROC curves", "False positive rate", "True positive rate", lines, curves)


def draw_calibration(curves: Curves) -> Drawing:
    """How many are positive among rows with like scores, of the largest groups."""
    lines = {group.group: [(point.score, point.share) for point in group.calibration] for group in curves.groups}
    return _drawing("Calibration", "Mean score", "Share that is positive", lines, curves)


def _drawing(title: str, across: str, up: str, lines: dict[str, list[tuple[float, float]]], curves: Curves) -> Drawing:
    drawn = [group for group in sorted(curves.groups, key=lambda g: -g.n) if len(lines.get(group.group, ())) > 1]
    made = {
        g.group: " ".join(f"{100 * x:.2f},{100 - 100 * y:.2f}" for x, y in lines[g.group]) for g in drawn[:_MOST_LINES]
    }
    return Drawing(title, across, up, made, len(curves.groups) - len(made))
