"""Intervals of benchmark scores: whole clusters (templates, terms, occupations) are drawn, never single items.

Every score is a function of sums over items, so a replicate is a weighted sum over clusters: one matrix product.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairhead.audit import intervals
from fairhead.stats import Estimate

Array = NDArray[np.float64]
Statistic = Callable[[Array], Array]

# With fewer clusters the interval is marked as unstable.
_STABLE_CLUSTERS = 10


@dataclass(frozen=True)
class Resampling:
    """How intervals are made.

    Attributes:
        n_boot: bootstrap replicates.
        seed: of the draws.
        level: confidence level.
        min_items: with fewer items a score is undefined.
    """

    n_boot: int = 2000
    seed: int = 0
    level: float = 0.95
    min_items: int = 10

    def estimate(
        self,
        metric: str,
        group_by: str | None,
        sums: ArrayLike,
        statistic: Statistic,
        n: int,
        ideal: float | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> Estimate:
        """A score with its interval, from sums over each cluster.

        With few clusters a percentile interval is too narrow; its tails are moved outwards as Student's t demands
        (Hesterberg 2015, "What teachers should know about the bootstrap", expanded percentile interval).

        Args:
            metric: name of the score.
            group_by: the category that it is of; None for all items.
            sums: what the items of each cluster add up to, shape [clusters, k].
            statistic: the score as a function of totals, from [..., k] to [...]; NaN where it has no value.
            n: number of items.
            ideal: the value of a model without a preference, where there is one.
            detail: anything else worth knowing.

        Example:
            >>> sums = cluster_sums([[1, 1], [0, 1], [1, 1], [1, 1]] * 5, ["a", "a", "b", "c"] * 5)
            >>> score = Resampling(n_boot=200).estimate("ss", None, sums, ratio, n=20, ideal=0.5)
            >>> score.value, score.low <= score.value <= score.high, score.detail["clusters"]
            (0.75, True, 3)
        """
        table = np.asarray(sums, dtype=np.float64)
        n_clusters = len(table)
        known: dict[str, Any] = {"clusters": n_clusters, **(detail or {})}
        if n < self.min_items:
            reason = f"{n} items; at least {self.min_items} are needed"
            return Estimate(metric, group_by, None, None, None, n, ideal, reason, detail=known)
        value = float(statistic(table.sum(axis=0)))
        if np.isnan(value):
            reason = "no item has an answer that it could be made of"
            return Estimate(metric, group_by, None, None, None, n, ideal, reason, detail=known)
        if n_clusters < 2:
            reason = "all items are of one cluster, so an interval cannot be made"
            return Estimate(metric, group_by, None, None, None, n, ideal, reason, detail={**known, "value": value})
        if n_clusters < _STABLE_CLUSTERS:
            known["unstable"] = f"only {n_clusters} clusters"
        star = self._replicates(table, statistic)
        interval = intervals.percentile(star, expanded_level(self.level, n_clusters))
        known |= {"se": interval.se, "interval": "cluster bootstrap, expanded percentile"}
        return Estimate(
            metric,
            group_by,
            value,
            min(interval.low, value),
            max(interval.high, value),
            n,
            ideal,
            mde=None if ideal is None else intervals.minimum_detectable(interval.se, self.level),
            detail=known,
        )

    def _replicates(self, table: Array, statistic: Statistic) -> Array:
        """Scores of resampled clusters, shape [replicates with a value]."""
        n_clusters = len(table)
        rng = np.random.default_rng(self.seed)
        block = max(1, (1 << 22) // n_clusters)
        stars = []
        for start in range(0, self.n_boot, block):
            size = min(block, self.n_boot - start)
            picked = rng.integers(n_clusters, size=(size, n_clusters)) + np.arange(size)[:, None] * n_clusters
            drawn = np.bincount(picked.ravel(), minlength=size * n_clusters).reshape(size, n_clusters)
            stars.append(statistic(drawn @ table))
        star = np.concatenate(stars)
        return star[~np.isnan(star)]


def expanded_level(level: float, n: int) -> float:
    """The level at which a percentile interval of n clusters holds `level`.

    Example:
        >>> round(expanded_level(0.95, 10), 4), round(expanded_level(0.95, 100_000), 4)
        (0.9829, 0.95)
    """
    from scipy.special import ndtr, stdtrit  # here: not needed for --help

    t = stdtrit(n - 1, (1 + level) / 2) * np.sqrt(n / (n - 1))
    return float(1 - 2 * ndtr(-t))


def cluster_sums(values: ArrayLike, clusters: Sequence[Hashable]) -> Array:
    """Sum rows [n, k] over each cluster: [clusters, k], in order of first appearance.

    Example:
        >>> cluster_sums([[1, 1], [2, 1], [4, 1]], ["a", "b", "a"]).tolist()
        [[5.0, 2.0], [2.0, 1.0]]
    """
    numbers: dict[Hashable, int] = {}
    codes = [numbers.setdefault(cluster, len(numbers)) for cluster in clusters]
    table = np.asarray(values, dtype=np.float64)
    sums = np.zeros((len(numbers), table.shape[1]))
    np.add.at(sums, codes, table)
    return sums


def ratio(totals: Array) -> Array:
    """First sum over second, [..., 2] to [...]: a share or a mean; NaN where the second is 0.

    Example:
        >>> ratio(np.array([3.0, 4.0]))
        array(0.75)
    """
    return divide(totals[..., 0], totals[..., 1])


def divide(part: Array, whole: Array) -> Array:
    """Quotient, NaN where the divisor is 0.

    Example:
        >>> divide(np.array([1.0, 1.0]), np.array([2.0, 0.0]))
        array([0.5, nan])
    """
    return np.divide(part, whole, out=np.full(np.shape(whole), np.nan), where=np.asarray(whole) != 0)
