"""Figures that need scores: AUC, Brier score and calibration error of each group.

Their bootstrap draws counts too. Scores are put into the 15 bins of equal mass of the calibration error, and a
replicate draws how many rows of each (group, label, bin) there are. For the calibration error nothing is lost by it.
The spread of a binned AUC or Brier score is off by a percent or so, more where all positives are few and in the highest
bins, and is stretched to what it is without bins by the ratio of their variances in closed form (DeLong's for AUC). The
observed figures are exact, or, of many rows, as good as exact: `ranked` says when.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.ranked import CALIBRATION_BINS, Auc, Binned, Entries, Ranked, auc_of
from fairhead.audit.rates import Rates, Terms, unsettle
from fairhead.records import Column
from fairhead.stats.clusters import cell_numbers, clusters_in, divide, sample_of_table, tabulate

Array = NDArray[np.float64]
Codes = NDArray[np.integer]


@dataclass(frozen=True)
class Scores:
    """The scores of an audit."""

    label: Codes  # class codes, shape [n]
    score: Array  # probability of class 1, shape [n], or of each class, shape [n, C]
    weight: Array | None = None  # shape [n], or None
    cluster: Codes | None = None  # shape [n], or None

    @cached_property
    def by_class(self) -> list[Ranked]:
        """One entry for a binary score, otherwise each class against the rest."""
        if self.score.ndim == 1:
            return [Ranked(self.label == 1, self.score, self.weight)]
        return [Ranked(self.label == c, self.score[:, c], self.weight) for c in range(self.score.shape[1])]

    @cached_property
    def top(self) -> Ranked:
        """What calibration is about: the positive class, or the most probable one and whether it is right."""
        if self.score.ndim == 1:
            return self.by_class[0]
        best = self.score.argmax(axis=1)
        return Ranked(best == self.label, self.score[np.arange(len(best)), best], self.weight)

    @cached_property
    def loss(self) -> Array:
        """Squared distance of the scores from the label, shape [n]."""
        if self.score.ndim == 1:
            return (self.score - (self.label == 1)) ** 2
        return ((self.score - np.eye(self.score.shape[1])[self.label]) ** 2).sum(axis=1)


@dataclass(frozen=True)
class ScoreTables:
    """Figures of scores for one group column, and their replicates."""

    scores: Scores  # the scores
    group: Codes  # group codes, shape [n]
    n_groups: int  # number of groups
    n_boot: int  # replicates
    seed: int  # of the replicates

    def rates(self, name: str) -> Rates:
        """The rate called "AUC", "Brier" or "ECE" for all groups."""
        return {"AUC": lambda: self._auc, "Brier": lambda: self._brier, "ECE": lambda: self._ece}[name]()

    @cached_property
    def kept(self) -> dict[str, Any]:
        """What figures that need more than these tables keep for each other."""
        return {}

    @cached_property
    def clusters(self) -> NDArray[np.int64] | None:
        """Clusters with rows of each group, shape [G], as `Rates` has them."""
        return clusters_in(self.group, self.n_groups, self.scores.cluster)

    @cached_property
    def by_class(self) -> list["ScoreTable"]:
        """One table for a binary score, otherwise one for each class against the rest."""
        return [self._table(ranked) for ranked in self.scores.by_class]

    @cached_property
    def _top(self) -> "ScoreTable":
        return self.by_class[0] if self.scores.top is self.scores.by_class[0] else self._table(self.scores.top)

    def auc_stretch(self, counts: Array, number: int = 0) -> Array:
        """By how much to stretch replicates of a class's binned AUC, [G], from its counts in any bins, [G, 2, K]."""
        return _without_bins(self._exact_auc[number].variance, auc_of(counts[:, 0], counts[:, 1]).variance)

    @cached_property
    def _exact_auc(self) -> list[Auc]:
        """For each class, figures of shape [G]."""
        found = [[auc_of(*entries.mass) for entries in table.entries] for table in self.by_class]
        return [Auc(*(np.array(part) for part in zip(*groups, strict=True))) for groups in found]

    @cached_property
    def _auc(self) -> Rates:
        hats, stars, rows = [], [], []
        for number, table in enumerate(self.by_class):
            hat = self._exact_auc[number].value
            binned = binned_auc(table.counts[:, 1], table.counts[:, 0])
            star = binned_auc(table.star[..., 1, :], table.star[..., 0, :])
            hats.append(hat)
            stars.append(hat + (star - binned) * self.auc_stretch(table.counts, number))
            rows.append(table.rows.sum(axis=-1).min(axis=-1))
        need = "rows in the smaller of its two classes"
        rates = Rates(np.stack(hats), np.stack(stars, axis=1), np.stack(rows), lambda c: need, self.clusters)
        return replace(rates, star=unsettle(rates, "AUC"))

    @cached_property
    def _brier(self) -> Rates:
        if self.scores.score.ndim == 1:
            table, goal = self.by_class[0], np.array([[0.0], [1.0]])
        else:  # the loss as a score, without hits
            table = self._table(
                Ranked(np.zeros(len(self.scores.loss), dtype=bool), self.scores.loss, self.scores.weight)
            )
            goal = np.zeros((2, 1))
        power = 2 if self.scores.score.ndim == 1 else 1
        mass, first, second = (np.zeros(self.n_groups) for _ in range(3))
        mean = np.zeros(table.counts.shape)
        for g, (entries, binned) in enumerate(zip(table.entries, table.binned, strict=True)):
            loss = (entries.value - goal) ** power
            lost = entries.mass * loss
            mass[g], first[g], second[g] = entries.mass.sum(), lost.sum(), np.vdot(lost, loss)
            mean[g] = _mean(binned.sums(lost), table.counts[g])
        hat, star = (divide((c * mean).sum(axis=(-1, -2)), c.sum(axis=(-1, -2))) for c in (table.counts, table.star))
        exact = divide(first, mass)
        variance = divide(second, mass) - exact**2
        binned_variance = divide((table.counts * mean**2).sum(axis=(-1, -2)), mass) - exact**2
        star = exact + (star - hat) * _without_bins(variance, binned_variance)
        return Rates(exact[None], star[:, None], table.rows.sum(axis=(-1, -2))[None], lambda c: "rows", self.clusters)

    @cached_property
    def _ece(self) -> Rates:
        table = self._top
        distance = np.zeros(table.counts.shape)
        for g, (entries, binned) in enumerate(zip(table.entries, table.binned, strict=True)):
            off = entries.mass * (np.array([[0.0], [1.0]]) - entries.value)
            distance[g] = _mean(binned.sums(off), table.counts[g])
        # Bins before groups: shape [..., K, G].
        hat, star = (
            np.swapaxes(divide((c * distance).sum(axis=-2), c.sum(axis=(-1, -2))[..., None]), -1, -2)
            for c in (table.counts, table.star)
        )
        rows = table.rows.sum(axis=(-1, -2))[None]
        error, error_star = (np.abs(terms).sum(axis=-2, keepdims=True) for terms in (hat, star))
        return Rates(error, error_star, rows, lambda c: "rows", self.clusters, Terms(hat, star))

    def _table(self, ranked: Ranked) -> "ScoreTable":
        entries = ranked.entries(self.group, self.n_groups)
        binned = [Binned.of(of_group) for of_group in entries]
        rows = np.stack([of_group.rows for of_group in binned])
        if self.scores.weight is None and self.scores.cluster is None:
            sample = sample_of_table(rows)
        else:
            at = np.zeros(len(ranked.score), dtype=np.int8)
            for g, of_group in enumerate(binned):
                own = np.flatnonzero(self.group == g)
                at[own] = np.searchsorted(of_group.edges, ranked.score[own], side="right")
            key = cell_numbers([self.group, ranked.hit.view(np.int8), at], rows.shape)
            sample = tabulate([key], [rows.shape], self.scores.weight, self.scores.cluster)
        star = sample.bootstrap(self.n_boot, np.random.default_rng(self.seed))[0]
        return ScoreTable(entries, binned, sample.observed()[0], star, rows)


