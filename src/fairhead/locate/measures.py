"""Measures of heads beside the gap: how well a head tells the groups apart, and whether that meets the class evidence.

Each measure comes with its interval and a p-value corrected over all heads. Errors are those of influence functions
summed over independent clusters, so rows that share a cluster may depend on each other in any way.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fairhead.errors import InputError
from fairhead.locate.scores import FloatMap, check_cells

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Measure:
    """One figure a head, all maps [layers, heads].

    Attributes:
        name: what it is.
        value: the estimate.
        low: lower end of its interval.
        high: upper end.
        p: two-sided p-value of the value that means "nothing".
        p_adjusted: after Benjamini–Hochberg over all heads.
    """

    name: str
    value: FloatMap
    low: FloatMap
    high: FloatMap
    p: FloatMap
    p_adjusted: FloatMap

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        maps = ("value", "low", "high", "p", "p_adjusted")
        return {"name": self.name, **{key: getattr(self, key).tolist() for key in maps}}


@dataclass(frozen=True)
class Separation:
    """How well heads tell two groups of the same label apart: Cohen's d, and AUC (0.5: not at all)."""

    d: Measure
    auc: Measure


def separation(
    parts: NDArray[np.floating],
    groups: NDArray[np.integer],
    labels: NDArray[np.integer],
    *,
    clusters: NDArray[np.integer] | None = None,
    names: tuple[str, str] = ("1", "0"),
    level: float = 0.95,
) -> Separation:
    """Separate the groups by each head's part along a concept direction.

    Args:
        parts: each head's part along the direction, [n, layers, heads].
        groups: 1 for the first pole and 0 for the second, [n].
        labels: class numbers, [n]; groups are compared within each, all counting the same.
        clusters: rows with one number belong together, [n]; None if all rows are independent.
        names: of the groups, that of group 1 first.
        level: of the intervals.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> groups = np.arange(300) % 2
        >>> parts = rng.normal(size=(300, 1, 2)) + np.array([0.0, 1.0]) * groups[:, None, None]
        >>> found = separation(parts, groups, np.zeros(300, int))
        >>> found.auc.value.round(2).tolist(), (found.d.p_adjusted < 0.01).tolist()
        ([[0.45, 0.79]], [[False, True]])
    """
    cells = check_cells(groups, labels, names)
    x = np.asarray(parts, dtype=np.float64).reshape(len(parts), -1)
    unit, n_units = _units(clusters, len(x))
    # Cohen's d: the gap over the deviation within cells.
    weight = np.where(groups == 1, 1.0, -1.0) / (cells.counts[cells.cell] * cells.n_labels)
    centred = x - cells.means(x)[cells.cell]
    gap = weight @ x
    within = np.sqrt((centred**2).sum(0) / (len(x) - len(cells.counts)))
    silent = within == 0  # a head that writes nothing along the direction
    within[silent] = 1.0
    d = gap / within
    of_spread = ((centred / within) ** 2 - 1) / (2 * (len(x) - len(cells.counts)))
    d_error = _error(weight[:, None] * centred / within - d * of_spread, unit, n_units)
    # AUC, label by label.
    auc, influence = np.zeros(x.shape[1]), np.zeros_like(x)
    for label in range(cells.n_labels):
        first, second = (np.flatnonzero(cells.cell == 2 * label + group) for group in (1, 0))
        above = _share_below(x[first], x[second])  # [n1, heads]
        below = 1 - _share_below(x[second], x[first])
        area = above.mean(0)
        auc += area / cells.n_labels
        influence[first] = (above - area) / len(first) / cells.n_labels
        influence[second] = (below - area) / len(second) / cells.n_labels
    auc_error = _error(influence, unit, n_units)
    # Under "no difference" the error of the gap, not that of d, decides: d's own grows with d.
    gap_error = _error(weight[:, None] * centred, unit, n_units)
    shape = parts.shape[1:]
    return Separation(
        _measure("Cohen's d", d, d_error, gap, gap_error, n_units, level, shape),
        _measure("AUC", auc, auc_error, auc - 0.5, auc_error, n_units, level, shape, (0.0, 1.0)),
    )


