"""Before and after: what a change of a language model did to every benchmark, from the folders of two or more suites.

Nothing is computed by a model here and nothing is read from the data: the tables of items that `fairhead lm suite`
wrote are joined on the ids of their items. Needs no torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from fairhead import __version__
from fairhead.errors import InputError
from fairhead.language.before_after_report import BeforeAfter, Collapsed, Run, Told, spillover, verdict
from fairhead.language.benchmark import ASKS, SECTIONS, Benchmark, Measure
from fairhead.language.benchmarks import all_benchmarks, benchmark_named
from fairhead.language.item_table import ItemTable, StoredItems
from fairhead.language.suite import Suite, read_run
from fairhead.report.sections.changes import CategoryChange
from fairhead.report.sections.plain import markdown_table
from fairhead.report.wording import p_value
from fairhead.stats import Difference
from fairhead.stats.bootstrap import Resampling
from fairhead.stats.paired import N_PERM, corrected, paired_difference

# What changes what is asked, beside options of the benchmark: answers to different questions are not compared.
_MUST_AGREE = ("start", "as", "chat", "max_new_tokens", "temperature", "top_k", "top_p")
# Methods that swap words for men and women, whatever sentences they see.
_AIMS = {"cda": ("gender",), "sentence_debias": ("gender",)}


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
    seen = frozenset().union(*map(_trained, suites))
    compared = [_Pair(suites[0], suite, seen, how, n_perm) for suite in suites[1:]]
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
        terms, axes = _trained(self.after), set()
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
            if key == "start" and _token(before) == _token(after) is not None:  # by whatever name it was chosen
                continue
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


def _trained(suite: Suite) -> set[str]:
    """Terms and digests of texts that its model was trained on."""
    training = suite.training or {}
    return {*training.get("training_targets", ()), *training.get("training_texts", ())}


def _token(stored: StoredItems) -> str | None:
    """The token that texts started with, where it is known."""
    name, _, _ = str(stored.settings.get("start_token", "")).rpartition(" (")
    return name or None


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


def markdown_of(found: BeforeAfter) -> str:
    """The figures as Markdown: verdict, headlines, the matrix."""
    level = f"{100 * found.provenance.get('level', 0.95):g} %"
    head = ["", "run", "before", "after", f"change ({level} interval)", "detectable", "p, Holm", "outcome"]
    every = [(run, c) for run in found.runs for c in run.headlines]
    order = list(dict.fromkeys((c.benchmark, c.metric, c.group_by) for _, c in every))
    every.sort(key=lambda one: order.index((one[1].benchmark, one[1].metric, one[1].group_by)))
    rows = [_row(Told.of(c, found), run) for run, c in every]
    parts = ["\n".join(f"- {sentence.text}" for sentence in verdict(found))]
    parts += ["### Figures", markdown_table(head, rows, figures=range(2, 7))]
    matrix = spillover(found)
    if matrix.rows:
        head = ["benchmark", "category", *matrix.columns]
        rows = [[row.benchmark, row.category, *map(_matrix_cell, row.cells)] for row in matrix.rows]
        parts += ["### Spill-over", markdown_table(head, rows, figures=range(2, len(head)))]
        parts.append("**bold**: significant; ◎: an axis that was trained on; ↓ nearer to even, ↑ further from it.")
    seen = [(run, Told.of(c)) for run in found.runs for c in run.seen]
    if seen:
        head = ["", "run", "before", "after", "change", "p"]
        rows = [[t.name, run.name, *t.written[:2], t.moved, p_value(t.change.p)] for run, t in seen]
        parts += ["### On the terms trained on (circular)", markdown_table(head, rows, figures=range(2, 6))]
    return "\n\n".join(parts) + "\n"


def _row(told: Told, run: Run) -> list[str]:
    change = told.change
    if change.value is None:
        return [told.name, run.name, "", "", "", "", "", f"undefined: {change.undefined}"]
    outcome = change.outcome if change.outcome == "not significant" else f"**{change.outcome}**"
    outcome += f" ({change.note})" if change.note else ""
    figures = (*told.written[:2], told.moved, told.written.detectable, p_value(change.p_adjusted))
    return [told.name, run.name, *figures, outcome]


def _matrix_cell(cell: CategoryChange) -> str:
    if cell.value is None:
        return "–"
    arrow = {"nearer": "↓", "further": "↑"}.get(cell.direction or "", "")
    text = f"{cell.written().difference} {arrow}".strip()
    text = f"**{text}**" if cell.outcome in ("better", "worse", "changed") else text
    return f"{text} ◎" if cell.targeted else text
