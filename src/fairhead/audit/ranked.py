"""Scores in ascending order: exact figures of each group, and the bins that stand for its rows in a bootstrap.

A figure of scores depends on how many rows of which label have which score. So each group is a short table of distinct
scores with the rows above each label, and a shorter one of bins. Scores of few decimals are counted without sorting,
and those of many rows in fine cells, where that cannot move an AUC by more than a small part of its standard error.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.stats.bootstrap import Sample
from fairhead.stats.clusters import cell_numbers, count_rows, divide, over_chunks

Array = NDArray[np.float64]
Codes = NDArray[np.integer]

CALIBRATION_BINS = 15
_DECIMALS = (2, 3, 4, 5)
_CELLS = 1 << 14  # between the lowest and the highest score; those two have cells of their own, where many may lie
# By how much an AUC may be off because all scores of a cell count as equal, times the root of the rows of a class.
_OFF = 0.03
_LEAST = 1e-30  # so that nothing is divided by 0
# The errors of a calibrated model are drawn in bins where it expects fewer hits, or fewer misses.
_FEW_HITS = 10


class Entries(NamedTuple):
    """The distinct scores of one group, ascending."""

    value: Array  # shape [E]
    mass: Array  # (weighted) rows that are no hit and that are, shape [2, E]
    rows: NDArray[Any]  # the same, unweighted


class _Codes(NamedTuple):
    """Scores as whole numbers, shape [n], and what those stand for."""

    codes: Codes
    values: Array
    exact: bool  # or the mean of a cell


@dataclass(frozen=True)
class Ranked:
    """One score of all rows, for every group column."""

    hit: NDArray[np.bool_]  # whether the row is what the score is a probability of, shape [n]
    score: Array  # shape [n]
    weight: Array | None  # shape [n], or None

    @cached_property
    def _counted_as(self) -> _Codes | None:
        """The scores as k / 10^d, where that is what they all are; else as cells, where there are rows enough."""
        n = len(self.score)
        for scale in (10**d for d in _DECIMALS if 4 * 10**d <= n):
            some = self.score[:: max(1, n // 1000)]
            if (np.rint(some * scale) / scale == some).all():
                codes = list(over_chunks(partial(self._codes, scale), n))
                if all(part is not None for part in codes):
                    return _Codes(np.concatenate(codes), np.arange(scale + 1) / scale, exact=True)
        if n < 4 * _CELLS:
            return None
        low, high = float(self.score.min()), float(self.score.max())
        if not 0 < high - low < np.inf:
            return None
        cells = np.concatenate(list(over_chunks(partial(self._cells, low, high), n)))
        rows, total = (np.bincount(cells, weight, _CELLS + 2) for weight in (None, self.score))
        # The mean of a cell lies between those of its neighbours, but for rounding.
        return _Codes(cells, np.maximum.accumulate(np.where(rows > 0, total / np.maximum(rows, 1), low)), exact=False)

    def _cells(self, low: float, high: float, rows: slice) -> Codes:
        """The cell of each of some scores: 0 for the lowest score alone, the last for the highest."""
        score = self.score[rows]
        inside = np.minimum(np.ceil((score - low) * (_CELLS / (high - low))), _CELLS)
        return (inside + (score == high)).astype(np.int32)

    def _codes(self, scale: int, rows: slice) -> Codes | None:
        """Scores of some rows as whole numbers, where they are k / scale, from 0 to 1."""
        score = self.score[rows]
        whole = np.rint(score * scale)
        if whole.min() < 0 or whole.max() > scale or not (whole / scale == score).all():
            return None
        return whole.astype(np.int32)

    @cached_property
    def _counted(self) -> list[list[Entries]]:
        """Entries of the group columns that were counted so far."""
        return []

    @cached_property
    def _ascending(self) -> "tuple[NDArray[np.intp], Ranked]":
        """The rows by ascending score: their numbers, and themselves."""
        order = np.argsort(self.score)
        weight = None if self.weight is None else self.weight[order]
        return order, Ranked(self.hit[order], self.score[order], weight)

    def entries(self, group: Codes, n_groups: int) -> list[Entries]:
        """The distinct scores of each group; `group` has the shape [n]."""
        found = self._counted_as
        if found is not None and 2 * n_groups * len(found.values) <= 4 * len(self.score):
            if n_groups == 1 and self._counted:  # all rows: those of any column's groups
                some = self._counted[0]
                return [
                    Entries(
                        found.values, np.sum([e.mass for e in some], axis=0), np.sum([e.rows for e in some], axis=0)
                    )
                ]
            shape = (n_groups, 2, len(found.values))
            columns = [group, self.hit.view(np.int8), found.codes]
            rows = mass = count_rows(columns, shape)
            if self.weight is not None:
                mass = np.bincount(cell_numbers(columns, shape), self.weight, rows.size).reshape(shape)
            counted = [Entries(found.values, m.astype(np.float64), r) for m, r in zip(mass, rows, strict=True)]
            if found.exact or all(_fine_enough(entries) for entries in counted):
                self._counted.append(counted)
                return counted
        order, ascending = self._ascending
        if n_groups == 1:
            return [ascending._merged(slice(None))]
        by_score = group.astype(np.min_scalar_type(n_groups))[order]  # 16 bits or fewer are sorted by radix
        positions = np.argsort(by_score, kind="stable")
        of_groups = np.split(positions, np.cumsum(np.bincount(by_score, minlength=n_groups))[:-1])
        return [ascending._merged(some) for some in of_groups]

    def auc_parts(self, entries: Entries, own: NDArray[np.bool_], cluster: Codes | None) -> Array:
        """What each of a group's own rows, or clusters, adds to its AUC, less the mean of its class: [rows]."""
        hit, places = self.hit[own], np.searchsorted(entries.value, self.score[own])
        weight = np.ones(len(hit)) if self.weight is None else self.weight[own]
        down, up = entries.mass
        placed = [(part.cumsum() - part / 2)[np.minimum(places, len(part) - 1)] for part in (down, up)]
        found = np.where(hit, placed[0] / max(down.sum(), _LEAST), -placed[1] / max(up.sum(), _LEAST))
        for some in (hit, ~hit):
            if some.any():
                found[some] -= dot(found[some], weight[some]) / weight[some].sum()
                found[some] *= weight[some] / weight[some].sum()
        return found if cluster is None else np.asarray(np.bincount(cluster[own], found), dtype=np.float64)

    def _merged(self, rows: NDArray[np.intp] | slice) -> Entries:
        """Entries of some rows, which are in ascending order."""
        score, hit = self.score[rows], self.hit[rows]
        new = np.ones(len(score), dtype=bool)
        np.not_equal(score[1:], score[:-1], out=new[1:])
        starts = np.flatnonzero(new)
        rows_of = np.diff(starts, append=len(score))
        hits = np.diff(np.cumsum(hit)[starts + rows_of - 1], prepend=0)  # much quicker than `reduceat`
        count = np.stack([rows_of - hits, hits])
        if self.weight is None:
            return Entries(score[starts], count.astype(np.float64), count)
        both = np.stack([~hit, hit]) * self.weight[rows]
        return Entries(score[starts], np.add.reduceat(both, starts, axis=-1) if len(starts) else both, count)


