"""A language benchmark as one object that says everything about itself. Needs no torch.

Each is one file of `fairhead.language.benchmarks`: how its items are read, what is asked of a model, what its figures
are made of and what they are called. The commands, the suite, comparisons and reports know no benchmark by name.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import numpy as np

from fairhead.errors import FairheadError, InputError, check_known
from fairhead.language.item_table import BenchmarkResult, ItemTable, Measure
from fairhead.report.wording import number
from fairhead.settings import check_settings
from fairhead.stats import Estimate
from fairhead.stats.bootstrap import FEW_CLUSTERS, Resampling

if TYPE_CHECKING:
    from fairhead.language.answers import Progress, Prompt, Request, Sampling
    from fairhead.report.sections.plain import PlainTables

T = TypeVar("T")
Section = Literal["Stereotypes", "Language", "Attention", "Scores"]
SECTIONS: tuple[str, ...] = get_args(Section)  # in the order in which figures are shown
Role = Literal["asks", "measures", "shows"]
_ROLES: tuple[str, ...] = get_args(Role)
# Annotated to an option: it changes what is asked of a model, so compared runs must agree on it; ...
ASKS: Role = "asks"
# ... or only what is measured of the answers; or only what is shown. All others choose items.
MEASURES: Role = "measures"
SHOWS: Role = "shows"


@dataclass(frozen=True)
class NoOptions:
    """Of a benchmark that has none."""


class Figure(NamedTuple):
    """A figure of a benchmark: a metric of all items, or of one category."""

    metric: str
    group: str | None = None


class Label(NamedTuple):
    """How a metric is written."""

    name: str  # short, for a table
    says: str = ""  # what it is, in a sentence
    share: bool = True  # whether it is a share, written in percent; its differences are then points
    section: str = ""  # of a comparison's report, where that is not the benchmark's


class SentencePair(NamedTuple):
    """Two sentences that differ in the words that carry a bias."""

    id: str  # distinct
    first: str  # the stereotype
    second: str  # its counterpart
    groups: tuple[str, ...]  # categories that the pair is of
    cluster: str  # pairs of one cluster are drawn together
    categories: Mapping[str, str] = {}  # kind of category -> the pair's


@dataclass(frozen=True)
class Work:
    """What a benchmark is given to make its table of."""

    scorer: Any  # the model, a `fairhead.language.Scorer`
    items: Sequence[Any]  # what the benchmark's `read` returned
    options: Any  # an instance of its `options`
    settings: Mapping[str, Any]  # what scores depend on: digest of the weights, precision, start token
    sampling: "Sampling"  # how continuations are drawn
    journals: Path | None = None  # folder of the journals from which a killed run goes on; None keeps none
    progress: "Progress | None" = None  # to be called with what is done and how much there is


class Measured(NamedTuple):
    """The answers of a model."""

    table: ItemTable  # one row per item
    facts: Mapping[str, Any] = {}  # for the provenance: how many texts, the file of their scores, ...
    reading: Any = None  # whatever else was read, for the benchmark's `finish`


class NotMeasured(FairheadError):
    """The answers of a model are kept, but their figures cannot be made on this machine."""


@dataclass(frozen=True)
class Benchmark:
    """A language benchmark.

    The table of a model's answers is made in one of three ways: of the log-probabilities of `requests`, of the
    continuations of `prompts` (by `table` either way), or by `measure` from the model itself.

    Example:
        >>> from fairhead.language.benchmarks import benchmark_named
        >>> crows = benchmark_named("crows")
        >>> crows.title, crows.label("ss").name, crows.axis("race-color")
        ('CrowS-Pairs', 'ss', 'race')
    """

    name: str  # of its files
    title: str  # as its authors write it
    question: str  # what it asks, in a line
    read: Callable[[Path, Any], Sequence[Any]]  # items, with distinct ids, from a path and the options
    # Its metrics, or a function that makes them of a table
    measures: Sequence[Measure] | Callable[[ItemTable], Sequence[Measure]]
    # The figures that a comparison gives a verdict on, or a function from a table to them
    headlines: Sequence[Figure] | Callable[[ItemTable], Sequence[Figure]]
    labels: Mapping[str, Label]  # metric -> how it is written. Those that have a label are shown, in this order.
    # What to ask a scorer, from items and options
    requests: "Callable[[Sequence[Any], Any], list[Request]] | None" = None
    prompts: "Callable[[Iterable[Any]], list[Prompt]] | None" = None  # what to have continued, from items
    # From items, answers by id (scores or continuations) and options to the table
    table: Callable[[Sequence[Any], Mapping[str, Any], Any], ItemTable] | None = None
    measure: Callable[[Work], Measured] | None = None  # the table from the model itself
    item: type | None = None  # class of its items, where it has one
    # A frozen dataclass; its fields are options of the command, and its docstring explains them. Those annotated with
    # `ASKS`, `MEASURES` or `SHOWS` do not choose items.
    options: type = NoOptions
    # The figures of a table's categories, for the spill-over matrix
    by_category: Callable[[ItemTable], Sequence[Figure]] = lambda table: ()
    # Names of its categories, in lower case, that other benchmarks call something else -> the common name
    axes: Mapping[str, str] = field(default_factory=dict)
    command: str = ""  # what the command line calls it; its name where this is empty. Several may share one.
    data: str = ""  # its folder in the data of a suite; its name where this is empty
    kinds: tuple[str, ...] = ()  # kinds of data, as in `fairhead.data.readers.KINDS`, whose items it takes
    unit: Callable[[Any], str] = lambda item: item.id  # items of one unit are drawn together; by default their ids
    reads_text: bool = False  # whether a text file can stand in for its data
    most_items: int | None = None  # no more than these, the first of those drawn
    min_items: int = 10  # with fewer items its figures are undefined; so they are with fewer than 10 clusters
    n_boot: int = 2000  # bootstrap replicates by default
    # Of a comparison's report; "Scores" are those of other harnesses
    section: Section = "Stereotypes"
    # Raises what the table would lack on this machine, given the options
    ready: Callable[[Any], None] = lambda options: None
    # Option -> folder in the data of a suite that it is taken from by default
    beside: Mapping[str, str] = field(default_factory=dict)
    # Adds to a result, given `Measured.reading` (None where the table was kept), the options and how intervals are made
    finish: Callable[[BenchmarkResult, Any, Any, Resampling], BenchmarkResult] = lambda result, *more: result
    # The report of a result, from it, the model's name and the confidence level
    report: Callable[[BenchmarkResult, str, float], dict[str, Any]] | None = None
    # Rows of a table whose terms are among these: a model trained on them is not scored on them
    trained_on: Callable[[ItemTable, Iterable[str]], list[int]] | None = None
    # Its items as pairs of sentences, stereotype first; the first two `requests` of an item are those of its pair
    pairs: Callable[[Iterable[Any]], list[SentencePair]] | None = None
    per_token: bool = False  # whether the log-odds of a pair are of means per token, not of sums
    # What the figures allow one to say, from a result and the confidence level
    sentences: Callable[[BenchmarkResult, float], list[str]] = lambda result, level: []
    # The table of a result, from it and the confidence level; by default one row per category
    shown: "Callable[[BenchmarkResult, float], PlainTables] | None" = None
    hides: Callable[[str], bool] = lambda category: False  # categories without a row there
    # Metric -> outcome of a comparison -> what it means
    outcomes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # A figure of each head of a table, [layers][heads], of which a comparison draws a map
    by_head: Callable[[ItemTable], list[list[float]]] | None = None
    # What has become of a layer whose figure was a and is b, in words; None where it has kept its shape
    collapse: Callable[[float, float], str | None] = lambda before, after: None
    explains: str = ""  # more for the help, in Markdown
    examples: tuple[str, ...] = ()  # commands for the help

    def sample(self, items: Sequence[Any], limit: int | None, seed: int) -> Sequence[Any]:
        """Some items, drawn at random, in their order; all of them where there is no limit."""
        drawn = items if limit is None else sample(items, limit, seed, self.unit)
        return drawn[: self.most_items]

    def measures_of(self, table: ItemTable) -> Sequence[Measure]:
        """The metrics of a table."""
        return self.measures(table) if callable(self.measures) else self.measures

    def headlines_of(self, table: ItemTable) -> Sequence[Figure]:
        """The figures of a table that a verdict is given on."""
        return self.headlines(table) if callable(self.headlines) else self.headlines

    def result(
        self, table: ItemTable, how: Resampling | None = None, options: Any = None, reading: Any = None
    ) -> BenchmarkResult:
        """The figures of a table."""
        chosen, measures = self.resampling(how or Resampling()), self.measures_of(table)
        found: list[Estimate] = []
        for group in (None, *table.order):
            part = table.part(group)
            found += [measure.estimate(part, group, chosen) for measure in measures if measure.of(group)]
        made = BenchmarkResult(self.name, tuple(found), len(table), table.left_out)
        return self.finish(made, reading, self.options() if options is None else options, chosen)

    def resampling(self, how: Resampling) -> Resampling:
        """How intervals are made, with the bounds of this benchmark."""
        return replace(how, min_items=self.min_items, min_clusters=max(FEW_CLUSTERS, self.min_items))

    def section_of(self, metric: str) -> str:
        """Of a comparison's report, where a metric stands."""
        return self.label(metric).section or self.section

    def label(self, metric: str) -> Label:
        """How a metric is written."""
        return self.labels.get(metric, Label(metric.replace("_", " "), share=False))

    def axis(self, category: str | None) -> str:
        """The axis of bias that a category is of, in the words of StereoSet."""
        plain = re.sub(r" \(.*\)$", "", (category or "").partition(" × ")[0]).lower()
        return self.axes.get(plain, plain.replace("_", " "))

    def chosen(self, **options: Any) -> Any:
        """Its options, held to their types."""
        known = [f.name for f in fields(self.options)]
        for name in options:
            check_known(name, known, f"{self.name} has no option {name!r}; it has")
        default = self.options()
        changed = {name: value for name, value in options.items() if value != getattr(default, name)}
        check_settings(self.options, changed, self.name)
        return self.options(**options)

    def settings(self, options: Any) -> dict[str, Any]:
        """The options that its table depends on beyond its items."""
        wanted = [*self.options_with(ASKS), *self.options_with(MEASURES)]
        return {name: getattr(options, name) for name in wanted}

    def options_with(self, role: Role | None) -> list[str]:
        """Names of the options of a role; None is of those that choose items."""
        hints = get_type_hints(self.options, include_extras=True)
        roles = {f.name: set(_ROLES) & set(getattr(hints[f.name], "__metadata__", ())) for f in fields(self.options)}
        return [name for name, found in roles.items() if (role in found if role else not found)]

    def figures(self, result: BenchmarkResult, level: float) -> "PlainTables":
        """A result as a section: its own, or a row per category with the metrics that have a label."""
        if self.shown is not None:
            return self.shown(result, level)
        from fairhead.report.sections.plain import PlainTable, PlainTables

        metrics = [metric for metric in self.labels if any(e.metric == metric for e in result.estimates)]
        rows = []
        for group in dict.fromkeys(e.group_by for e in result.estimates):
            found = {e.metric: e for e in result.estimates if e.group_by == group}
            n = max(e.n for e in found.values())
            if group is None or not (self.hides(group) or n == result.n):  # a category of all items is a line twice
                cells = [_figure(found.get(metric), self.label(metric).share) for metric in metrics]
                rows.append((group or "all", *cells, f"{n:,}"))
        caption = f"with {100 * level:g} % intervals (percent; Δ log p in nats)"
        columns = ("", *(self.label(metric).name for metric in metrics), "n")
        tables = [PlainTable(caption=caption, columns=columns, rows=rows)]
        return PlainTables(title=f"{result.n:,} items", tables=tables)

    @property
    def flag(self) -> str:
        """What the command line calls it."""
        return self.command or self.name


