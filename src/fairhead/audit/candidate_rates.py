"""What the true rates behind an observed gap may be: near the observed ones, with nearly equal ones taken for equal.

The largest of several rates is too large on average, the more so the more of them are nearly equal; how much, depends
on the true rates, and the observed ones are further apart than those. Here rates that noise alone may have parted are
shrunk towards each other, as in a meta-analysis with random effects (DerSimonian and Laird): as far as they are no
further apart than their standard errors say. A handful of rates at a time, so this is plain Python.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product
from math import exp, hypot, isnan, log, sqrt
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.metrics import Reduction
from fairhead.stats import intervals
from fairhead.stats.max_t import Contrasts, Row

Array = NDArray[np.float64]

# A rate without any noise counts as having this much.
_NO_NOISE = 1e-9
# Rates within so many standard errors of the extreme one may be the extreme one.
_NEAR = 3.0
# Rates count as different where Cochran's Q is above its mean by so many of its standard deviations.
_BEYOND = 1.0
# The same for a whole gap that is one of several: about a test at 5 %.
_BEYOND_EVEN = 2.0
# A rate without noise, beside others, counts as having this share of the largest.
_LEAST_NOISE = 1e-4
# A gap of logarithms of shares that no sample shows.
_FURTHEST = 30.0
# Whether a group is noisier than others: by so much.
_NOISIER = 1.1


def candidate_rates(
    reduction: Reduction,
    hat: Array,  # observed rates (or their logarithms), shape [R, C, G]; with "to_overall" the last group is all rows
    se: Array,  # their standard errors
    level: float,
    errors: Callable[[Array], intervals.Errors] | None = None,  # as in `Candidates`
    even: Callable[[], Array] | None = None,  # the rates of an even model
    logarithms: bool = False,
    rows: Array | None = None,  # how many plain rows say as much as those of each rate of `even`
) -> intervals.Candidates:
    """For `intervals.gap`: rates with a smaller gap than observed, of a gap, or of a ratio as a gap of logarithms."""
    reduce = reduction.gap_of_logarithms if logarithms else reduction
    to_overall = _to_overall(reduction)
    se = np.maximum(se, _NO_NOISE)
    pools = _pools(reduction, hat, se, to_overall)
    of_pairs = reduction.metric.compare == "pairwise"
    exact = not of_pairs and (len(pools) == 1 or not _is_mean_of_largest(reduction, hat))

    @cache  # where noise alone explains the gap, nobody asks
    def path() -> Callable[[float], Array]:
        together = hat.copy()
        for pool in pools:
            for row, rates in zip(pool, _together(pool), strict=True):
                together[row.place][: len(rates)] = rates
        observed, least = float(reduce(hat)), float(reduce(together))
        narrowed = _narrowed(together, pools, to_overall) if exact else None

        def at(theta: float) -> Array:
            if theta < least:
                return together * (theta / least) if narrowed is None else narrowed(theta)
            if observed <= least:
                return together
            between = together + (hat - together) * min(1.0, (theta - least) / (observed - least))
            value = float(reduce(between))
            return between * (theta / value) if value > 0 else between

        return at

    if of_pairs:  # a mean over all pairs, which no two groups make
        return intervals.Candidates(lambda theta: path()(theta))
    made_by = _made_by(hat, pools, to_overall) if exact else None
    signed = None if made_by is None else _signed(made_by)
    reach = _reach(hat, pools, level, to_overall)
    contrasts = Contrasts.of(pools, to_overall) if exact else None
    found = intervals.Candidates(
        lambda theta: path()(theta), signed, reach, contrasts=contrasts, errors=errors, even=even, se=se
    )
    if made_by is None or even is None or rows is None:
        return found
    return found._replace(apart=_noise_apart(made_by, se, even(), rows, logarithms))


def contrasts_of(reduction: Reduction, hat: Array, se: Array) -> Contrasts | None:
    """The differences of rates [R, C, G] that a gap is the largest of; None where they are alike, or it is none."""
    if reduction.metric.compare == "pairwise":
        return None
    if len(pools := _pools(reduction, hat, se, _to_overall(reduction))) > 1 and _is_mean_of_largest(reduction, hat):
        return None
    return Contrasts.of(pools, _to_overall(reduction))


def signed_gap(reduction: Reduction, hat: Array, se: Array) -> Callable[[Array], Array] | None:
    """From rates [B, R, C, G] to the signed gap [B] between the groups that make the gap of `hat`."""
    pools = _pools(reduction, hat, se, _to_overall(reduction))
    exact = len(pools) == 1 or not _is_mean_of_largest(reduction, hat)
    is_gap = exact and reduction.metric.compare not in ("minimum", "pairwise")
    return _signed(_made_by(hat, pools, _to_overall(reduction))) if is_gap else None


def further_apart(reduction: Reduction, hat: Array, se: Array, rows: Array) -> Callable[[Array, float], Array]:
    """From rates and θ to rates of which the groups that make the gap of `hat` are θ further apart.

    The one of fewer `rows` moves by more. Of a lowest rate, that one moves alone.
    """
    worst = np.unravel_index(np.nanargmin(hat), hat.shape)
    steps: list[tuple[tuple[Any, ...], float]] = [(worst, -1.0)]
    if reduction.metric.compare != "minimum":
        made_by = _made_by(hat, _pools(reduction, hat, se, _to_overall(reduction)), _to_overall(reduction))
        ends = [((*end.row.place, end.high), (*end.row.place, end.low)) for end in made_by]
        steps = [
            (one, rows[other] / (rows[high] + rows[low]) * (1 if one == high else -1))
            for high, low in ends
            for one, other in ((high, low), (low, high))
        ]

    def at(rates: Array, theta: float) -> Array:
        found = rates.copy()
        for place, share in steps:
            found[place] += share * theta
        return np.clip(found, 0.0, 1.0) if reduction.metric.unit else found

    return at


def _to_overall(reduction: Reduction) -> bool:
    return reduction.metric.compare == "to_overall"


def _is_mean_of_largest(reduction: Reduction, hat: Array) -> bool:
    return reduction.multiclass != "max" and reduction.metric.combine == "max" and min(hat.shape[:2]) > 1


def _pools(reduction: Reduction, hat: Array, se: Array, to_overall: bool) -> list[list[Row]]:
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
    pools: dict[tuple[int, int], list[Row]] = {}
    rates, noise, shares = hat[..., :n_groups].tolist(), se[..., :n_groups].tolist(), share.tolist()
    for r, c in product(range(kinds), range(classes)):
        if shares[r][c] == 0 or all(map(isnan, rates[r][c])):
            continue
        row = Row((r, c), shares[r][c], rates[r][c], noise[r][c])
        pools.setdefault((0 if mean_of_kinds else r, 0 if mean_of_classes else c), []).append(row)
    return list(pools.values())


def _together(pool: list[Row]) -> list[list[float]]:
    """The rates of a pool, nearly equal ones brought together."""
    tied = [tied_ends(row.rates, row.se) for row in pool]
    if len(pool) == 1:
        return tied
    # A gap that is none, beside one that is: all of its groups are nearly equal.
    common = [even(row.rates, row.se) for row in pool]
    if all(level is not None for level in common):
        return tied
    return [
        rates if level is None else [level + 0 * rate for rate in rates]
        for level, rates in zip(common, tied, strict=True)
    ]


def _narrowed(together: Array, pools: list[list[Row]], to_overall: bool) -> Callable[[float], Array]:
    """From θ to rates in which no pool has a larger mean gap; the gaps of a pool give way in proportion to noise."""
    parts: list[tuple[Callable[[float], float], list[tuple[tuple[int, int], float, Array, float, float]]]] = []
    for pool in pools:
        rows = []
        for row in pool:
            rates = together[row.place]
            low, high = float(np.fmin.reduce(rates)), float(np.fmax.reduce(rates))
            if to_overall:  # as far below all rows as above
                centre = float(rates[-1])
                high = centre + max(high - centre, centre - low)
                low = centre - (high - centre)
            known = [s * s for rate, s in zip(row.rates, row.se, strict=True) if rate == rate]
            rows.append((row.place, sum(known) / len(known), rates, low, high))
        scale = 0.5 if to_overall else 1.0  # of a gap to the distance of both bounds
        gaps = [(scale * (r[4] - r[3]), r[1], row.share) for r, row in zip(rows, pool, strict=True)]
        parts.append((_give_way(gaps), [(place, noise / scale, *rest) for place, noise, *rest in rows]))

    def at(theta: float) -> Array:
        found = together.copy()
        for step_to, rows in parts:
            step = step_to(theta)
            for place, noise, rates, low, high in rows:
                cut = min(step * noise, high - low) / 2
                np.minimum(np.maximum(rates, low + cut), high - cut, out=found[place])
        return found

    return at


def _give_way(gaps: list[tuple[float, float, float]]) -> Callable[[float], float]:
    """From a mean gap to the step where Σ share·max(0, gap − step·noise) is as large, of (gap, noise, share) each."""
    steps = sorted([0.0, *(gap / noise for gap, noise, _ in gaps)], reverse=True)
    values = [sum(share * max(0.0, gap - step * noise) for gap, noise, share in gaps) for step in steps]
    return lambda value: float(np.interp(value, values, steps))


class _End(NamedTuple):
    """What a gap is between in one row, by number of the groups."""

    row: Row
    high: int
    low: int


def _made_by(hat: Array, pools: list[list[Row]], to_overall: bool) -> list[_End]:
    """Of each row of the largest pool the highest and the lowest group, or the one furthest from all rows and these."""
    ends: list[list[_End]] = []
    values = []
    for pool in pools:
        of_pool, value = [], 0.0
        for row in pool:
            known = [(rate, g) for g, rate in enumerate(row.rates) if not isnan(rate)]
            high, low = max(known), min(known)
            if to_overall:
                overall = (float(hat[row.place][-1]), hat.shape[-1] - 1)
                above = high[0] - overall[0] >= overall[0] - low[0]
                high, low = (high, overall) if above else (overall, low)
            of_pool.append(_End(row, high[1], low[1]))
            value += row.share * (high[0] - low[0])
        ends.append(of_pool)
        values.append(value)
    return ends[values.index(max(values))]


def _signed(made_by: list[_End]) -> Callable[[Array], Array]:
    """The mean over rows of the higher group's errors minus the lower one's."""

    def signed(error: Array) -> Array:
        found = np.zeros(len(error))
        for row, high, low in made_by:
            of_groups = error[:, row.place[0], row.place[1]]
            found += row.share * (of_groups[:, high] - of_groups[:, low])
        return found

    return signed


def _noise_apart(
    made_by: list[_End], se: Array, even: Array, rows: Array, logarithms: bool
) -> Callable[[float], float]:
    """From θ to the noise of the gap if its groups were θ apart, as a share of the noise that it has.

    Around the rate of an even model: rows that say little are further away from it. Of a mean each gap is θ.
    """
    observed = sqrt(sum(end.row.share**2 * (se[end.row.place][g] ** 2) for end in made_by for g in end[1:]))
    known = [(end.row.share, *(float(of[end.row.place][g]) for g in end[1:] for of in (rows, even))) for end in made_by]

    def variance(rate: float, n: float) -> float:
        share, least = exp(rate) if logarithms else rate, 0.5 / (n + 1)
        share = least if share < least else 1 - least if share > 1 - least else share
        return (1 - share) / (share * n) if logarithms else share * (1 - share) / n

    def at(theta: float) -> float:
        total, theta = 0.0, min(theta, _FURTHEST)
        for share, n_high, _, n_low, rate in known:
            if logarithms:
                low = min(rate + log((n_high + n_low) / (n_high * exp(theta) + n_low)), -theta)
            else:
                low = min(max(rate - theta * n_high / (n_high + n_low), 0.0), 1 - theta)
            total += share**2 * (variance(low, n_low) + variance(low + theta, n_high))
        return sqrt(total) / observed

    return at


def _reach(hat: Array, pools: list[list[Row]], level: float, to_overall: bool) -> float:
    """By how much more than the noise of the groups that make the gap its upper end is away, at least 1."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    found = []
    for pool in pools:
        value, own, furthest = 0.0, 0.0, 0.0
        for row in pool:
            known = [(rate, s) for rate, s in zip(row.rates, row.se, strict=True) if not isnan(rate)]
            if to_overall:
                overall = float(hat[row.place][-1])
                away = [(abs(rate - overall), s) for rate, s in known]
                gap, noise = max(away)
                factor = (max(distance + z * s for distance, s in away) - gap) / (z * noise)
            else:
                (low, low_se), (high, high_se) = min(known), max(known)
                gap, noise = high - low, hypot(low_se, high_se)
                factor = reach(row.rates, row.se, z)
            value += row.share * gap
            own += (row.share * noise) ** 2
            furthest += (row.share * noise * factor) ** 2
        found.append((value, z * sqrt(own), z * sqrt(furthest)))
    value, own, _ = max(found)
    return max(1.0, (max(v + f for v, _, f in found) - value) / own)