def _fine_enough(entries: Entries) -> bool:
    """Whether an AUC would hardly change if the scores within each cell, but for the first and the last, were sorted.

    At most, all pairs within a cell are in one order: a win or a loss, and not half of one.
    """
    down, up = entries.mass.sum(axis=1)
    within = float(dot(entries.mass[0, 1:-1], entries.mass[1, 1:-1]))
    few = min(entries.rows.sum(axis=1))
    return bool(within / 2 * np.sqrt(few) <= _OFF * down * up)


class Binned(NamedTuple):
    """One group in bins of equal mass."""

    starts: NDArray[np.intp]  # the first entry of each bin, shape [K]
    edges: Array  # the lowest score of each bin but the first, shape [K − 1]
    rows: NDArray[Any]  # shape [2, K]: no hits and hits in each bin

    @classmethod
    def of(cls, entries: Entries, bins: int = CALIBRATION_BINS) -> "Binned":
        """Bins of as equal numbers of rows as equal scores, which share a bin, allow."""
        up_to = np.cumsum(entries.rows.sum(axis=0))
        if not len(up_to) or not up_to[-1]:
            return cls(np.zeros(bins, dtype=np.intp), np.zeros(bins - 1), np.zeros((2, bins), dtype=np.int64))
        first = np.searchsorted(up_to, np.arange(1, bins) * up_to[-1] // bins, side="right")
        starts = np.concatenate([[0], first])
        return cls(starts, entries.value[first], sums_from(entries.rows, starts))

    def sums(self, values: Array) -> Array:
        """Values of entries, [..., E], summed over each bin: [..., K]."""
        return sums_from(values, self.starts) if values.shape[-1] else np.zeros((*values.shape[:-1], len(self.starts)))


def sums_from(values: NDArray[Any], starts: NDArray[np.intp]) -> NDArray[Any]:
    """Values of entries, [..., E], summed from each start to the next: [..., K]."""
    found = np.add.reduceat(values, starts, axis=-1)
    found[..., :-1][..., starts[:-1] == starts[1:]] = 0  # nothing in between, which reduceat does not know
    return found


@dataclass(frozen=True)
class ScoreTable:
    """One score in each group."""

    entries: list[Entries]  # its distinct values
    binned: list[Binned]  # its bins
    sample: Sample  # rows by group, no hit or hit, and bin
    n_boot: int  # replicates
    seed: int  # of the replicates
    squares: Array | None = None  # of the weights, summed over the rows of each bin, [G, 2, K]; None without weights

    @property
    def rows(self) -> NDArray[np.int64]:
        """Unweighted counts of bins, shape [G, 2, K]."""
        return self.sample.rows[0]

    @cached_property
    def counts(self) -> Array:
        """(Weighted) counts of bins, shape [G, 2, K]: no hits and hits."""
        return self.sample.observed()[0]

    @cached_property
    def star(self) -> Array:
        """Replicates of the counts, shape [B, G, 2, K]."""
        return self.sample.bootstrap(self.n_boot, np.random.default_rng(self.seed))[0]

    @cached_property
    def powers(self) -> tuple[Array, Array]:
        """Sums of the scores in each bin, and of their squares, each [G, 2, K]."""
        found = []
        for entries, binned in zip(self.entries, self.binned, strict=True):
            first = entries.mass * entries.value
            found.append((binned.sums(first), binned.sums(first * entries.value)))
        first, second = (np.stack(of) for of in zip(*found, strict=True))
        return first, second

    def promised(self, clustered: bool) -> "Promised":
        """What the score promises, where it is a probability."""
        mass, first = self.counts.sum(axis=-2), self.powers[0].sum(axis=-2)
        squares = mass if self.squares is None else self.squares.sum(axis=-2)
        rows, share = (
            np.divide(*of, out=np.zeros(mass.shape), where=mass > 0) for of in ((mass**2, squares), (first, mass))
        )
        of_group = mass / np.maximum(mass.sum(axis=-1, keepdims=True), _LEAST)
        return Promised(rows, np.clip(share, 0.0, 1.0), of_group, clustered, tuple(range(len(mass))), self.seed, {})

    def mean(self, sums: Array) -> Array:
        """The mean in each bin, [G, 2, K], of what its rows add up to."""
        return np.divide(sums, self.counts, out=np.zeros(sums.shape), where=self.counts > 0)


def normal_sums(mean: Array, square: Array, rows: Array, normal: Array) -> Array:
    """Normal replicates [B, K, G] of means over rows, each of which has a value in one of K bins and 0 in the others.

    Of the means and the mean squares, [K, G], of so many rows, [G], from normal numbers [G, K, B]. With D² the squares
    and u the means over D, the covariance matrix of a row is D(1 − uuᵀ)D, and D(1 − c·uuᵀ) is a root of it.
    """
    scale = np.sqrt(square)
    u = np.divide(mean, scale, out=np.zeros_like(mean), where=scale > 0)
    length = np.maximum((u**2).sum(axis=0), _LEAST)
    factor = (1 - np.sqrt(np.maximum(1 - length, 0.0))) / length
    found = np.empty_like(normal)
    for g, drawn in enumerate(found):  # one group at a time fits in a processor's cache
        along = np.einsum("k,kb->b", u[:, g], normal[g])
        np.subtract(normal[g], np.outer(factor[g] * u[:, g], along), out=drawn)
        drawn *= (scale[:, g] / np.sqrt(rows[g]))[:, None]
        drawn += mean[:, g, None]
    return found.transpose(2, 1, 0)


class Promised(NamedTuple):
    """What scores promise in the bins of each group; it draws the errors of calibrated scores.

    A bin without a hit shows no noise when its rows are drawn again, though by chance it might have had some: where few
    hits or misses are promised, hits are drawn as the scores have them.
    """

    rows: Array  # plain rows that say as much as those of each bin, [G, K]
    share: Array  # of hits that the scores promise there, [G, K]
    mass: Array  # of each bin, as a share of its group, [G, K]
    clustered: bool  # whether rows of a cluster may have more in common than their scores
    names: tuple[int, ...]  # of the groups, for their seeds
    seed: int
    drawn: dict[Hashable, NDArray[np.int64]]  # hits of each group, which are the same for any level

    def of_groups(self, groups: NDArray[np.bool_]) -> "Promised":
        """Some of the groups, [G]."""
        names = tuple(np.array(self.names)[groups].tolist())
        rows, share, mass = (of[groups] for of in self[:3])
        return self._replace(rows=rows, share=share, mass=mass, names=names)

    def errors(self, error: Array, g: int) -> Array:
        """Errors [B, K] of a group's terms as they would be if it were calibrated."""
        rows, share, mass = self.rows[g], self.share[g], self.mass[g]
        if self.clustered:
            # All bins together have enough hits to show by how much more they vary than hits of single rows would.
            plain = float((mass**2 * share * (1 - share) / np.maximum(rows, 1)).sum())
            rows = rows / max(1.0, float(np.nanvar(error.sum(axis=-1))) / max(plain, _LEAST))
        few = rows * np.minimum(share, 1 - share) < _FEW_HITS
        if not few.any():
            return error
        rows, share, found = np.maximum(np.rint(rows[few]), 1), share[few], error.copy(order="K")
        key = self.names[g], len(error), *rows.tolist()
        if key not in self.drawn:
            rng = np.random.default_rng([self.seed, *f"calibrated {self.names[g]}".encode()])
            self.drawn[key] = rng.binomial(rows.astype(int), share, (len(error), len(share)))
        found[:, few] = mass[few] * (share - self.drawn[key] / rows)
        return found


class Auc(NamedTuple):
    """Area under the ROC curve, ties counted half, and its variance; NaN without both classes."""

    value: Array
    variance: Array


def auc_of(down: NDArray[Any], up: NDArray[Any]) -> Auc:
    """AUC of negatives and positives at ascending scores, [..., E] to [...].

    The variance is DeLong's: what each row adds, its placement among the rows of the other class, varies so much.
    """
    below, above = (np.cumsum(part, axis=-1) - part / 2 for part in (down, up))  # quicker of whole numbers
    down, up = down.astype(np.float64, copy=False), up.astype(np.float64, copy=False)
    n_down, n_up = down.sum(axis=-1), up.sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = np.where(n_up * n_down > 0, dot(up, below) / (n_up * n_down), np.nan)
        # Σ own·(placement − mean)² over the square of their number, with squares taken apart.
        of_up, of_down = (
            (np.einsum("...e,...e,...e->...", own, others, others) / (n_others**2 * n_own) - mean**2) / n_own
            for own, n_own, others, n_others, mean in (
                (up, n_up, below, n_down, value),
                (down, n_down, above, n_up, 1 - value),
            )
        )
    return Auc(value, np.maximum(of_up + of_down, 0.0))


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


def drawn_together(star: Array, parts: Array, rng: np.random.Generator) -> Array:
    """Replicates [B, C] of C figures of the same rows, put into an order in which they vary together as they should.

    They are ranked as normal numbers that correlate as what each row adds to each figure, [C, n] (Iman and Conover
    1982). Where some replicates have no value, the order stays.
    """
    if np.isnan(star).any():
        return star
    length = np.sqrt(dot(parts, parts))
    unit = np.divide(parts, length[:, None], out=np.zeros_like(parts), where=length[:, None] > 0)
    together = np.einsum("an,bn->ab", unit, unit)
    np.fill_diagonal(together, 1 + 1e-9)  # a root exists also where two figures are the same, or one does not vary
    normal = np.einsum("bk,ck->bc", rng.standard_normal(star.shape), np.linalg.cholesky(together))
    return np.take_along_axis(np.sort(star, axis=0), normal.argsort(axis=0).argsort(axis=0), axis=0)


def dot(a: Array, b: Array) -> Array:
    """Sums of products over the last axis; BLAS starts threads for these, which wait where others use the cores."""
    return np.asarray(np.einsum("...e,...e->...", a, b))


def equal_bins(values: Array, bins: int) -> NDArray[np.int8]:
    """The bin of each value, in bins of equal mass; equal values share a bin.

    Example:
        >>> equal_bins(np.array([0.3, 0.1, 0.2, 0.2]), 2).tolist()
        [1, 0, 1, 1]
    """
    edges = np.sort(values)[(np.arange(1, bins) * len(values)) // bins] if len(values) else values
    return np.searchsorted(edges, values, side="right").astype(np.int8)
