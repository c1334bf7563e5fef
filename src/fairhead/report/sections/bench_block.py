"""Methods on one data set with one backbone: figures, differences from the baseline, the search, and the frontier."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from markupsafe import Markup

from fairhead.report.forest import Cell
from fairhead.report.frontier import Frontier
from fairhead.report.markup import fill
from fairhead.report.sections import Section
from fairhead.report.wording import Scale, p_value, plain_value

BAR = "\\|"  # within a cell of Markdown


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
    """One method; see `fairhead.bench.table.Line`."""

    method: str
    uses_groups: bool
    seeds: Sequence[int]
    figures: Mapping[str, SeedMean]
    differences: Mapping[str, SeedChange]
    best: Sequence[str]
    cost: Cost | None = None
    failed: Mapping[str, str] = field(default_factory=dict)
    remark: str = ""
    search: Choice | None = None
    told: int | None = None


class _Row(NamedTuple):
    name: Cell
    cells: Sequence[Cell]
    reference: bool


class _Table(NamedTuple):
    """A table of methods; `joint` joins a figure and its note in Markdown."""

    caption: str
    head: Sequence[Cell]
    rows: Sequence[_Row]
    joint: str = " ({})"

    def markdown(self) -> str:
        head = [cell.text for cell in self.head]
        rows = [[row.name.text + (f" ({row.name.note})" if row.name.note else "")] for row in self.rows]
        for row, cells in zip(self.rows, rows, strict=True):
            for cell in row.cells:
                text = f"**{cell.text}**" if "bold" in cell.look else cell.text
                cells.append(text + (self.joint.format(cell.note) if cell.note else ""))
        return markdown_table(head, rows)


@dataclass(frozen=True, kw_only=True)
class BenchBlock(Section):
    """All methods on one data set with one backbone."""

    kind: ClassVar[str] = "bench"
    has_figures: ClassVar[bool] = False  # a table says below it how it is read

    baseline: str  # the method that the others are held against
    metrics: Sequence[str]  # in the order of the columns
    methods: Sequence[MethodFigures]  # one a row
    findings: Sequence[str] = ()  # a sentence for each metric
    frontier: Frontier | None = None  # of fairness and accuracy

    def draw(self) -> Markup:
        """Findings, tables, the frontier, and what failed."""
        return fill("bench.html", block=self, tables=self.tables(), points=points)

    def markdown(self) -> list[str]:
        """The same as paragraphs of Markdown, without the picture."""
        parts = [f"- {finding}" for finding in self.findings]
        for table in self.tables():
            parts += [table.caption, table.markdown()]
        failed = [f"- {m.method}, seed {seed}: {error}" for m in self.methods for seed, error in m.failed.items()]
        return [*parts, "Failed:", *failed] if failed else parts

    def tables(self) -> list[_Table]:
        """The figures, the differences and, where there was one, the search."""
        tables = [self._figures(), self._differences()]
        return [*tables, self._search()] if any(line.search for line in self.methods) else tables

    def _figures(self) -> _Table:
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
        return _Table(caption, head, rows)

    def _differences(self) -> _Table:
        head = _head("method", numbers=["told", *map(column_name, self.metrics)])
        compared = [line for line in self.methods if line.differences]
        rows = [
            _row(line, [_change(line.differences.get(m)) for m in self.metrics], self.baseline) for line in compared
        ]
        caption = (
            f"Difference from {self.baseline} in points, paired on seeds and test rows, with p (Holm) and the "
            "smallest detectable difference"
        )
        return _Table(caption, head, rows, joint=", {}")

    def _search(self) -> _Table:
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
        return _Table(caption, head, [_row(line, _choice(line.search)) for line in self.methods if line.search])


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], figures: Collection[int] = ()) -> str:
    """A table in Markdown; columns of `figures` are set to the right, and bars within a cell do not end it."""
    lines = [head, ["--:" if i in figures else "---" for i in range(len(head))], *rows]
    return "\n".join(f"| {' | '.join(text.replace('|', BAR) for text in line)} |" for line in lines)


def column_name(metric: str) -> str:
    """The short name of a metric, for the head of a column."""
    return {"worst_group_accuracy": "worst group"}.get(metric, metric)


def _head(*names: str, numbers: Sequence[str] = ()) -> list[Cell]:
    return [*(Cell(name) for name in names), *(Cell(name, look="number") for name in numbers)]


def _row(line: MethodFigures, cells: Sequence[Cell], baseline: str = "") -> _Row:
    """Of a table of differences from a baseline: names what else a method was held against."""
    others = {change.a for change in line.differences.values()} - {"", baseline} if baseline else set()
    # The remark is left out where the name says it already.
    said = [line.remark] if line.remark not in line.method else []
    note = ", ".join([*said, *(f"against {other}" for other in others)])
    told = Cell("–" if line.told is None else str(line.told), look="number")
    return _Row(Cell(line.method, note), [told, *cells], line.uses_groups)


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
