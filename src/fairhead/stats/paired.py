"""Paired differences: how a figure differs between two models that answered the same items.

Clusters are drawn with both models' answers, so what the items have in common cancels; the p-value swaps the two
models' answers of each cluster at random, and counts in standard errors.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from fairhead.stats import ALPHA, Difference, Span, adjust
from fairhead.stats.bootstrap import FEW_CLUSTERS, Array, Resampling, Statistic
from fairhead.stats.intervals import minimum_detectable

_ROUNDING = 1e-9
# What rounding makes of no change at all, and of the standard error of a change that is the same everywhere.
_NOTHING, _SURE = 1e-12, 1e-6
# Of a total, for the slope of a figure: small against it, large against rounding.
_STEP = 1e-4
# Swaps of each p-value: at most, and how many as large as what was seen are enough.
N_PERM, _ENOUGH = 100_000, 1000


def paired_difference(
    metric: str,  # its name
    statistic: Statistic,  # from totals [..., k] to the figure [...]
    first: Array,  # sums of the first model's answers, [clusters, k]
    second: Array,  # those of the second's
    n: int,  # items in all
    how: Resampling,  # how intervals are made
    *,
    ideal: float | None = None,  # the value of a model without a preference
    relative: bool = False,  # compare by the ratio, not by the difference
    n_perm: int = N_PERM,  # random swaps at most
) -> Difference:
    """One figure of two models, from what the items of each cluster add up to.

    Example:
        >>> from fairhead.stats.clusters import ratio
        >>> first = np.column_stack([np.arange(20) % 3, np.ones(20)])
        >>> paired_difference("mean", ratio, first, first + [1, 0], 20, Resampling()).value
        1.0
    """
    clusters = len(first)
    known: dict[str, Any] = {"n": n, "clusters": clusters, "ideal": ideal, "relative": relative}
    a, b = (how.value(statistic, sums, n) for sums in (first, second))

    def nothing(reason: str) -> Difference:
        one, other = (None, None) if np.isnan(a) or np.isnan(b) else (a, b)
        return Difference(metric, None, one, other, None, None, None, undefined=reason, **known)

    reason = how.why_undefined(n, clusters, a, b)
    if reason is not None:
        return nothing(reason)
    link: Callable[[Any], Any] = np.log if relative else lambda value: value
    star_a, star_b = how.replicates(statistic, first, second)
    kept = ~(np.isnan(star_a) | np.isnan(star_b))
    if not kept.any():
        return nothing("every replicate is without a value: too few items")
    star_a, star_b = star_a[kept], star_b[kept]
    moved, se = _span(float(link(b) - link(a)), link(star_b) - link(star_a), how, clusters)
    nearer = None
    if ideal is not None:
        distances = np.abs(star_b - ideal) - np.abs(star_a - ideal)
        nearer, _ = _span(abs(b - ideal) - abs(a - ideal), distances, how, clusters)
    known |= {"nearer": nearer, "note": f"only {clusters} clusters" if clusters < FEW_CLUSTERS else None}
    p = _p_value(statistic, first, second, link, how.seed, n_perm)
    # Where no replicate differs from another there is nothing to say what would have been seen.
    mde = minimum_detectable(se, how.level) if se > 0 else None
    return Difference(metric, None, a, b, moved.value, moved.low, moved.high, p=p, mde=mde, **known)


def corrected(differences: Sequence[Difference]) -> list[Difference]:
    """Differences with p-values corrected over all of them (Holm).

    A note says why a difference whose own interval leaves out 0 is not significant. Where there are so few clusters
    that no p-value of theirs could pass the correction, there is no smallest detectable difference either.
    """
    p = [d.p for d in differences]
    family = sum(value is not None for value in p)
    return [_noted(replace(d, p_adjusted=q), p, family) for d, q in zip(differences, adjust(p, "holm"), strict=True)]


def _noted(difference: Difference, p: Sequence[float | None], family: int) -> Difference:
    if difference.outcome != "not significant":
        return difference
    if difference.clusters is not None:
        # Two of all the ways to swap clusters, none and all, are as large as what was seen, whatever that was.
        least = 2.0 ** (1 - difference.clusters)
        if least * (family - sum(value is not None and value < least for value in p)) >= ALPHA:
            too_few = f"only {difference.clusters} clusters: too few to show any change among {family} figures"
            return replace(difference, mde=None, note=too_few)
    if difference.low is None or difference.high is None or difference.low <= 0 <= difference.high:
        return difference
    passes = difference.p is not None and difference.p < ALPHA
    why = f"it is not significant among {family} figures" if passes else f"its p is not below {ALPHA:g}"
    note = f"its own interval leaves out 0, but {why}"
    return replace(difference, note=", ".join(filter(None, [difference.note, note])))


def permutation_p(observed: float, by_chance: Array) -> float:
    """The p-value of an absolute difference among those of random swaps [n]; a swap without a value counts against it.

    Example:
        >>> permutation_p(0.3, np.array([0.1, 0.3, 0.0]))
        0.5
    """
    as_large = np.count_nonzero(~(by_chance < observed - _NOTHING))
    return (1 + int(as_large)) / (1 + len(by_chance))


def in_new_sample(value: float, star: Array, level: float, ratio: float = 1.0) -> float:
    """The one-sided upper end of a figure in a new sample, from its value here and bootstrap replicates [B].

    Both samples vary: where this one has `ratio` times as many rows as the new one, the variance of the difference is
    1 + ratio times that of the figure here. NaN where fewer than two replicates have a value.

    Example:
        >>> star = np.random.default_rng(0).normal(0.1, 0.01, 10_000)
        >>> round(in_new_sample(0.1, star, 0.8), 3), round(in_new_sample(0.1, star, 0.8, ratio=0), 3)
        (0.112, 0.108)
    """
    if len(star) < 2 or np.isnan(value):
        return float("nan")
    return value + NormalDist().inv_cdf(level) * float(np.std(star)) * (1 + ratio) ** 0.5


def change_of_size(a: Array, b: Array, star_a: Array, star_b: Array, level: float) -> tuple[Array, Array]:
    """Ends of |b| − |a| of signed figures [...], from replicates [B, ...] of both: each of shape [...].

    Of the two, the one that is further from 0 in its standard errors is taken to have the sign that it shows. If that
    is a, then |b| − |a| is the larger of b − a and −b − a (where a is positive), and both its ends are the larger ones
    of these two. So the interval covers also where b is 0, and is that of b − a where the sign of b is sure.

    Example:
        >>> draws = np.random.default_rng(0).normal(0, 0.01, (2, 4000))
        >>> low, high = change_of_size(np.array(-0.2), np.array(0.17), -0.2 + draws[0], 0.17 + draws[1], 0.95)
        >>> low.round(2).item(), high.round(2).item()  # reversed, and not much smaller
        (-0.06, -0.0)
    """
    tails = [(1 - level) / 2, (1 + level) / 2]
    error_a, error_b = (np.maximum(np.nanstd(star, axis=0), _NOTHING) for star in (star_a, star_b))
    sure_of_a = np.abs(a) / error_a >= np.abs(b) / error_b
    sign = np.where(np.where(sure_of_a, a, b) < 0, -1.0, 1.0)
    one, other = sign * (star_b - star_a), sign * (star_b + star_a)
    # With a sure: the larger of b − a and −(b + a). With b sure: the smaller of b − a and b + a.
    other = np.where(sure_of_a, -other, other)
    ends = np.nanquantile(np.stack([one, other]), tails, axis=1)  # [2 ends, 2 branches, ...]
    low, high = np.where(sure_of_a, ends.max(axis=1), ends.min(axis=1))
    most = np.abs(ends[:, 0]).max(axis=0)  # a size changes by no more than the figure itself
    return np.clip(low, -most, most), np.clip(high, -most, most)


def _span(value: float, star: Array, how: Resampling, clusters: int) -> tuple[Span, float]:
    """An interval that holds the value, and the standard error."""
    found = how.interval(star, clusters)
    return Span(value, min(found.low, value) + 0.0, max(found.high, value)), found.se  # never -0.0


def _p_value(
    statistic: Statistic, first: Array, second: Array, link: Callable[[Any], Any], seed: int, n_perm: int
) -> float:
    """Share of random swaps of whole clusters that make a difference as many standard errors large.

    In standard errors, because swaps may move what the figure itself is blind to. A model that came to prefer "he" to
    "she" as a whole has the WinoBias figure it had, but swapped by halves it has not: measured in its own units, chance
    would seem to explain nearly everything. (Chung and Romano 2013: so the test also holds where the two models'
    answers spread differently; where they can be exchanged it is exact, as without.) A swap without a value counts.

    Swaps are drawn until enough of them are as large (Besag and Clifford 1991): a figure that chance explains is soon
    done with, and one that it hardly explains is followed to the end, where corrections for many figures need it.
    """
    standardised = _Standardised(first, second, lambda totals: link(statistic(totals)))
    observed = float(standardised(np.zeros((1, len(first))))[0])
    found = drawn = 0
    for swaps in _swaps(len(first), n_perm, seed):
        by_chance = standardised(swaps)
        as_large = np.flatnonzero(~(by_chance < observed * (1 - _ROUNDING)))
        if found + len(as_large) >= _ENOUGH:
            return _ENOUGH / (drawn + int(as_large[_ENOUGH - found - 1]) + 1)
        found, drawn = found + len(as_large), drawn + len(swaps)
    return (1 + found) / (1 + n_perm)


class _Standardised:
    """How many standard errors a figure changes from the first answers to the second, with some clusters swapped.

    To the change each cluster adds the slopes of the figure (by the totals of both) times its own sums (of both), the
    delta method; the standard error is that of the sum of what they add. Squares of it are sums over clusters of
    products of two columns, and so, like the totals themselves, one matrix product for many swaps.
    """

    def __init__(self, first: Array, second: Array, figure: Statistic) -> None:
        """From sums of each cluster [clusters, k], and the figure as a function of totals [..., k]."""
        self._figure = figure
        self._size = (np.abs(first) + np.abs(second)).sum(axis=0) / 2
        self._clusters, k = first.shape
        kept, swapped = np.hstack([second, first]), np.hstack([first, second])
        one, other = np.triu_indices(2 * k)
        products, exchanged = kept[:, one] * kept[:, other], swapped[:, one] * swapped[:, other]
        there = (products != 0).any(axis=0) | (exchanged != 0).any(axis=0)
        self._one, self._other = one[there], other[there]
        self._twice = np.where(self._one == self._other, 1.0, 2.0)
        self._sums = np.concatenate([kept.sum(axis=0), products[:, there].sum(axis=0)])
        self._by_swap = np.hstack([swapped - kept, (exchanged - products)[:, there]])

    def __call__(self, swaps: Array) -> Array:
        """Swaps [n, clusters] of 0 and 1 → [n]; NaN where the figure has no value."""
        both, products = np.split(self._sums + swaps @ self._by_swap, [2 * len(self._size)], axis=1)
        after, before = np.hsplit(both, 2)
        change = np.abs(self._figure(after) - self._figure(before))
        change[change < _NOTHING] = 0.0
        slopes = np.hstack([self._slopes(after), -self._slopes(before)])
        squares = (slopes[:, self._one] * slopes[:, self._other] * products) @ self._twice
        squares -= (slopes * both).sum(axis=1) ** 2 / self._clusters
        # A change that is the same in all clusters has no error; it is then as large as with all clusters swapped.
        error = np.maximum(np.sqrt(np.maximum(squares, 0.0)), _SURE * change)
        return np.asarray(change / np.where(error == 0, 1.0, error))

    def _slopes(self, totals: Array) -> Array:
        """Of the figure by the totals, [n, k] → [n, k]; totals that are 0 in every cluster do not count."""
        found = np.zeros_like(totals)
        for k in np.flatnonzero(self._size):
            step = np.zeros(totals.shape[1])
            step[k] = _STEP * self._size[k]
            found[:, k] = (self._figure(totals + step) - self._figure(totals - step)) / (2 * step[k])
        return found


def _swaps(clusters: int, n: int, seed: int) -> Iterator[Array]:
    """Which clusters are swapped, blocks [≤ n, clusters] of 0 and 1."""
    rng = np.random.default_rng(seed + 1)
    block = max(1, (1 << 21) // clusters)
    for begin in range(0, n, block):
        yield rng.integers(2, size=(min(block, n - begin), clusters), dtype=np.int8).astype(np.float64)


def detectable_change(se: float, n: int, level: float) -> float | None:
    """The smallest change of a rate of `n` rows, or clusters, that is detected, from the standard error of the change.

    A rate changes by t only if t more answers in 1 change, and that adds noise. Where nothing changes it is not known.

    Example:
        >>> round(detectable_change(0.01, 500, 0.95), 4)
        0.0348
    """
    return minimum_detectable(se, level, apart=lambda t: (1 + t / (n * se**2)) ** 0.5) if se > 0 else None