def coupling(
    concept: NDArray[np.floating],
    evidence: NDArray[np.floating],
    labels: NDArray[np.integer],
    *,
    clusters: NDArray[np.integer] | None = None,
    level: float = 0.95,
) -> Measure:
    """Correlation, given the label, of a head's part along the concept with its part in the class evidence.

    Args:
        concept: parts along the concept, [n, layers, heads].
        evidence: parts in the class evidence, [n, layers, heads].
        labels: class numbers, [n].
        clusters: as in `separation`.
        level: of the intervals.

    Example:
        >>> x = np.random.default_rng(0).normal(size=(200, 1, 1))
        >>> coupling(x, -2 * x, np.zeros(200, int)).value.round(6).tolist()
        [[-1.0]]
    """
    n = len(concept)
    unit, n_units = _units(clusters, n)
    label = np.unique(labels, return_inverse=True)[1]
    a, b = (_standardised(np.asarray(x, dtype=np.float64).reshape(n, -1), label) for x in (concept, evidence))
    r = np.clip((a * b).mean(0), -1, 1)
    error = _error((a * b - r * (a**2 + b**2) / 2) / n, unit, n_units)
    # Fisher's z keeps the interval inside −1 and 1.
    inside = np.clip(r, -1 + 1e-12, 1 - 1e-12)
    reach = stats.t.ppf(0.5 + level / 2, n_units - 1) * error / (1 - inside**2)
    low, high = np.tanh(np.arctanh(inside) - reach), np.tanh(np.arctanh(inside) + reach)
    null = _error(a * b / n, unit, n_units)
    found = _measure("coupling", r, error, r, null, n_units, level, concept.shape[1:])
    shape = concept.shape[1:]
    return Measure("coupling", found.value, low.reshape(shape), high.reshape(shape), found.p, found.p_adjusted)


def _measure(
    name: str,
    value: Array,
    error: Array,
    distance: Array,
    null_error: Array,
    n_units: int,
    level: float,
    shape: tuple[int, ...],
    limits: tuple[float, float] = (-np.inf, np.inf),
) -> Measure:
    reach = stats.t.ppf(0.5 + level / 2, n_units - 1) * error
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(null_error > 0, np.abs(distance) / null_error, np.where(distance == 0, 0.0, np.inf))
    p = 2 * stats.t.sf(t, n_units - 1)
    return Measure(
        name,
        value.reshape(shape),
        np.maximum(value - reach, limits[0]).reshape(shape),
        np.minimum(value + reach, limits[1]).reshape(shape),
        p.reshape(shape),
        stats.false_discovery_control(p).reshape(shape),
    )


def _units(clusters: NDArray[np.integer] | None, n: int) -> tuple[NDArray[np.intp], int]:
    unit = np.arange(n) if clusters is None else np.unique(clusters, return_inverse=True)[1]
    n_units = int(unit.max()) + 1
    if n_units < 2:
        raise InputError("all rows belong to one cluster; at least two are needed to say how sure a figure is")
    return unit, n_units


def _error(influence: Array, unit: NDArray[np.intp], n_units: int) -> Array:
    """Standard error of a sum of influences [n, k] whose rows are independent between units: [k]."""
    if n_units < len(influence):
        summed = np.zeros((n_units, influence.shape[1]))
        np.add.at(summed, unit, influence)
        influence = summed
    return np.asarray(np.sqrt((influence**2).sum(0) * n_units / (n_units - 1)))


def _share_below(x: Array, others: Array) -> Array:
    """For each x [n, k], the share of others [m, k] of its column that are smaller; equal ones count half: [n, k]."""
    both = np.concatenate([x, others])
    overall = stats.rankdata(both, axis=0)[: len(x)]
    return (overall - stats.rankdata(x, axis=0)) / len(others)


def _standardised(x: Array, label: NDArray[np.intp]) -> Array:
    counts = np.bincount(label)
    one_hot = np.eye(len(counts))[label]
    x = x - (one_hot.T @ x / counts[:, None])[label]
    deviation = x.std(0)
    return x / np.where(deviation > 0, deviation, 1.0)
