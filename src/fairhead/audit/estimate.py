"""From group rates to one figure with its interval, or the reason why there is none."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.candidate_rates import candidate_rates, tied_lowest
from fairhead.audit.catalogue import Metric, Multiclass, Reduction
from fairhead.audit.rates import ROUNDED, Rates
from fairhead.report.wording import in_short
from fairhead.stats import Estimate, intervals
from fairhead.stats.bootstrap import STABLE_ROWS

Array = NDArray[np.float64]

NO_REPLICATE = "every replicate left a cell empty; too few rows for so many groups and classes"
# Replicates in which a cell was empty are left out; above this share the estimate says so.
_MENTION_LOST = 0.02
# Where a bootstrap has at least this share of the rows' own precision, rows are plain rows.
_PLAIN_ROWS = 0.85
# Of errors: so small that ratios are straight lines in them.
_TINY = 1e-6


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
        return np.where(found > _PLAIN_ROWS * rows, rows, found)

    def noise(self, rates: Array) -> Array:
        """Standard errors of the rates if these were the true ones, both [R, C, G]."""
        kept = np.clip(rates, 0.5 / (self._effective + 1), 1 - 0.5 / (self._effective + 1))
        return np.asarray(np.sqrt(kept * (1 - kept) / self._effective))

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


def _stacked(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return parts[0][None] if len(parts) == 1 else np.stack(parts)


def _replicates(parts: Sequence[Array]) -> Array:
    """Stack R arrays [B, C, G] to [B, R, C, G]."""
    # Replicates stay contiguous in memory, as `Content.total` has them: reductions over groups are then quick.
    return _stacked([part.transpose(1, 2, 0) for part in parts]).transpose(3, 0, 1, 2)


def estimate(
    metric: Metric,  # what to estimate
    rates: Sequence[Rates],  # the rates it is made of
    groups: Sequence[str],  # names of the groups
    classes: Sequence[str],  # names of the classes that the rates run over
    group_rows: NDArray[np.int64],  # rows of each group, shape [G]
    rules: Rules,  # options of the audit
    name: str | None,  # the group column; None for an overall figure
    tests: list[intervals.EvenTest] | None = None,  # where to put the test of evenness, if there is one
) -> Estimate:
    """One metric of one group column."""
    parts = Stack.of(metric, rates, groups, rules.min_cell)
    reduction = parts.reduction(metric, rules)
    detail: dict[str, Any] = {"definition": metric.definition}
    if parts.excluded:
        detail |= {"n_undefined": len(parts.excluded), "excluded": list(parts.excluded)}
    n = _rows_used(metric, parts, group_rows)
    reason = parts.why_undefined(reduction)
    if reason:
        return Estimate(metric.name, name, None, None, None, n, metric.ideal, reason, detail=detail)
    thin = _thin(rates, parts, groups)
    if thin:
        detail["unstable"] = thin
    lost = 1 - np.count_nonzero(parts.kept) / len(parts.kept)
    if lost > _MENTION_LOST:
        detail["replicates_without_a_value"] = lost
    value = float(reduction(parts.hat))
    interval = (
        _interval(reduction, parts, rules.level)
        if rates[0].terms is None
        else _sum_interval(parts, rates[0], rules.level)
    )
    if metric.unit and rates[0].terms is not None:
        interval = _within_unit(interval)
    if tests is not None and interval.test is not None:
        tests.append(interval.test)
    if parts.excluded and metric.compare == "minimum":
        # Any of the cells left out may be lower.
        detail["at_most"] = True
        interval = interval._replace(low=0.0)
    elif parts.excluded and metric.compare in ("spread", "to_overall"):
        # The interval is that of the groups with enough rows: a gap to one that is left out may be larger.
        detail["at_least"] = True
    if interval.surest:
        detail["most_certain"] = [
            {"rate": metric.rates[pair.place[0]], "groups": [groups[pair.high], groups[pair.low]]}
            for pair in interval.surest
        ]
    made_by = _made_by(reduction, parts.hat)
    if len(classes) > 1:
        if made_by.class_index is not None:
            detail["class"] = classes[made_by.class_index]
        if metric.compare not in ("minimum", "mean"):
            detail["multiclass"] = rules.multiclass
    attained_by = tuple(groups[g] for g in made_by.groups) if name is not None else ()
    return figure_of(metric, name, value, n, interval, rules.level, attained_by, detail)


def figure_of(
    metric: Metric,
    name: str | None,
    value: float,
    n: int,
    interval: intervals.Interval,
    level: float,
    groups: tuple[str, ...],
    detail: dict[str, Any],
) -> Estimate:
    """An estimate with its interval, what an even model would show, and the smallest detectable effect."""
    detail |= {"se": interval.se, "interval": interval.method}
    if interval.null is not None:
        detail["expected_if_even"] = interval.null
    low, high = min(interval.low, value), max(interval.high, value)
    mde = None
    if name is not None:
        mde = intervals.minimum_detectable(interval.se, level, critical=interval.critical)
    return Estimate(metric.name, name, value, low, high, n, metric.ideal, None, mde, groups, detail)


def _interval(reduction: Reduction, parts: Stack, level: float) -> intervals.Interval:
    wide = parts.wide(level)
    match reduction.metric.compare:
        case "minimum":
            # Where cells are left out only the upper end counts, and has the whole error.
            return _lowest(parts, wide, 2 * level - 1 if parts.excluded else level)
        case "spread" | "to_overall":
            noise = parts.noise if reduction.metric.unit and not reduction.metric.scores else None
            around = candidate_rates(reduction, parts.hat, parts.se * wide, level, noise, parts.even)
            found = intervals.gap(parts.hat, parts.errors(level), reduction, around, level)
            return _within_unit(found) if reduction.metric.unit else found
        case "pairwise":
            around = candidate_rates(reduction, parts.hat, parts.se * wide, level)
            return _within_unit(intervals.gap(parts.hat, parts.errors(level), reduction, around, level))
        case "ratio" if reduction.multiclass == "max" or parts.hat.shape[1] == 1:
            return _ratio(reduction, parts, level)
        case "ratio":
            return _mean_of_ratios(reduction, parts, wide, level)
        case _:
            values = reduction(parts.hat - parts.errors(level))
            found = intervals.percentile(values[~np.isnan(values)], level)
            # Stretched, replicates may leave the scale: of rates, but for a Brier score of several classes, 0 to 1.
            metric = reduction.metric
            if not metric.unit:
                return found
            endless = metric.compare == "signed_ratio" or "Brier" in metric.rates
            least, most = -1.0 if metric.compare == "signed" else 0.0, np.inf if endless else 1.0
            return found._replace(low=max(found.low, least), high=min(found.high, most))


def _sum_interval(parts: Stack, rates: Rates, level: float) -> intervals.Interval:
    """The interval of one sum of absolute values, or of the gap between several."""
    usable = ~np.isnan(parts.hat[0, 0])
    if not (usable.all() and parts.kept.all()):
        rates = rates.of_groups(usable, parts.kept)
    if rates.hat.shape[1] == 1:
        return rates.sum_intervals(level)[0]
    return intervals.spread_of_sums(rates.errors_of_terms(level), rates.sum_intervals, level)


def _lowest(parts: Stack, wide: Array, level: float) -> intervals.Interval:
    """The interval of the lowest rate, as that of angles.

    The noise of a rate depends on the rate, and is lopsided near 1; that of the angle arcsin √rate hardly is. What is
    left of it is evened out by turning every other error around.
    """
    kept = ~np.isnan(parts.hat)
    hat = np.arcsin(np.sqrt(parts.hat[kept]))
    error = (hat - np.arcsin(np.sqrt(parts.star[:, kept]))) * wide[kept]
    error[::2] *= -1
    found = intervals.minimum(hat, error, tied_lowest, level)
    low, high = (float(np.sin(min(max(angle, 0.0), np.pi / 2)) ** 2) for angle in (found.low, found.high))
    worst = int(np.argmin(hat))
    return found._replace(low=low, high=high, se=float(parts.se[kept][worst] * wide[kept][worst]))


def _ratio(reduction: Reduction, parts: Stack, level: float) -> intervals.Interval:
    """The interval of a ratio, as that of a gap of logarithms."""
    # Rates without a single hit would be infinitely far away; half a hit is as far as the data can tell.
    least = 0.5 / np.maximum(parts.rows, 1)
    hat = np.log(np.where(parts.hat < ROUNDED, least, parts.hat))
    error = hat - np.log(np.maximum(parts.hat - parts.errors(level), least))

    def noise(logarithms: Array) -> Array:
        rates = np.clip(np.exp(logarithms), least, 1.0)
        return parts.noise(rates) / rates

    even = np.log(np.maximum(parts.even, least))
    around = candidate_rates(reduction, hat, np.std(error, axis=0), level, noise, even, logarithms=True)
    gap = intervals.gap(hat, error, reduction.gap_of_logarithms, around, level)
    value = float(np.exp(-reduction.gap_of_logarithms(hat)))
    null = None if gap.null is None else float(np.exp(-gap.null))
    critical = None if gap.critical is None else gap.critical * value
    ends = float(np.exp(-gap.high)), float(np.exp(-gap.low))
    return gap._replace(low=ends[0], high=ends[1], se=gap.se * value, null=null, critical=critical)


def _mean_of_ratios(reduction: Reduction, parts: Stack, wide: Array, level: float) -> intervals.Interval:
    """The interval of a mean of ratios over classes: 1 less a mean gap, of rates as shares of the highest.

    Whether the groups may be even is asked of that gap. Where they are not, the noise of the highest rate counts for
    less in a ratio than in a gap: what true rates would show is reckoned from ratios.
    """
    highest = np.fmax.reduce(parts.hat, axis=-1)[..., None]
    hat, error = parts.hat / highest, parts.errors(level) / highest
    lack = replace(reduction, metric=replace(reduction.metric, compare="spread"))
    around = candidate_rates(lack, hat, parts.se * wide / highest, level)

    def ratios(rates: Array) -> Array:
        """The mean of ratios, [B], where these are the true rates."""
        return reduction(np.maximum(rates + error, 0.0))

    def shown(theta: float) -> Array:
        rates = around.at(theta)
        return 1 - ratios(rates + 1 - np.fmax.reduce(rates, axis=-1)[..., None])

    def signed(error: Array) -> Array:
        return (reduction(hat) - reduction(hat + _TINY * error)) / _TINY

    gap = intervals.gap(hat, error, lack, around._replace(shown=shown, signed=signed, contrasts=None), level)
    gap = _within_unit(gap)
    return gap._replace(low=1 - gap.high, high=1 - gap.low, null=float(np.nanmean(ratios(np.ones_like(hat)))))


def _within_unit(interval: intervals.Interval) -> intervals.Interval:
    return interval._replace(low=max(interval.low, 0.0), high=min(interval.high, 1.0))


class _MadeBy(NamedTuple):
    """Which groups, highest first, and which class make a figure."""

    groups: tuple[int, ...]
    class_index: int | None


def _made_by(reduction: Reduction, hat: Array) -> _MadeBy:
    compare = reduction.metric.compare
    if compare == "mean":
        return _MadeBy((), None)
    if compare == "minimum":
        _, c, g = np.unravel_index(_place_of_least(hat), hat.shape)
        return _MadeBy((int(g),), int(c))
    by_class = reduction.by_class(hat)
    one_class = reduction.multiclass == "max" or len(by_class) == 1
    if compare in ("signed", "signed_ratio"):
        return _MadeBy((0, 1), reduction.followed if one_class else None)
    sign = 1.0 if compare == "ratio" else -1.0
    worst_class = _place_of_least(sign * by_class)
    rates = hat[_place_of_least(sign * reduction.by_part(hat)[:, worst_class]), worst_class]
    if compare == "to_overall":
        groups: tuple[int, ...] = (_place_of_least(-np.abs(rates[:-1] - rates[-1])),)
    else:
        groups = (_place_of_least(-rates), _place_of_least(rates))
    return _MadeBy(groups, worst_class if one_class else None)


def _place_of_least(values: Array) -> int:
    """`np.nanargmin`, which takes longer than all else here for a handful of values."""
    return int(np.where(np.isnan(values), np.inf, values).argmin())


def _thin(rates: Sequence[Rates], parts: Stack, groups: Sequence[str]) -> list[str]:
    thin = ~np.isnan(parts.hat) & (parts.independent < STABLE_ROWS)
    return [
        f"{groups[g]} has {rates[kind].basis(int(c), int(g))}" for kind, c, g in zip(*np.nonzero(thin), strict=True)
    ]


def _rows_used(metric: Metric, parts: Stack, group_rows: NDArray[np.int64]) -> int:
    """Rows in the denominators, each counted once; figures of scores rest on all rows of their groups."""
    if metric.scores:
        return int(group_rows[~np.isnan(parts.hat).all(axis=(0, 1))].sum())
    used = np.where(np.isnan(parts.hat), 0, parts.rows).sum(axis=(0, 1))
    return int(np.minimum(used[: len(group_rows)], group_rows).sum())
