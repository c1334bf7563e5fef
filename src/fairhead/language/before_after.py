"""Before and after: what a change of a language model did to every benchmark, from the folders of two or more suites.

Nothing is computed by a model here and nothing is read from the data: the tables of items that `fairhead lm suite`
wrote are joined on the ids of their items. Needs no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fairhead import __version__
from fairhead.errors import InputError
from fairhead.language.benchmark import ASKS, SECTIONS, Benchmark, Measure
from fairhead.language.benchmarks import all_benchmarks, benchmark_named
from fairhead.language.item_table import ItemTable
from fairhead.language.suite import Suite, read_run
from fairhead.report import Report, Result
from fairhead.stats import Difference
from fairhead.stats.bootstrap import Resampling
from fairhead.stats.paired import N_PERM, corrected, paired_difference

if TYPE_CHECKING:
    from rich.console import Console

SCHEMA = "fairhead.before_after/1"
# What changes what is asked, beside options of the benchmark: answers to different questions are not compared.
_MUST_AGREE = ("start", "as", "chat", "max_new_tokens", "temperature", "top_k", "top_p")
# Methods that swap words for men and women, whatever sentences they see.
_AIMS = {"cda": ("gender",), "sentence_debias": ("gender",)}


class Collapsed(NamedTuple):
    """A layer whose attention has lost its shape."""

    layer: int  # its number
    before: float  # its mean entropy before
    after: float  # and after
    what: str  # what has become of it, in words


@dataclass(frozen=True)
class Run:
    """What one model did against the first."""

    name: str  # of its folder
    model: str  # path of the model
    method: str | None  # how it came about, where its folder says so
    targeted: tuple[str, ...]  # axes of bias that it was trained on
    headlines: tuple[Difference, ...]  # one figure or more of each benchmark, corrected over all of them and all runs
    # Figures of categories, corrected over all of them and all runs: the spill-over matrix
    by_category: tuple[Difference, ...]
    seen: tuple[Difference, ...]  # figures on terms that were trained on. They say nothing about other terms.
    # Mean attention entropy of each head after, [layers][heads]; None where it was not measured
    entropy: list[list[float]] | None
    collapsed: tuple[Collapsed, ...]  # layers whose attention has lost its shape
    missing: tuple[str, ...]  # benchmarks that only one of the two has
    unpaired: Mapping[str, int]  # benchmark -> items that only one of the two has; they take no part


@dataclass(frozen=True)
class BeforeAfter(Result):
    """One model and what became of it."""

    base: str  # name of the first run
    base_model: str  # path of its model
    base_entropy: list[list[float]] | None  # mean attention entropy of each head, [layers][heads]
    runs: tuple[Run, ...]  # the others
    # Terms (of pairs: sentences) that one of the models was trained on; no figure but `seen` has them
    left_out_targets: tuple[str, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)  # version, options, and what each run was made with

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; every change has its outcome in words."""
        content = {"schema": SCHEMA, **asdict(self)}
        for run, made in zip(self.runs, content["runs"], strict=True):
            made["collapsed"] = [c._asdict() for c in run.collapsed]
            for key in ("headlines", "by_category", "seen"):
                for one, line in zip(getattr(run, key), made[key], strict=True):
                    line |= {"before": line.pop("a"), "after": line.pop("b")}
                    line |= {"outcome": one.outcome, "axis": benchmark_named(one.benchmark).axis(one.group_by)}
                    line["targeted"] = line["axis"] in run.targeted
        return content

    def rows(self) -> list[dict[str, Any]]:
        """One row per run and headline figure, with its outcome."""
        hidden = ("a", "b", "detail")
        return [
            {"run": run.name, "before": one.a, "after": one.b, "outcome": one.outcome}
            | {key: value for key, value in asdict(one).items() if key not in hidden}
            for run in self.runs
            for one in run.headlines
        ]

    def page(self, command: str | None = None) -> Report:
        """The report: verdict, headlines, spill-over, attention."""
        from fairhead.language.before_after_report import report_of

        return report_of(self, command)

    def show(self, console: "Console | None" = None) -> None:
        """Print the verdict, and the headlines of every run in a table."""
        from fairhead.language.before_after_report import show_changes
        from fairhead.report import terminal

        show_changes(console or terminal(), self)


