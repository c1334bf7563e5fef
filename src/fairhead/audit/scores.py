"""Figures that need scores: AUC, Brier score and calibration error of each group.

Their bootstrap draws counts too. Scores are put into fine bins of equal mass, and a replicate draws how many rows of
each (group, label, bin) there are: with 32 bins the spread of an AUC is off by about one part in a thousand, the
observed figure is exact.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.counts import cell_numbers, clusters_in, tabulate
from fairhead.audit.metrics import divide
from fairhead.audit.rates import Rates, Terms, unsettle

Array = NDArray[np.float64]
Codes = NDArray[np.integer]

FINE_BINS = 32
CALIBRATION_BINS = 15


def auc(positive: NDArray[np.bool_], score: Array, weight: Array | None = None) -> float:
    """Area under the ROC curve, ties counted half; NaN without both classes.

    Example:
        >>> auc(np.array([False, True, True]), np.array([0.1, 0.4, 0.9]))
        1.0
    """
    return Ranked(positive, score, weight).auc(np.arange(len(score)))


def brier(positive: NDArray[np.bool_], score: Array, weight: Array | None = None) -> float:
    """Mean squared distance of the score from the label.

    Example:
        >>> round(brier(np.array([False, True]), np.array([0.2, 0.6])), 6)
        0.1
    """
    return float(np.average((score - positive) ** 2, weights=weight))


def calibration_error(
    positive: NDArray[np.bool_], score: Array, weight: Array | None = None, bins: int = CALIBRATION_BINS
) -> float:
    """Expected calibration error over bins of equal mass; equal scores share a bin.

    Example:
        >>> round(calibration_error(np.array([False, True]), np.array([0.25, 0.75])), 6)
        0.25
    """
    order = np.argsort(score)
    at = bins_of_sorted(score[order], bins)
    mass = np.ones(len(score)) if weight is None else weight[order]
    distance = mass * (positive[order] - score[order])
    return float(np.abs(np.bincount(at, distance, bins)).sum() / mass.sum())


@dataclass(frozen=True)
class Ranked:
    """One score of all rows, sorted once for every group column.

    Attributes:
        hit: whether the row is what the score is a probability of, shape [n].
        score: shape [n].
        weight: shape [n], or None.
    """

    hit: NDArray[np.bool_]
    score: Array
    weight: Array | None

    @cached_property
    def order(self) -> NDArray[np.intp]:
        """Rows by ascending score."""
        return np.argsort(self.score)

    @cached_property
    def sorted(self) -> Array:
        """The scores in that order."""
        return self.score[self.order]

    @cached_property
    def fine(self) -> NDArray[np.int8]:
        """The fine bin of each row, shape [n]."""
        bins = np.empty(len(self.score), dtype=np.int8)
        bins[self.order] = bins_of_sorted(self.sorted, FINE_BINS)
        return bins

    def groups(self, group: Codes, n_groups: int) -> list[NDArray[np.intp]]:
        """Positions in the order, of each group's rows."""
        by_score = group[self.order]
        positions = np.argsort(by_score, kind="stable")
        return np.split(positions, np.cumsum(np.bincount(by_score, minlength=n_groups))[:-1])

    def auc(self, positions: NDArray[np.intp]) -> float:
        """Exact AUC of some rows, given by ascending positions in the order."""
        rows = self.order[positions]
        starts = np.flatnonzero(np.diff(self.sorted[positions], prepend=-np.inf) > 0)
        if not len(starts):
            return float("nan")
        hit = self.hit[rows]
        mass = np.ones(len(rows)) if self.weight is None else self.weight[rows]
        return float(binned_auc(np.add.reduceat(mass * hit, starts), np.add.reduceat(mass * ~hit, starts)))


