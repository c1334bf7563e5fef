"""From group rates to one figure with its interval, or the reason why there is none."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf, sqrt
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairhead.audit import metrics
from fairhead.audit.candidate_rates import candidate_rates, even, shrink, tied_lowest
from fairhead.audit.catalogue import Metric
from fairhead.audit.metrics import Reduction, Rules, Stack
from fairhead.audit.rates import ROUNDED, Rates
from fairhead.audit.tables import Tables
from fairhead.report.wording import in_short
from fairhead.stats import Estimate, Span, intervals
from fairhead.stats.bootstrap import STABLE_ROWS

Array = NDArray[np.float64]

# Replicates in which a cell was empty are left out; above this share the estimate says so.
_MENTION_LOST = 0.02
# Of errors: so small that ratios are straight lines in them.
_TINY = 1e-6


def estimate(
    metric: Metric,  # what to estimate
    parts: Stack,  # the rates it is made of
    groups: Sequence[str],  # names of the groups
    classes: Sequence[str],  # names of the classes that the rates run over
    group_rows: NDArray[np.int64],  # rows of each group, shape [G]
    rules: Rules,  # options of the audit
    name: str | None,  # the group column; None for an overall figure
    tests: list[intervals.EvenTest] | None = None,  # where to put the test of evenness, if there is one
) -> Estimate:
    """One metric of one group column."""
    reduction = parts.reduction(metric, rules)
    detail: dict[str, Any] = {"definition": metric.definition}
    if parts.excluded:
        detail |= {"n_undefined": len(parts.excluded), "excluded": list(parts.excluded)}
    n = _rows_used(metric, parts, group_rows)
    value = float(reduction(parts.hat))
    reason = parts.why_undefined(reduction, value)
    if reason:
        return Estimate(metric.name, name, None, None, None, n, metric.ideal, reason, detail=detail)
    thin = _thin(parts, groups)
    if thin:
        detail["unstable"] = thin
    lost = 1 - np.count_nonzero(parts.kept) / len(parts.kept)
    if lost > _MENTION_LOST:
        detail["replicates_without_a_value"] = lost
    if parts.rates[0].terms is None:
        interval = interval_of(reduction, parts, rules.level)
    else:
        interval = _sum_interval(parts, parts.rates[0], rules.level)
        interval = _within_unit(interval) if metric.unit else interval
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
    made_by, of_class = _made_by(reduction, parts.hat)
    if len(classes) > 1:
        if of_class is not None:
            detail["class"] = classes[of_class]
        if metric.compare not in ("minimum", "mean"):
            detail["multiclass"] = rules.multiclass
    attained_by = tuple(groups[g] for g in made_by) if name is not None else ()
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
    mde = intervals.minimum_detectable(interval.se, level) if interval.mde is None else interval.mde
    # A level is tested against nothing, no share is further than 1 from another, and what has no noise says nothing.
    gap = name is not None and metric.compare not in ("minimum", "mean")
    known = gap and mde > ROUNDED and (mde < 1 or not metric.unit)
    return Estimate(metric.name, name, value, low, high, n, metric.ideal, None, mde if known else None, groups, detail)


def interval_of(reduction: Reduction, parts: Stack, level: float, lower_alone: bool = False) -> intervals.Interval:
    """The interval of a metric; with `lower_alone` that of a ratio ends at 1, which saves a search."""
    wide = parts.wide(level)
    match reduction.metric.compare:
        case "minimum":
            return _lowest(parts, wide, level)
        case "spread" | "to_overall":
            error, se = parts.errors(level), parts.se * wide
            shares = reduction.metric.unit and not reduction.metric.scores
            at = partial(parts.errors_at, error, se) if shares else None
            rows = parts.effective if shares else None
            around = candidate_rates(reduction, parts.hat, se, level, at, lambda: parts.even, rows=rows)
            found = intervals.gap(parts.hat, error, reduction, around, level)
            return _within_unit(found) if reduction.metric.unit else found
        case "pairwise":
            error, around = parts.errors(level), candidate_rates(reduction, parts.hat, parts.se * wide, level)
            if apart := _one_apart(reduction, parts):
                both = around.at, apart
                around = around._replace(shown=lambda theta: np.stack([reduction(at(theta) + error) for at in both]))
            return _within_unit(intervals.gap(parts.hat, error, reduction, around, level))
        case "ratio" if reduction.multiclass == "max" or parts.hat.shape[1] == 1:
            return _ratio(reduction, parts, level, lower_alone)
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


def reach_of_change(
    reduction: Reduction, first: Stack, value: Array, there: Stack, star: Array, alone: tuple[Span, Span], level: float
) -> Array:
    """How far the interval of a change reaches towards 0 in samples [B] of two models, by `intervals.difference`.

    Of figures `value` and `star` there. The better figure alone reaches as far as the first of `alone`, the worse one
    at least as far as the second, where that is not folded: groups near the extreme ones make it reach further.
    """
    interval, worse, ideal = interval_of(reduction, there, level), float(reduction(there.hat)), reduction.metric.ideal
    better, other = alone
    x, y, own, end = better.high - better.value, worse - interval.low, other.value - other.low, interval.low
    folded = other.low == ideal
    if ideal:
        x, y, own, end = better.value - better.low, interval.high - worse, other.high - other.value, interval.high
        folded = other.high == ideal
    y = max(y, 0.0 if folded else own)
    if end == ideal:
        return x + y + 0 * value
    # How the error of the better figure goes with that of the worse: other groups make it in each sample.
    noise = (star - star.mean()) / max(float(np.std(star)), ROUNDED)
    common = np.einsum("b...,b->...", first.star - first.hat, noise) / len(noise)
    along = (reduction(first.star + _TINY * common) - value) / _TINY
    z = NormalDist().inv_cdf((1 + level) / 2)
    return np.asarray(np.sqrt(np.maximum(x * x + y * y - 2 * z * y * along, 0.0)))


def shrunk(hat: Array, se: Array) -> Array:
    """Rates [R, C, G] without what noise explains of how groups differ; NaN stays."""
    found = hat.copy()
    for rates, noise in zip(found.reshape(-1, hat.shape[-1]), se.reshape(-1, hat.shape[-1]), strict=True):
        known = ~np.isnan(rates)
        rates[known] = shrink(rates[known].tolist(), noise[known].tolist(), 0.0, 0.5)
    return found


def _one_apart(reduction: Reduction, parts: Stack) -> Callable[[float], Array] | None:
    """From a mean gap of all pairs to rates that are even but for one group's; None where the others are not even.

    With few large differences and the rest noise, a mean gap shows more than with as much in many small ones.
    """
    off = (parts.hat - parts.even) / np.maximum(parts.se, ROUNDED)
    place = np.unravel_index(np.nanargmax(np.abs(off)), off.shape)
    others, alone = parts.hat.copy(), 0 * parts.hat
    others[place], alone[place] = np.nan, np.sign(off[place])
    rows = zip(others.reshape(-1, others.shape[-1]).tolist(), parts.se.reshape(-1, others.shape[-1]), strict=True)
    if any(even(rates, se.tolist()) is None for rates, se in rows if np.count_nonzero(~np.isnan(rates)) > 1):
        return None
    return lambda theta: alone * (theta / float(reduction(alone)))


def _sum_interval(parts: Stack, rates: Rates, level: float) -> intervals.Interval:
    """The interval of one sum of absolute values, or of the gap between several."""
    usable = ~np.isnan(parts.hat[0, 0])
    if not (usable.all() and parts.kept.all()):
        rates = rates.of_groups(usable, parts.kept)
    if rates.terms is None or rates.hat.shape[1] == 1:
        return rates.sum_interval(0, level)
    return intervals.spread_of_sums(rates.terms.hat, rates.sum_interval, level)


def _lowest(parts: Stack, wide: Array, level: float) -> intervals.Interval:
    """The interval of the lowest rate, as that of angles.

    The noise of a rate depends on the rate, and is lopsided near 1; that of the angle arcsin √rate hardly is. What is
    left of it is evened out by turning every other error around.
    """
    kept = ~np.isnan(parts.hat)
    hat = np.arcsin(np.sqrt(parts.hat[kept]))
    star = parts.star.transpose(1, 2, 3, 0)[kept].T  # replicates lie together in memory
    error = (hat - np.arcsin(np.sqrt(star))) * wide[kept]
    error[::2] *= -1
    # Any cell that is left out may be lower.
    found = intervals.minimum(hat, error, tied_lowest, level, at_most=bool(parts.excluded))
    low, high = (float(np.sin(min(max(angle, 0.0), np.pi / 2)) ** 2) for angle in (found.low, found.high))
    worst = int(np.argmin(hat))
    return found._replace(low=low, high=high, se=float(parts.se[kept][worst] * wide[kept][worst]))


def _ratio(reduction: Reduction, parts: Stack, level: float, lower_alone: bool) -> intervals.Interval:
    """The interval of a ratio, as that of a gap of logarithms."""
    # Rates without a single hit would be infinitely far away; half a hit is as far as the data can tell.
    least = 0.5 / np.maximum(parts.rows, 1)
    hat = np.log(np.where(parts.hat < ROUNDED, least, parts.hat))
    error = hat - np.log(np.maximum(parts.hat - parts.errors(level), least))

    se = np.std(error, axis=0)

    def errors(logarithms: Array) -> intervals.Errors:
        rates = np.clip(np.exp(logarithms), least, 1.0)
        there = parts.noise(rates) / rates
        return intervals.Errors(error * np.divide(there, se, out=np.ones_like(se), where=se > 0), there)

    def even_logarithms() -> Array:
        return np.asarray(np.log(np.maximum(parts.even, least)))

    around = candidate_rates(reduction, hat, se, level, errors, even_logarithms, True, parts.effective)
    around = around._replace(upper_alone=lower_alone)
    gap = intervals.gap(hat, error, reduction.gap_of_logarithms, around, level)
    value = float(np.exp(-reduction.gap_of_logarithms(hat)))
    null = None if gap.null is None else float(np.exp(-gap.null))
    # The test is of logarithms: so is what it detects, and no ratio is further than 1 from 1.
    mde = None if gap.mde is None else float(-np.expm1(-gap.mde))
    ends = float(np.exp(-gap.high)), float(np.exp(-gap.low))
    return gap._replace(low=ends[0], high=ends[1], se=gap.se * value, null=null, mde=mde)


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


def _made_by(reduction: Reduction, hat: Array) -> tuple[tuple[int, ...], int | None]:
    """Which groups, highest first, and which class make a figure."""
    compare = reduction.metric.compare
    if compare == "mean":
        return (), None
    if compare == "minimum":
        _, c, g = np.unravel_index(_place_of_least(hat), hat.shape)
        return (int(g),), int(c)
    one_class = reduction.multiclass == "max" or hat.shape[1] == 1
    if compare in ("signed", "signed_ratio"):
        return (0, 1), reduction.followed if one_class else None
    sign = 1.0 if compare == "ratio" else -1.0
    worst_class = 0 if hat.shape[1] == 1 else _place_of_least(sign * reduction.by_class(hat))
    worst_kind = 0 if len(hat) == 1 else _place_of_least(sign * reduction.by_part(hat)[:, worst_class])
    rates = hat[worst_kind, worst_class]
    if compare == "to_overall":
        groups: tuple[int, ...] = (_place_of_least(-np.abs(rates[:-1] - rates[-1])),)
    else:
        groups = (_place_of_least(-rates), _place_of_least(rates))
        groups = groups if groups[0] != groups[1] else ()  # no gap has no groups
    return groups, worst_class if one_class else None


def _place_of_least(values: Array) -> int:
    """`np.nanargmin`, which takes longer than all else here for a handful of values."""
    every = [inf if value != value else value for value in values.ravel().tolist()]
    return every.index(min(every))


def _thin(parts: Stack, groups: Sequence[str]) -> list[str]:
    thin = metrics.places(parts.usable & (parts.independent < STABLE_ROWS))
    return [f"{groups[g]} has {parts.rates[kind].basis(c, g)}" for kind, c, g in thin]


def _rows_used(metric: Metric, parts: Stack, group_rows: NDArray[np.int64]) -> int:
    """Rows in the denominators, each counted once; figures of scores rest on all rows of their groups."""
    if metric.scores:
        return int(group_rows[parts.usable.any(axis=(0, 1))].sum())
    used = (parts.rows * parts.usable).sum(axis=(0, 1))
    return int(np.minimum(used[: len(group_rows)], group_rows).sum())


def association_estimate(metric: Metric, tables: Tables, rules: Rules, name: str | None) -> Estimate:
    """One of the three association metrics of a group column.

    V is a length, so it is folded like a gap and gets its interval like one. The bias-corrected V estimates the same
    quantity as the plain one and shares its interval.
    """
    sizes = tables.rows.sum(axis=(-1, -2))
    usable = enough_rows(tables, rules.min_cell)
    n = int(sizes[usable].sum())
    detail: dict[str, object] = {"definition": metric.definition}
    selected = tables.rates("selection_rate")
    short = [selected.shortage(0, int(g), tables.groups[g], rules.min_cell) for g in np.flatnonzero(~usable)]
    if short:
        detail |= {"n_undefined": len(short), "excluded": short}
    value = float(metrics.association_value(metric.name, tables.counts[usable], n))
    if usable.sum() < 2 or np.isnan(value):
        reason = in_short(short) if usable.sum() < 2 else "all rows have the same prediction or the same label"
        return Estimate(metric.name, name, None, None, None, n, metric.ideal, reason, detail=detail)
    if not usable.all():
        tables = replace(tables, counts=tables.counts[usable], star=tables.star[:, usable])
    if metric.name == "cramers_v_excess":
        by_label = metrics.cramers_v(tables.star.sum(axis=-1))
        replicates = metrics.cramers_v(tables.predicted, tables.association) - by_label
        interval = intervals.percentile(replicates[~np.isnan(replicates)], rules.level)
    else:
        interval = _length_interval(tables, rules.level)
    return figure_of(metric, name, value, n, interval, rules.level, (), detail)


def _length_interval(tables: Tables, level: float) -> intervals.Interval:
    """The interval of V, which is the length of all deviations from independence; these may be scaled, θ to V."""
    by_prediction = tables.counts.sum(axis=-2)
    hat = metrics.association(by_prediction)
    degrees = min(int((by_prediction.sum(axis=-2) > 0).sum()), len(by_prediction)) - 1
    error = hat - tables.association
    # |c·hat + error|² is a square in c.
    square, along, across = float((hat**2).sum()), (error * hat).sum(axis=(-1, -2)), (error**2).sum(axis=(-1, -2))
    observed = sqrt(square / degrees)

    def shown(theta: float) -> Array:
        scale = theta / observed
        return np.sqrt(np.maximum(scale * scale * square + 2 * scale * along + across, 0.0) / degrees)

    around = intervals.Candidates(
        at=lambda theta: hat * (theta / observed),
        signed=lambda _: along / (observed * degrees),
        shown=shown,
    )
    found = intervals.gap(hat, error, lambda rates: np.sqrt((rates**2).sum(axis=(-1, -2)) / degrees), around, level)
    return found._replace(high=min(found.high, 1.0))


def enough_rows(tables: Tables, min_cell: int) -> NDArray[np.bool_]:
    """Groups with enough rows, and enough clusters where there are clusters, shape [G]."""
    return np.asarray(tables.rates("selection_rate").enough(min_cell)[0])
