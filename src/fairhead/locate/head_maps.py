"""Heads and maps of them: each head's part in a gap of two groups of the same label, or of the two texts of a pair.

A gap is a weighted sum over rows; its error is that of the sum over independent clusters, so rows that share a cluster
(one picture in two shades) may depend on each other in any way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fairhead.errors import InputError
from fairhead.stats import ALPHA, adjust
from fairhead.stats.clusters import ClusterErrors, cluster_errors

FloatMap = NDArray[np.float64]
Clusters = NDArray[np.integer] | None


class Head(NamedTuple):
    """One attention head: layer and number, both from 0."""

    layer: int
    head: int


@dataclass(frozen=True)
class HeadMap:
    """Layers × heads: each head's part in a gap, with its uncertainty."""

    # Mean evidence of the first group minus the second's, given the label, in logits; or the mean log-odds of the first
    # text of a pair against the second, in nats; [layers, heads]
    gap: FloatMap
    low: FloatMap  # lower end of the interval of `gap`
    high: FloatMap  # upper end
    p: FloatMap  # two-sided p-value of `gap` = 0
    p_adjusted: FloatMap  # p after correction over all heads: Benjamini–Hochberg for groups, Holm for pairs
    effect_size: FloatMap  # `gap` over the deviation within group and label (Cohen's d)
    share: FloatMap  # `gap` over the gap of the model's own evidence; the rest of 1 lies in MLPs and embeddings
    total: float  # the gap of the model's own evidence, in logits
    groups: tuple[str, str]  # the two groups, first minus second
    n: int  # rows
    clusters: int  # independent units among them (pictures, people, documents)
    selected: tuple[Head, ...] = ()  # heads chosen elsewhere, to be marked in this map
    measure: str | None = None  # what `gap` is, in words; by default the gap given the label
    unit: str = "logits"  # of `gap`
    total_low: float = float("nan")  # lower end of the interval of `total`
    total_high: float = float("nan")  # upper end

    @property
    def has_total(self) -> bool:
        """Whether the interval of the whole gap leaves 0 out; where it does not, shares of it mean little."""
        return self.total_low > 0 or self.total_high < 0

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, which is also the data of a report's "headmap" section."""
        first, second = self.groups
        return {
            "measure": self.measure or f"evidence gap given the label, {first} minus {second}",
            "unit": self.unit,
            "values": self.gap.tolist(),
            **{name: getattr(self, name).tolist() for name in ("low", "high", "p_adjusted", "effect_size", "share")},
            **{name: getattr(self, name) for name in ("total", "total_low", "total_high", "n", "clusters")},
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


def check_cells(
    groups: NDArray[np.integer],
    labels: NDArray[np.integer],
    names: tuple[str, str] = ("1", "0"),
    classes: Sequence[str] = (),
    least: int = 2,
) -> Cells:
    """Number the cells; both groups must have rows of every class, at least so many.

    Groups are 0 and 1, that of 1 named first; `classes` are named in errors.
    """
    if not np.isin(groups, (0, 1)).all():
        raise InputError(f"expected two groups, coded 0 and 1; found {np.unique(groups).tolist()}")
    levels, label = np.unique(labels, return_inverse=True)
    cell = 2 * label + groups
    counts = np.bincount(cell, minlength=2 * len(levels))
    if (counts < least).any():
        where = int(np.argmin(counts))
        group, few = names[1 - where % 2], "1 row" if counts[where] == 1 else f"{counts[where]} rows"
        number = int(levels[where // 2])
        raise InputError(
            f"the group {group!r} has {few} of the class {classes[number] if classes else number!r}; at least {least} "
            "are needed to compare groups within a class: use more rows"
        )
    return Cells(cell, counts)


def score_heads(
    evidence: NDArray[np.floating],  # each head's part in the class evidence, [n, layers, heads]
    total: NDArray[np.floating],  # the model's own class evidence, [n]
    groups: NDArray[np.integer],  # 1 for the first group and 0 for the second, [n]
    labels: NDArray[np.integer],  # class numbers, [n]; every label counts the same
    *,
    clusters: Clusters = None,  # rows with one number belong together, [n]; None if all rows are independent
    names: tuple[str, str] = ("1", "0"),  # the two groups' names, that of group 1 first
    classes: Sequence[str] = (),  # names of the classes
    level: float = 0.95,  # of the intervals
    measure: str | None = None,  # what the evidence is, in words; None for a head's own part
) -> HeadMap:
    """Score each head by how far apart it puts two groups of the same label; Benjamini–Hochberg over the heads."""
    cells = check_cells(groups, labels, names, classes)
    flat = _flat(evidence, total)
    weight, centred = cells.weight, cells.centred(flat)
    errors = cluster_errors(weight[:, None] * centred, clusters, cells.cell)
    found = _head_map(weight @ flat, errors, cells.within(centred), len(flat), evidence.shape[1:], names, level)
    corrected = stats.false_discovery_control(found.p.ravel()).reshape(found.p.shape)
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
    """
    n = len(differences)
    if n < 2:
        raise InputError(f"{n} pairs; at least 2 are needed to say how sure a mean is")
    flat = _flat(differences, total)
    weight = np.full(n, 1 / n) if weights is None else np.asarray(weights, dtype=np.float64) / np.sum(weights)
    gap = weight @ flat
    centred = flat - gap
    within = np.sqrt(weight @ centred**2 * n / (n - 1))
    errors = cluster_errors(weight[:, None] * centred, clusters)
    found = _head_map(gap, errors, within, n, differences.shape[1:], names, level)
    corrected = np.array(adjust(found.p.ravel().tolist(), "holm"), dtype=np.float64).reshape(found.p.shape)
    return replace(found, p_adjusted=corrected, measure=measure, unit=unit)


def _flat(parts: NDArray[np.floating], total: NDArray[np.floating]) -> FloatMap:
    """Parts [n, layers, heads] and the whole [n] side by side, [n, heads + 1]."""
    return np.concatenate([parts.reshape(len(parts), -1), total[:, None]], axis=1).astype(np.float64)


def _head_map(
    gap: FloatMap,
    errors: ClusterErrors,
    within: FloatMap,
    n: int,
    shape: tuple[int, ...],
    names: tuple[str, str],
    level: float,
) -> HeadMap:
    """A map from gaps [heads + 1] (the whole's last) and their errors."""
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
        n=n,
        clusters=errors.clusters,
        total_low=float(gap[-1] - reach[-1]),
        total_high=float(gap[-1] + reach[-1]),
    )


def largest_first(rank: FloatMap) -> list[Head]:
    """All heads by their rank [layers, heads], the largest first."""
    order = np.argsort(-rank, axis=None, kind="stable")
    return [Head(int(layer), int(head)) for layer, head in zip(*np.unravel_index(order, rank.shape), strict=True)]


def mask_of(heads: Sequence[tuple[int, int]], shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Which heads these are, [layers, heads]."""
    found = np.zeros(shape, dtype=bool)
    for head in heads:
        found[tuple(head)] = True
    return found


def top_heads(
    rank: FloatMap, p_adjusted: FloatMap, count: int, alpha: float = ALPHA, per_layer: int | None = None
) -> tuple[Head, ...]:
    """The heads with the largest positive rank [layers, heads] among those that are significant, best first.

    There are `count` at most, and so many of one layer.
    """
    chosen: list[Head] = []
    for head in largest_first(rank):
        if len(chosen) == count or rank[head] <= 0:
            break
        in_layer = sum(other.layer == head.layer for other in chosen)
        if p_adjusted[head] <= alpha and (per_layer is None or in_layer < per_layer):
            chosen.append(head)
    return tuple(chosen)


@dataclass(frozen=True)
class Measure:
    """Another figure of each head, all maps [layers, heads]."""

    name: str  # what it is
    value: FloatMap  # the estimate
    low: FloatMap  # lower end of its interval
    high: FloatMap  # upper end
    p: FloatMap  # two-sided p-value of the value that means "nothing"
    p_adjusted: FloatMap  # after Benjamini–Hochberg over all heads

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        maps = ("value", "low", "high", "p", "p_adjusted")
        return {"name": self.name, **{key: getattr(self, key).tolist() for key in maps}}


class Separation(NamedTuple):
    """How well heads separate two groups of the same label: Cohen's d, and AUC (0.5: not at all)."""

    d: Measure
    auc: Measure


def separation(
    parts: NDArray[np.floating],
    groups: NDArray[np.integer],
    labels: NDArray[np.integer],
    *,
    clusters: Clusters = None,
    names: tuple[str, str] = ("1", "0"),
    classes: Sequence[str] = (),
    level: float = 0.95,
) -> Separation:
    """Separate the groups by each head's part along a concept direction, [n, layers, heads]; else as `score_heads`."""
    cells = check_cells(groups, labels, names, classes)
    x = np.asarray(parts, dtype=np.float64).reshape(len(parts), -1)
    # Cohen's d: the gap over the deviation within cells.
    weight, centred = cells.weight, cells.centred(x)
    gap, within = weight @ x, cells.within(centred)
    within[within == 0] = 1.0  # a head that writes nothing along the direction
    d = gap / within
    of_spread = ((centred / within) ** 2 - 1) / (2 * (len(x) - len(cells.counts)))
    d_errors = cluster_errors(weight[:, None] * centred / within - d * of_spread, clusters, cells.cell)
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
    auc_errors = cluster_errors(influence, clusters, cells.cell)
    # Under "no difference" the error of the gap, not that of d, decides: d's own grows with d.
    d_p = cluster_errors(weight[:, None] * centred, clusters, cells.cell).p_values(gap)
    d_reach, auc_reach = d_errors.reach(level), auc_errors.reach(level)
    shape = parts.shape[1:]
    limits = np.maximum(auc - auc_reach, 0.0), np.minimum(auc + auc_reach, 1.0)
    return Separation(
        _measure("Cohen's d", d, d - d_reach, d + d_reach, d_p, shape),
        _measure("AUC", auc, *limits, auc_errors.p_values(auc - 0.5), shape),
    )


def coupling(
    concept: NDArray[np.floating],
    evidence: NDArray[np.floating],
    labels: NDArray[np.integer],
    *,
    clusters: Clusters = None,
    level: float = 0.95,
) -> Measure:
    """Correlation, given the label, of a head's part along the concept with its part in the evidence.

    Both are [n, layers, heads]; the other arguments are those of `score_heads`.
    """
    n = len(concept)
    label = np.unique(labels, return_inverse=True)[1]
    a, b = (_standardised(np.asarray(x, dtype=np.float64).reshape(n, -1), label) for x in (concept, evidence))
    r = np.clip((a * b).mean(0), -1, 1)
    errors = cluster_errors((a * b - r * (a**2 + b**2) / 2) / n, clusters)
    # Fisher's z keeps the interval inside −1 and 1.
    inside = np.clip(r, -1 + 1e-12, 1 - 1e-12)
    reach = errors.reach(level) / (1 - inside**2)
    low, high = np.tanh(np.arctanh(inside) - reach), np.tanh(np.arctanh(inside) + reach)
    p = cluster_errors(a * b / n, clusters).p_values(r)
    return _measure("coupling", r, low, high, p, concept.shape[1:])


def _measure(name: str, value: FloatMap, low: FloatMap, high: FloatMap, p: FloatMap, shape: tuple[int, ...]) -> Measure:
    maps = (value, low, high, p, stats.false_discovery_control(p))
    return Measure(name, *(x.reshape(shape) for x in maps))


def _share_below(x: FloatMap, others: FloatMap) -> FloatMap:
    """For each x [n, k], the share of others [m, k] of its column that are smaller; equal ones count half: [n, k]."""
    both = np.concatenate([x, others])
    overall = stats.rankdata(both, axis=0)[: len(x)]
    return np.asarray((overall - stats.rankdata(x, axis=0)) / len(others))


def _standardised(x: FloatMap, label: NDArray[np.intp]) -> FloatMap:
    counts = np.bincount(label)
    one_hot = np.eye(len(counts))[label]
    x = x - (one_hot.T @ x / counts[:, None])[label]
    deviation = x.std(0)
    return np.asarray(x / np.where(deviation > 0, deviation, 1.0))