@dataclass(frozen=True)
class Scores:
    """The scores of an audit.

    Attributes:
        label: class codes, shape [n].
        score: probability of class 1, shape [n], or of each class, shape [n, C].
        weight: shape [n], or None.
        cluster: shape [n], or None.
    """

    label: Codes
    score: Array
    weight: Array | None = None
    cluster: Codes | None = None

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
    """Figures of scores for one group column, and their replicates.

    Attributes:
        scores: the scores.
        group: group codes, shape [n].
        n_groups: number of groups.
        n_boot: replicates.
        seed: of the replicates.
    """

    scores: Scores
    group: Codes
    n_groups: int
    n_boot: int
    seed: int

    def rates(self, name: str) -> Rates:
        """The rate called "AUC", "Brier" or "ECE" for all groups."""
        return {"AUC": lambda: self._auc, "Brier": lambda: self._brier, "ECE": lambda: self._ece}[name]()

    @cached_property
    def _top_groups(self) -> list[NDArray[np.intp]]:
        return self.scores.top.groups(self.group, self.n_groups)

    @cached_property
    def _clusters(self) -> NDArray[np.int64] | None:
        return clusters_in(self.group, self.n_groups, self.scores.cluster)

    @cached_property
    def _fine_tables(self) -> list["_Draw"]:
        """For each class the cells (group, hit, fine bin)."""
        return [
            self._draw([self.group, ranked.hit, ranked.fine], (self.n_groups, 2, FINE_BINS))
            for ranked in self.scores.by_class
        ]

    @cached_property
    def _auc(self) -> Rates:
        hats, stars, rows = [], [], []
        for ranked, drawn in zip(self.scores.by_class, self._fine_tables, strict=True):
            same = ranked is self.scores.top
            groups = self._top_groups if same else ranked.groups(self.group, self.n_groups)
            exact = np.array([ranked.auc(positions) for positions in groups])
            binned, star = (binned_auc(c[..., 1, :], c[..., 0, :]) for c in (drawn.counts, drawn.star))
            hats.append(exact)
            stars.append(star + (exact - binned))
            rows.append(drawn.rows.sum(axis=-1).min(axis=-1))
        need = "rows in the smaller of its two classes"
        rates = Rates(np.stack(hats), np.stack(stars, axis=1), np.stack(rows), lambda c: need, self._clusters)
        return replace(rates, star=unsettle(rates.hat, rates.star, rates.independent))

    @cached_property
    def _brier(self) -> Rates:
        if len(self._fine_tables) == 1:  # given label and fine bin, the loss hardly varies
            drawn = self._fine_tables[0]
        else:
            fine = Ranked(np.zeros(0, bool), self.scores.loss, None).fine
            drawn = self._draw([self.group, fine], (self.n_groups, FINE_BINS))
        mean = self._cell_mean(drawn, self.scores.loss)
        cells = tuple(range(-drawn.rows.ndim + 1, 0))
        hat, star = (divide((c * mean).sum(axis=cells), c.sum(axis=cells)) for c in (drawn.counts, drawn.star))
        return Rates(hat[None], star[:, None], drawn.rows.sum(axis=cells)[None], lambda c: "rows", self._clusters)

    @cached_property
    def _ece(self) -> Rates:
        top = self.scores.top
        at = np.empty(len(top.score), dtype=np.int8)
        for positions in self._top_groups:
            at[top.order[positions]] = bins_of_sorted(top.sorted[positions], CALIBRATION_BINS)
        drawn = self._draw([self.group, at, top.hit], (self.n_groups, CALIBRATION_BINS, 2))
        distance = self._cell_mean(drawn, top.hit - top.score)
        # Bins before groups: shape [..., K, G].
        hat, star = (
            np.swapaxes(divide((c * distance).sum(axis=-1), c.sum(axis=(-1, -2))[..., None]), -1, -2)
            for c in (drawn.counts, drawn.star)
        )
        rows = drawn.rows.sum(axis=(-1, -2))[None]
        error, error_star = (np.abs(terms).sum(axis=-2, keepdims=True) for terms in (hat, star))
        return Rates(error, error_star, rows, lambda c: "rows", self._clusters, Terms(hat, star))

    def _draw(self, codes: list[NDArray[Any]], shape: tuple[int, ...]) -> "_Draw":
        key = cell_numbers(codes, shape)
        sample = tabulate([key], [shape], self.scores.weight, self.scores.cluster)
        star = sample.bootstrap(self.n_boot, np.random.default_rng(self.seed))[0]
        return _Draw(key, sample.observed()[0], star, sample.contents[0].rows)

    def _cell_mean(self, drawn: "_Draw", values: Array) -> Array:
        mass = values if self.scores.weight is None else values * self.scores.weight
        sums = np.bincount(drawn.key, mass, drawn.counts.size).reshape(drawn.counts.shape)
        return np.divide(sums, drawn.counts, out=np.zeros(drawn.counts.shape), where=drawn.counts > 0)


class _Draw(NamedTuple):
    """Cell numbers [n], (weighted) counts [*cells], replicates [B, *cells] and rows [*cells]."""

    key: NDArray[np.integer]
    counts: Array
    star: Array
    rows: NDArray[np.int64]


def binned_auc(up: Array, down: Array) -> Array:
    """AUC from masses of positives and negatives in ascending bins, [..., K] to [...].

    Example:
        >>> binned_auc(np.array([0.0, 2.0]), np.array([1.0, 1.0])).item()
        0.75
    """
    below = np.cumsum(down, axis=-1) - down / 2
    pairs = up.sum(axis=-1) * down.sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(pairs > 0, (up * below).sum(axis=-1) / pairs, np.nan)


def bins_of_sorted(values: Array, bins: int) -> NDArray[np.int8]:
    """Bins of equal mass for ascending values; equal values share a bin.

    Example:
        >>> bins_of_sorted(np.array([0.1, 0.2, 0.2, 0.9]), 2).tolist()
        [0, 1, 1, 1]
    """
    if not len(values):
        return np.zeros(0, dtype=np.int8)
    edges = values[(np.arange(1, bins) * len(values)) // bins]
    ends = np.searchsorted(values, edges, side="left")
    return np.repeat(np.arange(bins, dtype=np.int8), np.diff(ends, prepend=0, append=len(values)))
