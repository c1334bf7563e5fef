"""The rates of one metric, stacked: which cells take part, how noisy they are, and what even groups would have."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.catalogue import Metric, Multiclass, Reduction
from fairhead.audit.rates import ROUNDED, Rates
from fairhead.report.wording import in_short
from fairhead.stats import intervals
from fairhead.stats.bootstrap import STABLE_ROWS

Array = NDArray[np.float64]

NO_REPLICATE = "every replicate left a cell empty; too few rows for so many groups and classes"
# Where a bootstrap has at least this share of the rows' own precision, rows are plain rows.
_PLAIN_ROWS = 0.85
# Rows up to which a share without a hit or a miss is drawn anew at other rates.
_FEW = 1000


@dataclass(frozen=True)
class Rules:
    """The options that every figure of an audit shares."""

    level: float  # confidence level
    min_cell: int  # rows that a rate needs; with fewer it is undefined
    multiclass: Multiclass  # how one-vs-rest gaps of several classes become one
    prevalence: Array  # share of each class, shape [C], for "weighted"


@dataclass(frozen=True)
class Stack:
    """The rates of a metric, stacked, with unusable cells as NaN."""

    rates: tuple[Rates, ...]  # what is stacked
    hat: Array  # shape [R, C, G]
    usable: NDArray[np.bool_]  # which cells take part, shape [R, C, G]
    rows: NDArray[np.int64]  # shape [R, C, G]
    independent: NDArray[np.int64]  # rows or clusters, shape [R, C, G]
    kept: NDArray[np.bool_]  # replicates without an empty cell, shape [B before leaving out]
    excluded: tuple[str, ...]  # the reason for each cell left out

    @classmethod
    def of(cls, metric: Metric, rates: Sequence[Rates], groups: Sequence[str], min_cell: int) -> "Stack":
        """Stack rates and take out the cells with too few rows."""
        rows, hat, independent, enough = (
            _stacked(parts)
            for parts in zip(*((r.rows, r.hat, r.independent, r.enough(min_cell)) for r in rates), strict=True)
        )
        usable = enough & ~np.isnan(hat)
        excluded = [
            rates[kind].shortage(int(c), int(g), groups[g], min_cell)
            for kind, c, g in zip(*np.nonzero(~usable), strict=True)
        ]
        if excluded and metric.compare not in ("minimum", "mean"):
            # A rate that only one group has says nothing about a gap: left out, never 0.
            compared = usable[..., :-1] if metric.compare == "to_overall" else usable
            usable &= compared.sum(axis=-1, keepdims=True) >= 2
        if metric.compare == "ratio":
            # Nor has a rate that is 0 in every group a ratio: a class that is never predicted takes no part.
            usable &= np.max(hat, axis=-1, keepdims=True, where=usable, initial=0.0) > 0
        if not usable.all():
            if len(rates) > 1 and metric.compare not in ("minimum", "mean"):
                # A figure made of several rates needs them all: a class without one takes no part with the others.
                usable &= usable.any(axis=-1, keepdims=True).all(axis=0, keepdims=True)
            hat = np.where(usable, hat, np.nan)
        kept = np.ones(len(rates[0].star), dtype=bool)
        if any(r.has_empty for r in rates):
            kept = np.asarray(~(np.isnan(_replicates([r.star for r in rates])) & usable).any(axis=(1, 2, 3)))
        return cls(tuple(rates), hat, usable, rows, independent, kept, tuple(dict.fromkeys(excluded)))

    @cached_property
    def star(self) -> Array:
        """The replicates that are kept, shape [B, R, C, G]."""
        star = _replicates([r.star for r in self.rates])
        if not self.kept.all():
            star = star[self.kept]
        return star if self.usable.all() else np.where(self.usable, star, np.nan)

    def wide(self, level: float) -> Array:
        """How far to stretch the replicates, shape [R, C, G]."""
        return _stacked([r.wide(level) for r in self.rates])

    def errors(self, level: float) -> Array:
        """Errors hat − star, stretched for the few rows or clusters there are, shape [B, R, C, G]."""
        if self.usable.all() and self.kept.all():
            return _replicates([r.errors(level) for r in self.rates])
        return (self.hat - self.star) * self.wide(level)

    @cached_property
    def se(self) -> Array:
        """Standard errors of the rates, shape [R, C, G]."""
        if self.kept.all() or not self.kept.any():
            return _stacked([r.se for r in self.rates])
        return np.asarray(np.std(self.star, axis=0))

    @cached_property
    def _effective(self) -> Array:
        """Rows, or how many of them say as much as weighted or clustered rows do, shape [R, C, G]."""
        variance, rows = self.hat * (1 - self.hat), np.maximum(self.rows, 1.0)
        known = (self.se > 0) & (variance > ROUNDED)
        found = np.divide(variance, self.se**2, out=np.maximum(self.independent, 1.0), where=known)
        # A bootstrap knows a variance to a few percent. Rows of a cluster may say as much as single rows do.
        return np.where(found > _PLAIN_ROWS * (rows - 1), rows, found)

    def noise(self, rates: Array) -> Array:
        """Standard errors of the rates if these were the true ones, both [R, C, G]."""
        kept = np.clip(rates, 0.5 / (self._effective + 1), 1 - 0.5 / (self._effective + 1))
        return np.asarray(np.sqrt(kept * (1 - kept) / self._effective))

    def errors_at(self, error: Array, se: Array, rates: Array) -> intervals.Errors:
        """What errors [B, R, C, G] with these standard errors would be if these were the true rates.

        They are scaled. Where rows are few, or none or all of them are hits, errors have a shape that depends on the
        rate as well: there they are those of as many draws with the true rate, in the same order.
        """
        there = self.noise(rates)
        drawn = error * np.divide(there, se, out=np.ones_like(se), where=se > 0)
        for (r, c, g), order in self._thin.items():
            n, rate = max(1, round(self._effective[r, c, g])), float(rates[r, c, g])
            drawn[order, r, c, g] = binomial_errors(len(order), n, rate)
        return intervals.Errors(drawn, there)

    @cached_property
    def _thin(self) -> dict[tuple[int, int, int], NDArray[np.intp]]:
        """The replicates by descending rate, of rates with few rows, or without a hit or a miss."""
        settled = (self.hat < ROUNDED) | (self.hat > 1 - ROUNDED)
        few = self.usable & (self._effective <= _FEW) & ((self.independent < STABLE_ROWS) | settled)
        return {(r, c, g): np.argsort(-self.star[:, r, c, g]) for r, c, g in np.argwhere(few).tolist()}

    @cached_property
    def even(self) -> Array:
        """The rates that all groups would have in common, shape [R, C, G]."""
        weight = np.where(np.isnan(self.hat), 0.0, self._effective)
        mean = np.nansum(self.hat * weight, axis=-1, keepdims=True) / np.maximum(weight.sum(axis=-1, keepdims=True), 1)
        return np.where(np.isnan(self.hat), np.nan, mean)

    def reduction(self, metric: Metric, rules: Rules) -> Reduction:
        """The metric as a function of these rates."""
        n_classes = self.hat.shape[1]
        weights = rules.prevalence if len(rules.prevalence) == n_classes else np.ones(n_classes)
        reduction = Reduction(metric, rules.multiclass, weights)
        if metric.compare in ("signed", "signed_ratio") and n_classes > 1:
            distance = np.abs(reduction.by_class(self.hat) - (metric.ideal or 0.0))
            reduction = replace(reduction, followed=int(np.argmax(np.nan_to_num(distance, nan=-1.0))))
        return reduction

    def why_undefined(self, reduction: Reduction) -> str | None:
        """The reason why there is no figure, or None."""
        if not np.isnan(reduction(self.hat)):
            return None if self.kept.any() else NO_REPLICATE
        if self.excluded:
            return in_short(self.excluded)
        if reduction.metric.compare in ("ratio", "signed_ratio"):
            return "no row of the groups compared is predicted positive, so a ratio of their rates has no value"
        return "fewer than two groups can be compared"


def binomial_errors(size: int, n: int, rate: float) -> Array:
    """Errors of the share of hits among n rows, ascending, at evenly spaced quantiles, [size].

    Example:
        >>> binomial_errors(4, 10, 0.5).round(2).tolist()
        [-0.2, -0.1, 0.1, 0.2]
    """
    from scipy.special import bdtr  # here: not needed for --help

    up_to = bdtr(np.arange(n), n, min(max(rate, 0.0), 1.0))
    return np.asarray(np.searchsorted(up_to, (np.arange(size) + 0.5) / size) / n - rate)


def _stacked(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return parts[0][None] if len(parts) == 1 else np.stack(parts)


def _replicates(parts: Sequence[Array]) -> Array:
    """Stack R arrays [B, C, G] to [B, R, C, G]."""
    # Replicates stay contiguous in memory, as `Content.total` has them: reductions over groups are then quick.
    return _stacked([part.transpose(1, 2, 0) for part in parts]).transpose(3, 0, 1, 2)
