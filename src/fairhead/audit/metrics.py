"""Metrics as functions of rates and counts, and the rates of one metric, stacked.

Rates have the shape [..., R, C, G]: R kinds of rate, C classes, G groups; cells that are left out are NaN. Counts have
the shape [..., G, C, C]: group, true class, predicted class. Leading axes (bootstrap replicates) pass through.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.catalogue import METRICS, Metric, Multiclass
from fairhead.audit.rates import RATES, ROUNDED, Margins, Rates
from fairhead.errors import InputError
from fairhead.report.wording import in_short
from fairhead.stats import intervals
from fairhead.stats.bootstrap import STABLE_ROWS
from fairhead.stats.clusters import divide

Array = NDArray[np.float64]

NO_REPLICATE = "every replicate left a cell empty; too few rows for so many groups and classes"
# Where a bootstrap has at least this share of the rows' own precision, rows are plain rows.
_PLAIN_ROWS = 0.85
# Rows up to which a share without a hit or a miss is drawn anew at other rates.
_FEW = 1000


def spread(rates: Array) -> Array:
    """Largest minus smallest over groups, [..., G] to [...]; NaN with fewer than one defined group."""
    return np.fmax.reduce(rates, axis=-1) - np.fmin.reduce(rates, axis=-1)


def mean_pairwise(rates: Array) -> Array:
    """Mean absolute difference over all pairs of groups that have the rate, [..., G] to [...].

    Example:
        >>> mean_pairwise(np.array([0.1, 0.4, np.nan, 0.2])).round(3).item()  # 0.3, 0.1 and 0.2
        0.2
    """
    ranked, n = np.sort(rates, axis=-1), (~np.isnan(rates)).sum(axis=-1)[..., None]  # NaN comes last
    sign = 2.0 * np.arange(rates.shape[-1]) - n + 1  # above how many more than below
    return divide(2 * np.nansum(ranked * sign, axis=-1), (n * (n - 1.0))[..., 0])


def places(cells: NDArray[np.bool_]) -> list[list[int]]:
    """Where cells are true; most often nowhere, and then `np.argwhere` is slow to say so."""
    return np.argwhere(cells).tolist() if cells.any() else []


def pooled(counts: NDArray[Any]) -> NDArray[Any]:
    """All groups as one: [..., G, C, C] to [..., 1, C, C]."""
    return counts.sum(axis=-3, keepdims=True)


def association(table: Array) -> Array:
    """Scaled deviations from independence of a table [..., G, C], as [..., C, G]: their squares sum to χ²/n."""
    of_row, of_column = table.sum(axis=-1, keepdims=True), table.sum(axis=-2, keepdims=True)
    product = of_row * of_column
    deviation = table - divide(product, of_row.sum(axis=-2, keepdims=True))
    if np.min(product, initial=1.0) > 0:
        deviation /= np.sqrt(product)
    else:
        deviation = np.where(product > 0, deviation / np.sqrt(np.where(product > 0, product, 1)), 0.0)
    return deviation.swapaxes(-1, -2)


def cramers_v(table: Array, deviation: Array | None = None) -> Array:
    """Cramér's V of a table [..., G, C]: 0 is independence, 1 full association. Empty rows and columns do not count.

    Its `association` [..., C, G] can be given where it is known.
    """
    rows, columns = _filled(table)
    deviation = association(table) if deviation is None else deviation
    return np.sqrt(divide((deviation**2).sum(axis=(-1, -2)), np.minimum(rows, columns) - 1.0))


def cramers_v_corrected(table: Array, n: Array | float | None = None) -> Array:
    """Bergsma's bias-corrected V of counts [..., G, C]: 0 on average without association, unlike the plain V.

    Give the rows n behind the table where the counts are weighted.
    """
    rows, columns = _filled(table)
    size = table.sum(axis=(-1, -2)) if n is None else np.asarray(n, dtype=np.float64)
    phi2 = (association(table) ** 2).sum(axis=(-1, -2))
    phi2 = np.maximum(0.0, phi2 - (rows - 1) * (columns - 1) / (size - 1))
    rows = rows - (rows - 1) ** 2 / (size - 1)
    columns = columns - (columns - 1) ** 2 / (size - 1)
    return np.sqrt(divide(phi2, np.minimum(rows, columns) - 1))


def _filled(table: Array) -> tuple[Array, Array]:
    """How many rows and columns of a table have a count."""
    rows, columns = ((table.sum(axis=axis) > 0).sum(axis=-1) for axis in (-1, -2))
    return rows.astype(np.float64), columns.astype(np.float64)


def association_value(name: str, counts: Array, n: int) -> Array:
    """An association metric: counts [..., G, C, C] of n rows to [...].

    Example:
        >>> association_value("cramers_v_excess", np.ones((2, 2, 2)), 8).item()
        0.0
    """
    by_prediction = counts.sum(axis=-2)
    if name == "cramers_v_corrected":
        return cramers_v_corrected(by_prediction, n)
    value = cramers_v(by_prediction)
    return value if name == "cramers_v" else value - cramers_v(counts.sum(axis=-1))


@dataclass(frozen=True)
class Reduction:
    """A metric as a function of rates [..., R, C, G]."""

    metric: Metric  # what to compute
    multiclass: Multiclass  # how classes are put together: the worst one, their mean, or weighted
    weights: Array  # weight of each class, shape [C]
    followed: int = 0  # the class whose signed difference is reported, where "max" would let signs cancel

    def __call__(self, rates: Array) -> Array:
        """The metric: [..., R, C, G] to [...]."""
        match self.metric.compare:
            case "minimum":
                return np.fmin.reduce(rates, axis=(-1, -2, -3))
            case "mean" if rates.shape[-3:] == (1, 1, 1):
                return rates[..., 0, 0, 0]
            case "mean":
                every = (-1, -2, -3)
                return divide(np.nansum(rates, axis=every), (~np.isnan(rates)).sum(axis=every))
            case _:
                return self.over_classes(self.by_class(rates))

    def by_part(self, rates: Array) -> Array:
        """Compare groups: [..., R, C, G] to [..., R, C]."""
        match self.metric.compare:
            case "ratio":
                return divide(np.fmin.reduce(rates, axis=-1), np.fmax.reduce(rates, axis=-1))
            case "to_overall":
                return np.fmax.reduce(np.abs(rates[..., :-1] - rates[..., -1:]), axis=-1)
            case "pairwise":
                return mean_pairwise(rates)
            case "signed":
                return rates[..., 0] - rates[..., 1]
            case "signed_ratio":
                return divide(rates[..., 0], rates[..., 1])
            case _:
                return spread(rates)

    def by_class(self, rates: Array) -> Array:
        """Put the kinds of rate together: [..., R, C, G] to [..., C]."""
        parts = self.by_part(rates)
        if parts.shape[-2] == 1:
            return parts[..., 0, :]
        if self.metric.combine == "mean":
            return parts.mean(axis=-2)
        return parts.min(axis=-2) if self.metric.compare == "ratio" else parts.max(axis=-2)

    def over_classes(self, by_class: Array) -> Array:
        """Put classes together, [..., C] to [...]; those without a value count neither in an extreme nor in a mean."""
        if by_class.shape[-1] == 1:
            return by_class[..., 0]
        if self.multiclass != "max":
            weights = np.where(np.isnan(by_class), 0.0, self.weights if self.multiclass == "weighted" else 1.0)
            return divide(np.nansum(by_class * weights, axis=-1), weights.sum(axis=-1))
        if self.metric.compare in ("signed", "signed_ratio"):
            return by_class[..., self.followed]
        extreme = np.fmin if self.metric.compare == "ratio" else np.fmax
        return extreme.reduce(by_class, axis=-1)

    def gap_of_logarithms(self, log_rates: Array) -> Array:
        """For a ratio that is an extreme over rates and classes: minus its logarithm, from logarithms of the rates."""
        return np.fmax.reduce(spread(log_rates), axis=(-1, -2))


def table_metrics(counts: Array, names: Sequence[str], min_cell: int = 10) -> dict[str, Array]:
    """Metrics as an audit defines them, of tables that all have the same rows.

    Args:
        counts: rows by group, label and prediction, [S, G, C, C]. Tables may differ in the predictions alone.
        names: metrics of counts: accuracy, gaps, worst groups, associations.
        min_cell: a rate of fewer rows is undefined.

    Returns:
        By name, [S]; NaN where a table leaves a metric undefined.
    """
    margins, found = Margins.of(counts), {}
    for name in names:
        metric = METRICS[name]
        if name == "accuracy":
            found[name] = Margins.of(pooled(counts)).accuracy()[..., 0, 0]
        elif metric.compare == "association":
            found[name] = association_value(name, counts, int(counts[0].sum()))
        else:
            kinds = [RATES[rate] for rate in metric.rates]
            rates = [np.where(kind.rows(margins) >= min_cell, kind.rate(margins), np.nan) for kind in kinds]
            # Of two classes the positive one.
            first = 1 if counts.shape[-1] == 2 and metric.compare != "minimum" else 0
            stacked = np.stack(rates, axis=1)[..., first:, :]
            found[name] = Reduction(metric, "max", np.ones(stacked.shape[-2]))(stacked)
    return found


@dataclass(frozen=True)
class Rules:
    """The options that every figure of an audit shares."""

    level: float  # confidence level
    min_cell: int  # rows that a rate needs; with fewer it is undefined
    multiclass: Multiclass  # how one-vs-rest gaps of several classes become one
    prevalence: Array  # share of each class, shape [C], for "weighted"


def check_options(n_boot: int, seed: int, level: float, min_cell: int, min_group: float, multiclass: str) -> None:
    """Refuse options of an audit that make no sense; see `audit`."""
    whole, numbers = {"n_boot": n_boot, "seed": seed}, {"level": level, "min_cell": min_cell, "min_group": min_group}
    for name, given in (whole | numbers).items():
        if not isinstance(given, int | np.integer if name in whole else int | float | np.integer | np.floating):
            raise InputError(f"{name} is {given!r}; expected a {'whole ' * (name in whole)}number.")
    if seed < 0:
        raise InputError(f"seed is {seed}; expected a whole number of at least 0.")
    if n_boot < 100:
        raise InputError(f"n_boot is {n_boot}; at least 100 replicates are needed for an interval.")
    if not 0.5 <= level < 1:
        raise InputError(f"level is {level}; expected a confidence level such as 0.95.")
    if min_cell < 1:
        raise InputError(f"min_cell is {min_cell}; expected at least 1.")
    if not 0 <= min_group < np.inf or (min_group > 1 and min_group % 1):
        raise InputError(f"min_group is {min_group}; expected a number of rows, or a share of rows below 1.")
    if multiclass not in ("max", "mean", "weighted"):
        raise InputError(f"multiclass is {multiclass!r}; expected 'max', 'mean' or 'weighted'.")


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
        excluded = [rates[kind].shortage(c, g, groups[g], min_cell) for kind, c, g in places(~usable)]
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
    def effective(self) -> Array:
        """Rows, or how many of them say as much as weighted or clustered rows do, shape [R, C, G]."""
        variance, rows = self.hat * (1 - self.hat), np.maximum(self.rows, 1.0)
        known = (self.se > 0) & (variance > ROUNDED)
        found = np.divide(variance, self.se**2, out=np.maximum(self.independent, 1.0), where=known)
        # A bootstrap knows a variance to a few percent. Rows of a cluster may say as much as single rows do.
        return np.where(found > _PLAIN_ROWS * (rows - 1), rows, found)

    def noise(self, rates: Array) -> Array:
        """Standard errors of the rates if these were the true ones, both [R, C, G]."""
        least = 0.5 / (self.effective + 1)
        kept = np.minimum(np.maximum(rates, least), 1 - least)  # quicker than `np.clip`
        return np.asarray(np.sqrt(kept * (1 - kept) / self.effective))

    def errors_at(self, error: Array, se: Array, rates: Array) -> intervals.Errors:
        """What errors [B, R, C, G] with these standard errors would be if these were the true rates.

        They are scaled. Where rows are few, or none or all of them are hits, errors have a shape that depends on the
        rate as well: there they are those of as many draws with the true rate, in the same order.
        """
        there = self.noise(rates)
        drawn = error * np.divide(there, se, out=np.ones_like(se), where=se > 0)
        for (r, c, g), order in self._thin.items():
            n, rate = max(1, round(self.effective[r, c, g])), float(rates[r, c, g])
            drawn[order, r, c, g] = binomial_errors(len(order), n, rate)
        return intervals.Errors(drawn, there)

    def some(self, replicates: NDArray[np.integer]) -> "Stack":
        """The same rates with some of their replicates, by number."""
        rates = tuple(replace(r, star=r.star[replicates]) for r in self.rates)
        return replace(self, rates=rates, kept=self.kept[replicates])

    def at(self, rates: Array, shares: bool) -> "Stack":
        """A sample of as many rows of which these [R, C, G] are the rates, their errors as large as `shares` have."""
        star = rates - self.hat + self.star
        if shares:
            star = np.clip(rates - self.errors_at(self.hat - self.star, self.se, rates).drawn, 0.0, 1.0)
        moved = (replace(r, hat=rates[k], star=star[:, k]) for k, r in enumerate(self.rates))
        return replace(self, rates=tuple(moved), hat=rates, kept=np.ones(len(star), dtype=bool))

    @cached_property
    def _thin(self) -> dict[tuple[int, int, int], NDArray[np.intp]]:
        """The replicates by descending rate, of rates with few rows, or without a hit or a miss."""
        settled = (self.hat < ROUNDED) | (self.hat > 1 - ROUNDED)
        few = self.usable & (self.effective <= _FEW) & ((self.independent < STABLE_ROWS) | settled)
        # Equal rates keep their order: an unstable sort would order them as the processor does.
        return {(r, c, g): np.argsort(-self.star[:, r, c, g], kind="stable") for r, c, g in places(few)}

    @cached_property
    def even(self) -> Array:
        """The rates that all groups would have in common, shape [R, C, G]."""
        weight = np.where(self.usable, self.effective, 0.0)
        total = np.where(self.usable, self.hat * weight, 0.0).sum(axis=-1, keepdims=True)
        return np.where(self.usable, total / np.maximum(weight.sum(axis=-1, keepdims=True), 1), np.nan)

    def reduction(self, metric: Metric, rules: Rules) -> Reduction:
        """The metric as a function of these rates."""
        n_classes = self.hat.shape[1]
        weights = rules.prevalence if len(rules.prevalence) == n_classes else np.ones(n_classes)
        reduction = Reduction(metric, rules.multiclass, weights)
        if metric.compare in ("signed", "signed_ratio") and n_classes > 1:
            distance = np.abs(reduction.by_class(self.hat) - (metric.ideal or 0.0))
            reduction = replace(reduction, followed=int(np.argmax(np.nan_to_num(distance, nan=-1.0))))
        return reduction

    def why_undefined(self, reduction: Reduction, value: float) -> str | None:
        """The reason why there is no figure, whose value is NaN then, or None."""
        if value == value:  # not NaN
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
