"""Nearly equal rates: what a largest gap or a lowest rate could have come from.

The largest of several rates is too large on average, the more so the more of them are nearly equal; how much, depends
on the true rates, and the observed ones are further apart than those. Here rates that noise alone may have parted are
brought together again, as in a meta-analysis with random effects (DerSimonian and Laird): as far as they are no further
apart than their standard errors say. A handful of rates at a time, so this is plain Python.
"""

from collections.abc import Sequence
from math import hypot, isnan, sqrt

# Rates within so many standard errors of the extreme one may be the extreme one.
_NEAR = 3.0
# Rates count as different where Cochran's Q is above its mean by so many of its standard deviations.
_BEYOND = 1.0
# The same for a whole gap that is one of several: about a test at 5 %.
_BEYOND_EVEN = 2.0
# A rate without noise, beside others, counts as having this share of the largest.
_NO_NOISE = 1e-4
# Whether a group is noisier than others: by so much.
_NOISIER = 1.1


def shrink(rates: Sequence[float], se: Sequence[float], beyond: float = _BEYOND) -> list[float]:
    """Rates moved towards their mean, all the way where noise explains how they differ.

    Example:
        >>> shrink([0.79, 0.81], [0.02, 0.02])
        [0.8, 0.8]
        >>> [round(rate, 3) for rate in shrink([0.6, 0.9], [0.02, 0.02])]
        [0.601, 0.899]
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
    return [mean + (rate - mean) * between / (between + v) for rate, v in zip(rates, noise, strict=True)]


def _weights(se: Sequence[float]) -> list[float]:
    least = max(se) * _NO_NOISE
    return [1 / max(s, least) ** 2 for s in se]


def _cochran(rates: Sequence[float], weights: Sequence[float]) -> tuple[float, float]:
    """The weighted mean, and Cochran's Q: how far the rates are from it."""
    mean = sum([w * rate for w, rate in zip(weights, rates, strict=True)]) / sum(weights)
    return mean, sum([w * (rate - mean) ** 2 for w, rate in zip(weights, rates, strict=True)])


def tied_ends(rates: Sequence[float], se: Sequence[float]) -> list[float]:
    """Rates of groups with those near the highest brought together, and those near the lowest; NaN stays.

    Example:
        >>> [round(rate, 3) for rate in tied_ends([0.5, 0.51, 0.7, 0.69], [0.02] * 4)]
        [0.505, 0.505, 0.695, 0.695]
    """
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
    """Rates with those near the lowest brought together.

    Example:
        >>> [round(rate, 3) for rate in tied_lowest([0.5, 0.51, 0.7, 0.69], [0.02] * 4)]
        [0.505, 0.505, 0.7, 0.69]
    """
    found = list(rates)
    low = min(range(len(rates)), key=rates.__getitem__)
    near = [g for g, rate in enumerate(rates) if rate - rates[low] < _NEAR * hypot(se[g], se[low])]
    _bring_together(found, se, near)
    return found


def _bring_together(rates: list[float], se: Sequence[float], some: Sequence[int]) -> None:
    for g, rate in zip(some, shrink([rates[g] for g in some], [se[g] for g in some]), strict=True):
        rates[g] = rate


def even(rates: Sequence[float], se: Sequence[float]) -> float | None:
    """The common rate of all groups, where noise explains how they differ; else None.

    Example:
        >>> even([0.79, 0.81], [0.02, 0.02]), even([0.6, 0.9], [0.02, 0.02])
        (0.8, None)
    """
    known = [g for g, rate in enumerate(rates) if not isnan(rate)]
    free = len(known) - 1
    if free < 1:
        return None
    mean, q = _cochran([rates[g] for g in known], _weights([se[g] for g in known]))
    return mean if q <= free + _BEYOND_EVEN * sqrt(2 * free) else None


def reach(rates: Sequence[float], se: Sequence[float], z: float) -> float:
    """How far above the largest gap, in its standard errors times z, the upper ends of all gaps between groups reach.

    1 where all are equally noisy; more where a small group could be the highest or the lowest as well.

    Example:
        >>> reach([0.5, 0.6], [0.02, 0.02], 1.96)
        1.0
        >>> round(reach([0.5, 0.58, 0.6], [0.02, 0.1, 0.02], 1.96), 2)
        3.24
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
