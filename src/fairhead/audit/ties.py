"""Nearly equal rates: what a largest gap or a lowest rate could have come from.

The largest of several rates is too large on average, the more so the more of them are nearly equal; how much, depends
on the true rates, and the observed ones are further apart than those. Here rates that noise alone may have parted are
brought together again, as in a meta-analysis with random effects (DerSimonian and Laird): as far as they are no further
apart than their standard errors say. A handful of rates at a time, so this is plain Python.
"""

from collections.abc import Sequence
from math import hypot, isnan, sqrt

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Rates within so many standard errors of the extreme one may be the extreme one.
_NEAR = 3.0
# Rates count as different where Cochran's Q is above its mean by so many of its standard deviations.
_BEYOND = 1.0
# The same for a whole gap that is one of several: about a test at 5 %.
_BEYOND_EVEN = 2.0
# A rate without noise, beside others, counts as having this share of the largest.
_NO_NOISE = 1e-4
# Groups at each end that a gap may reach to.
_CANDIDATES = 32


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
    least = max(se) * _NO_NOISE
    se = [max(s, least) for s in se]
    weights = [1 / s**2 for s in se]
    total = sum(weights)
    mean = sum(w * rate for w, rate in zip(weights, rates, strict=True)) / total
    q = sum(w * (rate - mean) ** 2 for w, rate in zip(weights, rates, strict=True))
    excess = q - (n - 1) - beyond * sqrt(2 * (n - 1))
    if excess <= 0:
        return [mean] * n
    between = excess / (total - sum(w * w for w in weights) / total)
    weights = [1 / (s**2 + between) for s in se]
    mean = sum(w * rate for w, rate in zip(weights, rates, strict=True)) / sum(weights)
    return [mean + (rate - mean) * between / (between + s**2) for rate, s in zip(rates, se, strict=True)]


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
    level = shrink([rates[g] for g in known], [se[g] for g in known], _BEYOND_EVEN)
    return level[0] if len(level) > 1 and level[0] == level[-1] and min(level) == max(level) else None


def reach(rates: Array, se: Array, z: float) -> float:
    """How much further than the largest gap, in its standard errors times z, the gap of any two of the groups reaches.

    1 where all are equally noisy; more where a small group could be the highest or the lowest as well.

    Example:
        >>> reach(np.array([0.5, 0.6]), np.array([0.02, 0.02]), 1.96)
        1.0
        >>> round(reach(np.array([0.5, 0.58, 0.6]), np.array([0.02, 0.1, 0.02]), 1.96), 2)
        3.24
    """
    known = ~np.isnan(rates)
    rates, se = rates[known], se[known]
    high, low = int(rates.argmax()), int(rates.argmin())
    own = z * hypot(se[high], se[low])
    if own <= 0:
        return 1.0
    # Those that can: enough of them.
    highest, lowest = (np.argsort(sign * rates - z * se)[:_CANDIDATES] for sign in (-1.0, 1.0))
    ends = np.subtract.outer(rates[highest], rates[lowest]) + z * np.hypot.outer(se[highest], se[lowest])
    ends[np.equal.outer(highest, lowest)] = 0.0  # a group and itself
    return max(1.0, (float(ends.max()) - float(rates[high] - rates[low])) / own)
