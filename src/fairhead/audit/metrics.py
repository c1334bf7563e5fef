"""Rates and gaps as plain functions of counts.

Counts have the shape [..., G, C, C]: group, true class, predicted class; leading axes (bootstrap replicates) pass
through. Rates come back as [..., C, G], one class against the rest and groups last; an empty denominator gives NaN,
which the functions that compare groups leave out. For a binary task take class 1: `rates[..., 1, :]`.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.stats.clusters import divide

Array = NDArray[np.float64]


def _classes_first(counts: Array) -> Array:
    return counts.swapaxes(-1, -2)


class Margins(NamedTuple):
    """What all rates are quotients of, each [..., C, G] but for the last.

    Example:
        >>> margins = Margins.of(np.array([[[3, 1], [0, 4]], [[1, 1], [1, 1]]]))
        >>> margins.selection_rate()[1].tolist(), margins.true_positive_rate()[1].tolist()
        ([0.625, 0.5], [1.0, 0.5])
        >>> margins.precision()[1].tolist(), margins.accuracy().tolist()
        ([0.8, 0.5], [[0.875, 0.5]])
    """

    true: Array  # rows of each class
    predicted: Array  # rows predicted to be of each class
    hits: Array  # rows that are both
    total: Array  # all rows of a group, shape [..., 1, G]

    @classmethod
    def of(cls, counts: Array) -> "Margins":
        """From counts [..., G, C, C]."""
        true = _classes_first(counts.sum(axis=-1))
        predicted = _classes_first(counts.sum(axis=-2))
        return cls(true, predicted, _classes_first(_hits(counts)), true.sum(axis=-2, keepdims=True))

    def of_classes(self, classes: slice) -> "Margins":
        """Some of the classes, each against all others."""
        true, predicted, hits = (part[..., classes, :] for part in self[:3])
        return Margins(true, predicted, hits, self.total)

    def base_rate(self) -> Array:
        """P(y = c | g)."""
        return divide(self.true, self.total)

    def selection_rate(self) -> Array:
        """P(ŷ = c | g)."""
        return divide(self.predicted, self.total)

    def true_positive_rate(self) -> Array:
        """P(ŷ = c | y = c, g)."""
        return divide(self.hits, self.true)

    def false_positive_rate(self) -> Array:
        """P(ŷ = c | y ≠ c, g)."""
        return divide(self.predicted - self.hits, self.total - self.true)

    def precision(self) -> Array:
        """P(y = c | ŷ = c, g)."""
        return divide(self.hits, self.predicted)

    def negative_predictive_value(self) -> Array:
        """P(y ≠ c | ŷ ≠ c, g)."""
        others = self.total - self.predicted
        return divide(others - (self.true - self.hits), others)

    def accuracy(self) -> Array:
        """P(ŷ = y | g), shape [..., 1, G], of the margins of all classes."""
        return divide(self.hits.sum(axis=-2, keepdims=True), self.total)


def spread(rates: Array) -> Array:
    """Largest minus smallest over groups, [..., G] to [...]; NaN with fewer than one defined group."""
    return np.fmax.reduce(rates, axis=-1) - np.fmin.reduce(rates, axis=-1)


def mean_pairwise(rates: Array) -> Array:
    """Mean absolute difference over all pairs of groups that have the rate, [..., G] to [...].

    Example:
        >>> mean_pairwise(np.array([0.1, 0.4, np.nan, 0.2])).round(3).item()  # 0.3, 0.1 and 0.2
        0.2
    """
    ranked, n = np.sort(rates, axis=-1), (~np.isnan(rates)).sum(axis=-1)[..., None]  # NaN comes last
    sign = 2.0 * np.arange(rates.shape[-1]) - n + 1  # above how many more than below
    return divide(2 * np.nansum(ranked * sign, axis=-1), (n * (n - 1.0))[..., 0])


def ratio(rates: Array) -> Array:
    """Smallest over largest over groups, [..., G] to [...]; 1 is even, and below 0.8 fails the four-fifths rule."""
    return divide(np.fmin.reduce(rates, axis=-1), np.fmax.reduce(rates, axis=-1))


def pooled(counts: Array) -> Array:
    """All groups as one: [..., G, C, C] to [..., 1, C, C]."""
    return counts.sum(axis=-3, keepdims=True)


def association(table: Array) -> Array:
    """Scaled deviations from independence of a table [..., G, C], as [..., C, G]: their squares sum to χ²/n."""
    of_row, of_column = table.sum(axis=-1, keepdims=True), table.sum(axis=-2, keepdims=True)
    product = of_row * of_column
    deviation = table - divide(product, of_row.sum(axis=-2, keepdims=True))
    if np.min(product, initial=1.0) > 0:
        deviation /= np.sqrt(product)
    else:
        deviation = np.where(product > 0, deviation / np.sqrt(np.where(product > 0, product, 1)), 0.0)
    return _classes_first(deviation)


def cramers_v(table: Array) -> Array:
    """Cramér's V of a table [..., G, C]: 0 is independence, 1 full association. Empty rows and columns do not count."""
    return length(association(table), table)


def length(deviation: Array, table: Array) -> Array:
    """Cramér's V from deviations [..., C, G] of a table [..., G, C], as `association` has them."""
    rows, columns = _filled(table)
    return np.sqrt(divide((deviation**2).sum(axis=(-1, -2)), np.minimum(rows, columns) - 1.0))


def cramers_v_corrected(table: Array, n: Array | float | None = None) -> Array:
    """Bergsma's bias-corrected V of counts [..., G, C]: 0 on average without association, unlike the plain V.

    Give the rows n behind the table where the counts are weighted.
    """
    rows, columns = _filled(table)
    size = table.sum(axis=(-1, -2)) if n is None else np.asarray(n, dtype=np.float64)
    phi2 = (association(table) ** 2).sum(axis=(-1, -2))
    phi2 = np.maximum(0.0, phi2 - (rows - 1) * (columns - 1) / (size - 1))
    rows = rows - (rows - 1) ** 2 / (size - 1)
    columns = columns - (columns - 1) ** 2 / (size - 1)
    return np.sqrt(divide(phi2, np.minimum(rows, columns) - 1))


def association_value(name: str, counts: Array, n: int) -> Array:
    """The metric itself: counts [..., G, C, C] of n rows to [...].

    Example:
        >>> association_value("cramers_v_excess", np.ones((2, 2, 2)), 8).item()
        0.0
    """
    by_prediction = counts.sum(axis=-2)
    if name == "cramers_v":
        return cramers_v(by_prediction)
    if name == "cramers_v_corrected":
        return cramers_v_corrected(by_prediction, n)
    return cramers_v(by_prediction) - cramers_v(counts.sum(axis=-1))


def _filled(table: Array) -> tuple[Array, Array]:
    rows = (table.sum(axis=-1) > 0).sum(axis=-1)
    columns = (table.sum(axis=-2) > 0).sum(axis=-1)
    return rows.astype(np.float64), columns.astype(np.float64)


def _hits(counts: Array) -> Array:
    return np.diagonal(counts, axis1=-2, axis2=-1)
