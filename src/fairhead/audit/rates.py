"""Group rates of a sample and of its bootstrap replicates, with the rows each rests on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isnan
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit import metrics
from fairhead.stats import intervals

Array = NDArray[np.float64]
Counts = NDArray[Any]  # whole numbers of rows, or sums of weights

# A rate this close to 0 or 1 is 0 or 1.
ROUNDED = 1e-12


@dataclass(frozen=True)
class Rates:
    """One kind of rate for every class and group."""

    hat: Array  # observed, shape [C, G]; C is 1 where there is one positive class or the rate is not about a class
    star: Array  # bootstrap replicates, shape [B, C, G]
    rows: NDArray[np.int64]  # rows in the denominator, shape [C, G]
    need: Callable[[int], str]  # what those rows are, for messages: "rows with label 1"
    # Clusters with rows of each group, shape [G]; None where rows stand for themselves
    clusters: NDArray[np.int64] | None = None
    terms: "Terms | None" = None  # where the rate is a sum of absolute values (a calibration error), what those are of
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

    def errors(self, level: float) -> Array:
        """Errors hat − star, stretched for the few rows or clusters there are, shape [B, C, G]."""
        if level not in self._errors:
            self._errors[level] = (self.hat - self.star) * self.wide(level)
        return self._errors[level]

    def wide(self, level: float) -> Array:
        """How far to stretch the replicates, shape [C, G]."""
        if level not in self._wide:
            self._wide[level] = stretch(self.independent, level)
        return self._wide[level]

    @cached_property
    def _wide(self) -> dict[float, Array]:
        return {}

    @cached_property
    def _errors(self) -> dict[float, Array]:
        return {}

    def enough(self, min_cell: int) -> NDArray[np.bool_]:
        """Where there are enough observations, shape [C, G]; a single cluster never is, drawn again it is the same."""
        enough = np.asarray(self.independent >= (min_cell if self.clusters is None else max(min_cell, 2)))
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
        needed = min_cell if self.clusters is None else max(min_cell, 2)
        if self.independent[c, g] >= needed:
            return f"the rate of {group} has no value: its counts lead to a division by 0, or the like"
        return f"{group} has {self.basis(c, g)}; at least {needed} are needed"

    def of_class(self, c: int) -> "Rates":
        """The rates of one class."""
        one = slice(c, c + 1)
        need = self.need(c)
        return Rates(self.hat[one], self.star[:, one], self.rows[one], lambda _: need, self.clusters, None, self.small)

    def of_groups(self, groups: NDArray[np.bool_], replicates: NDArray[np.bool_]) -> "Rates":
        """A rate that is a sum of absolute values, of some groups [G] and with some replicates [B] only."""
        assert self.terms is not None
        terms = Terms(self.terms.hat[:, groups], self.terms.star[replicates][..., groups], self.terms.curve)
        clusters = None if self.clusters is None else self.clusters[groups]
        star = self.star[replicates][..., groups]
        return Rates(self.hat[:, groups], star, self.rows[:, groups], self.need, clusters, terms)

    def errors_of_terms(self, level: float) -> "Terms":
        """The terms, with errors hat − star for replicates, stretched for the few rows or clusters there are."""
        assert self.terms is not None
        if level not in self._error_terms:
            hat, star, curve = self.terms
            self._error_terms[level] = Terms(hat, (hat - star) * self.wide(level)[0], curve)
        return self._error_terms[level]

    def sum_interval(self, g: int, level: float) -> intervals.Interval:
        """The interval of a group's sum of absolute values."""
        if (g, level) not in self._sum_intervals:
            hat, error, curve = self.errors_of_terms(level)
            self._sum_intervals[g, level] = intervals.absolute_sum(hat[:, g], error[..., g], level, curve)
        return self._sum_intervals[g, level]

    @cached_property
    def _error_terms(self) -> dict[float, "Terms"]:
        return {}

    @cached_property
    def _sum_intervals(self) -> dict[tuple[int, float], intervals.Interval]:
        return {}


class Terms(NamedTuple):
    """Signed terms of a rate Σ|term|: observed, shape [K, G], and replicates, shape [B, K, G].

    Noise makes such a sum larger, most of all in small groups; its interval has to look at the terms.
    """

    hat: Array
    star: Array
    curve: bool = False  # they are points of a curve, and neighbours err alike


