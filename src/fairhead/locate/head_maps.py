"""Heads and maps of them: each head's part in a gap of two groups of the same label, or of the two texts of a pair.

A gap is a weighted sum over rows; its error is that of the sum over independent clusters, so rows that share a cluster
(one picture in two shades) may depend on each other in any way.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fairhead.errors import InputError
from fairhead.stats import ALPHA, adjust
from fairhead.stats.clusters import cluster_errors

FloatMap = NDArray[np.float64]
Clusters = NDArray[np.integer] | None


class Head(NamedTuple):
    """One attention head: layer and number, both from 0.

    Example:
        >>> Head(11, 4).layer
        11
    """

    layer: int
    head: int


@dataclass(frozen=True)
class HeadMap:
    """Layers × heads: each head's part in a gap, with its uncertainty.

    Attributes:
        gap: mean evidence of the first group minus the second's, given the label, in logits; or the mean log-odds of
            the first text of a pair against the second, in nats; [layers, heads].
        low: lower end of the interval of `gap`.
        high: upper end.
        p: two-sided p-value of `gap` = 0.
        p_adjusted: p after correction over all heads: Benjamini–Hochberg for groups, Holm for pairs.
        effect_size: `gap` over the deviation within group and label (Cohen's d).
        share: `gap` over the gap of the model's own evidence; the rest of 1 lies in MLPs and embeddings.
        total: the gap of the model's own evidence, in logits.
        groups: the two groups, first minus second.
        n: rows.
        clusters: independent units among them (pictures, people, documents).
        selected: heads chosen elsewhere, to be marked in this map.
        measure: what `gap` is, in words; by default the gap given the label.
        unit: of `gap`.
        total_low: lower end of the interval of `total`.
        total_high: upper end.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> evidence = rng.normal(size=(200, 2, 3)) + (np.arange(200) % 2)[:, None, None]
        >>> found = score_heads(evidence, evidence.sum((1, 2)), np.arange(200) % 2, np.zeros(200, int))
        >>> found.gap.shape, round(float(found.share.sum()), 6), found.has_total
        ((2, 3), 1.0, True)
    """

    gap: FloatMap
    low: FloatMap
    high: FloatMap
    p: FloatMap
    p_adjusted: FloatMap
    effect_size: FloatMap
    share: FloatMap
    total: float
    groups: tuple[str, str]
    n: int
    clusters: int
    selected: tuple[Head, ...] = field(default=())
    measure: str | None = None
    unit: str = "logits"
    total_low: float = float("nan")
    total_high: float = float("nan")

    @property
    def has_total(self) -> bool:
        """Whether the interval of the whole gap leaves 0 out; where it does not, shares of it mean little."""
        return self.total_low > 0 or self.total_high < 0

    def marking(self, selected: tuple[Head, ...]) -> "HeadMap":
        """The same map with heads marked that were chosen elsewhere, as on the other half of the rows."""
        return replace(self, selected=selected)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, which is also the data of a report's "headmap" section."""
        first, second = self.groups
        return {
            "measure": self.measure or f"evidence gap given the label, {first} minus {second}",
            "unit": self.unit,
            "values": self.gap.tolist(),
            "low": self.low.tolist(),
            "high": self.high.tolist(),
            "p_adjusted": self.p_adjusted.tolist(),
            "effect_size": self.effect_size.tolist(),
            "share": self.share.tolist(),
            "total": self.total,
            "total_low": self.total_low,
            "total_high": self.total_high,
            "n": self.n,
            "clusters": self.clusters,
            "selected": [list(head) for head in self.selected],
        }


class Cells(NamedTuple):
    """Rows by label and group: cell 2 · label + group of each row, [n], and rows in each, [2 · labels]."""

    cell: NDArray[np.intp]
    counts: NDArray[np.intp]

    @property
    def n_labels(self) -> int:
        """Labels that occur."""
        return len(self.counts) // 2

    @property
    def weight(self) -> FloatMap:
        """Each row's weight in a gap, [n]: groups have opposite signs, labels count the same."""
        return np.where(self.cell % 2 == 1, 1.0, -1.0) / (self.counts[self.cell] * self.n_labels)

    def centred(self, x: FloatMap) -> FloatMap:
        """Rows x [n, k] less the mean of their cell."""
        one_hot = np.eye(len(self.counts))[self.cell]
        return x - np.asarray(one_hot.T @ x / self.counts[:, None])[self.cell]

    def within(self, centred: FloatMap) -> FloatMap:
        """Standard deviation within cells, [k]."""
        return np.asarray(np.sqrt((centred**2).sum(0) / (len(centred) - len(self.counts))))


def check_cells(groups: NDArray[np.integer], labels: NDArray[np.integer], names: tuple[str, str]) -> Cells:
    """Number the cells; both groups must have rows of every label.

    Raises:
        InputError: a group has no rows of some label, or there are not two groups.
    """
    if not np.isin(groups, (0, 1)).all():
        raise InputError(f"expected two groups, coded 0 and 1; found {np.unique(groups).tolist()}")
    levels, label = np.unique(labels, return_inverse=True)
    cell = 2 * label + groups
    counts = np.bincount(cell, minlength=2 * len(levels))
    if (counts < 2).any():
        where = int(np.argmin(counts))
        raise InputError(
            f"{names[1 - where % 2]} has {counts[where]} rows with label {levels[where // 2]}; at least 2 are needed "
            "to compare the groups within a label: use more rows"
        )
    return Cells(cell, counts)


def score_heads(
    evidence: NDArray[np.floating],
    total: NDArray[np.floating],
    groups: NDArray[np.integer],
    labels: NDArray[np.integer],
    *,
    clusters: Clusters = None,
    names: tuple[str, str] = ("1", "0"),
    level: float = 0.95,
    measure: str | None = None,
) -> HeadMap:
    """Score each head by how far apart it puts two groups of the same label; Benjamini–Hochberg over the heads.

    Args:
        evidence: each head's part in the class evidence, [n, layers, heads].
        total: the model's own class evidence, [n].
        groups: 1 for the first group and 0 for the second, [n].
        labels: class numbers, [n]; every label counts the same.
        clusters: rows with one number belong together, [n]; None if all rows are independent.
        names: the two groups' names, that of group 1 first.
        level: of the intervals.
        measure: what the evidence is, in words; None for a head's own part.

    Raises:
        InputError: a group has no rows of some label, or there are not two groups.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> groups, labels = np.arange(200) % 2, np.arange(200) // 100
        >>> evidence = rng.normal(size=(200, 2, 3))
        >>> evidence[:, 1, 2] += 2 * groups          # one head sees the group
        >>> found = score_heads(evidence, evidence.sum((1, 2)), groups, labels)
        >>> np.argwhere(found.p_adjusted < 0.05).tolist()
        [[1, 2]]
    """
    cells = check_cells(groups, labels, names)
    flat = _flat(evidence, total)
    centred = cells.centred(flat)
    weight = cells.weight
    influence = weight[:, None] * centred
    shape = evidence.shape[1:]
    found = _head_map(weight @ flat, influence, cells.within(centred), clusters, shape, names, level)
    corrected = stats.false_discovery_control(found.p.ravel()).reshape(shape)
    return replace(found, p_adjusted=corrected, measure=measure)


def score_pairs(
    differences: NDArray[np.floating],
    total: NDArray[np.floating],
    *,
    weights: NDArray[np.floating] | None = None,
    clusters: Clusters = None,
    names: tuple[str, str] = ("first", "second"),
    level: float = 0.95,
    measure: str | None = None,
    unit: str = "nats",
) -> HeadMap:
    """Score each head by its mean part in a difference between the two members of n pairs; Holm over the heads.

    Parts are [n, layers, heads] of the whole difference, [n]; a pair counts as much as its weight. The other arguments
    are those of `score_heads`.

    Example:
        >>> parts = np.random.default_rng(0).normal(size=(200, 2, 3))
        >>> parts[:, 1, 2] += 1                      # one head always favours the first
        >>> found = score_pairs(parts, parts.sum((1, 2)))
        >>> np.argwhere(found.p_adjusted < 0.05).tolist()
        [[1, 2]]
    """
    n = len(differences)
    if n < 2:
        raise InputError(f"{n} pairs; at least 2 are needed to say how sure a mean is")
    flat = _flat(differences, total)
    weight = np.full(n, 1 / n) if weights is None else np.asarray(weights, dtype=np.float64) / np.sum(weights)
    gap = weight @ flat
    centred = flat - gap
    within = np.sqrt(weight @ centred**2 * n / (n - 1))
    found = _head_map(gap, weight[:, None] * centred, within, clusters, differences.shape[1:], names, level)
    corrected = np.array(adjust(found.p.ravel().tolist(), "holm"), dtype=np.float64).reshape(found.p.shape)
    return replace(found, p_adjusted=corrected, measure=measure, unit=unit)


def _flat(parts: NDArray[np.floating], total: NDArray[np.floating]) -> FloatMap:
    """Parts [n, layers, heads] and the whole [n] side by side, [n, heads + 1]."""
    return np.concatenate([parts.reshape(len(parts), -1), total[:, None]], axis=1).astype(np.float64)


def _head_map(
    gap: FloatMap,
    influence: FloatMap,
    within: FloatMap,
    clusters: Clusters,
    shape: tuple[int, ...],
    names: tuple[str, str],
    level: float,
) -> HeadMap:
    """A map from gaps [heads + 1] (the whole's last) and each row's part in their error [n, heads + 1]."""
    errors = cluster_errors(influence, clusters)
    # A head that is constant within every cell has no error: its gap is certain, or there is none.
    p, reach = errors.p_values(gap)[:-1].reshape(shape), errors.reach(level)
    with np.errstate(divide="ignore", invalid="ignore"):
        effect_size = np.where(within > 0, gap / within, 0.0)

    def as_map(x: FloatMap) -> FloatMap:
        return x[:-1].reshape(shape)

    return HeadMap(
        gap=as_map(gap),
        low=as_map(gap - reach),
        high=as_map(gap + reach),
        p=p,
        p_adjusted=p,
        effect_size=as_map(effect_size),
        share=as_map(gap / gap[-1]) if gap[-1] else np.zeros(shape),
        total=float(gap[-1]),
        groups=names,
        n=len(influence),
        clusters=errors.clusters,
        total_low=float(gap[-1] - reach[-1]),
        total_high=float(gap[-1] + reach[-1]),
    )


def top_heads(
    rank: FloatMap, p_adjusted: FloatMap, count: int, alpha: float = ALPHA, per_layer: int | None = None
) -> tuple[Head, ...]:
    """The heads with the largest positive rank [layers, heads] among those that are significant, best first.

    There are `count` at most, and so many of one layer.

    Example:
        >>> top_heads(np.array([[3.0, 1.0], [2.0, 5.0]]), np.array([[0.01, 0.01], [0.01, 0.5]]), count=2)
        (Head(layer=0, head=0), Head(layer=1, head=0))
    """
    chosen: list[Head] = []
    for index in np.argsort(-rank, axis=None, kind="stable"):
        head = Head(*(int(i) for i in np.unravel_index(index, rank.shape)))
        if len(chosen) == count or rank[head] <= 0:
            break
        in_layer = sum(other.layer == head.layer for other in chosen)
        if p_adjusted[head] <= alpha and (per_layer is None or in_layer < per_layer):
            chosen.append(head)
    return tuple(chosen)
