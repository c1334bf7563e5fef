"""Confidence intervals for gaps, ratios and extremes over groups, from bootstrap replicates of the group rates.

A largest-minus-smallest gap is folded: random noise alone makes it positive, so the percentile interval of a gap never
reaches 0 and misses a true gap near 0 almost always. Here the interval holds the gaps θ that a two-sided test does not
refuse: rates with a gap of θ, plus the bootstrap's own errors, would often enough show the gap that was observed. Far
from 0, and without near-ties between groups, it is the percentile interval of the gap.

Which rates with a gap of θ? The caller's `Candidates`: those near the observed ones, with nearly equal rates taken for
equal. The largest and the lowest of several are not smooth, and of such figures no estimate has the right quantiles
whatever the true rates are (Hirano and Porter 2012): an interval covers more than 95 % here or less there. Those of an
audit cover 93 to 97 % in most cases, down to 92 % with two clusters of equal rates and up to 98 % and more where one
group is lower than many by about its standard error, or where a small, noisy group could be the extreme one as well. A
mean over classes of the larger of two gaps (Fairlearn's equalized odds, where classes are not put together by "max")
knows no ties between the two: where both are equal in every class, 88 %.

Errors are hat − star, replicates mirrored at the observed rates: inversion then gives back the percentile interval
where a figure is smooth.

A gap is any function f of group rates that is homogeneous, f(c·rates) = c·f(rates), and blind to a common shift.
"""

from collections.abc import Callable, Sequence
from itertools import permutations
from math import isnan, sqrt
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.stats import Span
from fairhead.stats.max_t import Compared, Contrasts

Array = NDArray[np.float64]
Reduce = Callable[[Array], Array]
Tied = Callable[[Sequence[float], Sequence[float]], Sequence[float]]

# λ beyond which one pair of groups makes the gap in every replicate, whatever the noise.
_FAR = 1e6
# Ends are sought to this share of √B times their Monte-Carlo error: to a sixth of that error at 2000 replicates.
_PRECISION = 1 / 271
_MOST_PROBES = 16
_STEPS = 5  # until the noise of a gap and what it lets one detect agree
_ROUNDED = 1e-9
# A rate without any noise, beside others, counts as having this share of theirs.
_NO_NOISE = 1e-6


class Interval(NamedTuple):
    """A confidence interval and what it was made from."""

    low: float  # lower end
    high: float  # upper end
    se: float  # standard error of the figure (for a gap: of the signed gap between the groups that make it)
    # What an even model of the same size would show by chance, on average; None where nothing is folded
    null: float | None
    method: str  # "inversion" of a test (gaps, ratios, extremes) or "percentile" (smooth figures)
    test: "EvenTest | None" = None  # of evenness, where there is one
    mde: float | None = None  # the smallest detectable gap between the same groups; None where it follows from `se`
    # The pairs of groups whose difference, or mean of differences, is most certain; none where that is the gap itself
    surest: tuple[Compared, ...] = ()


class EvenTest(NamedTuple):
    """A test of the hypothesis that all groups are even: large values speak against it."""

    observed: float
    draws: Array  # what an even model of the same size shows, shape [B]


def percentile(star: Array, level: float = 0.95) -> Interval:
    """Percentile interval of replicates, shape [B]: for rates, means and signed differences."""
    low, high = quantiles(star, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high), _std(star), None, "percentile")


def quantiles(values: Array, shares: Sequence[float]) -> Array:
    """`np.quantile` over the last axis, [..., B] to [shares, ...]; quicker, as sorting is on today's processors."""
    ranked = np.sort(values, axis=-1).transpose(-1, *range(values.ndim - 1))  # NaN comes last
    last = len(ranked) - 1
    if last < 0 or np.isnan(ranked[last]).any():  # its answers and its errors
        return np.asarray(np.quantile(values, shares, axis=-1))
    found = []
    for place in (share * last for share in shares):
        before = int(place)
        low, high = ranked[before], ranked[min(before + 1, last)]
        found.append(low + (high - low) * (place - before))
    return np.array(found)


