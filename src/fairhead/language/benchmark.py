"""A language benchmark as one object that says everything about itself. Needs no torch.

Each is one file of `fairhead.language.benchmarks`: how its items are read, what is asked of a model, what its figures
are made of and what they are called. The commands, the suite, comparisons and reports know no benchmark by name.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args, get_type_hints

import numpy as np

from fairhead.errors import FairheadError, InputError, check_known
from fairhead.language.answers import Progress, Prompt, Request, Sampling
from fairhead.language.item_table import ItemTable
from fairhead.report import Result
from fairhead.report.wording import number
from fairhead.settings import check_settings
from fairhead.stats import Estimate
from fairhead.stats.bootstrap import FEW_CLUSTERS, Array, Resampling, Statistic
from fairhead.stats.clusters import cluster_sums, ratio

if TYPE_CHECKING:
    from rich.console import Console

    from fairhead.report.page import Report, Sentence
    from fairhead.report.sections import Section as PageSection
    from fairhead.report.sections.plain import PlainTables

T = TypeVar("T")
Section = Literal["Stereotypes", "Language", "Attention", "Scores"]
SECTIONS: tuple[str, ...] = get_args(Section)  # in the order in which figures are shown
# Annotated to an option: it changes what is asked of a model, so compared runs must agree on it; or only what is
# measured of the answers; or only what is shown. All others choose items.
ASKS, MEASURES, SHOWS = "asks", "measures", "shows"


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
class Measure:
    """A figure as a function of sums over items."""

    metric: str  # its name
    columns: Callable[[ItemTable], Array]  # what each item adds, from a table of n items to [n, k]
    statistic: Statistic  # from totals [..., k] to the figure [...]; NaN where it has no value
    ideal: float | None = None  # the value of a model without a preference (or without a mistake), where there is one
    # Which categories it is made for, None being all items; by default all of them
    of: Callable[[str | None], bool] = lambda category: True
    # The figure is a mean over clusters that count alike, however many items each has; the last column is then the
    # number of items
    per_cluster: bool = False
    relative: bool = False  # two models are compared by the ratio of their figures, not by the difference
    detail: Callable[[ItemTable], Mapping[str, Any]] | None = None  # anything else worth knowing about the items

    @classmethod
    def mean(cls, metric: str, value: Callable[[ItemTable], Array], ideal: Any = None, **more: Any) -> "Measure":
        """The mean of a value of each item, [n]."""
        return cls(metric, lambda table: np.column_stack([value(table), np.ones(len(table))]), ratio, ideal, **more)

    def sums(self, table: ItemTable) -> Array:
        """What the items of each cluster add up to, [clusters, k], in order of first appearance."""
        sums = cluster_sums(self.columns(table), table.clusters)
        return sums / sums[:, -1:] if self.per_cluster else sums

    def estimate(self, part: ItemTable, group: str | None, how: Resampling) -> Estimate:
        """The figure of the items of one category, with its interval."""
        detail = None if self.detail is None else self.detail(part)
        return how.estimate(self.metric, group, self.sums(part), self.statistic, len(part), self.ideal, detail)


@dataclass(frozen=True)
class BenchmarkResult(Result):
    """The scores of a model on a benchmark."""

    benchmark: str  # its name
    estimates: tuple[Estimate, ...]  # each with interval and n. Shares are fractions, not percent.
    n: int  # items scored
    of: "Benchmark" = field(repr=False, compare=False)  # what made it
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # items that were not, by reason
    provenance: Mapping[str, Any] = field(default_factory=dict)  # model, data and settings
    more: Mapping[str, Any] = field(default_factory=dict)  # what else was found, JSON-ready, by name

    def __getitem__(self, key: str | tuple[str, str | None]) -> Estimate:
        """`result["ss"]` over all items, or `result["ss", "gender"]`."""
        metric, group_by = (key, None) if isinstance(key, str) else key
        found = {(e.metric, e.group_by): e for e in reversed(self.estimates)}
        if (metric, group_by) not in found:
            raise KeyError(f"there is no estimate {(metric, group_by)}; there are {sorted(found, key=str)}")
        return found[metric, group_by]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "schema": "fairhead.language/1",
            "benchmark": self.benchmark,
            "provenance": dict(self.provenance),
            "n": self.n,
            "left_out": {reason: list(ids) for reason, ids in self.left_out.items()},
            "estimates": [asdict(e) for e in self.estimates],
            **self.more,
        }

    def rows(self) -> list[dict[str, Any]]:
        """One row per figure."""
        return [{k: v for k, v in vars(e).items() if k not in ("detail", "groups")} for e in self.estimates]

    def page(self) -> "Report":
        """The figures of each category, with what can be said of them, and what was left out."""
        from fairhead.report.model_card import name_of
        from fairhead.report.page import Report, Sentence

        benchmark, level = self.of, float(self.provenance.get("level", 0.95))
        model = str(self.provenance.get("model_path") or self.provenance.get("model", ""))
        said = (*benchmark.sentences(self, level), *self._remarks())
        more = () if benchmark.page_sections is None else benchmark.page_sections(self, level)
        return Report(
            title=f"{name_of(model)} on {benchmark.title}",
            question=benchmark.question,
            verdict=[Sentence(one, "note") if isinstance(one, str) else one for one in said],
            sections=[benchmark.figures(self, level), *more],
            provenance=dict(self.provenance),
        )

    def _remarks(self) -> Iterator[str]:
        """What should be known of the figures, and where the answers lie."""
        # How many there are differs by category: without it, the reason is the same for all of them.
        few, needed = r"^\d+ (items|clusters); at least (\d+) ", r"at least \2 \1 "
        reasons = (re.sub(few, needed, e.undefined) for e in self.estimates if e.undefined)
        yield from (f"–: {reason}" for reason in list(dict.fromkeys(reasons))[:5])
        for reason, names in self.left_out.items():
            yield f"Left out: {len(names):,} ({reason}); the first is {names[0]}"
        if self.provenance.get("merged_boundaries"):
            yield f"{self.provenance['merged_boundaries']:,} texts have a token that spans the end of the prefix"
        for key, what in (("scores", "Scores of each text"), ("generations", "Continuations")):
            if self.provenance.get(key):
                yield f"{what}: {self.provenance[key]}"

    def show(self, console: "Console | None" = None) -> None:
        """Print what was measured, what can be said, one line per category, and what was left out."""
        from fairhead.report import show_page, terminal

        out, page = console or terminal(), self.page()
        out.print(f"{page.title}: {self.n:,} item{'s'[: self.n != 1]}", style="bold", markup=False, highlight=False)
        show_page(page, out)
        if page.sections[0].text:
            out.print(page.sections[0].text, markup=False, highlight=False)


@dataclass(frozen=True)
class Work:
    """What a benchmark is given to make its table of."""

    scorer: Any  # the model, a `fairhead.language.Scorer`
    items: Sequence[Any]  # what the benchmark's `read` returned
    options: Any  # an instance of its `options`
    settings: Mapping[str, Any]  # what scores depend on: digest of the weights, precision, start token
    sampling: Sampling  # how continuations are drawn
    journals: Path | None = None  # folder of the journals from which a killed run goes on; None keeps none
    progress: Progress | None = None  # to be called with what is done and how much there is


class Measured(NamedTuple):
    """The answers of a model."""

    table: ItemTable  # one row per item
    facts: Mapping[str, Any] = {}  # for the provenance: how many texts, the file of their scores, ...
    # What else was found, of how intervals are made
    more: Callable[[Resampling], Mapping[str, Any]] = lambda how: {}


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
    measures: Sequence[Measure] | Callable[[ItemTable], Sequence[Measure]]  # its metrics, or what makes them of a table
    # The figures that a comparison gives a verdict on, or a function from a table to them
    headlines: Sequence[Figure] | Callable[[ItemTable], Sequence[Figure]]
    labels: Mapping[str, Label]  # metric -> how it is written. Those that have a label are shown, in this order.
    requests: Callable[[Sequence[Any], Any], list[Request]] | None = None  # what to ask, from items and options
    prompts: Callable[[Iterable[Any]], list[Prompt]] | None = None  # what to have continued, from items
    # From items, answers by id (scores or continuations) and options to the table
    table: Callable[[Sequence[Any], Mapping[str, Any], Any], ItemTable] | None = None
    measure: Callable[[Work], Measured] | None = None  # the table from the model itself
    item: type | None = None  # class of its items, where it has one
    # A frozen dataclass; its fields are options of the command, and its docstring explains them. Those annotated with
    # `ASKS`, `MEASURES` or `SHOWS` do not choose items.
    options: type = NoOptions
    by_category: Callable[[ItemTable], Sequence[Figure]] = lambda table: ()  # of a table, for the spill-over matrix
    # Names of its categories, in lower case, that other benchmarks call something else -> the common name
    axes: Mapping[str, str] = field(default_factory=dict)
    command: str = ""  # what the command line calls it; its name where this is empty. Several may share one.
    data: str = ""  # its folder in the data of a suite; its name where this is empty
    kinds: tuple[str, ...] = ()  # kinds of data, as in `fairhead.data.KINDS`, whose items it takes
    unit: Callable[[Any], str] = lambda item: item.id  # items of one unit are drawn together; by default their ids
    reads_text: bool = False  # whether a text file can stand in for its data
    most_items: int | None = None  # no more than these, the first of those drawn
    min_items: int = 10  # with fewer items its figures are undefined; so they are with fewer than 10 clusters
    n_boot: int = 2000  # bootstrap replicates by default
    section: Section = "Stereotypes"  # of a comparison's report; "Scores" are those of other harnesses
    ready: Callable[[Any], None] = lambda options: None  # raises what the table would lack here, given the options
    beside: Mapping[str, str] = field(default_factory=dict)  # option -> folder in a suite's data, taken by default
    correct: Callable[[BenchmarkResult], BenchmarkResult] = lambda result: result  # corrects p-values over its figures
    # Rows of a table whose terms, or digests of texts, are among these: a model trained on them is not scored on them
    trained_on: Callable[[ItemTable, Iterable[str]], list[int]] | None = None
    # Its items as pairs of sentences, stereotype first; the first two `requests` of an item are those of its pair
    pairs: Callable[[Iterable[Any]], list[SentencePair]] | None = None
    per_token: bool = False  # whether the log-odds of a pair are of means per token, not of sums
    # What the figures allow one to say, from a result and the confidence level
    sentences: "Callable[[BenchmarkResult, float], Sequence[str | Sentence]]" = lambda result, level: ()
    # The table of a result, from it and the confidence level; by default one row per category
    shown: "Callable[[BenchmarkResult, float], PlainTables] | None" = None
    # Further sections of its page, of what `Measured.more` found
    page_sections: "Callable[[BenchmarkResult, float], Sequence[PageSection]] | None" = None
    hides: Callable[[str], bool] = lambda category: False  # categories without a row there
    outcomes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # metric -> outcome -> what it means
    by_head: Callable[[ItemTable], list[list[float]]] | None = None  # of each head, [layers][heads], for a map
    # What has become of a layer whose figure was a and is b, in words; None where it has kept its shape
    collapse: Callable[[float, float], str | None] = lambda before, after: None
    explains: str = ""  # more for the help, in Markdown
    examples: tuple[str, ...] = ()  # commands for the help

    def sample(self, items: Sequence[Any], limit: int | None, seed: int) -> Sequence[Any]:
        """Some items, drawn at random, in their order; all of them where there is no limit."""
        return (items if limit is None else sample(items, limit, seed, self.unit))[: self.most_items]

    def measures_of(self, table: ItemTable) -> Sequence[Measure]:
        """The metrics of a table."""
        return self.measures(table) if callable(self.measures) else self.measures

    def headlines_of(self, table: ItemTable) -> Sequence[Figure]:
        """The figures of a table that a verdict is given on."""
        return self.headlines(table) if callable(self.headlines) else self.headlines

    def result(self, table: ItemTable, how: Resampling | None = None) -> BenchmarkResult:
        """The figures of a table."""
        chosen, measures = self.resampling(how or Resampling()), self.measures_of(table)
        parts = {group: table.part(group) for group in (None, *table.order)}
        found = [m.estimate(part, group, chosen) for group, part in parts.items() for m in measures if m.of(group)]
        return self.correct(BenchmarkResult(self.name, tuple(found), len(table), self, table.left_out))

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
        for name in options:
            check_known(name, [f.name for f in fields(self.options)], f"{self.name} has no option {name!r}; it has")
        default = self.options()
        changed = {name: value for name, value in options.items() if value != getattr(default, name)}
        check_settings(self.options, changed, self.name)
        return self.options(**options)

    def settings(self, options: Any) -> dict[str, Any]:
        """The options that its table depends on beyond its items."""
        return {name: getattr(options, name) for role in (ASKS, MEASURES) for name in self.options_with(role)}

    def options_with(self, role: str | None) -> list[str]:
        """Names of the options annotated with `ASKS`, `MEASURES` or `SHOWS`; None is of those that choose items."""
        hints = get_type_hints(self.options, include_extras=True)
        told = {f.name: getattr(hints[f.name], "__metadata__", ()) for f in fields(self.options)}
        roles = {name: {ASKS, MEASURES, SHOWS}.intersection(of) for name, of in told.items()}
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
                cells = [_figure(found[m], self.label(m).share) if m in found else "" for m in metrics]
                rows.append((group or "all", *cells, f"{n:,}"))
        caption = f"with {100 * level:g} % intervals (percent; Δ log p in nats)"
        columns = ("", *(self.label(metric).name for metric in metrics), "n")
        table = PlainTable(caption=caption, columns=columns, rows=rows)
        return PlainTables(title=f"{result.n:,} items", tables=[table])

    @property
    def flag(self) -> str:
        """What the command line calls it."""
        return self.command or self.name


def _figure(estimate: Estimate, share: bool) -> str:
    if estimate.value is None:
        return "–"
    scale, digits = (100, 1) if share else (1, 2)
    value, low, high = (scale * (x or 0.0) for x in (estimate.value, estimate.low, estimate.high))
    between = "–" if low >= 0 else " to "
    return f"{value:.{digits}f} ({low:.{digits}f}{between}{high:.{digits}f})"


def sample(items: Sequence[T], limit: int, seed: int, unit: Callable[[T], str] | None = None) -> list[T]:
    """Draw items at random, in their order; those of one unit stay together."""
    if limit < 1:
        raise InputError(f"a limit of {limit} items: expected at least 1")
    units = [str(i) if unit is None else unit(item) for i, item in enumerate(items)]
    distinct = list(dict.fromkeys(units))
    kept = {distinct[i] for i in np.random.default_rng(seed).permutation(len(distinct))[:limit]}
    return [item for item, of in zip(items, units, strict=True) if of in kept]


def percent(estimate: Estimate, level: float, unit: str = " %") -> str:
    """A share that is defined, with its interval."""
    value, low, high = (number(100 * (x or 0.0), 1) for x in (estimate.value, estimate.low, estimate.high))
    return f"{value}{unit} ({100 * level:g} % interval {low} to {high})"


def more_often(metric: str, words: str) -> Callable[[BenchmarkResult, float], list[str]]:
    """A sentence on a share whose even value is one half: `Benchmark.sentences` of many."""

    def sentences(result: BenchmarkResult, level: float) -> list[str]:
        found = result[metric]
        if found.value is None or found.low is None or found.high is None:
            return [f"{metric} is undefined: {found.undefined}."]
        verdict = "not significantly different from 50 %"
        if not found.low <= 0.5 <= found.high:
            verdict = "more often than not" if found.low > 0.5 else "less often than not"
        return [f"{words} {percent(found, level)}: {verdict}."]

    return sentences


def of_terms(found: ItemTable, terms: Iterable[str]) -> list[int]:
    """Rows whose cluster is one of these terms, after the category or the id that it begins with, or whose text is."""
    trained = set(terms)
    names = zip(found.ids, found.clusters, found.texts or found.ids, strict=True)
    return [i for i, (n, c, t) in enumerate(names) if {c.removeprefix(f"{n}/"), c.partition("/")[2], t} & trained]
