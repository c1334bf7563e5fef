"""Group rates of a sample and of its bootstrap replicates, with the rows each rests on."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import isnan
from statistics import NormalDist
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.ranked import Promised
from fairhead.stats import intervals
from fairhead.stats.clusters import divide

Array = NDArray[np.float64]
Made = TypeVar("Made")

# A rate this close to 0 or 1 is 0 or 1.
ROUNDED = 1e-12


class Margins(NamedTuple):
    """What all rates are quotients of, each [..., C, G] but for the last.

    A rate is of one class against the rest; an empty denominator gives NaN. For a binary task take class 1.

    Example:
        >>> margins = Margins.of(np.array([[[3, 1], [0, 4]], [[1, 1], [1, 1]]]))
        >>> margins.selection_rate()[1].tolist(), margins.true_positive_rate()[1].tolist()
        ([0.625, 0.5], [1.0, 0.5])
        >>> margins.precision()[1].tolist(), margins.accuracy().tolist()
        ([0.8, 0.5], [[0.875, 0.5]])
    """

    true: Array  # rows of each class
    predicted: Array  # rows predicted to be of each class
    hits: Array  # rows that are both
    total: Array  # all rows of a group, shape [..., 1, G]

    @classmethod
    def of(cls, counts: Array) -> "Margins":
        """From counts [..., G, C, C] of group, true class and predicted class."""
        true, predicted = (counts.sum(axis=axis).swapaxes(-1, -2) for axis in (-1, -2))
        hits = np.diagonal(counts, axis1=-2, axis2=-1).swapaxes(-1, -2)
        return cls(true, predicted, hits, true.sum(axis=-2, keepdims=True))

    def of_classes(self, classes: slice) -> "Margins":
        """Some of the classes, each against all others."""
        true, predicted, hits = (part[..., classes, :] for part in self[:3])
        return Margins(true, predicted, hits, self.total)

    def base_rate(self) -> Array:
        """P(y = c | g)."""
        return divide(self.true, self.total)

    def selection_rate(self) -> Array:
        """P(ŷ = c | g)."""
        return divide(self.predicted, self.total)

    def true_positive_rate(self) -> Array:
        """P(ŷ = c | y = c, g)."""
        return divide(self.hits, self.true)

    def false_positive_rate(self) -> Array:
        """P(ŷ = c | y ≠ c, g)."""
        return divide(self.predicted - self.hits, self.total - self.true)

    def precision(self) -> Array:
        """P(y = c | ŷ = c, g)."""
        return divide(self.hits, self.predicted)

    def negative_predictive_value(self) -> Array:
        """P(y ≠ c | ŷ ≠ c, g)."""
        others = self.total - self.predicted
        return divide(others - (self.true - self.hits), others)

    def accuracy(self) -> Array:
        """P(ŷ = y | g), shape [..., 1, G], of the margins of all classes."""
        return divide(self.hits.sum(axis=-2, keepdims=True), self.total)


@dataclass(frozen=True)
class Kind:
    """How a rate is computed from margins, which rows it needs, and over which classes it runs."""

    rate: Callable[[Any], Array]  # of margins, or of `Moments` where numbers are predicted
    rows: Callable[[Any], NDArray[Any]] = lambda m: m.total  # in its denominator
    need: str = "rows"  # what those are
    classes: str = "none"  # "positive" (or each, where none is), "all", or "none"
    own: bool = False  # a user's: it may be any number


def rows_of_groups(rows: Margins) -> NDArray[Any]:
    """All rows of each group, once for each class, [C, G]."""
    return rows.total + 0 * rows.true


_PREDICTED_OTHER = "rows with a prediction other than {}"

RATES = {
    "base_rate": Kind(Margins.base_rate, rows_of_groups, "rows", "positive"),
    "selection_rate": Kind(Margins.selection_rate, rows_of_groups, "rows", "positive"),
    "TPR": Kind(Margins.true_positive_rate, lambda m: m.true, "rows with label {}", "positive"),
    "FPR": Kind(Margins.false_positive_rate, lambda m: m.total - m.true, "rows with a label other than {}", "positive"),
    "precision": Kind(Margins.precision, lambda m: m.predicted, "rows with prediction {}", "positive"),
    "NPV": Kind(Margins.negative_predictive_value, lambda m: m.total - m.predicted, _PREDICTED_OTHER, "positive"),
    "recall": Kind(Margins.true_positive_rate, lambda m: m.true, "rows with label {}", "all"),
    "accuracy": Kind(Margins.accuracy),
}


class Terms(NamedTuple):
    """Signed terms of a rate Σ|term|: observed, shape [K, G], and replicates, shape [B, K, G].

    Noise makes such a sum larger, most of all in small groups; its interval has to look at the terms.
    """

    hat: Array
    star: Array
    curve: bool = False  # they are points of a curve, and neighbours err alike
    promised: Promised | None = None  # what scores promise, where the terms are those of calibration


@dataclass(frozen=True)
class Rates:
    """One kind of rate for every class and group."""

    hat: Array  # observed, shape [C, G]; C is 1 where there is one positive class or the rate is not about a class
    star: Array  # bootstrap replicates, shape [B, C, G]
    rows: NDArray[np.int64]  # rows in the denominator, shape [C, G]
    need: Callable[[int], str]  # what those rows are, for messages: "rows with label 1"
    # Clusters with rows of each group, shape [G]; None where rows stand for themselves
    clusters: NDArray[np.int64] | None = None
    terms: Terms | None = None  # where the rate is a sum of absolute values (a calibration error), what those are of
    small: Mapping[int, str] = field(default_factory=dict)  # groups that take no part, and why

    @cached_property
    def se(self) -> Array:
        """Standard errors, shape [C, G]."""
        star = self.star.transpose(1, 2, 0)
        variance = np.vecdot(star, star) / len(self.star) - star.mean(axis=-1) ** 2
        # Of rates between 0 and 1, rounding leaves 1e-16; what is no more than that is 0.
        return np.sqrt(np.where(variance > 1e-15, variance, 0.0))

    @cached_property
    def has_empty(self) -> bool:
        """Whether a replicate left a cell empty: a rate without a value."""
        return isnan(self.star.sum())  # quicker than looking at each

    @cached_property
    def independent(self) -> NDArray[np.int64]:
        """How many independent observations there are at most: rows or clusters, shape [C, G]."""
        return self.rows if self.clusters is None else np.minimum(self.rows, self.clusters)

    def wide(self, level: float) -> Array:
        """How far to stretch the replicates, shape [C, G]."""
        return self._once(("wide", level), lambda: stretch(self.independent, level))

    def errors(self, level: float) -> Array:
        """Errors hat − star, stretched for the few rows or clusters there are, shape [B, C, G]."""
        return self._once(("errors", level), lambda: (self.hat - self.star) * self.wide(level))

    def sum_interval(self, g: int, level: float) -> intervals.Interval:
        """The interval of a group's sum of absolute values."""
        assert self.terms is not None
        hat, star, curve, promised = self.terms

        def made() -> intervals.Interval:
            error = (hat[:, g] - star[..., g]) * self.wide(level)[0, g]
            even = None if promised is None else promised.errors(error, g)
            return intervals.absolute_sum(hat[:, g], error, level, curve, even)

        return self._once((g, level), made)

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    def _once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        if key not in self._made:
            self._made[key] = make()
        found: Made = self._made[key]
        return found

    def needed(self, min_cell: int) -> int:
        """Observations that a rate needs: a single cluster, drawn again, is the same, and so is never enough."""
        return min_cell if self.clusters is None else max(min_cell, 2)

    def enough(self, min_cell: int) -> NDArray[np.bool_]:
        """Where there are enough observations, shape [C, G]."""
        enough = np.asarray(self.independent >= self.needed(min_cell))
        if self.small:
            enough[:, list(self.small)] = False
        return enough

    def basis(self, c: int, g: int) -> str:
        """What the rate of a class in a group rests on, in words: whichever is fewer, rows or clusters."""
        if self.clusters is not None and self.clusters[g] < self.rows[c, g]:
            return f"rows of {self.clusters[g]} cluster{'' if self.clusters[g] == 1 else 's'}"
        rows = int(self.rows[c, g])
        return f"{rows} {self.need(c).replace('rows', 'row', 1) if rows == 1 else self.need(c)}"

    def shortage(self, c: int, g: int, group: str, min_cell: int) -> str:
        """Why the rate of a class in a group is undefined."""
        if g in self.small:
            return f"{group} {self.small[g]}"
        if self.independent[c, g] >= self.needed(min_cell):
            return f"the rate of {group} has no value: its counts lead to a division by 0, or the like"
        return f"{group} has {self.basis(c, g)}; at least {self.needed(min_cell)} are needed"

    def of_class(self, c: int) -> "Rates":
        """The rates of one class."""
        one, need = slice(c, c + 1), self.need(c)
        return Rates(self.hat[one], self.star[:, one], self.rows[one], lambda _: need, self.clusters, None, self.small)

    def of_groups(self, groups: NDArray[np.bool_], replicates: NDArray[np.bool_]) -> "Rates":
        """A rate that is a sum of absolute values, of some groups [G] and with some replicates [B] only."""
        assert self.terms is not None
        hat, star, curve, promised = self.terms
        own = None if promised is None else promised.of_groups(groups)
        terms = Terms(hat[:, groups], star[replicates][..., groups], curve, own)
        clusters = None if self.clusters is None else self.clusters[groups]
        star = self.star[replicates][..., groups]
        return Rates(self.hat[:, groups], star, self.rows[:, groups], self.need, clusters, terms)


