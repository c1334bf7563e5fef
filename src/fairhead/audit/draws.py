"""Drawing counts: how often each unit turns up when n of them are drawn with replacement.

Counts of frequent units come from normal numbers, which are drawn much more quickly than binomial ones: a quantile of
the binomial distribution is a normal one, bent for its skewness (Cornish and Fisher) and rounded. Where the variance is
100 or more, that is the binomial distribution to a thousandth, as a test holds against SciPy's. Rare units are drawn
exactly.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_LARGE = 100.0  # variance of a count


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
    bent = z * z
    bent -= 1
    bent *= ((1 - 2 * part[:n_large]) / 6)[:, None]
    z *= np.sqrt(part[:n_large] * (1 - part[:n_large]))[:, None]
    for place in range(n_large):
        count = drawn[order[place]]
        np.sqrt(left, out=noise)
        noise *= z[place]
        noise += bent[place]
        np.multiply(left, part[place], out=count)
        count += noise
        np.rint(count, out=count)
        left -= count
    rest = order[n_large:]
    if len(rest) == 1:
        drawn[rest[0]] = left
    else:
        drawn[rest] = rng.multinomial(left.astype(np.int64), share[rest] / share[rest].sum()).T
    return drawn
