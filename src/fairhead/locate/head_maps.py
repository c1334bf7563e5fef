"""Heads, and figures of them: their part in a gap of two groups of the same label, or of the two texts of a pair.

Every figure is an estimate with the influence that each row has on it; its error is that of the influence added up over
independent clusters, so rows that share a cluster (one picture in two shades) may depend on each other in any way. A
gap is a weighted sum over the rows of some cells (`Cells`), each less the mean of its cell.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fairhead.errors import InputError
from fairhead.report.wording import head_name
from fairhead.stats import ALPHA, Correction, adjust
from fairhead.stats.clusters import ClusterErrors, cluster_errors

FloatMap = NDArray[np.float64]
Clusters = NDArray[np.integer] | None


class Head(NamedTuple):
    """One attention head: layer and number, both from 0."""

    layer: int
    head: int


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A figure of each head, all maps [layers, heads]."""

    name: str  # what it is
    value: FloatMap  # the estimate
    low: FloatMap  # lower end of its interval
    high: FloatMap  # upper end
    p: FloatMap  # two-sided p-value of the value that means "nothing"
    p_adjusted: FloatMap  # after correction over all heads: Benjamini–Hochberg, or Holm for pairs

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        maps = ("value", "low", "high", "p", "p_adjusted")
        return {"name": self.name, **{key: getattr(self, key).tolist() for key in maps}}


@dataclass(frozen=True, kw_only=True)
class HeadMap(Measure):
    """Each head's part in a gap, beside the whole gap.

    A part is the mean evidence of the first group minus the second's, given the label, in logits; or the mean log-odds
    of the first text of a pair against the second, in nats.
    """

    effect_size: FloatMap  # `value` over the deviation within cells (Cohen's d)
    share: FloatMap  # `value` over the gap of the model's own evidence; the rest of 1 lies in MLPs and embeddings
    total: float  # the gap of the model's own evidence
    total_low: float  # lower end of its interval
    total_high: float  # upper end
    n: int  # rows
    clusters: int  # independent units among them (pictures, people, documents)
    unit: str = "logits"
    selected: tuple[Head, ...] = ()  # heads chosen elsewhere, to be marked in this map

    @property
    def has_total(self) -> bool:
        """Whether the interval of the whole gap leaves 0 out; where it does not, shares of it mean little."""
        return self.total_low > 0 or self.total_high < 0

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, which is also the data of a report's "headmap" section."""
        return {
            "measure": self.name,
            "unit": self.unit,
            "values": self.value.tolist(),
            **{name: getattr(self, name).tolist() for name in ("low", "high", "p_adjusted", "effect_size", "share")},
            **{name: getattr(self, name) for name in ("total", "total_low", "total_high", "n", "clusters")},
            "selected": [list(head) for head in self.selected],
        }

    def rows(self) -> list[dict[str, Any]]:
        """One row a head."""
        return [
            {
                "layer": layer,
                "head": head,
                "name": head_name(layer, head),
                "gap": float(self.value[layer, head]),
                "low": float(self.low[layer, head]),
                "high": float(self.high[layer, head]),
                "p_adjusted": float(self.p_adjusted[layer, head]),
                "selected": (layer, head) in self.selected,
            }
            for layer, head in np.ndindex(self.value.shape)
        ]


class Gap(NamedTuple):
    """A gap in each of k columns."""

    value: FloatMap  # [k]
    centred: FloatMap  # the rows less the mean of their cell, [n, k]
    within: FloatMap  # standard deviation within cells, [k]
    errors: ClusterErrors  # of the value


