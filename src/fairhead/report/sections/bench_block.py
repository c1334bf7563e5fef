"""Methods on one data set with one backbone: figures, differences from the baseline, the search, and the frontier.

The frontier of fairness and accuracy (DAM, Figure 2) says which methods no other one beats in both, as a picture.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, NamedTuple

from markupsafe import Markup

from fairhead.report.markup import Axis, Cell, Row, Table, fill
from fairhead.report.sections import Section
from fairhead.report.sections.plain import PlainTables, markdown_table
from fairhead.report.wording import Scale, p_value, plain_value

# The corner that hyper-volume is measured from: 5 points of accuracy below plain training, and a gap of 50 points.
_ACCURACY_BELOW = 0.05
_GAP_AT_MOST = 0.5
_TOP, _BOTTOM = 14, 300  # of the plot inside the drawing, in pixels
# The width is the reader's; names are placed as for this one, between a phone's and a screen's. Pixels a letter.
_WIDTH, _LETTER = 700, 7


@dataclass(frozen=True, kw_only=True)
class SeedMean:
    """A figure over seeds: mean, standard deviation, and the interval from test sampling."""

    mean: float | None
    sd: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class SeedChange:
    """A paired difference from the baseline, or from `a`; `outcome` is "better" or "worse" where it is significant."""

    value: float | None
    low: float | None
    high: float | None
    mde: float | None
    p_adjusted: float | None
    outcome: str = ""
    a: str = ""


@dataclass(frozen=True)
class Cost:
    """What a run of a method cost, averaged over seeds; None: not known there."""

    seconds: float  # wall time of training, all stages
    watt_hours: float | None  # of the GPU
    mib: float | None  # peak memory: PyTorch's tensors on the GPU, or the resident memory of the process
    mib_of: str  # which of the two
    shared_by: int  # how many cells shared the device at most: time is longer and energy an equal share
    steps: float  # optimizer steps, all stages


@dataclass(frozen=True)
class Choice:
    """What a search of one method found."""

    config: int  # the number of the configuration; 0 is the grid's own
    values: Mapping[str, Any]  # the settings that were drawn; empty for the grid's own
    score: float  # its validation score, averaged over the search's seeds
    own_score: float | None  # that of the grid's own settings; None where they came to nothing
    searched: Mapping[str, str]  # option -> what it was drawn from
    trials: int  # how many ran
    failed: int  # how many of them came to nothing, such as a loss that was not finite
    seconds: float  # wall time of all trials
    watt_hours: float | None  # of the GPU; None where not known
    with_groups: bool = False  # it was chosen by the worst (class, group) accuracy


@dataclass(frozen=True, kw_only=True)
class MethodFigures:
    """One method in a block."""

    method: str  # its name
    uses_groups: bool  # whether it trains or was chosen with groups: a reference
    seeds: Sequence[int]  # those that are done
    figures: Mapping[str, Annotated[Any, SeedMean]]  # metric -> figure over seeds
    # Metric -> paired difference from the baseline, p corrected over the methods of the block (Holm)
    differences: Mapping[str, Annotated[Any, SeedChange]]
    best: Sequence[str]  # metrics in which it is significantly better than every other method
    cost: Cost | None = None  # averaged over seeds
    failed: Mapping[str, str] = field(default_factory=dict)  # seed -> error of the cells that failed
    remark: str = ""  # how it uses groups, if it does
    search: Choice | None = None  # what a search of its hyper-parameters found; None where there was none
    told: int | None = None  # its level on the ladder of what methods are told; never in bold above 2

    @property
    def circular(self) -> bool:
        """Whether the rows that test it have chosen its epoch."""
        return "circular" in self.remark


@dataclass(frozen=True)
class Point:
    """One method: mean accuracy and gap over seeds, their test-sampling intervals, and whether it is on the front."""

    method: str
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    gap: float
    gap_low: float
    gap_high: float
    on_front: bool = False

    def beats(self, other: "Point") -> bool:
        """Whether it is as good in both means and better in one."""
        at_least = self.accuracy >= other.accuracy and self.gap <= other.gap
        return at_least and (self.accuracy > other.accuracy or self.gap < other.gap)


@dataclass(frozen=True)
class Frontier:
    """Points of all methods.

    Example:
        >>> means = {"erm": (0.90, 0.20), "dam": (0.88, 0.10), "bad": (0.87, 0.15)}
        >>> found = Frontier.of("EOd", [Point(name, x, x, x, y, y, y) for name, (x, y) in means.items()], "erm")
        >>> [point.method for point in found.front()]
        ['dam', 'erm']
    """

    metric: str  # the gap
    points: Sequence[Point]  # one a method
    # Area between the front and the corner (baseline's accuracy − 5 points, gap of 50 points), as a share of the
    # largest such area there could be; None without the baseline
    hypervolume: float | None

    @classmethod
    def of(cls, metric: str, points: Sequence[Point], baseline: str) -> "Frontier":
        """Mark the points that no other one beats, and measure the area up to them."""
        marked = tuple(replace(p, on_front=not any(other.beats(p) for other in points)) for p in points)
        corner = next((p.accuracy - _ACCURACY_BELOW for p in points if p.method == baseline), None)
        found = cls(metric, marked, None)
        if corner is None:
            return found
        area, reached = 0.0, corner
        for point in found.front():
            if point.accuracy > reached and point.gap < _GAP_AT_MOST:
                area += (point.accuracy - reached) * (_GAP_AT_MOST - point.gap)
                reached = point.accuracy
        return replace(found, hypervolume=area / ((1 - corner) * _GAP_AT_MOST))

    def front(self) -> list[Point]:
        """The points that no other one beats, by accuracy."""
        return sorted((p for p in self.points if p.on_front), key=lambda p: p.accuracy)

    def draw(self) -> Markup:
        """Draw the points with their intervals: accuracy to the right, the gap downwards to even; the front dashed."""
        across = Axis.over([x for p in self.points for x in (p.accuracy_low, p.accuracy_high)])
        up = Axis.over([0.0, *(x for p in self.points for x in (p.gap_low, p.gap_high))])

        def y(gap: float) -> float:
            return _BOTTOM - up.fraction(gap) / 100 * (_BOTTOM - _TOP)

        places = _places([(across.fraction(p.accuracy), y(p.gap), p.method) for p in self.points])
        return fill(
            "frontier.html",
            found=self,
            steps=list(pairwise(self.front())),
            named=[(point, place, place in _APART) for point, place in zip(self.points, places, strict=True)],
            across=across,
            up=up,
            y=y,
            percent=lambda value: f"{100 * value:.3g} %",
            top=_TOP,
            bottom=_BOTTOM,
        )


@dataclass(frozen=True, kw_only=True)
class BenchBlock(Section):
    """All methods on one data set with one backbone."""

    kind: ClassVar[str] = "bench"
    has_figures: ClassVar[bool] = False  # a table says below it how it is read

    baseline: str  # the method that the others are held against
    metrics: Sequence[str]  # in the order of the columns
    methods: Sequence[MethodFigures]  # one a row
    findings: Sequence[str] = ()  # a sentence for each metric
    frontier: Frontier | None = None  # of fairness and accuracy; None where a figure is undefined
    data: str = ""  # name of the data set
    backbone: str = ""  # name of the model
    group: str = ""  # the column that gaps are about
    n: int = 0  # test rows, averaged over seeds
    verdict: str = ""  # what the block shows, in a few sentences

    def draw(self) -> Markup:
        """Findings, tables, the frontier, and what failed."""
        return fill("bench.html", block=self, tables=self.tables(), points=points)

    def markdown(self) -> list[str]:
        """The section as paragraphs of Markdown, without the picture."""
        parts = [f"- {finding}" for finding in self.findings]
        # A figure and its note, in the tables of figures, of differences and of the search.
        for table, joint in zip(self.tables(), (" ({})", ", {}", " ({})"), strict=False):
            rows = [[row.name + (f" ({row.note})" if row.note else "")] for row in table.rows]
            for row, cells in zip(table.rows, rows, strict=True):
                for cell in row.cells:
                    text = f"**{cell.text}**" if "bold" in cell.look else cell.text
                    cells.append(text + (joint.format(cell.note) if cell.note else ""))
            parts += [table.caption, markdown_table([cell.text for cell in table.columns], rows)]
        failed = [f"- {m.method}, seed {seed}: {error}" for m in self.methods for seed, error in m.failed.items()]
        return [*parts, "Failed:", *failed] if failed else parts

    def tables(self) -> list[Table]:
        """The figures, the differences and, where there was one, the search."""
        tables = [self._figures(), self._differences()]
        return [*tables, self._search()] if any(line.search for line in self.methods) else tables

    def _figures(self) -> Table:
        head = _head("method", numbers=["told", "seeds", *map(column_name, self.metrics), "s", "Wh", "MiB"])
        rows = []
        for line in self.methods:
            cells = [Cell(str(len(line.seeds)), f"{len(line.failed)} failed" if line.failed else "", "number")]
            for metric in self.metrics:
                look = "number bold" if metric in line.best else "number"
                cells.append(Cell(*_mean(line.figures.get(metric)), look))
            cost = line.cost
            known = (cost_text(cost.seconds), cost_text(cost.watt_hours, 1), cost_text(cost.mib)) if cost else "–––"
            rows.append(_row(line, [*cells, *(Cell(text, "", "number") for text in known)]))
        caption = "Percent, mean ± standard deviation over seeds, with the interval from test sampling"
        return Table(head, rows, caption)

    def _differences(self) -> Table:
        head = _head("method", numbers=["told", *map(column_name, self.metrics)])
        compared = [line for line in self.methods if line.differences]
        rows = [
            _row(line, [_change(line.differences.get(m)) for m in self.metrics], self.baseline) for line in compared
        ]
        caption = (
            f"Difference from {self.baseline} in points, paired on seeds and test rows, with p (Holm) and the "
            "smallest detectable difference"
        )
        return Table(head, rows, caption)

    def _search(self) -> Table:
        found = [line.search for line in self.methods if line.search]
        own = [search for search in found if not search.with_groups]
        energy = [search.watt_hours for search in own if search.watt_hours is not None]
        cost = f"{cost_text(sum(search.seconds for search in own))} s"
        cost += f", {cost_text(sum(energy), 1)} Wh" if len(energy) == len(own) else ""
        caption = (
            f"Search of hyper-parameters: {found[0].trials} trials a method, all on validation rows; {cost} in all, "
            "not counted in the costs above"
        )
        head = _head("method", "told", "searched", "chosen", "validation score (the grid's own)", "trials", "s", "Wh")
        return Table(head, [_row(line, _choice(line.search)) for line in self.methods if line.search], caption)


def column_name(metric: str) -> str:
    """The short name of a metric, for the head of a column."""
    return {"worst_group_accuracy": "worst group"}.get(metric, metric)


def _head(*names: str, numbers: Sequence[str] = ()) -> list[Cell]:
    return [*(Cell(name) for name in names), *(Cell(name, look="number") for name in numbers)]


def _row(line: MethodFigures, cells: Sequence[Cell], baseline: str = "") -> Row:
    """One row of a table; with a `baseline`, the note names any other method that it was compared with."""
    others = {change.a for change in line.differences.values()} - {"", baseline} if baseline else set()
    # The remark is left out where the name says it already.
    said = [line.remark] if line.remark not in line.method else []
    note = ", ".join([*said, *(f"against {other}" for other in others)])
    told = Cell("–" if line.told is None else str(line.told), look="number")
    return Row(line.method, [told, *cells], line.uses_groups, note)


def _mean(figure: SeedMean | None) -> tuple[str, str]:
    """Mean ± sd over seeds, and the interval."""
    if figure is None or figure.mean is None:
        return "–" if figure is None else "undefined", ""
    text = points(figure.mean) + (f" ± {points(figure.sd)}" if figure.sd is not None else "")
    return text, "" if figure.low is None else f"{points(figure.low)} to {points(figure.high)}"


def _change(change: SeedChange | None) -> Cell:
    look = f"number {change.outcome if change and change.outcome in ('better', 'worse') else 'vague'}"
    if change is None or change.value is None:
        return Cell("–", "", look)
    text, p = points(change.value, signed=True), change.p_adjusted
    if change.low is not None:
        text += f" ({points(change.low, signed=True)} to {points(change.high, signed=True)})"
    return Cell(text, "" if p is None else f"p {p_value(p)}, detectable {points(change.mde)}", look)


def _choice(search: Choice) -> list[Cell]:
    chosen = ", ".join(f"{name} {plain_value(value)}" for name, value in search.values.items())
    texts = (
        ", ".join(f"{name} {prior}" for name, prior in search.searched.items()).replace("_", " ") or "nothing",
        chosen.replace("_", " ") or "as the grid has it",
        f"{points(search.score)} ({points(search.own_score)})",
        f"{search.trials}{f' ({search.failed} failed)' if search.failed else ''}",
        cost_text(search.seconds),
        cost_text(search.watt_hours, 1),
    )
    return [Cell(text) for text in texts]


def points(value: float | None, signed: bool = False) -> str:
    """A fraction as percent points with one decimal, or a dash."""
    return "–" if value is None else Scale(100, 1).write(value, signed)


def cost_text(value: float | None, digits: int = 0) -> str:
    """A cost, or what can be said where it is not known."""
    return "not known" if value is None else Scale(1, digits).write(value)


@dataclass(frozen=True, kw_only=True)
class EditFront(PlainTables):
    """A picture of edits above their table."""

    kind: ClassVar[str] = "edit_front"

    frontier: Frontier

    def draw(self) -> Markup:
        """The picture, and the table below it."""
        caption = (
            "Edits that no other beat on the selection half, by their figures on the reporting half. Bars: 95 % "
            "intervals of the change from the model as it is. Filled: no other is better in both here, too."
        )
        figure = Markup('<figure class="block">{}<figcaption class="note">{}</figcaption></figure>')
        return figure.format(self.frontier.draw(), caption) + super().draw()


class _Place(NamedTuple):
    """Where a name stands, seen from its point: pixels, and the end of the text that they lead to."""

    across: int
    down: int
    anchor: str


# Beside the point first; then further off, with a line that leads there.
_BESIDE, _APART = (
    [_Place(side * across, down, "start" if side > 0 else "end") for down in downs for side in (1, -1)]
    for across, downs in ((8, (-8, 17)), (16, (-26, 35, -42, 51, -58, 67)))
)


def _places(points: Sequence[tuple[float, float, str]]) -> list[_Place]:
    """Where names of points (percent of the width, pixels from the top, name) hide nothing, if possible."""
    dots = [(x * _WIDTH / 100, y) for x, y, _ in points]
    taken, found = [_Box(x - 6, y - 6, x + 6, y + 6) for x, y in dots], []
    for dot, (_, _, name) in zip(dots, points, strict=True):
        places = [place for place in _BESIDE if _is_nearest(dot, place, dots)] + _APART
        boxes = [(place, _box(*dot, name, place)) for place in places]
        inside = [(place, box) for place, box in boxes if box.within(_Box(0, 0, _WIDTH, _BOTTOM))]
        free = [both for both in inside if not any(both[1].meets(other) for other in taken)]
        place, box = (free or inside or boxes)[0]
        taken.append(box)
        found.append(place)
    return found


def _is_nearest(dot: tuple[float, float], place: _Place, dots: Sequence[tuple[float, float]]) -> bool:
    """Whether a name at this place would be taken for that of its own point: others are twice as far off."""
    start = (dot[0] + place.across, dot[1] + place.down)
    return all(math.dist(start, other) >= 2 * math.dist(start, dot) for other in dots if other != dot)


class _Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: "_Box") -> bool:
        left, right = max(self.left, other.left), min(self.right, other.right)
        return left < right and max(self.top, other.top) < min(self.bottom, other.bottom)

    def within(self, other: "_Box") -> bool:
        beside = other.left <= self.left and self.right <= other.right
        return beside and other.top <= self.top and self.bottom <= other.bottom


def _box(x: float, y: float, name: str, place: _Place) -> _Box:
    """About what a name covers."""
    width = _LETTER * len(name)
    left = x + place.across - (width if place.anchor == "end" else 0)
    return _Box(left, y + place.down - 11, left + width, y + place.down + 3)
