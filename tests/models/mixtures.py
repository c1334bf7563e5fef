"""Assumption 1 of the DAM paper: groups as mixtures of normal distributions, with their gap exactly and simulated."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairhead.locate.assumption import Operation, folded_mean

Array = NDArray[np.float64]


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
            raise ValueError("a dimension that never varies cannot be normalised")
        mean0, mean1 = (1 - share0) * self._difference() / sd, -share0 * self._difference() / sd
        if operation == "norm":
            return mean0, mean1
        return folded_mean(mean0, np.asarray(self.sd0, float) / sd), folded_mean(
            mean1, np.asarray(self.sd1, float) / sd
        )

    def _difference(self) -> Array:
        return np.asarray(self.mean0, float) - np.asarray(self.mean1, float)


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
    q0, q1 = q.group_means(share0, operation)
    k0, k1 = k.group_means(share0, operation)
    by_dimension = np.atleast_1d(q0 * k0 - q1 * k1)
    return float(abs(by_dimension.sum()) / np.sqrt(by_dimension.size))


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
