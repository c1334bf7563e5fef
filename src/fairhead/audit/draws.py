"""Drawing counts: how often each unit turns up when n of them are drawn with replacement.

Counts of frequent units come from normal numbers, which are drawn much more quickly than binomial ones: a quantile of
the binomial distribution is a normal one, bent for skewness and kurtosis (Cornish and Fisher) and rounded, with the
cumulants less what rounding adds to them (Sheppard). Where the variance is 10 or more, that is the binomial
distribution to less than a thousandth, as a test holds against SciPy's. Rare units are drawn exactly.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_LARGE = 10.0  # variance of a count
_LARGER = 100.0  # from here on kurtosis and rounding no longer show


def multinomial(n: int, share: Floats, size: int, rng: np.random.Generator) -> Floats:
    """How often each of U units is drawn, [U, size], in `size` replicates of n draws.

    Args:
        n: draws in a replicate.
        share: probabilities of the units, shape [U].
        size: replicates.
        rng: random numbers.

    Example:
        >>> drawn = multinomial(10_000, np.array([0.5, 0.499, 0.001]), 3, np.random.default_rng(0))
        >>> drawn.shape, drawn.sum(axis=0).tolist()
        ((3, 3), [10000.0, 10000.0, 10000.0])
    """
    order = np.argsort(-share, kind="stable")  # of equal units the first comes first, on any processor
    # Of what the units before it have left, each takes its part.
    mass = np.cumsum(share[order][::-1])[::-1]
    part = share[order] / mass
    variance = n * mass * part * (1 - part)
    n_large = int(np.argmax(np.append(variance[:-1] < _LARGE, True)))
    drawn = np.empty((len(share), size))
    left, noise = np.full(size, float(n)), np.empty(size)
    z = rng.standard_normal((n_large, size))
    bent = _bent(z, part[:n_large, None], variance[:n_large, None])
    for place in range(n_large):
        count = drawn[order[place]]
        np.sqrt(left, out=noise)
        noise *= z[place]
        noise += bent[place]
        np.multiply(left, part[place], out=count)
        count += noise
        np.rint(count, out=count)
        if variance[place] < _LARGER:  # once in a million draws
            np.maximum(count, 0.0, out=count)
            np.minimum(count, left, out=count)
        left -= count
    rest = order[n_large:]
    if len(rest) == 1:
        drawn[rest[0]] = left
    else:
        drawn[rest] = rng.multinomial(left.astype(np.int64), share[rest] / share[rest].sum()).T
    return drawn


def _bent(z: Floats, part: Floats, variance: Floats) -> Floats:
    """What is added to μ + √left·z for the shape of the binomial distribution, [U, size]; scales z, in place, for it.

    Args:
        z: normal numbers, shape [U, size].
        part: the probability of each unit among what is left, shape [U, 1].
        variance: of each count on average, shape [U, 1].
    """
    squared = z * z
    bent = squared - 1
    bent *= (1 - 2 * part) / 6
    scale = np.sqrt(part * (1 - part))
    few = (variance < _LARGER)[:, 0]
    if few.any():
        p, v = part[few], variance[few]
        continuous = v - 1 / 12
        kurtosis = (v * (1 - 6 * p * (1 - p)) + 1 / 120) / (24 * continuous**1.5)
        skewness = (v * (1 - 2 * p)) ** 2 / (36 * continuous**2.5)
        bent[few] *= v / continuous
        bent[few] += z[few] * (squared[few] * (kurtosis - 2 * skewness) + (5 * skewness - 3 * kurtosis))
        scale[few] *= np.sqrt(continuous / v)
    z *= scale
    return bent
