"""What normalising q and k can promise: the exact gap in attention logits between two groups, and bounds on it.

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

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import erf

from fairhead.errors import InputError

Array = NDArray[np.float64]
Operation = Literal["none", "norm", "norm_abs"]


@dataclass(frozen=True)
class Mixture:
    """One dimension (or d of them, as arrays of shape [d]) of q or k: two normal distributions.

    Attributes:
        mean0: of group 0.
        mean1: of group 1.
        sd0: of group 0.
        sd1: of group 1.

    Example:
        >>> float(Mixture(1.0, -1.0, 0.0, 0.0).sd(0.5))
        1.0
    """

    mean0: ArrayLike
    mean1: ArrayLike
    sd0: ArrayLike
    sd1: ArrayLike

    def sd(self, share0: float) -> Array:
        """Of both groups together, where group 0 has this share: σ² = λ0σ0² + λ1σ1² + λ0λ1Δ²."""
        share1 = 1 - share0
        sd0, sd1 = np.asarray(self.sd0, float), np.asarray(self.sd1, float)
        return np.sqrt(share0 * sd0**2 + share1 * sd1**2 + share0 * share1 * self._difference() ** 2)

    def group_means(self, share0: float, operation: Operation) -> tuple[Array, Array]:
        """The mean of each group after the operation."""
        if operation == "none":
            return np.asarray(self.mean0, float), np.asarray(self.mean1, float)
        sd = self.sd(share0)
        if not (sd > 0).all():
            raise InputError(
                "a dimension that never varies cannot be normalised: give a positive sd or different means"
            )
        mean0, mean1 = (1 - share0) * self._difference() / sd, -share0 * self._difference() / sd
        if operation == "norm":
            return mean0, mean1
        return folded_mean(mean0, np.asarray(self.sd0, float) / sd), folded_mean(
            mean1, np.asarray(self.sd1, float) / sd
        )

    def _difference(self) -> Array:
        return np.asarray(self.mean0, float) - np.asarray(self.mean1, float)


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


def exact_gap(q: Mixture, k: Mixture, share0: float, operation: Operation = "norm_abs") -> float:
    """The gap in the expected attention logit between the groups, over all d dimensions.

    Args:
        q: the query's dimensions.
        k: the key's dimensions.
        share0: λ0, the share of group 0.
        operation: what is done to q and k: nothing, "norm", or "norm_abs" (DAM).

    Example:
        >>> apart = Mixture(3.0, -3.0, 1.0, 1.0)
        >>> exact_gap(apart, apart, 0.5, "norm")        # groups of one size: nothing is left
        0.0
        >>> round(exact_gap(apart, apart, 0.8, "norm"), 4)
        3.1953
    """
    share0 = _share(share0)
    q0, q1 = q.group_means(share0, operation)
    k0, k1 = k.group_means(share0, operation)
    by_dimension = np.atleast_1d(q0 * k0 - q1 * k1)
    return float(abs(by_dimension.sum()) / np.sqrt(by_dimension.size))


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


class Simulated(NamedTuple):
    """A gap that was simulated, and its standard error."""

    value: float
    error: float


def simulated_gap(
    q: Mixture, k: Mixture, share0: float, operation: Operation = "norm_abs", n: int = 100_000, seed: int = 0
) -> Simulated:
    """The gap (before its absolute value is taken) in n draws, normalised by their own mean and deviation, as DAM does.

    Example:
        >>> one = Mixture(1.0, -1.0, 1.0, 1.0)
        >>> found = simulated_gap(one, one, 0.8, "norm")
        >>> abs(abs(found.value) - exact_gap(one, one, 0.8, "norm")) < 4 * found.error
        True
    """
    share0 = _share(share0)
    rng = np.random.default_rng(seed)
    d = max(np.size(getattr(m, name)) for m in (q, k) for name in ("mean0", "mean1", "sd0", "sd1"))
    in_group1 = np.arange(n) >= round(share0 * n)

    def draw(mixture: Mixture) -> Array:
        group = in_group1[:, None]
        mean, sd = np.where(group, mixture.mean1, mixture.mean0), np.where(group, mixture.sd1, mixture.sd0)
        x = mean + sd * rng.standard_normal((n, d))
        if operation != "none":
            x = (x - x.mean(0)) / x.std(0)
        return np.abs(x) if operation == "norm_abs" else x

    logits = (draw(q) * draw(k)).sum(1) / np.sqrt(d)
    groups = [logits[~in_group1], logits[in_group1]]
    error = np.sqrt(sum(group.var(ddof=1) / group.size for group in groups))
    return Simulated(float(groups[0].mean() - groups[1].mean()), float(error))


def _share(share0: float) -> float:
    if not 0 < share0 < 1:
        raise InputError(f"the share of group 0 lies between 0 and 1; found {share0}")
    return share0