def rows_of_groups(rows: metrics.Margins) -> Counts:
    """All rows of each group, once for each class, [C, G]."""
    return rows.total + 0 * rows.true


@dataclass(frozen=True)
class Kind:
    """How a rate is computed from margins, which rows it needs, and over which classes it runs."""

    rate: Callable[[Any], Array]  # of margins, or of `Moments` where numbers are predicted
    rows: Callable[[Any], Counts]
    need: str
    classes: str = "positive"
    own: bool = False  # a user's: it may be any number


RATES = {
    "base_rate": Kind(metrics.Margins.base_rate, rows_of_groups, "rows"),
    "selection_rate": Kind(metrics.Margins.selection_rate, rows_of_groups, "rows"),
    "TPR": Kind(metrics.Margins.true_positive_rate, lambda m: m.true, "rows with label {}"),
    "FPR": Kind(metrics.Margins.false_positive_rate, lambda m: m.total - m.true, "rows with a label other than {}"),
    "precision": Kind(metrics.Margins.precision, lambda m: m.predicted, "rows with prediction {}"),
    "NPV": Kind(
        metrics.Margins.negative_predictive_value,
        lambda m: m.total - m.predicted,
        "rows with a prediction other than {}",
    ),
    "recall": Kind(metrics.Margins.true_positive_rate, lambda m: m.true, "rows with label {}", "all"),
    "accuracy": Kind(metrics.Margins.accuracy, lambda m: m.total, "rows", "none"),
}