def _figure(estimate: Estimate | None, share: bool) -> str:
    if estimate is None:
        return ""
    if estimate.value is None:
        return "–"
    scale, digits = (100, 1) if share else (1, 2)
    value, low, high = (scale * (x or 0.0) for x in (estimate.value, estimate.low, estimate.high))
    between = "–" if low >= 0 else " to "
    return f"{value:.{digits}f} ({low:.{digits}f}{between}{high:.{digits}f})"


def sample(items: Sequence[T], limit: int, seed: int, unit: Callable[[T], str] | None = None) -> list[T]:
    """Draw items at random, in their order; those of one unit stay together."""
    if limit < 1:
        raise InputError(f"a limit of {limit} items: at least 1 is expected")
    units = [str(i) if unit is None else unit(item) for i, item in enumerate(items)]
    distinct = list(dict.fromkeys(units))
    kept = {distinct[i] for i in np.random.default_rng(seed).permutation(len(distinct))[:limit]}
    return [item for item, of in zip(items, units, strict=True) if of in kept]


def percent(estimate: Estimate, level: float, unit: str = " %") -> str:
    """A share that is defined, with its interval."""
    value, low, high = (100 * (x or 0.0) for x in (estimate.value, estimate.low, estimate.high))
    return f"{number(value, 1)}{unit} ({100 * level:g} % interval {number(low, 1)} to {number(high, 1)})"