class Errors(NamedTuple):
    """Errors of rates, [B, ...], and their standard errors, [...]."""

    drawn: Array
    se: Array


class Candidates(NamedTuple):
    """What the true rates behind a gap may be."""

    at: Callable[[float], Array]  # from θ below the observed gap to rates whose gap is θ
    # From errors of the rates, shape [B, ...], to those of the signed gap between the groups that make it
    signed: Callable[[Array], Array] | None = None
    reach: float = 1.0  # the half-width above, times the noise of these groups
    # From θ to the gaps that these rates and the errors make, shape [B], where there is a quicker way; or [k, B] for
    # k sets of rates with that gap, of which a test has to refuse each
    shown: Callable[[float], Array] | None = None
    contrasts: Contrasts | None = None  # the differences that the gap is the largest of, where they are not alike
    # From true rates, with the shape of `hat`, to the errors that rates of as many rows would have; None where these do
    # not depend on the rates
    errors: "Callable[[Array], Errors] | None" = None
    even: Callable[[], Array] | None = None  # the rates of an even model, for `errors`
    se: Array | None = None  # standard errors of the errors, where they are known
    # From θ to the noise of the gap between the groups that make it if they were θ apart, as a share of what it is
    apart: Callable[[float], float] = lambda _: 1.0
    upper_alone: bool = False  # whether nobody asks for the lower end, which takes a test and a search: it is 0 then


def gap(
    hat: Array, error: Array, reduce: Reduce, candidates: Candidates | None = None, level: float = 0.95
) -> Interval:
    """Interval of a gap f(rates) ≥ 0 by inverting a test; the module's head says why.

    The test of a gap θ accepts what lies in [θ − w, b(θ)]: w is the percentile half-width far from 0, and b(θ) takes
    what is left of the error. So near 0, where nothing can fall below the interval, the whole error lies on one side,
    and the lower end is 0 when an even model, or one with the noise of the observed rates, would show a gap this large
    more often than 1 time in 20.

    `hat` are the observed group rates, of any shape [...], `error` their errors, [B, ...], and `reduce` is f, from
    [..., shape of hat] to [...]. Without `candidates` the true rates may be the observed ones, scaled.
    """
    observed, alpha = float(reduce(hat)), 1 - level
    candidates = candidates or Candidates(lambda theta: hat * (theta / observed))
    if observed == 0:
        null = reduce(error)
        of_two = null if candidates.signed is None or candidates.se is None else candidates.signed(error)
        high, se = float(quantiles(null, [level])[0]), sqrt(float(of_two @ of_two) / len(of_two))
        mde = minimum_detectable(se, level, high, candidates.apart)
        return Interval(0.0, high, se, float(null.mean()), "inversion", EvenTest(0.0, null), mde)
    signed, contrasts, errors_of = candidates.signed, candidates.contrasts, candidates.errors
    # Far from 0 only the groups that make the gap count, with their signs: what is left is the signed gap's own noise.
    far = reduce(_FAR * hat + error) - _FAR * observed if signed is None else signed(error)
    lowest, highest = quantiles(far, [alpha / 2, 1 - alpha / 2]).tolist()
    se, width = _std(far), -lowest * candidates.reach
    if candidates.upper_alone:
        return Interval(0.0, observed + max(width, 0.0), se, None, "inversion")
    two = hat.size == 2 and signed is not None  # rates, and one difference
    null = np.abs(far) if two else reduce(error)
    surest: tuple[Compared, ...] = ()
    if contrasts is None:
        draws = null
        if errors_of is not None and candidates.even is not None:
            # Of an even model: a small group whose rate is near 1 by chance has less noise there than it should.
            drawn = errors_of(candidates.even()).drawn
            draws = np.abs(signed(drawn)) if two and signed is not None else reduce(drawn)
        even, guess, noise = EvenTest(observed, draws), observed - highest, se
        critical = float(quantiles(draws, [level])[0])
    else:
        # Studentised: the largest of all differences, each in its own standard error.
        each = np.std(error, axis=0) if candidates.se is None else candidates.se
        errors_of = errors_of or (lambda _: Errors(error, each))
        differences = contrasts.differences(hat)
        errors = errors_of(hat if candidates.even is None else candidates.even())
        scale = contrasts.se(errors.se)
        even = EvenTest(float(np.max(differences / scale)), contrasts.largest(errors.drawn, scale))
        largest = float(quantiles(even.draws, [level])[0])
        critical = largest * float(scale[differences.argmax()])
        scale = contrasts.se(each)
        ends = differences - (NormalDist().inv_cdf(1 - alpha / 2) + largest) / 2 * scale
        surest = contrasts.compared(int(ends.argmax()), hat)
        guess, noise = float(ends.max()), float(scale[ends.argmax()])

    def p_value(theta: float) -> float:
        if candidates.shown is not None:
            shown = candidates.shown(theta)
        elif two:
            shown = np.abs(theta + far)
        else:
            rates = candidates.at(theta)
            if contrasts is not None and errors_of is not None:
                errors = errors_of(rates)
                scale = contrasts.se(errors.se)
                least = theta + float(((differences - theta) / scale).max()) * scale
                found = contrasts.share_above(rates + errors.drawn, least)
                if theta > width and signed is not None:
                    # A gap is no smaller than the difference of any two groups: few replicates need a look.
                    (small,) = np.nonzero(far < theta - width - float(signed(rates[None])[0]) + _ROUNDED)
                    found += np.count_nonzero(reduce(rates + error[small]) < theta - width) / len(error)
                return found
            shown = reduce(rates + error)
        return max(
            (np.count_nonzero(some >= observed) + np.count_nonzero(some < theta - width)) / len(some)
            for some in (shown if shown.ndim > 1 else (shown,))
        )

    low = 0.0
    if np.count_nonzero(even.draws >= even.observed) <= alpha * len(null):
        low = crossing(p_value, alpha, guess, 0.0, observed, noise) if se > 0 else observed
    # Studentised, the lower end starts from rates in the middle of those of the two groups.
    mde = minimum_detectable(se, level, critical, candidates.apart, 1.0 if contrasts is None else 0.5)
    return Interval(low, observed + max(width, 0.0), se, float(null.sum()) / len(null), "inversion", even, mde, surest)