@dataclass(frozen=True)
class Tables:
    """Counts of one group column and everything drawn from them."""

    groups: tuple[str, ...]  # names of the groups
    classes: tuple[str, ...]  # names of the classes; with two, the second is the positive one
    counts: Array  # (weighted) counts, shape [G, C, C]
    star: Array  # replicates, shape [B, G, C, C]
    rows: NDArray[np.int64]  # rows in each cell, unweighted, shape [G, C, C]
    settled: bool = False  # leave rates of exactly 0 or 1 without a spread of their own
    # Clusters with rows of each group, shape [G]; None where rows stand for themselves
    clusters: NDArray[np.int64] | None = None
    small: Mapping[int, str] = field(default_factory=dict)  # groups that take no part in gaps, and why
    kinds: Mapping[str, Kind] = field(default_factory=lambda: RATES)  # the rates by name

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Rows of each group, shape [G]."""
        return np.asarray(self.rows.sum(axis=(-1, -2)))

    @property
    def binary(self) -> bool:
        """Whether there are two classes, one of them positive; else each class is seen against the others."""
        return len(self.classes) == 2

    @cached_property
    def _cache(self) -> dict[str, Rates]:
        return {}

    def rates(self, name: str) -> Rates:
        """The rate called `name` for all groups."""
        if name not in self._cache:
            self._cache[name] = self._rates(name, self.kinds[name])
        return self._cache[name]

    def class_names(self, name: str) -> tuple[str, ...]:
        """The classes that the first axis of this rate runs over."""
        classes = self.kinds[name].classes if name in self.kinds else "none"
        if classes == "none":
            return ("",)
        return self.classes[1:] if classes == "positive" and self.binary else self.classes

    @cached_property
    def _margins(self) -> tuple[Any, Any]:
        """Of the counts and of their replicates."""
        return metrics.Margins.of(self.counts), metrics.Margins.of(self.star)

    @cached_property
    def _row_margins(self) -> Any:
        """Of the rows, unweighted."""
        return metrics.Margins.of(np.asarray(self.rows, dtype=np.float64))

    @cached_property
    def predicted(self) -> Array:
        """Rows of each group predicted to be of each class, in replicates, shape [B, G, C]."""
        return self.star.sum(axis=-2)

    @cached_property
    def association(self) -> Array:
        """How far these are from independent of the groups, as `metrics.association` has it, shape [B, C, G]."""
        return metrics.association(self.predicted)

    def _rates(self, name: str, kind: Kind) -> Rates:
        chosen = slice(1, 2) if kind.classes == "positive" and self.binary else slice(None)
        hat, star = (kind.rate(m if kind.classes == "none" else m.of_classes(chosen)) for m in self._margins)
        names = self.classes[1:] if chosen.start else self.classes
        rows = kind.rows(self._row_margins)[chosen].astype(np.int64)
        rates = Rates(hat, star, rows, lambda c: kind.need.format(names[c]), self.clusters, None, self.small)
        # What is no share has no spread to be given where it is 0 or 1.
        keep = self.settled or (kind.own and bool((hat > 1).any() or (hat < 0).any()))
        return rates if keep else replace(rates, star=unsettle(rates, name))

    @property
    def prevalence(self) -> Array:
        """Share of each class, shape [C]."""
        true = self.counts.sum(axis=(0, -1))
        return np.asarray(true / true.sum())

    @cached_property
    def with_overall(self) -> "Tables":
        """The groups, and all rows as one more group."""
        return self._map(lambda counts: np.concatenate([counts, metrics.pooled(counts)], axis=-3), "overall")

    def against(self, privileged: int) -> "Tables":
        """All other groups pooled, against the privileged one."""

        def pool(counts: Counts) -> Counts:
            one = counts[..., privileged : privileged + 1, :, :]
            return np.concatenate([metrics.pooled(counts) - one, one], axis=-3)

        return self._map(pool, groups=("not " + self.groups[privileged], self.groups[privileged]))

    def of_bias(self, aligned: bool) -> "Tables":
        """As one group, the rows whose label is more frequent in their group than in all rows, or the others."""
        expected = self.rows.sum(axis=(-1, -2))[:, None] * (self.rows.sum(axis=(0, -1)) / self.rows.sum())
        chosen = ((self.rows.sum(axis=-1) > expected) == aligned)[..., None]
        found = self._map(
            lambda counts: metrics.pooled(counts * chosen), groups=("aligned" if aligned else "conflicting",)
        )
        # At least as many clusters as the group with the most of them has.
        return found if self.clusters is None else replace(found, clusters=self.clusters.max(keepdims=True))

    @cached_property
    def all_rows(self) -> "Tables":
        """All groups as one."""
        return self._map(metrics.pooled, groups=("all",))

    def _map(self, change: Callable[[Counts], Counts], *more: str, groups: tuple[str, ...] | None = None) -> "Tables":
        names = (*self.groups, *more) if groups is None else groups
        # A cluster may have rows in several groups that become one: then this is an upper bound.
        clusters = None if self.clusters is None else change(self.clusters[:, None, None])[:, 0, 0]
        counts, star, rows = (change(table) for table in (self.counts, self.star, self.rows))
        small = self.small if groups is None else {}
        return Tables(names, self.classes, counts, star, rows, self.settled, clusters, small, self.kinds)


def small_groups(rows: NDArray[np.int64], min_group: float) -> dict[int, str]:
    """Groups of fewer rows [G] than asked for, a number or a share of all of them, and how many they have.

    Example:
        >>> small_groups(np.array([970, 30]), 0.05)
        {1: 'has 30 rows; min_group leaves out groups of fewer than 50'}
    """
    least = min_group * rows.sum() if min_group < 1 else min_group
    why = f"rows; min_group leaves out groups of fewer than {np.ceil(least):.0f}"
    return {int(g): f"has {rows[g]} {why}" for g in np.flatnonzero(rows < least)}


def stretch(n: NDArray[np.int64], level: float) -> Array:
    """How far to stretch replicates of rates with few rows or clusters, as t does the normal.

    A bootstrap of few is too sure of itself. The factor is √(n/(n−1))·t/z, with t/z to first order in 1/n: 1.06 for 30
    rows, 1.006 for 300.
    """
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
    n = np.maximum(n, 2)
    return np.asarray(np.sqrt(n / (n - 1)) * (1 + (z2 + 1) / (4 * (n - 1))))


def unsettle(rates: Rates, name: str) -> Array:
    """Give rates of 0 or 1 the spread of Jeffreys' posterior of n: a bootstrap of 10 hits in 10 knows no doubt.

    Args:
        rates: as the bootstrap has them.
        name: of the rate; the doubts about rates of different names are independent of each other.

    Returns:
        Their replicates, shape [B, C, G].
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