def shrink(rates: Sequence[float], se: Sequence[float], beyond: float = _BEYOND, power: float = 1.0) -> list[float]:
    """Rates moved towards their mean, all the way where noise explains how they differ; by a `power` of the share.

    Each is nearest to its true rate with the power 1; all of them differ as much as the true rates with ½.
    """
    n = len(rates)
    if n < 2:
        return list(rates)
    weights = _weights(se)
    mean, q = _cochran(rates, weights)
    excess = q - (n - 1) - beyond * sqrt(2 * (n - 1))
    if excess <= 0:
        return [mean] * n
    total = sum(weights)
    between = excess / (total - sum([w * w for w in weights]) / total)
    noise = [1 / w for w in weights]
    weights = [1 / (v + between) for v in noise]
    mean = sum([w * rate for w, rate in zip(weights, rates, strict=True)]) / sum(weights)
    return [mean + (rate - mean) * (between / (between + v)) ** power for rate, v in zip(rates, noise, strict=True)]


def _weights(se: Sequence[float]) -> list[float]:
    least = max(se) * _LEAST_NOISE or _NO_NOISE
    return [1 / max(s, least) ** 2 for s in se]


def _cochran(rates: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """The weighted mean, and Cochran's Q: how far the rates are from it."""
    mean = sum([w * rate for w, rate in zip(weights, rates, strict=True)]) / sum(weights)
    return mean, sum([w * (rate - mean) ** 2 for w, rate in zip(weights, rates, strict=True)])


def tied_ends(rates: Sequence[float], se: Sequence[float]) -> list[float]:
    """Rates of groups with those near the highest brought together, and those near the lowest; NaN stays."""
    known = [g for g, rate in enumerate(rates) if not isnan(rate)]
    found = list(rates)
    if len(known) < 3:
        return found
    low, high = min(known, key=rates.__getitem__), max(known, key=rates.__getitem__)
    ends: tuple[list[int], list[int]] = ([], [])
    for g in known:
        from_low = (rates[g] - rates[low]) / hypot(se[g], se[low])
        from_high = (rates[high] - rates[g]) / hypot(se[g], se[high])
        if min(from_low, from_high) < _NEAR:
            ends[from_high < from_low].append(g)
    for end in ends:
        _bring_together(found, se, end)
    return found


def tied_lowest(rates: Sequence[float], se: Sequence[float]) -> list[float]:
    """Rates with those near the lowest brought together."""
    found = list(rates)
    low = min(range(len(rates)), key=rates.__getitem__)
    near = [g for g, rate in enumerate(rates) if rate - rates[low] < _NEAR * hypot(se[g], se[low])]
    _bring_together(found, se, near)
    return found


def _bring_together(rates: list[float], se: Sequence[float], some: Sequence[int]) -> None:
    for g, rate in zip(some, shrink([rates[g] for g in some], [se[g] for g in some]), strict=True):
        rates[g] = rate


def even(rates: Sequence[float], se: Sequence[float]) -> float | None:
    """The common rate of all groups, where noise explains how they differ; else None."""
    known = [g for g, rate in enumerate(rates) if not isnan(rate)]
    free = len(known) - 1
    if free < 1:
        return None
    mean, q = _cochran([rates[g] for g in known], _weights([se[g] for g in known]))
    return mean if q <= free + _BEYOND_EVEN * sqrt(2 * free) else None


def reach(rates: Sequence[float], se: Sequence[float], z: float) -> float:
    """How far above the largest gap, in its standard errors times z, the upper ends of all gaps between groups reach.

    1 where all are equally noisy; more where a small group could be the highest or the lowest as well.
    """
    known = [(rate, s) for rate, s in zip(rates, se, strict=True) if not isnan(rate)]
    (low, low_se), (high, high_se) = min(known), max(known)
    own = z * hypot(low_se, high_se)
    if own <= 0 or max([s for _, s in known]) <= _NOISIER * min(low_se, high_se):
        return 1.0
    # One end at a time, and both of the furthest.
    far_high = max([(a - low + z * hypot(s, low_se), a, s) for a, s in known if (a, s) != (low, low_se)])
    far_low = max([(high - b + z * hypot(s, high_se), b, s) for b, s in known if (b, s) != (high, high_se)])
    end = max(far_high[0], far_low[0])
    if far_high[1:] != far_low[1:]:
        end = max(end, far_high[1] - far_low[1] + z * hypot(far_high[2], far_low[2]))
    return max(1.0, (end - (high - low)) / own)
