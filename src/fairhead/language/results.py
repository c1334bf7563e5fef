"""What a language benchmark returns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fairhead.language.tables import ItemTable, Measure, evaluate_table
from fairhead.stats import Estimate
from fairhead.stats.bootstrap import Resampling

SCHEMA = "fairhead.language/1"


@dataclass(frozen=True)
class BenchmarkResult:
    """The scores of a model on a benchmark.

    Attributes:
        benchmark: its name.
        estimates: each with interval and n. Shares are fractions, not percent.
        n: items scored.
        left_out: items that were not, by reason.
        provenance: model, data and settings.
        more: what else was found, JSON-ready, by name.

    Example:
        >>> estimate = Estimate("ss", None, 0.6, 0.5, 0.7, 100, 0.5)
        >>> BenchmarkResult("crows_pairs", (estimate,), 100)["ss"].value
        0.6
    """

    benchmark: str
    estimates: tuple[Estimate, ...]
    n: int
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str | tuple[str, str | None]) -> Estimate:
        """`result["ss"]` over all items, or `result["ss", "gender"]`."""
        metric, group_by = (key, None) if isinstance(key, str) else key
        for estimate in self.estimates:
            if (estimate.metric, estimate.group_by) == (metric, group_by):
                return estimate
        have = sorted({(e.metric, e.group_by) for e in self.estimates}, key=str)
        raise KeyError(f"there is no estimate {(metric, group_by)}; there are {have}")

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return {
            "schema": SCHEMA,
            "benchmark": self.benchmark,
            "provenance": dict(self.provenance),
            "n": self.n,
            "left_out": {reason: list(ids) for reason, ids in self.left_out.items()},
            "estimates": [asdict(e) for e in self.estimates],
            **self.more,
        }


def result_of(table: ItemTable, measures: Sequence[Measure], resampling: Resampling | None = None) -> BenchmarkResult:
    """The figures of a table of items.

    Example:
        >>> from fairhead.stats.clusters import ratio
        >>> import numpy as np
        >>> table = ItemTable.of("b", list("abcdefghijkl"), list("abcdefghijkl"), [[]] * 12, {"right": [1, 0] * 6})
        >>> right = Measure("accuracy", lambda t: np.column_stack([t.column("right"), np.ones(len(t))]), ratio, 1.0)
        >>> result_of(table, [right])["accuracy"].value
        0.5
    """
    estimates = evaluate_table(table, measures, resampling or Resampling())
    return BenchmarkResult(table.benchmark, estimates, len(table), table.left_out)


def percent(estimate: Estimate, level: float, unit: str = " %") -> str:
    """A share that is defined, with its interval.

    Example:
        >>> percent(Estimate("ss", None, 0.6, 0.55, 0.65, 100, ideal=0.5), 0.95)
        '60.0 % (95 % interval 55.0 to 65.0)'
    """
    value, low, high = (100 * (x or 0.0) for x in (estimate.value, estimate.low, estimate.high))
    return f"{value:.1f}{unit} ({100 * level:g} % interval {low:.1f} to {high:.1f})"


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
