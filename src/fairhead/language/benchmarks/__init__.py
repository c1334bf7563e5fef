"""Language benchmarks, one file each, and the registry of them.

A benchmark is a file with an object `BENCHMARK` and one line in `BENCHMARKS`. Another package adds one by an entry
point of the group `fairhead.benchmarks` that names a `Benchmark`.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from operator import methodcaller
from typing import Any

from fairhead import added, registered
from fairhead.errors import InputError, did_you_mean
from fairhead.language.benchmark import Benchmark, Figure, Label, Measure

ENTRY_POINTS = "fairhead.benchmarks"
# Metrics with a direction -> the value of a model without a mistake, or without a preference. Of others a comparison
# says whether they changed, and not whether that is better.
_IDEALS = {
    **dict.fromkeys(("acc", "acc_norm", "acc_mutual_info", "acc_bytes", "acc_all", "exact_match", "em", "f1"), 1.0),
    **dict.fromkeys(("mc1", "mc2", "accuracy"), 1.0),
    "pct_stereotype": 0.5,
    "likelihood_diff": 0.0,
}
_OWN = {"pairs": "Own pairs", "triplets": "Own triplets"}  # what is not published under a name
# Name -> module, in the order in which a suite runs them.
BENCHMARKS = {
    "stereoset": "fairhead.language.benchmarks.stereoset",
    "crows_pairs": "fairhead.language.benchmarks.crows_pairs",
    "bbq": "fairhead.language.benchmarks.bbq",
    "winobias": "fairhead.language.benchmarks.winobias",
    "perplexity": "fairhead.language.benchmarks.perplexity",
    "attention_entropy": "fairhead.language.benchmarks.attention_entropy",
    "attention_gap": "fairhead.language.benchmarks.attention_gap",
    "bold": "fairhead.language.benchmarks.bold",
}


def all_benchmarks() -> list[Benchmark]:
    """Every benchmark, those of other packages last."""
    found = [registered(name, f"{module}:BENCHMARK", Benchmark) for name, module in BENCHMARKS.items()]
    return [*found, *(benchmark for benchmark in _added() if benchmark.name not in BENCHMARKS)]


@cache
def _added() -> list[Benchmark]:
    """Those of other packages. One that is broken is named, and does not keep the others from being run."""
    found = []
    for name, point in added(ENTRY_POINTS).items():
        try:
            found.append(registered(name, point.value, Benchmark))
        except InputError as error:
            warnings.warn(str(error), stacklevel=2)
    return found


def benchmark_named(name: str) -> Benchmark:
    """The benchmark of this name, or the last that the command line calls so; "lm-eval:TASK" is one of a log.

    Example:
        >>> benchmark_named("crows_pairs.pairs").title  # CrowS-Pairs' way to score, on other pairs
        'Own pairs'
    """
    if ":" in name:
        return _logged(name)
    known, _, data = name.partition(".")
    return on_data(choose([known])[-1], data)


def on_data(benchmark: Benchmark, data: str) -> Benchmark:
    """A benchmark on data of this name: where they are not its own, it is called what they are."""
    if data in ("", benchmark.name) or benchmark.item is None:
        return benchmark
    return replace(benchmark, name=f"{benchmark.name}.{data}", title=_OWN.get(data, data))


def _logged(name: str) -> Benchmark:
    """A task of a log as a benchmark: the mean of each metric, of all samples and of each category."""
    return Benchmark(
        name=name,
        title=name.partition(":")[2],
        question="",
        read=lambda path, options: (),
        measures=lambda table: [Measure.mean(m, methodcaller("column", m), _ideal(m)) for m in table.fields],
        headlines=lambda table: [Figure(metric) for metric in table.fields],
        labels=_Labels(),
        by_category=lambda table: [Figure(metric, group) for group in table.order for metric in table.fields],
        section="Scores",
    )


def _ideal(metric: str) -> float | None:
    return _IDEALS.get(metric.rpartition(" ")[2])


class _Labels(dict[str, Label]):
    """Metrics are written as their harness writes them."""

    def get(self, metric: str, default: Any = None) -> Label:
        return Label(metric, share=_ideal(metric) in (0.5, 1.0))


def benchmark_of(items: Sequence[Any]) -> Benchmark:
    """The benchmark that items are of, by their class.

    Example:
        >>> from fairhead.data.sentences import CrowsPair
        >>> benchmark_of([CrowsPair("0", "She cried.", "He cried.", "stereo", "gender", ())]).name
        'crows_pairs'
    """
    kinds = {type(item) for item in items}
    found = [benchmark for benchmark in all_benchmarks() if benchmark.item in kinds]
    if len(kinds) != 1 or not found:
        named = ", ".join(sorted(kind.__name__ for kind in kinds)) or "nothing"
        raise InputError(f"expected the items of one benchmark; found {named}")
    return found[0]


def choose(names: Iterable[str]) -> list[Benchmark]:
    """The benchmarks that are called so, by name or on the command line; all of them where no name is given."""
    everything, wanted = all_benchmarks(), list(names)
    known = list(dict.fromkeys(benchmark.flag for benchmark in everything))
    called = {*known, *(benchmark.name for benchmark in everything)}
    for name in wanted:
        if name not in called:
            there = ", ".join(known)
            raise InputError(f"there is no benchmark {name!r}; there are {there}.{did_you_mean(name, sorted(called))}")
    return [b for b in everything if not wanted or b.flag in wanted or b.name in wanted]
