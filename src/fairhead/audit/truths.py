"""What the true rates behind an observed gap may be: near the observed ones, with nearly equal ones taken for equal."""

from collections.abc import Callable
from math import hypot, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit import intervals, ties
from fairhead.audit.reduction import Reduction

Array = NDArray[np.float64]

# A rate without any noise counts as having this much.
_NO_NOISE = 1e-9


class _Row(NamedTuple):
    """One kind of rate of one class in all groups.

    Attributes:
        place: its kind and class.
        share: of its gap in the mean of its pool.
        rates: of the groups, NaN where left out.
        se: their standard errors.
    """

    place: tuple[int, int]
    share: float
    rates: list[float]
    se: list[float]


def truths(reduction: Reduction, hat: Array, se: Array, level: float, logarithms: bool = False) -> intervals.Truths:
    """For `intervals.gap`: rates with a smaller gap than observed.

    Args:
        reduction: the metric: a gap, or a ratio as a gap of logarithms.
        hat: observed rates (or their logarithms), shape [R, C, G]; with "to_overall" the last group is all rows.
        se: their standard errors.
        level: confidence level.
        logarithms: the metric is a ratio, as `Reduction.gap_of_logarithms` has it.
    """
    reduce = reduction.gap_of_logarithms if logarithms else reduction
    to_overall = reduction.metric.compare == "to_overall"
    pools = _pools(reduction, hat, np.maximum(se, _NO_NOISE), to_overall)
    together = hat.copy()
    for pool in pools:
        for row, rates in zip(pool, _together(pool), strict=True):
            together[row.place][: len(rates)] = rates
    observed, least = float(reduce(hat)), float(reduce(together))
    exact = len(pools) == 1 or not _is_mean_of_largest(reduction, hat)
    narrowed = _narrowed(together, pools, to_overall) if exact else None

    def at(theta: float) -> Array:
        if theta < least:
            return together * (theta / least) if narrowed is None else narrowed(theta)
        if observed <= least:
            return together
        between = together + (hat - together) * min(1.0, (theta - least) / (observed - least))
        value = float(reduce(between))
        return between * (theta / value) if value > 0 else between

    return intervals.Truths(at, _reach(hat, pools, level, to_overall))


def _is_mean_of_largest(reduction: Reduction, hat: Array) -> bool:
    return reduction.multiclass != "max" and reduction.metric.combine == "max" and min(hat.shape[:2]) > 1


def _pools(reduction: Reduction, hat: Array, se: Array, to_overall: bool) -> list[list[_Row]]:
    """Gaps that are averaged with each other, by pool; of several pools the largest mean counts."""
    kinds, classes, n_groups = hat.shape
    n_groups -= to_overall
    mean_of_kinds = reduction.metric.combine == "mean" and reduction.metric.compare != "ratio"
    mean_of_classes = reduction.multiclass != "max" and reduction.metric.compare != "ratio"
    share = np.full((kinds, classes), 1 / kinds if mean_of_kinds else 1.0)
    if mean_of_classes and classes > 1:
        weights = reduction.weights if reduction.multiclass == "weighted" else np.ones(classes)
        weights = np.where(np.isnan(hat).all(axis=(0, 2)), 0.0, weights)
        share = share * weights / weights.sum()
    pools: dict[tuple[int, int], list[_Row]] = {}
    for r, c in np.ndindex(kinds, classes):
        if np.isnan(hat[r, c]).all() or share[r, c] == 0:
            continue
        row = _Row((r, c), float(share[r, c]), hat[r, c, :n_groups].tolist(), se[r, c, :n_groups].tolist())
        pools.setdefault((0 if mean_of_kinds else r, 0 if mean_of_classes else c), []).append(row)
    return list(pools.values())


def _together(pool: list[_Row]) -> list[list[float]]:
    """The rates of a pool, nearly equal ones brought together."""
    tied = [ties.tied_ends(row.rates, row.se) for row in pool]
    if len(pool) == 1:
        return tied
    # A gap that is none, beside one that is: all of its groups are nearly equal.
    even = [ties.even(row.rates, row.se) for row in pool]
    if all(level is not None for level in even):
        return tied
    return [
        rates if level is None else [level + 0 * rate for rate in rates]
        for level, rates in zip(even, tied, strict=True)
    ]


def _narrowed(together: Array, pools: list[list[_Row]], to_overall: bool) -> Callable[[float], Array]:
    """From θ to rates in which no pool has a larger mean gap; the gaps of a pool give way in proportion to noise."""
    centre = together[..., -1:]
    deviation = np.abs(together[..., :-1] - centre) if to_overall else together
    gap = np.fmax.reduce(deviation, axis=-1) - (0.0 if to_overall else np.fmin.reduce(deviation, axis=-1))
    noise = np.ones(gap.shape)
    for row in (row for pool in pools for row in pool):
        known = [s * s for rate, s in zip(row.rates, row.se, strict=True) if rate == rate]
        noise[row.place] = sum(known) / len(known)
    lines = [_give_way([(float(gap[r.place]), float(noise[r.place]), r.share) for r in pool]) for pool in pools]

    def at(theta: float) -> Array:
        cut = np.zeros(gap.shape)
        for pool, line in zip(pools, lines, strict=True):
            step = float(np.interp(theta, line.values, line.steps))
            for row in pool:
                cut[row.place] = step * noise[row.place]
        if not to_overall:
            return intervals.narrow(together, cut)
        most = np.maximum(gap - cut, 0.0)[..., None]
        return np.concatenate([centre + np.clip(together[..., :-1] - centre, -most, most), centre], axis=-1)

    return at


class _Line(NamedTuple):
    """A broken line by its knots, values ascending."""

    values: list[float]
    steps: list[float]


def _give_way(gaps: list[tuple[float, float, float]]) -> _Line:
    """The line Σ share·max(0, gap − step·noise) of several (gap, noise, share)."""
    steps = sorted([0.0, *(gap / noise for gap, noise, _ in gaps)], reverse=True)
    values = [sum(share * max(0.0, gap - step * noise) for gap, noise, share in gaps) for step in steps]
    return _Line(values, steps)


def _reach(hat: Array, pools: list[list[_Row]], level: float, to_overall: bool) -> float:
    """By how much more than the noise of the groups that make the gap its upper end is away, at least 1."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    found = []
    for pool in pools:
        value, own, furthest = 0.0, 0.0, 0.0
        for row in pool:
            rates, se = np.array(row.rates), np.array(row.se)
            if to_overall:
                away = np.abs(rates - hat[row.place][-1])
                worst = int(np.nanargmax(away))
                gap, noise = float(away[worst]), float(se[worst])
                factor = (float(np.nanmax(away + z * se)) - gap) / (z * noise)
            else:
                high, low = int(np.nanargmax(rates)), int(np.nanargmin(rates))
                gap, noise = float(rates[high] - rates[low]), hypot(se[high], se[low])
                factor = ties.reach(rates, se, z)
            value += row.share * gap
            own += (row.share * noise) ** 2
            furthest += (row.share * noise * factor) ** 2
        found.append((value, z * sqrt(own), z * sqrt(furthest)))
    value, own, _ = max(found)
    return max(1.0, (max(v + f for v, _, f in found) - value) / own)
