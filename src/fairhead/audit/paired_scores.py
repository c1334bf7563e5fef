"""Paired differences of AUC, Brier score and calibration error: two binary scores of the same rows."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.ranked import CALIBRATION_BINS
from fairhead.audit.rates import Rates
from fairhead.audit.scores import Scores, ScoreTables, binned_auc, bins_of_sorted
from fairhead.records import Column
from fairhead.stats.clusters import cell_numbers, clusters_in, divide, tabulate

Array = NDArray[np.float64]


@dataclass(frozen=True)
class BinnedScores:
    """Figures of one of the two scores, from counts of (group, label, bin); the bins are those of both together.

    Attributes:
        groups: names of the groups.
        counts: (weighted) counts, shape [G, 2, K].
        star: replicates, shape [B, G, 2, K].
        rows: rows of each (group, label), shape [G, 2].
        mean: mean score in each bin, shape [K].
        clusters: as in `Rates`.
        exact: exact figures to move the binned ones to, with the spread of an AUC stretched to that without bins; None
            for swaps, where only binned ones compare.
    """

    groups: tuple[str, ...]
    counts: Array
    star: Array
    rows: NDArray[np.int64]
    mean: Array
    clusters: NDArray[np.int64] | None
    exact: ScoreTables | None

    def rates(self, name: str) -> Rates:
        """The rate called "AUC", "Brier" or "ECE" for all groups."""
        hat, star = self._figure(name, self.counts), self._figure(name, self.star)
        need = "rows in the smaller of its two classes" if name == "AUC" else "rows"
        rows = self.rows.min(axis=-1) if name == "AUC" else self.rows.sum(axis=-1)
        if self.exact is not None:
            exact = self.exact.rates(name).hat[0]
            wide = self.exact.auc_stretch(self.counts) if name == "AUC" else 1.0
            hat, star = exact, exact + (star - hat) * wide
        return Rates(hat[None], star[:, None], rows[None], lambda c: need, self.clusters)

    def _figure(self, name: str, counts: Array) -> Array:
        if name == "AUC":
            return binned_auc(counts[..., 1, :], counts[..., 0, :])
        total = counts.sum(axis=(-1, -2))
        label = np.array([[0.0], [1.0]])
        if name == "Brier":
            return divide((counts * (self.mean - label) ** 2).sum(axis=(-1, -2)), total)
        return divide(np.abs((counts * (label - self.mean)).sum(axis=-2)).sum(axis=-1), total)


BinnedPair = tuple[BinnedScores, BinnedScores]


def pair_scores(
    first: Scores, second: Scores, column: Column, n_boot: int, n_perm: int, seed: int
) -> tuple[BinnedPair, BinnedPair]:
    """Both scores resampled together, and swapped; each as a pair (a, b)."""
    both = np.concatenate([first.score, second.score])
    order = np.argsort(both)
    bins = np.empty(len(both), dtype=np.int8)
    bins[order] = bins_of_sorted(both[order], CALIBRATION_BINS)
    mean = np.bincount(bins, both, CALIBRATION_BINS) / np.maximum(np.bincount(bins, minlength=CALIBRATION_BINS), 1)
    shape = (len(column.levels), 2, CALIBRATION_BINS)
    n = len(first.score)
    keys = [cell_numbers([column.codes, first.label, part], shape) for part in (bins[:n], bins[n:])]
    sample = tabulate(keys, [shape, shape], first.weight, first.cluster)
    groups = tuple(str(level) for level in column.levels)
    clusters = clusters_in(column.codes, shape[0], first.cluster)
    observed = sample.observed()
    exact = [ScoreTables(scores, column.codes, shape[0], 1, seed) for scores in (first, second)]

    def pair(stars: list[Array], move: bool) -> BinnedPair:
        one, other = (
            BinnedScores(groups, hat, star, content.rows.sum(axis=-1), mean, clusters, side if move else None)
            for hat, star, content, side in zip(observed, stars, sample.contents, exact, strict=True)
        )
        return one, other

    return (
        pair(sample.bootstrap(n_boot, np.random.default_rng(seed)), move=True),
        pair(sample.swapped(n_perm, np.random.default_rng(seed)), move=False),
    )