def absolute_sum(
    hat: Array, error: Array, level: float = 0.95, curve: bool = False, even: Array | None = None
) -> Interval:
    """Interval of Σ|term|, such as a calibration error: folded like a gap, and with an interval like one.

    Of terms [K] and their errors [B, K]; replicates with NaN are left out, and if none is left the ends are NaN. If the
    true terms were all 0, the errors would be those of `even`, [B, K]. Where the terms are points of a `curve`,
    neighbours err alike. Where it crosses 0 by chance, errors before and after seem to cancel out; so the upper end is
    as far away as if all terms had one sign.

    Example:
        >>> noise = np.random.default_rng(0).normal(0, 0.01, (2001, 15))
        >>> interval = absolute_sum(noise[0], noise[1:])
        >>> interval.low, 0.1 < interval.null < 0.14
        (0.0, True)
    """
    most = np.abs(error).max(axis=0, initial=0.0)
    if isnan(most.sum()):
        error = error[~np.isnan(error).any(axis=-1)]
        most = np.abs(error).max(axis=0, initial=0.0)
    if not len(error):
        return Interval(np.nan, np.nan, np.nan, None, "inversion")
    size, sign = np.abs(hat), np.sign(hat)
    observed = float(size.sum())

    def folded(scale: float) -> Array:
        """Σ|scale·hat + error|: terms whose sign no error turns only add up."""
        straight = scale * size > most
        found = error @ (sign * straight) + scale * float(size[straight].sum())
        if not straight.all():
            turning = error.T[~straight]  # replicates lie together in memory
            turning += scale * hat[~straight, None]
            found += np.abs(turning, out=turning).sum(axis=0)
        return found

    candidates = Candidates(
        at=lambda theta: hat * (theta / observed),
        signed=lambda _: folded(_FAR) - _FAR * observed,
        shown=lambda theta: folded(theta / observed),
        errors=None if even is None else lambda _: Errors(even, even),
        even=lambda: hat,
    )
    found = gap(hat, error, lambda terms: np.abs(terms).sum(axis=-1), candidates, level)
    if not curve:
        return found
    one_sign = (-1 if hat.sum() < 0 else 1) * error.sum(axis=-1)
    return found._replace(high=max(found.high, observed - float(quantiles(one_sign, [(1 - level) / 2])[0])))


