"""Figures that need scores: AUC, Brier score and calibration error of each group.

Their bootstrap draws counts too. Scores are put into fine bins of equal mass, and a replicate draws how many rows of
each (group, label, bin) there are: with 32 bins the spread of an AUC is off by about one part in a thousand, the
observed figure is exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.counts import tabulate
from fairhead.audit.rates import Rates

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
    order = np.argsort(score)
    score, positive = score[order], positive[order]
    mass = np.ones(len(score)) if weight is None else weight[order]
    starts = np.flatnonzero(np.diff(score, prepend=-np.inf) > 0)
    up = np.add.reduceat(mass * positive, starts)
    down = np.add.reduceat(mass * ~positive, starts)
    return float(_binned_auc(up, down))


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
    mass = np.ones(len(score)) if weight is None else weight
    at = _equal_mass(score, bins)
    return float(
        np.abs(np.bincount(at, mass * positive, bins) - np.bincount(at, mass * score, bins)).sum() / mass.sum()
    )


@dataclass(frozen=True)
class ScoreTables:
    """Scores of one group column, and the replicates of their figures.

    Attributes:
        group: group codes, shape [n].
        n_groups: number of groups.
        label: class codes, shape [n].
        score: probability of class 1, shape [n], or of each class, shape [n, C].
        weight: shape [n], or None.
        cluster: shape [n], or None.
        n_boot: replicates.
        seed: of the replicates.
    """

    group: Codes
    n_groups: int
    label: Codes
    score: Array
    weight: Array | None
    cluster: Codes | None
    n_boot: int
    seed: int

    def rates(self, name: str) -> Rates:
        """The rate called "AUC", "Brier" or "ECE" for all groups."""
        return {"AUC": self._auc, "Brier": self._brier, "ECE": self._ece}[name]

    @cached_property
    def _members(self) -> list[NDArray[np.intp]]:
        order = np.argsort(self.group, kind="stable")
        ends = np.cumsum(np.bincount(self.group, minlength=self.n_groups))
        return np.split(order, ends[:-1])

    @cached_property
    def _top(self) -> tuple[NDArray[np.bool_], Array]:
        """What calibration is about: the positive class, or the most probable one and whether it is right."""
        if self.score.ndim == 1:
            return self.label == 1, self.score
        best = self.score.argmax(axis=1)
        return best == self.label, self.score[np.arange(len(best)), best]

    @cached_property
    def _auc(self) -> Rates:
        columns = [self.score] if self.score.ndim == 1 else list(self.score.T)
        targets = [1] if self.score.ndim == 1 else range(len(columns))
        parts = [self._auc_of(self.label == c, s) for c, s in zip(targets, columns, strict=True)]
        hat = np.stack([p[0] for p in parts])
        star = np.stack([p[1] for p in parts], axis=1)
        return Rates(hat, star, np.stack([p[2] for p in parts]), lambda c: "rows in the smaller of its two classes")

    def _auc_of(self, positive: NDArray[np.bool_], score: Array) -> tuple[Array, Array, NDArray[np.int64]]:
        fine = _equal_mass(score, FINE_BINS)
        shape = (self.n_groups, 2, FINE_BINS)
        key = (self.group.astype(np.int64) * 2 + positive) * FINE_BINS + fine
        counts, star, rows = self._draw(key, shape)
        binned = _binned_auc(counts[:, 1], counts[:, 0])
        exact = np.array([auc(positive[i], score[i], w) if len(i) else np.nan for i, w in self._groups()])
        shifted = _binned_auc(star[..., 1, :], star[..., 0, :]) + (exact - binned)
        return exact, shifted, rows.sum(axis=-1).min(axis=-1)

    @cached_property
    def _brier(self) -> Rates:
        if self.score.ndim == 1:
            loss = (self.score - (self.label == 1)) ** 2
        else:
            loss = ((self.score - np.eye(self.score.shape[1])[self.label]) ** 2).sum(axis=1)
        key = self.group.astype(np.int64) * FINE_BINS + _equal_mass(loss, FINE_BINS)
        counts, star, rows = self._draw(key, (self.n_groups, FINE_BINS))
        mean = self._cell_mean(key, loss, counts)
        with np.errstate(invalid="ignore"):
            hat = (counts * mean).sum(axis=-1) / counts.sum(axis=-1)
            replicates = (star * mean).sum(axis=-1) / star.sum(axis=-1)
        return Rates(hat[None], replicates[:, None], rows.sum(axis=-1)[None], lambda c: "rows")

    @cached_property
    def _ece(self) -> Rates:
        right, score = self._top
        at = np.zeros(len(score), dtype=np.int64)
        for members in self._members:
            at[members] = _equal_mass(score[members], CALIBRATION_BINS)
        key = (self.group.astype(np.int64) * CALIBRATION_BINS + at) * 2 + right
        counts, star, rows = self._draw(key, (self.n_groups, CALIBRATION_BINS, 2))
        distance = self._cell_mean(key, right - score, counts)
        with np.errstate(invalid="ignore"):
            hat, replicates = (
                np.abs((c * distance).sum(axis=-1)).sum(axis=-1) / c.sum(axis=(-1, -2)) for c in (counts, star)
            )
        return Rates(hat[None], replicates[:, None], rows.sum(axis=(-1, -2))[None], lambda c: "rows")

    def _groups(self) -> Iterator[tuple[NDArray[np.intp], Array | None]]:
        for members in self._members:
            yield members, None if self.weight is None else self.weight[members]

    def _draw(self, key: NDArray[np.int64], shape: tuple[int, ...]) -> tuple[Array, Array, NDArray[np.int64]]:
        sample = tabulate([key], [shape], self.weight, self.cluster)
        star = sample.bootstrap(self.n_boot, np.random.default_rng(self.seed))[0]
        return sample.observed()[0], star, sample.contents[0].rows

    def _cell_mean(self, key: NDArray[np.int64], values: Array, counts: Array) -> Array:
        mass = values if self.weight is None else values * self.weight
        sums = np.bincount(key, mass, counts.size).reshape(counts.shape)
        return np.divide(sums, counts, out=np.zeros(counts.shape), where=counts > 0)


def _binned_auc(up: Array, down: Array) -> Array:
    """AUC from masses of positives and negatives in ascending bins, [..., K] to [...]."""
    below = np.cumsum(down, axis=-1) - down / 2
    pairs = up.sum(axis=-1) * down.sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(pairs > 0, (up * below).sum(axis=-1) / pairs, np.nan)


def _equal_mass(values: Array, bins: int) -> NDArray[np.intp]:
    if not len(values):
        return np.zeros(0, dtype=np.intp)
    edges = np.quantile(values, np.arange(1, bins) / bins)
    return np.searchsorted(edges, values, side="right")