class Cells(NamedTuple):
    """Rows that are compared, by cell: 2 · label + group; pairs, each a comparison by itself, are one cell."""

    cell: NDArray[np.intp]  # of each row, [n]
    counts: NDArray[np.intp]  # rows in each
    weight: FloatMap  # of each row in a gap, [n]
    share: FloatMap | float = 1.0  # how much each row counts in the mean and the spread of its cell, [n]; 1 on average
    clusters: Clusters = None  # rows with one number belong together, [n]; None if all rows are independent

    def centred(self, x: FloatMap) -> FloatMap:
        """Rows x [n, k] less the mean of their cell."""
        return _centred(x, self.cell, self.share)

    def gap(self, x: FloatMap) -> Gap:
        """The gap in x [n, k], with its error."""
        centred = self.centred(x)
        spread = np.broadcast_to(self.share, len(x)) @ centred**2 / (len(x) - len(self.counts))
        return Gap(self.weight @ x, centred, np.sqrt(spread), self.errors(self.weight[:, None] * centred))

    def errors(self, influence: FloatMap) -> ClusterErrors:
        """Of sums of what each row adds, [n, k], once the mean of its cell is taken out."""
        return cluster_errors(influence, self.clusters, self.cell)


def _centred(x: FloatMap, cell: NDArray[np.intp], share: FloatMap | float = 1.0) -> FloatMap:
    counted = np.zeros((len(cell), int(cell.max()) + 1))
    counted[np.arange(len(cell)), cell] = share
    return x - np.asarray(counted.T @ x / counted.sum(0)[:, None])[cell]


def group_cells(
    groups: NDArray[np.integer],
    labels: NDArray[np.integer],
    names: tuple[str, str] = ("1", "0"),
    classes: Sequence[str] = (),
    least: int = 2,
    clusters: Clusters = None,
) -> Cells:
    """Cells of two groups and their labels, which all count the same; both groups need so many rows of every class.

    Groups are 0 and 1, that of 1 named first, from which the other is subtracted; `classes` are named in errors.
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
    weight = np.where(cell % 2 == 1, 1.0, -1.0) / (counts[cell] * len(levels))
    return Cells(cell, counts, weight, clusters=clusters)


def pair_cells(weights: NDArray[np.floating], clusters: Clusters = None) -> Cells:
    """One cell of n pairs, each of which counts as much as its weight, [n]: the gap is their mean."""
    n, weight = len(weights), np.asarray(weights, dtype=np.float64) / np.sum(weights)
    if n < 2:
        raise InputError(f"{n} pairs; at least 2 are needed to say how sure a mean is")
    return Cells(np.zeros(n, dtype=np.intp), np.array([n]), weight, n * weight, clusters)


def score(
    parts: NDArray[np.floating],  # each head's part, [n, layers, heads]
    total: NDArray[np.floating],  # the model's own evidence, [n]
    cells: Cells,  # who is compared
    *,
    level: float = 0.95,  # of the intervals
    correction: Correction = "bh",  # of p-values over the heads
    name: str = "gap",  # what the parts are, in words
    unit: str = "logits",
) -> HeadMap:
    """Score each head by its part in the gap between the cells."""
    flat = np.concatenate([parts.reshape(len(parts), -1), total[:, None]], axis=1).astype(np.float64)
    gap, _, within, errors = cells.gap(flat)
    reach, shape = errors.reach(level), parts.shape[1:]
    with np.errstate(divide="ignore", invalid="ignore"):
        effect_size = np.where(within > 0, gap / within, 0.0)
    # A head that is constant within every cell has no error: its gap is certain, or there is none.
    of_heads, far, p = gap[:-1], reach[:-1], errors.p_values(gap)[:-1]
    return HeadMap(
        name=name,
        **_maps(of_heads, of_heads - far, of_heads + far, p, shape, correction),
        effect_size=effect_size[:-1].reshape(shape),
        share=(of_heads / gap[-1]).reshape(shape) if gap[-1] else np.zeros(shape),
        total=float(gap[-1]),
        total_low=float(gap[-1] - reach[-1]),
        total_high=float(gap[-1] + reach[-1]),
        n=len(flat),
        clusters=errors.clusters,
        unit=unit,
    )


def _maps(
    value: FloatMap, low: FloatMap, high: FloatMap, p: FloatMap, shape: tuple[int, ...], correction: Correction = "bh"
) -> dict[str, Any]:
    """The maps of a measure from estimates [k], with p-values corrected over all of them."""
    corrected = np.array(adjust(p.tolist(), correction), dtype=np.float64)
    maps = {"value": value, "low": low, "high": high, "p": p, "p_adjusted": corrected}
    return {name: x.reshape(shape) for name, x in maps.items()}


def largest_first(rank: FloatMap) -> list[Head]:
    """All heads by their rank [layers, heads], the largest first."""
    order = np.argsort(-rank, axis=None, kind="stable")
    return [Head(int(layer), int(head)) for layer, head in zip(*np.unravel_index(order, rank.shape), strict=True)]


def gained(gains: FloatMap) -> tuple[Head, ...]:
    """Heads whose gain [layers, heads] is not 1, the farthest from it first."""
    return tuple(head for head in largest_first(np.abs(gains - 1)) if gains[head] != 1)


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


class Separation(NamedTuple):
    """How well heads separate two groups of the same label: Cohen's d, and AUC (0.5: not at all)."""

    d: Measure
    auc: Measure