def compare_suites(
    # Folders of `fairhead lm suite`, or logs of another harness (`read_run`); the first is "before"
    folders: Sequence[Path],
    names: Sequence[str] | None = None,  # what to call them; their folders' names by default
    resampling: Resampling | None = None,  # how intervals are made
    n_perm: int = N_PERM,  # random swaps of each p-value, at most
    cluster: str | None = None,  # of logs: the field whose equal values are drawn together
    category: str | None = None,  # of logs: the field whose values are compared one by one
) -> BeforeAfter:
    """Compare the first of several suites with each of the others."""
    if len(folders) < 2:
        raise InputError(f"{len(folders)} folder: expected the one before and at least one after")
    called = tuple(names) if names else _names(folders)
    if len(set(called)) != len(called) or len(called) != len(folders):
        raise InputError(f"{len(folders)} runs are called {', '.join(called)}; expected a unique name for each")
    suites = [read_run(Path(folder), cluster, category) for folder in folders]
    how = resampling or Resampling()
    trained = sorted({target for suite in suites for target in (suite.training or {}).get("training_targets", ())})
    compared = [_Pair(suites[0], suite, frozenset(trained), how, n_perm) for suite in suites[1:]]
    for pair in compared:
        if not pair.common():
            raise InputError(f"{pair.before.folder} and {pair.after.folder} have no benchmark or task in common")
    # One family of headlines and one of categories: whoever looks at three methods has three chances of a fluke.
    headlines, by_category = (
        _corrected([of(pair) for pair in compared]) for of in (_Pair.headlines, _Pair.by_category)
    )
    runs = tuple(
        Run(
            name,
            pair.after.model,
            (pair.after.training or {}).get("method"),
            pair.targeted(),
            headlines[i],
            by_category[i],
            pair.seen(),
            _entropy(pair.after),
            pair.collapsed(),
            tuple(sorted(set(pair.before.measured) ^ set(pair.after.measured))),
            pair.unpaired(),
        )
        for i, (name, pair) in enumerate(zip(called[1:], compared, strict=True))
    )
    provenance = {
        "version": __version__,
        "n_boot": how.n_boot,
        "n_perm": n_perm,
        "seed": how.seed,
        "level": how.level,
        "correction": "Holm, over the headlines of all runs and over the categories of all runs",
        "runs": {name: _provenance(suite) for name, suite in zip(called, suites, strict=True)},
    }
    return BeforeAfter(called[0], suites[0].model, _entropy(suites[0]), runs, tuple(trained), provenance)


@dataclass(frozen=True)
class _Pair:
    before: Suite
    after: Suite
    trained: frozenset[str]
    how: Resampling
    n_perm: int

    def headlines(self) -> list[Difference]:
        """Headline figures of every benchmark that both runs have: of stereotypes first, then of language."""
        found = [c for name in self.common() for c in self._changes(name, "headlines_of")]
        return sorted(found, key=lambda c: SECTIONS.index(benchmark_named(c.benchmark).section_of(c.metric)))

    def by_category(self) -> list[Difference]:
        """Figures of every category."""
        return [c for name in self.common() for c in self._changes(name, "by_category")]

    def seen(self) -> tuple[Difference, ...]:
        """Headline figures on the terms that were trained on, of benchmarks that have any of those."""
        names = [name for name in self.common() if self.trained and benchmark_named(name).trained_on]
        return tuple(c for name in names for c in self._changes(name, "headlines_of", trained=True))

    def targeted(self) -> tuple[str, ...]:
        """Axes that the method aims at, or that its settings name, or that the terms trained on are of."""
        training = self.after.training or {}
        method = str(training.get("method"))
        if method in _AIMS:
            return _AIMS[method]
        named = (training.get("settings") or {}).get("bias_types")
        if named:
            common = {old: new for benchmark in all_benchmarks() for old, new in benchmark.axes.items()}
            return tuple(sorted({common.get(name.lower(), name.lower()) for name in named}))
        terms, axes = training.get("training_targets", ()), set()
        for benchmark in map(benchmark_named, self.after.measured if terms else ()):
            if benchmark.trained_on is not None:
                table = self.after.table(benchmark.name)
                categories = {figure.group for figure in benchmark.by_category(table)}
                groups = (group for i in benchmark.trained_on(table, terms) for group in table.groups[i])
                axes |= {benchmark.axis(group) for group in groups if group in categories}
        return tuple(sorted(axes))

    def collapsed(self) -> tuple[Collapsed, ...]:
        """Layers that have lost the shape of their attention."""
        before, after, of = _entropy(self.before) or [], _entropy(self.after) or [], _of_heads(self.after)
        if of is None or len(before) != len(after):  # one was not measured, or has other layers
            return ()
        means = [(sum(a) / len(a), sum(b) / len(b)) for a, b in zip(before, after, strict=True)]
        found = ((layer, a, b, of.collapse(a, b)) for layer, (a, b) in enumerate(means))
        return tuple(Collapsed(layer, a, b, what) for layer, a, b, what in found if what is not None)

    def unpaired(self) -> dict[str, int]:
        """Items without a counterpart."""
        both = {name: [set(s.table(name).ids) for s in (self.before, self.after)] for name in self.common()}
        return {name: len(one ^ other) for name, (one, other) in both.items() if one != other}

    def common(self) -> list[str]:
        """Benchmarks that both runs have."""
        return [name for name in self.before.measured if name in self.after.measured]

    def _changes(self, name: str, wanted: str, trained: bool = False) -> list[Difference]:
        """Changes of the wanted figures on the items that no model was trained on, or on those alone."""
        benchmark = benchmark_named(name)
        before, after = self.before.stored(name), self.after.stored(name)
        for key in (*benchmark.options_with(ASKS), *_MUST_AGREE):
            # What one of them does not say was measured by another command, from the same answers.
            said = [stored.settings[key] for stored in (before, after) if key in stored.settings]
            if key == "chat":  # said where there is one
                said = [stored.settings.get(key, False) for stored in (before, after)]
            if len(said) == 2 and said[0] != said[1]:
                raise InputError(
                    f"{name} was run with {key} {said[0]!r} in {self.before.folder} and with {said[1]!r} in "
                    f"{self.after.folder}; run both alike"
                )
        one, other = join_items(before.table, after.table)
        if benchmark.trained_on is not None and self.trained:
            seen = set(benchmark.trained_on(one, self.trained))
            rows = [i for i in range(len(one)) if (i in seen) == trained]
            one, other = one.take(rows), other.take(rows)
        if trained and not len(one):
            return []
        measures, how = benchmark.measures_of(one), benchmark.resampling(self.how)
        return [
            compare_items(
                next(m for m in measures if m.metric == metric and m.of(group)), group, one, other, how, self.n_perm
            )
            for metric, group in getattr(benchmark, wanted)(one)
        ]