def spread_of_sums(hat: Array, own: Callable[[int, float], Interval], level: float = 0.95) -> Interval:
    """Interval of the largest minus the smallest Σ|term| over groups.

    Noise makes these sums larger, most of all in small groups, so the gap between them can be too large as well as too
    small. Each group's own interval knows; those of two groups give that of their difference, and the gap is the
    largest difference. Its lower end is corrected (Bonferroni) for the number of pairs that could have been it. Terms
    are [K, G]; `own` goes from a group and a level to its interval, as `absolute_sum` makes it.

    Example:
        >>> noise = np.random.default_rng(0).normal(0, [0.01, 0.05], (2001, 15, 2))
        >>> own = lambda g, level: absolute_sum(noise[0][:, g], noise[1:, :, g], level)
        >>> spread_of_sums(noise[0], own).low
        0.0
    """
    n_groups, sums = hat.shape[1], np.abs(hat).sum(axis=0)
    pairs = n_groups * (n_groups - 1) // 2
    every, strict = [own(g, level) for g in range(n_groups)], level if pairs == 1 else 1 - (1 - level) / pairs

    def apart(a: int, b: int, ends: Sequence[Interval]) -> Span:
        one, other = (Span(float(sums[g]), end.low, end.high) for g, end in zip((a, b), ends, strict=True))
        return difference(one, other, 0.0, 0.0)

    found = [(apart(a, b, (every[a], every[b])), a, b) for a, b in permutations(range(n_groups), 2)]
    low, high = 0.0, max(span.high for span, _, _ in found)
    for span, a, b in sorted(found, key=lambda pair: -pair[0].low):
        if span.low <= low:  # a stricter one is no higher
            break
        low = max(low, apart(a, b, (own(a, strict), own(b, strict))).low)
    most, least = int(sums.argmax()), int(sums.argmin())
    se = float(np.hypot(every[most].se, every[least].se))
    # The largest has to differ from 0, and from what noise makes of the smallest.
    mde = max(own(most, strict).mde or 0.0, (every[least].null or 0.0) + minimum_detectable(se, strict))
    noise = [end.test.draws for end in every if end.test is not None]
    by_chance = np.fmax.reduce(noise) - np.fmin.reduce(noise)
    return Interval(low, high, se, float(np.nanmean(by_chance)), "inversion", mde=mde)


def minimum(hat: Array, error: Array, tied: Tied | None = None, level: float = 0.95, at_most: bool = False) -> Interval:
    """Interval of the lowest of several rates, such as worst-group accuracy, by inverting a test like that of `gap`.

    The lowest of nearly equal rates is too low on average. So a lowest rate of θ is refused where it would show one as
    low as observed, each rate in its own standard error, or one too high for the lower end, in less than 1 case of 20;
    with the observed lowest at θ, and the others no lower, nearly equal ones taken for equal. The lower end is that of
    the group whose own reaches furthest down.

    Of rates [K] and their errors [B, K]. `tied` goes from rates and standard errors to rates with those near the lowest
    brought together. With `at_most` the upper end has the whole error, and the lower end is without a promise.
    """
    worst, observed, alpha = int(np.argmin(hat)), float(np.min(hat)), 1 - level
    each = np.std(error, axis=0)
    se = float(each[worst])
    if se == 0:
        return Interval(observed, observed, 0.0, None, "inversion")
    tail = alpha if at_most else alpha / 2
    lowest, highest = quantiles(error[:, worst], [tail, 1 - tail]).tolist()
    low = float(np.min(hat - each * (highest / se)))
    width = np.inf if at_most else observed - low
    noise = np.maximum(each, _NO_NOISE * se)
    together = hat if tied is None else np.array(tied(hat.tolist(), noise.tolist()))

    def p_value(theta: float) -> float:
        centre = np.maximum(together, theta)
        centre[worst] = theta
        shown = centre + error
        # Each below θ in its own standard errors: a small cell that is low by chance does not hide a large one that is.
        as_low = np.min((shown - theta) / noise, axis=-1) <= np.min((hat - theta) / noise)
        return float(np.count_nonzero(as_low) + np.count_nonzero(np.min(shown, axis=-1) > theta + width)) / len(shown)

    reach = max(8 * se, -float(np.min(error[:, worst])))
    high = crossing(p_value, alpha, observed - lowest, observed + reach, observed, se)
    return Interval(low, high, se, None, "inversion")


