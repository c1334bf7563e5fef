"""Groups as pictures: a forest of rates against a reference group, a heat map of all rates, and curves of scores."""

from collections.abc import Mapping, Sequence
from math import copysign, hypot
from typing import Any, NamedTuple

from markupsafe import Markup

from fairhead.report.forest import Mark, forest
from fairhead.report.sections.headmap import colour_bar, colour_class
from fairhead.report.wording import Scale, count, is_share, metric_name, scale_of
from fairhead.stats import Curves, Estimate, GroupRow

# Columns that a page holds: of drawings, and of a heat map.
FOREST_COLUMNS = 5
HEAT_COLUMNS = 12
# No colour is strong for a difference as small as this.
_PALE = 0.1
# Lines that can be told apart in one drawing.
_MOST_LINES = 6


class Cell(NamedTuple):
    """One rate of one group."""

    value: str  # "–" where it is undefined
    interval: str
    words: str  # what a pointer over it shows
    order: float | None  # by which the column is sorted
    drawn: Markup = Markup()
    look: str = ""  # CSS class of its colour


class Row(NamedTuple):
    """One group."""

    group: str
    n: int
    is_reference: bool
    cells: tuple[Cell, ...]


class Table(NamedTuple):
    """Groups × rates."""

    columns: tuple[str, ...]
    headings: tuple[Markup, ...]  # the axis of each column, where it is drawn
    rows: tuple[Row, ...]


def group_forest(groups: Sequence[GroupRow], rates: Sequence[str], reference: str | None) -> Table:
    """One drawing a group and rate: its value and interval, and a line where the reference group's value is."""
    drawn: dict[str, list[Markup]] = {}
    headings = []
    for name in rates:
        known = [group.rates.get(name) for group in groups]
        against = _reference(groups, reference)
        other = None if against is None else against.rates.get(name)
        marks = [_mark(rate, other) for rate in known if rate is not None and rate.value is not None]
        line = None if other is None else other.value
        made = forest(marks, Scale(100.0 if is_share(name) else 1.0), line, parts=3)
        headings.append(made.heading)
        cells = iter(made.rows)
        drawn[name] = [next(cells) if rate is not None and rate.value is not None else Markup() for rate in known]
    rows = tuple(
        Row(
            group.group,
            group.n,
            group.group == reference,
            tuple(_cell(group, name)._replace(drawn=drawn[name][i]) for name in rates),
        )
        for i, group in enumerate(groups)
    )
    return Table(tuple(metric_name(name) for name in rates), tuple(headings), rows)


class HeatMap(NamedTuple):
    """Every rate of every group, coloured by how much of its difference from the reference group is certain."""

    tables: tuple[Table, ...]
    bar: Markup


def group_heat_map(groups: Sequence[GroupRow], reference: str | None) -> HeatMap:
    """Tables of at most `HEAT_COLUMNS` rates each, and what their colours mean."""
    names = list(dict.fromkeys(name for group in groups for name in group.rates))
    against = _reference(groups, reference)
    steps = {
        (group.group, name): step
        for group in groups
        for name in names
        if (is_share(name) or name.partition("[")[0] in ("AUC", "Brier"))  # on one scale, which colours can stand for
        and (step := _certain(group.rates.get(name), None if against is None else against.rates.get(name))) is not None
    }
    largest = max([_PALE, *(abs(step) for step in steps.values())])

    def row(group: GroupRow, some: Sequence[str]) -> Row:
        cells = []
        for name in some:
            step = steps.get((group.group, name))
            look = "none" if step is None else colour_class(step, largest)
            cells.append(_cell(group, name, against)._replace(look=look))
        return Row(group.group, group.n, group.group == reference, tuple(cells))

    parts = [names[start : start + HEAT_COLUMNS] for start in range(0, len(names), HEAT_COLUMNS)]
    tables = [Table(tuple(map(metric_name, some)), (), tuple(row(group, some) for group in groups)) for some in parts]
    return HeatMap(tuple(tables), colour_bar(-largest, largest, 100.0) if steps else Markup())


def _reference(groups: Sequence[GroupRow], reference: str | None) -> GroupRow | None:
    return next((group for group in groups if group.group == reference), None)


def _certain(rate: Estimate | None, reference: Estimate | None) -> float | None:
    """The end nearer to 0 of the interval of a rate's difference from the reference's; 0 where it holds 0."""
    if rate is None or reference is None or rate.value is None or reference.value is None:
        return None
    step = rate.value - reference.value
    own, other = (rate.low, reference.high) if step > 0 else (rate.high, reference.low)
    noise = 0.0 if own is None or other is None else hypot(rate.value - own, reference.value - other)
    return copysign(max(0.0, abs(step) - noise), step)


def _cell(group: GroupRow, name: str, against: GroupRow | None = None) -> Cell:
    rate = group.rates.get(name)
    if rate is None or rate.value is None:
        reason = "not computed" if rate is None else rate.undefined
        return Cell("–", "", f"{metric_name(name)} undefined: {reason}", None)
    scale = scale_of(rate.metric, rate.value, rate.low, rate.high)
    value, interval = scale.write(rate.value), scale.interval(rate.low, rate.high)
    words = f"{group.group}, {metric_name(name)}: {value}" + (f", {interval}" if interval else "")
    reference = None if against is None else against.rates.get(name)
    if reference is not None and reference.value is not None:
        step = rate.value - reference.value
        words += f"; {scale_of(name, step, difference=True).write(step, signed=True)} against the reference"
    # As narrow as can be; the words say more.
    short = Scale(scale.factor, min(scale.digits, 3 if scale.factor == 1 else 1 if rate.value >= 0.01 else 2))
    return Cell(short.number(rate.value), _bare(short, rate), f"{words}; n {count(rate.n)}", rate.value)


def _bare(scale: Scale, rate: Any) -> str:
    """The interval without a unit."""
    if rate.low is None or rate.high is None:
        return ""
    short = Scale(scale.factor, min(scale.digits, 2))
    # An en dash before a minus could not be read.
    return f"{short.number(rate.low)}{'–' if rate.low >= 0 else ' to '}{short.number(rate.high)}"


def _mark(rate: Estimate, reference: Estimate | None) -> Mark:
    """Filled where the intervals of the group and of the reference have nothing in common."""
    assert rate.value is not None
    low, high = rate.low, rate.high
    apart = False
    if reference is not None and reference.low is not None and reference.high is not None:
        apart = low is not None and high is not None and (low > reference.high or high < reference.low)
    scale = scale_of(rate.metric, rate.value, low, high)
    words = f"{scale.write(rate.value)}, interval {scale.interval(low, high)}"
    return Mark(rate.value, low, high, (), "clear" if apart else "vague", words)


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
