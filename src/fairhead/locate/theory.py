"""What normalising q and k can promise: bounds on the gap in attention logits between two groups.

The setting is Assumption 1 of the DAM paper: each dimension of q (and of k) is a mixture of two normal distributions,
one for each group, and q and k are independent within a group. The gap is
|E[q·k / √d | group 0] − E[q·k / √d | group 1]|, for q and k as they are, normalised, or normalised and made absolute.

Per dimension and in units where d dimensions add up to √d times it, the gap is at most

- `paper_bound`: the paper's Theorem 1, for normalisation with absolute values;
- `absolute_bound` = max(1/λ0, 1/λ1), for the same, always below the paper's: by Cauchy–Schwarz, as the second moments
  of the groups average to 1;
- `norm_bound` = |λ0 − λ1| / (λ0 λ1), for normalisation alone. It is reached as the groups' own spread vanishes, and it
  is zero for groups of equal size: taking absolute values can only widen the worst case.
"""

from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import erf

from fairhead.errors import InputError

Array = NDArray[np.float64]
Operation = Literal["none", "norm", "norm_abs"]


def folded_mean(mean: ArrayLike, sd: ArrayLike) -> Array:
    """E|x| of x ~ N(mean, sd²).

    Example:
        >>> round(float(folded_mean(0.0, 1.0)), 6), float(folded_mean(-3.0, 0.0))   # √(2/π), and a constant
        (0.797885, 3.0)
    """
    mean, sd = np.asarray(mean, float), np.asarray(sd, float)
    # Where nothing varies the mean's own size is the answer; a tiny sd would divide by zero.
    safe = np.where(sd > 1e-300, sd, 1.0)
    z = mean / (safe * np.sqrt(2))
    folded = safe * np.sqrt(2 / np.pi) * np.exp(-np.minimum(z**2, 700.0)) + mean * erf(z)
    return np.where(sd > 1e-300, folded, np.abs(mean))


def paper_bound(share0: float, d: int = 1) -> float:
    """Theorem 1 of the paper.

    Example:
        >>> round(paper_bound(0.5), 2)
        9.06
    """
    share0 = _share(share0)
    share1 = 1 - share0
    first = np.sqrt(2 / (np.pi * share0)) + np.sqrt(share1 / share0)
    second = np.sqrt(2 / (np.pi * share1)) + np.sqrt(share0 / share1)
    return float(np.sqrt(d) * (first**2 + second**2))


def norm_bound(share0: float, d: int = 1) -> float:
    """For normalisation alone.

    Example:
        >>> norm_bound(0.5), round(norm_bound(0.8), 6)
        (0.0, 3.75)
    """
    share0 = _share(share0)
    return float(np.sqrt(d) * abs(1 - 2 * share0) / (share0 * (1 - share0)))


def absolute_bound(share0: float, d: int = 1) -> float:
    """For normalisation with absolute values.

    Example:
        >>> absolute_bound(0.5), round(absolute_bound(0.8), 6)
        (2.0, 5.0)
    """
    share0 = _share(share0)
    return float(np.sqrt(d) / min(share0, 1 - share0))


def _share(share0: float) -> float:
    if not 0 < share0 < 1:
        raise InputError(f"the share of group 0 lies between 0 and 1; found {share0}")
    return share0