def more_often(metric: str, words: str) -> Callable[[BenchmarkResult, float], list[str]]:
    """A sentence on a share whose even value is one half: `Benchmark.sentences` of many.

    Example:
        >>> estimate = Estimate("ss", None, 0.6, 0.55, 0.65, 100, ideal=0.5)
        >>> more_often("ss", "The first is likelier in")(BenchmarkResult("b", (estimate,), 100), 0.95)
        ['The first is likelier in 60.0 % (95 % interval 55.0 to 65.0): more often than not.']
    """

    def sentences(result: BenchmarkResult, level: float) -> list[str]:
        found = result[metric]
        if found.value is None or found.low is None or found.high is None:
            return [f"{metric} is undefined: {found.undefined}."]
        verdict = "more often than not" if found.low > 0.5 else "less often than not"
        if found.low <= 0.5 <= found.high:
            verdict = "not significantly different from 50 %"
        return [f"{words} {percent(found, level)}: {verdict}."]

    return sentences


def crossed(*names: str) -> str:
    """The name of an intersection, as in audits.

    Example:
        >>> crossed("intrasentence", "gender")
        'intrasentence × gender'
    """
    return " × ".join(names)


def of_terms(found: ItemTable, terms: Iterable[str]) -> list[int]:
    """Rows whose cluster is one of these terms, after the category or the id that it begins with.

    Example:
        >>> clusters, columns = ["race/thai", "race/irish"], {"stereotype": [-1.0, -2.0]}
        >>> of_terms(ItemTable.of("stereoset", ["a", "b"], clusters, [[], []], columns), ["irish"])
        [1]
    """
    trained = set(terms)
    names = zip(found.ids, found.clusters, strict=True)
    return [i for i, (n, c) in enumerate(names) if {c.removeprefix(f"{n}/"), c.partition("/")[2]} & trained]
