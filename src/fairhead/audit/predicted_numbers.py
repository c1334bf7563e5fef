"""Predicted numbers: errors by group, from sums of a few powers over rows, and the same sums of rows drawn again."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.rates import Kind, Tables
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


def number_tables(
    numbers: Array,
    group: NDArray[np.integer],
    groups: tuple[str, ...],
    weight: Array | None,
    cluster: NDArray[np.integer] | None,
    n_boot: int,
    seed: int,
    clusters: NDArray[np.int64] | None,
) -> NumberTables:
    """The sums of groups, from true and predicted numbers [n, 2] and group codes [n]."""
    true, error = numbers[:, 0] - numbers[:, 0].mean(), numbers[:, 1] - numbers[:, 0]
    powers = np.stack([np.ones_like(true), error, np.abs(error), error**2, true, true**2], axis=-1)
    powers *= 1.0 if weight is None else weight[:, None]
    rows = np.bincount(group, minlength=len(groups))
    # The distance of a mean from the true numbers' mean is what R² needs: shifted, squares lose no digits.
    sums = np.stack([np.bincount(group, column, len(groups)) for column in powers.T], axis=-1).astype(np.float64)
    star = _replicates(powers, group, rows, cluster, n_boot, np.random.default_rng(seed))
    one_class = rows[:, None, None]
    return NumberTables(
        groups,
        ("a number",),
        one_class.astype(np.float64),
        np.broadcast_to(one_class.astype(np.float64), (n_boot, len(groups), 1, 1)),
        one_class,
        settled=True,
        clusters=clusters,
        kinds=NUMBER_RATES,
        sums=sums,
        sums_star=star,
    )


def _replicates(
    powers: Array,
    group: NDArray[np.integer],
    rows: NDArray[np.int64],
    cluster: NDArray[np.integer] | None,
    n_boot: int,
    rng: np.random.Generator,
) -> Array:
    """Sums [B, G, 6] of rows drawn with replacement within each group, or of clusters."""
    if cluster is not None:
        units, unit = np.unique(cluster, return_inverse=True)
        cells = group[:, None] * _POWERS + np.arange(_POWERS)
        shape = np.zeros((len(rows), _POWERS), dtype=np.int64)
        content = Content(np.repeat(unit, _POWERS), cells.ravel(), powers.ravel(), shape)
        return Sample(np.ones(len(units), dtype=np.int64), (content,)).bootstrap(n_boot, rng)[0]
    star = np.zeros((n_boot, len(rows), _POWERS))
    for g, n in enumerate(rows.tolist()):
        own = powers[group == g]
        if n > _MANY:
            mean, spread = own.mean(axis=0), np.cov(own.T, bias=True)
            # Sums of n rows: their covariance is n times that of a row, which may be singular.
            values, axes = np.linalg.eigh(spread)
            root = axes * np.sqrt(np.maximum(values, 0.0) * n)
            star[:, g] = n * mean + rng.standard_normal((n_boot, _POWERS)) @ root.T
        elif n:
            for block in np.array_split(np.arange(n_boot), max(1, n_boot * n >> 22)):
                drawn = rng.multinomial(n, np.full(n, 1 / n), size=len(block))
                star[block, g] = drawn @ own
    return star
