"""Predicted numbers: errors by group, from sums of a few powers over rows, and the same sums of rows drawn again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.rates import Kind, Tables, small_groups
from fairhead.stats.bootstrap import Content, Sample
from fairhead.stats.clusters import divide

Array = NDArray[np.float64]

# From so many rows on, sums are as good as normal, and drawn as such: row by row would take minutes.
_MANY = 20_000
_POWERS = 6


class Moments(NamedTuple):
    """Sums over the rows of each group, each [..., 1, G]; e is predicted minus true."""

    total: Array
    error: Array  # of e
    size: Array  # of |e|
    square: Array  # of e²
    true: Array  # of the true number
    true_square: Array  # of its square

    @classmethod
    def of(cls, sums: Array) -> "Moments":
        """From sums [..., G, 6]."""
        return cls(*np.moveaxis(sums, -1, 0)[..., None, :])

    def mean_error(self) -> Array:
        """Mean of predicted minus true."""
        return divide(self.error, self.total)

    def mae(self) -> Array:
        """Mean absolute error."""
        return divide(self.size, self.total)

    def rmse(self) -> Array:
        """Square root of the mean squared error."""
        return np.sqrt(np.maximum(divide(self.square, self.total), 0.0))

    def r2(self) -> Array:
        """1 − squared errors over squared distances from the group's own mean."""
        return 1 - divide(self.square, self.true_square - divide(self.true**2, self.total))


NUMBER_RATES = {
    "mean_error": Kind(Moments.mean_error, lambda m: m.total, "rows", "none"),
    "MAE": Kind(Moments.mae, lambda m: m.total, "rows", "none"),
    "RMSE": Kind(Moments.rmse, lambda m: m.total, "rows", "none"),
    "R2": Kind(Moments.r2, lambda m: m.total, "rows", "none"),
}


@dataclass(frozen=True)
class NumberTables(Tables):
    """Sums of one group column, and their replicates, where numbers are predicted.

    `counts`, `star` and `rows` are those of a single class: how many rows there are.
    """

    sums: Array = field(default_factory=lambda: np.zeros((0, _POWERS)))  # shape [G, 6]
    sums_star: Array = field(default_factory=lambda: np.zeros((0, 0, _POWERS)))  # shape [B, G, 6]

    @cached_property
    def _margins(self) -> tuple[Moments, Moments]:
        return Moments.of(self.sums), Moments.of(self.sums_star)

    @cached_property
    def _row_margins(self) -> Moments:
        return Moments(*(self.rows.sum(axis=(-1, -2))[None] for _ in range(_POWERS)))


class NumberSample:
    """Rows with true and predicted numbers, of one or two sets of predictions, to be drawn again and to be swapped."""

    def __init__(
        self,
        numbers: Sequence[Array],  # true and predicted ones, each [n, 2]; the true ones are the same
        group: NDArray[np.integer],  # codes, shape [n]
        groups: tuple[str, ...],  # their names
        weight: Array | None,  # shape [n]
        cluster: NDArray[np.integer] | None,  # shape [n]
    ) -> None:
        # The distance of a mean from the true numbers' mean is what R² needs: shifted, squares lose no digits.
        self._powers = [_powers(of, weight) for of in numbers]
        self._group, self._groups = group, groups
        self._unit = None if cluster is None else np.unique(cluster, return_inverse=True)[1]
        self._rows = np.bincount(group, minlength=len(groups))

    def bootstrap(self, n_boot: int, seed: int, clusters: NDArray[np.int64] | None, small: float) -> list[NumberTables]:
        """Tables, one for each set, with sums of rows drawn with replacement within each group, or of clusters."""
        star = self._drawn(np.hstack(self._powers), n_boot, np.random.default_rng(seed), swaps=False)
        stars = np.split(star, len(self._powers), axis=-1)
        return [self._table(*of, clusters, small) for of in zip(self._sums(), stars, strict=True)]

    def swapped(self, n_perm: int, seed: int, clusters: NDArray[np.int64] | None, small: float) -> list[NumberTables]:
        """Both tables, with sums after swapping the two predictions of each row, or cluster, with probability ½."""
        (one, other), (first, second) = self._sums(), self._powers
        moved = self._drawn(second - first, n_perm, np.random.default_rng(seed), swaps=True)
        return [self._table(one, one + moved, clusters, small), self._table(other, other - moved, clusters, small)]

    def _sums(self) -> list[Array]:
        n_groups = len(self._groups)
        return [np.stack([np.bincount(self._group, p, n_groups) for p in of.T], axis=-1) for of in self._powers]

    def _table(self, sums: Array, star: Array, clusters: NDArray[np.int64] | None, small: float) -> NumberTables:
        one_class = self._rows[:, None, None]
        rows = np.broadcast_to(one_class.astype(np.float64), (len(star), len(self._groups), 1, 1))
        left_out = small_groups(self._rows, small)
        return NumberTables(
            self._groups,
            ("a number",),
            one_class.astype(np.float64),
            rows,
            one_class,
            True,
            clusters,
            left_out,
            NUMBER_RATES,
            sums,
            star,
        )

    def _drawn(self, values: Array, size: int, rng: np.random.Generator, swaps: bool) -> Array:
        """Sums [size, G, K] of values [n, K] over rows drawn with replacement, or over rows that a coin picks."""
        k, n_groups = values.shape[1], len(self._groups)
        if self._unit is not None:
            cells = self._group[:, None] * k + np.arange(k)
            shape = np.zeros((n_groups, k), dtype=np.int64)
            content = Content(np.repeat(self._unit, k), cells.ravel(), values.ravel(), shape)
            units = int(self._unit.max()) + 1
            if not swaps:
                return Sample(np.ones(units, dtype=np.int64), (content,)).bootstrap(size, rng)[0]
            blocks = np.array_split(np.arange(size), max(1, size * units >> 22))
            return np.concatenate([content.total(_coins(rng, units, len(b)).astype(np.float64)) for b in blocks])
        found = np.zeros((size, n_groups, k))
        for g, n in enumerate(self._rows.tolist()):
            own = values[self._group == g]
            if n > _MANY:
                # The covariance of a sum of n rows is n times that of a row; of one over coins, a quarter of Σ v vᵀ.
                mean, spread = (own.sum(axis=0) / 2, own.T @ own / 4) if swaps else _of_sums(own)
                of_axis, axes = np.linalg.eigh(spread)  # it may be singular
                root = axes * np.sqrt(np.maximum(of_axis, 0.0))
                found[:, g] = mean + rng.standard_normal((size, k)) @ root.T
            elif n:
                for block in np.array_split(np.arange(size), max(1, size * n >> 22)):
                    drawn = _coins(rng, len(block), n) if swaps else rng.multinomial(n, np.full(n, 1 / n), len(block))
                    found[block, g] = drawn @ own
        return found


def _powers(numbers: Array, weight: Array | None) -> Array:
    true, error = numbers[:, 0] - numbers[:, 0].mean(), numbers[:, 1] - numbers[:, 0]
    powers = np.stack([np.ones_like(true), error, np.abs(error), error**2, true, true**2], axis=-1)
    return powers if weight is None else powers * weight[:, None]


def _of_sums(own: Array) -> tuple[Array, Array]:
    return own.sum(axis=0), len(own) * np.cov(own.T, bias=True)


def _coins(rng: np.random.Generator, *shape: int) -> NDArray[np.int8]:
    return rng.integers(2, size=shape, dtype=np.int8)