def crossing(
    p_value: Callable[[float], float], alpha: float, guess: float, refused: float, kept: float, se: float
) -> float:
    """The end of an interval between a value that its test refuses and one that it keeps; figures vary by `se`."""
    normal, goal = NormalDist(), NormalDist().inv_cdf(alpha)
    precision = max(_PRECISION * se * sqrt(alpha * (1 - alpha)) / normal.pdf(goal), 1e-12)
    # As a normal quantile, a p-value is nearly a straight line: by how much it grows from here to the kept end.
    slope = 1 / se if kept > refused else -1 / se
    probe, before = guess, None
    for _ in range(_MOST_PROBES):
        if not min(refused, kept) < probe < max(refused, kept):
            probe = (refused + kept) / 2
        p = p_value(probe)
        score = normal.inv_cdf(min(max(p, 1e-6), 1 - 1e-6)) - goal
        if p <= alpha:
            refused = probe
        else:
            kept = probe
        if before is not None and score != before[1] and (score - before[1]) / (probe - before[0]) * slope > 0:
            slope = (score - before[1]) / (probe - before[0])
        before = (probe, score)
        probe -= score / slope
        if abs(probe - before[0]) < precision or abs(kept - refused) < precision:
            break
    return float(min(max(probe, min(refused, kept)), max(refused, kept)))


def difference(a: Span, b: Span, correlation: float, ideal: float | None) -> Span:
    """Interval of b − a from the intervals of both and the correlation of their replicates.

    Each side adds the distances to the ends that matter there as the sides of a triangle (MOVER). A distance that ends
    at the ideal value is bias as much as noise, because the figure is folded there, and is added in full.
    """

    def reach(end_a: float, end_b: float) -> float:
        x, y = abs(end_a - a.value), abs(end_b - b.value)
        if ideal in (end_a, end_b):
            return x + y
        return max(0.0, x * x + y * y - 2 * correlation * x * y) ** 0.5

    value = b.value - a.value
    return Span(value, value - reach(a.high, b.low), value + reach(a.low, b.high))


def minimum_detectable(
    se: float,
    level: float = 0.95,
    critical: float | None = None,
    apart: Callable[[float], float] = lambda _: 1.0,
    tested: float = 1.0,
) -> float:
    """The smallest true effect that is significant in 80 % of samples with this standard error.

    Where a test has another critical value than that of one normal figure, it is given. Where the noise depends on the
    effect, `apart` says how (`Candidates.apart`): significant is what is too large for the noise without any effect and
    for that with `tested` of the effect.

    Example:
        >>> round(minimum_detectable(0.01), 4), round(minimum_detectable(0.01, critical=0.03), 4)
        (0.028, 0.0384)
    """
    normal, even = NormalDist(), apart(0.0)
    least = critical = normal.inv_cdf((1 + level) / 2) * se if critical is None else critical
    for _ in range(_STEPS):
        least = critical * max(1.0, apart(tested * least) / even)
    found = least
    for _ in range(_STEPS):
        found = least + normal.inv_cdf(0.8) * se * apart(found)
    return found


def _std(values: Array) -> float:
    """`np.std` of shape [B], without what it costs for few values."""
    centred = values - values.sum() / len(values)
    return sqrt(float(centred @ centred) / len(centred))
