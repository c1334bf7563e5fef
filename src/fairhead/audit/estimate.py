"""From group rates to one figure with its interval, or the reason why there is none."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fairhead.audit import intervals, metrics
from fairhead.audit.catalogue import Metric
from fairhead.audit.rates import Rates
from fairhead.audit.results import Estimate

Array = NDArray[np.float64]
Multiclass = Literal["max", "mean", "weighted"]

# Fewer rows than this in a denominator: the figure stands, marked as unstable.
STABLE_ROWS = 30
# Replicates in which a cell was empty are left out; above this share the estimate says so.
_MENTION_LOST = 0.02
_TINY_RATE = 1e-9


@dataclass(frozen=True)
class Rules:
    """The options that every figure of an audit shares.

    Attributes:
        level: confidence level.
        min_cell: rows that a rate needs; with fewer it is undefined.
        multiclass: how one-vs-rest gaps of several classes become one.
        prevalence: share of each class, shape [C], for "weighted".
    """

    level: float
    min_cell: int
    multiclass: Multiclass
    prevalence: Array


@dataclass(frozen=True)
class Stack:
    """The rates of a metric, stacked, with unusable cells as NaN.

    Attributes:
        hat: shape [R, C, G].
        star: shape [B, R, C, G].
        rows: shape [R, C, G].
        lost: replicates left out because a cell was empty in them.
        excluded: "group: reason" for each cell left out.
    """

    hat: Array
    star: Array
    rows: NDArray[np.int64]
    lost: int
    excluded: dict[str, str]


def stack(rates: Sequence[Rates], groups: Sequence[str], min_cell: int) -> Stack:
    """Stack rates and take out the cells with too few rows."""
    rows = np.stack([r.rows for r in rates])
    usable = rows >= min_cell
    hat = np.where(usable, np.stack([r.hat for r in rates]), np.nan)
    usable &= ~np.isnan(hat)
    excluded = {}
    for kind, c, g in zip(*np.nonzero(~usable), strict=True):
        need = rates[kind].need(int(c))
        found = f"{groups[g]} has {rows[kind, c, g]} {need}"
        excluded[f"{groups[g]}: {need}"] = f"{found}; at least {min_cell} are needed"
    star = np.stack([r.star for r in rates], axis=1)
    kept = ~(np.isnan(star) & usable).any(axis=(1, 2, 3))
    star = np.where(usable, star, np.nan)
    return Stack(hat, star if kept.all() else star[kept], rows, int((~kept).sum()), excluded)


class Reduction:
    """How the stacked rates [..., R, C, G] of a metric become one number [...]."""

    def __init__(self, metric: Metric, rules: Rules, n_classes: int) -> None:
        self.metric = metric
        self.multiclass = rules.multiclass
        self.weights = rules.prevalence if len(rules.prevalence) == n_classes else np.ones(n_classes)

    def by_part(self, rates: Array) -> Array:
        """Compare groups: [..., R, C, G] to [..., R, C]."""
        match self.metric.compare:
            case "to_overall":
                return np.fmax.reduce(np.abs(rates[..., :-1] - rates[..., -1:]), axis=-1)
            case "signed":
                return rates[..., 0] - rates[..., 1]
            case "signed_ratio":
                return rates[..., 0] / rates[..., 1]
            case _:
                return metrics.spread(rates)

    def by_class(self, rates: Array) -> Array:
        """Put rates together: [..., R, C, G] to [..., C]."""
        parts = self.by_part(rates)
        return parts.max(axis=-2) if self.metric.combine == "max" else parts.mean(axis=-2)

    def __call__(self, rates: Array) -> Array:
        """Put classes together: [..., R, C, G] to [...]."""
        return self.over_classes(self.by_class(rates))

    def over_classes(self, by_class: Array) -> Array:
        """Classes without a value count neither in a maximum nor in a mean."""
        if by_class.shape[-1] == 1:
            return by_class[..., 0]
        if self.multiclass == "max":
            return np.fmax.reduce(by_class, axis=-1)
        weights = np.where(np.isnan(by_class), 0.0, self.weights if self.multiclass == "weighted" else 1.0)
        return np.nansum(by_class * weights, axis=-1) / weights.sum(axis=-1)

    def towards(self, hat: Array, star: Array) -> intervals.Towards | None:
        """The rates nearest to `hat` with a smaller gap: parts give way as their noise allows, through ties."""
        if self.metric.compare == "to_overall":
            return None
        width = metrics.spread(hat)  # [R, C]
        if width.size == 1:
            return lambda theta: intervals.narrow(hat, width - theta)
        usable = np.maximum((~np.isnan(hat)).sum(axis=-1), 1)
        noise = np.maximum(np.nansum(np.var(star, axis=0), axis=-1) / usable, 1e-300)
        share = np.full(width.shape, 1.0 / width.shape[0])
        pools: list[tuple[slice, int | slice]] = [(slice(None), c) for c in range(width.shape[1])]
        if self.metric.combine == "max":
            return lambda theta: intervals.narrow(hat, np.maximum(width - theta, 0.0))
        if self.multiclass != "max" and width.shape[1] > 1:
            weights = self.weights if self.multiclass == "weighted" else np.ones(width.shape[1])
            weights = np.where(np.isnan(width).any(axis=0), 0.0, weights)
            share = share * weights / weights.sum()
            pools = [(slice(None), slice(None))]
        curves = [_give_way(width[pool].ravel(), noise[pool].ravel(), share[pool].ravel()) for pool in pools]

        def rates_at(theta: float) -> Array:
            cut = np.empty(width.shape)
            for pool, (values, steps) in zip(pools, curves, strict=True):
                cut[pool] = np.interp(theta, values, steps) * noise[pool]
            return intervals.narrow(hat, cut)

        return rates_at


def _give_way(width: Array, noise: Array, share: Array) -> tuple[Array, Array]:
    """Step s at which Σ share·max(0, width − s·noise) has a given value: the knots (values ascending, steps)."""
    kept = ~np.isnan(width) & (share > 0)
    width, noise, share = width[kept], noise[kept], share[kept]
    if not len(width):
        return np.zeros(1), np.zeros(1)
    steps = np.sort(np.append(width / noise, 0.0))
    values = (share * np.maximum(0.0, width - steps[:, None] * noise)).sum(axis=1)
    return values[::-1], steps[::-1]


def estimate(
    metric: Metric,
    rates: Sequence[Rates],
    groups: Sequence[str],
    classes: Sequence[str],
    group_rows: NDArray[np.int64],
    rules: Rules,
    name: str | None,
) -> Estimate:
    """One metric of one group column.

    Args:
        metric: what to estimate.
        rates: the rates it is made of.
        groups: names of the groups.
        classes: names of the classes that the rates run over.
        group_rows: rows of each group, shape [G].
        rules: options of the audit.
        name: the group column; None for an overall figure.
    """
    parts = stack(rates, groups, rules.min_cell)
    if metric.compare not in ("minimum", "mean"):
        parts = _without_lone_groups(parts, metric)
    detail: dict[str, Any] = {"definition": metric.definition}
    if parts.excluded:
        detail["n_undefined"] = len(parts.excluded)
        detail["excluded"] = list(parts.excluded.values())
    n = _rows_used(parts, group_rows)
    reduction = Reduction(metric, rules, parts.hat.shape[1])
    reason = _why_undefined(metric, parts, reduction)
    if reason:
        return Estimate(metric.name, name, None, None, None, n, metric.ideal, reason, detail=detail)
    thin = _thin(rates, parts, groups)
    if thin:
        detail["unstable"] = thin
    lost_share = parts.lost / (parts.lost + len(parts.star))
    if lost_share > _MENTION_LOST:
        detail["replicates_without_a_value"] = round(lost_share, 4)

    value, interval, attained = _figure(metric, reduction, parts, rules.level)
    if attained.class_index is not None and len(classes) > 1:
        detail["class"] = classes[attained.class_index]
    if len(classes) > 1 and metric.compare not in ("minimum", "mean"):
        detail["multiclass"] = rules.multiclass
    detail["se"] = interval.se
    detail["interval"] = interval.method
    if interval.null is not None:
        detail["expected_if_even"] = interval.null
    return Estimate(
        metric.name,
        name,
        value,
        min(interval.low, value),
        max(interval.high, value),
        n,
        metric.ideal,
        mde=intervals.minimum_detectable(interval.se, rules.level) if name is not None else None,
        groups=tuple(groups[g] for g in attained.groups) if name is not None else (),
        detail=detail,
    )


@dataclass(frozen=True)
class _Attained:
    groups: tuple[int, ...]
    class_index: int | None


def _figure(
    metric: Metric, reduction: Reduction, parts: Stack, level: float
) -> tuple[float, intervals.Interval, _Attained]:
    hat, star = parts.hat, parts.star
    if metric.compare in ("minimum", "mean"):
        kept = ~np.isnan(hat)
        flat, flat_star = hat[kept], star[:, kept]
        if metric.compare == "mean":
            return float(flat.mean()), intervals.percentile(flat_star.mean(axis=1), level), _Attained((), None)
        _, c, g = np.unravel_index(np.nanargmin(hat), hat.shape)
        return float(flat.min()), intervals.minimum(flat, flat_star, level), _Attained((int(g),), int(c))
    if metric.compare in ("signed", "signed_ratio"):
        return _signed(reduction, parts, level)
    if metric.compare == "ratio":
        return _ratio(reduction, parts, level)
    interval = intervals.gap(hat, star, reduction, reduction.towards(hat, star), level)
    return float(reduction(hat)), interval, _extremes(reduction, hat)


def _signed(reduction: Reduction, parts: Stack, level: float) -> tuple[float, intervals.Interval, _Attained]:
    """Signed differences cancel in a maximum: of several classes, the one with the largest size is followed."""
    by_class, star = reduction.by_class(parts.hat), reduction.by_class(parts.star)
    if reduction.multiclass == "max":
        c = int(np.nanargmax(np.abs(by_class - (reduction.metric.ideal or 0.0))))
        return float(by_class[c]), intervals.percentile(star[:, c], level), _Attained((0, 1), c)
    value = float(reduction.over_classes(by_class))
    return value, intervals.percentile(reduction.over_classes(star), level), _Attained((0, 1), None)


def _ratio(reduction: Reduction, parts: Stack, level: float) -> tuple[float, intervals.Interval, _Attained]:
    """A ratio is a gap of logarithms; a rate of 0 makes it 0, with the percentile interval."""
    log_hat, log_star = (np.log(np.maximum(r, _TINY_RATE)) for r in (parts.hat, parts.star))
    attained = _extremes(reduction, log_hat)
    value = float(np.exp(-reduction(log_hat)))
    if np.fmin.reduce(parts.hat, axis=None) <= 0:
        star = np.exp(-reduction(log_star))
        return 0.0, intervals.percentile(star, level), attained
    # A replicate without a single hit would be infinitely far away; half a hit is as far as the data can tell.
    floor = np.log(0.5 / np.maximum(parts.rows, 1))
    log_star = np.maximum(log_star, floor)
    interval = intervals.gap(log_hat, log_star, reduction, reduction.towards(log_hat, log_star), level)
    low, high = float(np.exp(-interval.high)), float(np.exp(-interval.low))
    null = None if interval.null is None else float(np.exp(-interval.null))
    return value, intervals.Interval(low, high, interval.se * value, null, interval.method), attained


def _extremes(reduction: Reduction, hat: Array) -> _Attained:
    """Which groups, highest first, and which class make the gap."""
    by_class = reduction.by_class(hat)
    c = int(np.nanargmax(by_class))
    part = int(np.nanargmax(reduction.by_part(hat)[:, c]))
    rates = hat[part, c]
    class_index = c if reduction.multiclass == "max" or len(by_class) == 1 else None
    if reduction.metric.compare == "to_overall":
        return _Attained((int(np.nanargmax(np.abs(rates[:-1] - rates[-1]))),), class_index)
    return _Attained((int(np.nanargmax(rates)), int(np.nanargmin(rates))), class_index)


def _why_undefined(metric: Metric, parts: Stack, reduction: Reduction) -> str | None:
    usable = ~np.isnan(parts.hat)
    reasons = "; ".join(parts.excluded.values())
    if metric.compare in ("minimum", "mean"):
        enough = bool(usable.any())
    else:
        enough = bool((usable.sum(axis=-1) >= 2).all(axis=0).any())
        if enough and metric.compare in ("signed", "signed_ratio", "to_overall"):
            enough = not bool(np.isnan(reduction(parts.hat)))
    if not enough:
        return reasons or "fewer than two groups"
    if metric.compare == "ratio" and np.isnan(_largest(parts.hat)).all():
        return "no group is ever predicted positive"
    if not len(parts.star):
        return "every bootstrap replicate left a cell empty"
    return None


def _largest(hat: Array) -> Array:
    top = np.fmax.reduce(hat, axis=-1)
    return np.where(top > 0, top, np.nan)


def _thin(rates: Sequence[Rates], parts: Stack, groups: Sequence[str]) -> list[str]:
    thin = ~np.isnan(parts.hat) & (parts.rows < STABLE_ROWS)
    return [
        f"{groups[g]} has {parts.rows[kind, c, g]} {rates[kind].need(int(c))}"
        for kind, c, g in zip(*np.nonzero(thin), strict=True)
    ]


def _without_lone_groups(parts: Stack, metric: Metric) -> Stack:
    """A rate that only one group has says nothing about a gap: NaN, never 0."""
    compared = parts.hat[..., :-1] if metric.compare == "to_overall" else parts.hat
    lone = (~np.isnan(compared)).sum(axis=-1, keepdims=True) < 2
    if not lone.any():
        return parts
    return replace(parts, hat=np.where(lone, np.nan, parts.hat), star=np.where(lone, np.nan, parts.star))


def _rows_used(parts: Stack, group_rows: NDArray[np.int64]) -> int:
    """Rows in the denominators, each counted once."""
    used = np.where(np.isnan(parts.hat), 0, parts.rows).sum(axis=(0, 1))
    return int(np.minimum(used[: len(group_rows)], group_rows).sum())