class ScoreTable(NamedTuple):
    """One score in each group."""

    entries: list[Entries]  # its distinct values
    binned: list[Binned]  # its bins
    counts: Array  # (weighted) counts of bins, shape [G, 2, K]: no hits and hits
    star: Array  # replicates of them, shape [B, G, 2, K]
    rows: NDArray[np.int64]  # unweighted, shape [G, 2, K]


def _mean(sums: Array, counts: Array) -> Array:
    return np.divide(sums, counts, out=np.zeros(counts.shape), where=counts > 0)


def _without_bins(variance: Array, binned: Array) -> Array:
    """By how much to stretch replicates of binned scores, [G], which have not seen that the rows of a bin differ.

    With 15 bins this is a matter of a percent or so; where one bin holds nearly all positives, there is no limit to it.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = np.sqrt(variance / binned)
    return np.where(np.isfinite(factor) & (binned > 0), np.maximum(factor, 0.5), 1.0)


def binned_auc(up: Array, down: Array) -> Array:
    """AUC from masses of positives and negatives in ascending bins, [..., K] to [...].

    Example:
        >>> binned_auc(np.array([0.0, 2.0]), np.array([1.0, 1.0])).item()
        0.75
    """
    # Bin by bin: replicates, which lie together in memory, are the innermost loop then.
    below, won = np.zeros_like(down[..., 0]), np.zeros_like(down[..., 0])
    for k in range(down.shape[-1]):
        half = down[..., k] / 2
        below += half
        won += up[..., k] * below
        below += half
    return divide(won, up.sum(axis=-1) * below)


def bins_of_sorted(values: Array, bins: int) -> NDArray[np.int8]:
    """Bins of equal mass for ascending values; equal values share a bin."""
    if not len(values):
        return np.zeros(0, dtype=np.int8)
    edges = values[(np.arange(1, bins) * len(values)) // bins]
    ends = np.searchsorted(values, edges, side="left")
    return np.repeat(np.arange(bins, dtype=np.int8), np.diff(ends, prepend=0, append=len(values)))


@dataclass(frozen=True)
class BinnedScores:
    """Figures of one of the two scores, from counts of (group, label, bin); the bins are those of both together."""

    groups: tuple[str, ...]  # names of the groups
    counts: Array  # (weighted) counts, shape [G, 2, K]
    star: Array  # replicates, shape [B, G, 2, K]
    rows: NDArray[np.int64]  # rows of each (group, label), shape [G, 2]
    mean: Array  # mean score in each bin, shape [K]
    clusters: NDArray[np.int64] | None  # as in `Rates`
    # Exact figures to move the binned ones to, with the spread of an AUC stretched to that without bins; None for
    # swaps, where only binned ones compare
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