def _of_heads(suite: Suite) -> Benchmark | None:
    """The benchmark of a suite that has a figure of each head."""
    return next((b for b in map(benchmark_named, suite.measured) if b.by_head is not None), None)


def _entropy(suite: Suite) -> list[list[float]] | None:
    """Mean entropy of each head."""
    of = _of_heads(suite)
    return None if of is None or of.by_head is None else of.by_head(suite.table(of.name))


def _corrected(of_runs: Sequence[Sequence[Difference]]) -> list[tuple[Difference, ...]]:
    """Correct over the changes of all runs, and part them again."""
    together = iter(corrected([c for of_run in of_runs for c in of_run]))
    return [tuple(islice(together, len(of_run))) for of_run in of_runs]


def _names(folders: Sequence[Path]) -> tuple[str, ...]:
    """The folders' own names, or their paths where those are the same."""
    short = tuple(Path(folder).resolve().name for folder in folders)
    return short if len(set(short)) == len(short) else tuple(str(folder) for folder in folders)


def _provenance(suite: Suite) -> dict[str, Any]:
    training = suite.training or {}
    made = {key: training[key] for key in ("method", "base", "settings", "plan", "data") if training.get(key)}
    skipped = {name: reason for name, reason in suite.skipped.items() if name not in suite.measured}
    return {"model": suite.model, **suite.settings, "skipped": skipped, "training": made}


def join_items(first: ItemTable, second: ItemTable) -> tuple[ItemTable, ItemTable]:
    """The items that both tables have, in the same order."""
    places = {name: i for i, name in enumerate(second.ids)}
    here = [i for i, name in enumerate(first.ids) if name in places]
    if not here:
        raise InputError(f"{first.benchmark}: the two runs have no item in common; were they made of the same data?")
    there = [places[first.ids[i]] for i in here]
    a, b = first.take(here), second.take(there)
    if a.clusters != b.clusters or a.fields != b.fields:
        raise InputError(
            f"{first.benchmark}: the two runs describe the same items differently; run both with one version"
        )
    return a, b


def compare_items(
    measure: Measure, group: str | None, before: ItemTable, after: ItemTable, how: Resampling, n_perm: int = N_PERM
) -> Difference:
    """One figure of a category (None: of all items) on two tables of the same items; `n_perm` random swaps at most."""
    one, other = before.part(group), after.part(group)
    figure = partial(paired_difference, ideal=measure.ideal, relative=measure.relative, n_perm=n_perm)
    found = figure(measure.metric, measure.statistic, measure.sums(one), measure.sums(other), len(one), how)
    return replace(found, benchmark=before.benchmark, group_by=group)