def stretch(n: NDArray[np.int64], level: float) -> Array:
    """How far to stretch replicates of rates with few rows or clusters, as t does the normal.

    A bootstrap of few is too sure of itself. The factor is √(n/(n−1))·t/z, with t/z to first order in 1/n: 1.06 for 30
    rows, 1.006 for 300.
    """
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
    n = np.maximum(n, 2)
    return np.asarray(np.sqrt(n / (n - 1)) * (1 + (z2 + 1) / (4 * (n - 1))))


def unsettle(rates: Rates, name: str) -> Array:
    """Replicates [B, C, G] in which rates of 0 or 1 have the spread of Jeffreys' posterior of n.

    A bootstrap of 10 hits in 10 knows no doubt. The doubts about rates of different names are independent.
    """
    hat, star, n = rates.hat, rates.star, rates.independent
    # Differences of sums of weights are rounded: a rate of 1 can be 1 - 1e-16.
    settled = ((hat < ROUNDED) | (hat > 1 - ROUNDED)) & (n > 0)
    if not settled.any():
        return star
    star = star.copy(order="K")
    rng = np.random.default_rng(list(name.encode()))
    for c, g in zip(*np.nonzero(settled), strict=True):
        doubt = rng.beta(0.5, n[c, g] + 0.5, size=len(star))
        star[:, c, g] = doubt if hat[c, g] < 0.5 else 1 - doubt
    return star