def separation(parts: NDArray[np.floating], cells: Cells, level: float = 0.95) -> Separation:
    """Separate the groups of some cells by each head's part along a concept direction, [n, layers, heads]."""
    shape, x = parts.shape[1:], np.asarray(parts, dtype=np.float64).reshape(len(parts), -1)
    gap, centred, within, errors = cells.gap(x)
    within[within == 0] = 1.0  # a head that writes nothing along the direction
    d = gap / within
    of_spread = ((centred / within) ** 2 - 1) / (2 * (len(x) - len(cells.counts)))
    d_reach = cells.errors(cells.weight[:, None] * centred / within - d * of_spread).reach(level)
    # AUC, label by label.
    auc, influence, labels = np.zeros(x.shape[1]), np.zeros_like(x), len(cells.counts) // 2
    for label in range(labels):
        first, second = (np.flatnonzero(cells.cell == 2 * label + group) for group in (1, 0))
        above = _share_below(x[first], x[second])  # [n1, heads]
        below = 1 - _share_below(x[second], x[first])
        area = above.mean(0)
        auc += area / labels
        influence[first] = (above - area) / len(first) / labels
        influence[second] = (below - area) / len(second) / labels
    auc_errors = cells.errors(influence)
    auc_reach = auc_errors.reach(level)
    limits = np.maximum(auc - auc_reach, 0.0), np.minimum(auc + auc_reach, 1.0)
    # Under "no difference" the error of the gap, not that of d, decides: d's own grows with d.
    return Separation(
        Measure(name="Cohen's d", **_maps(d, d - d_reach, d + d_reach, errors.p_values(gap), shape)),
        Measure(name="AUC", **_maps(auc, *limits, auc_errors.p_values(auc - 0.5), shape)),
    )


def coupling(
    concept: NDArray[np.floating], evidence: NDArray[np.floating], cells: Cells, level: float = 0.95
) -> Measure:
    """Correlation, given the label, of a head's part along the concept with its part in the evidence.

    Both are [n, layers, heads].
    """
    n, label = len(concept), cells.cell // 2
    a, b = (_centred(np.asarray(x, dtype=np.float64).reshape(n, -1), label) for x in (concept, evidence))
    a, b = (x / np.where(x.std(0) > 0, x.std(0), 1.0) for x in (a, b))
    r = np.clip((a * b).mean(0), -1, 1)
    # Fisher's z keeps the interval inside −1 and 1.
    inside = np.clip(r, -1 + 1e-12, 1 - 1e-12)
    errors = cluster_errors((a * b - r * (a**2 + b**2) / 2) / n, cells.clusters)
    reach = errors.reach(level) / (1 - inside**2)
    low, high = (np.tanh(np.arctanh(inside) + side * reach) for side in (-1, 1))
    p = cluster_errors(a * b / n, cells.clusters).p_values(r)
    return Measure(name="coupling", **_maps(r, low, high, p, concept.shape[1:]))


def _share_below(x: FloatMap, others: FloatMap) -> FloatMap:
    """For each x [n, k], the share of others [m, k] of its column that are smaller; equal ones count half: [n, k]."""
    both = np.concatenate([x, others])
    overall = stats.rankdata(both, axis=0)[: len(x)]
    return np.asarray((overall - stats.rankdata(x, axis=0)) / len(others))
