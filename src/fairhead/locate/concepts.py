"""Concept directions: where the output keeps an attribute such as perceived gender, and which heads write it.

From prompts (zero-shot) where there is a text side, or from labelled images where there is none. A direction is a unit
vector [d'] that points from the second pole to the first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fairhead.errors import InputError
from fairhead.locate.class_directions import Task, fit_logistic, unit
from fairhead.locate.head_features import Array, shrunk
from fairhead.locate.head_maps import Clusters, FloatMap, check_cells
from fairhead.locate.prompts import Prompts, TextSide
from fairhead.stats.clusters import cluster_errors


@dataclass(frozen=True)
class Concept:
    """A direction with its name.

    Attributes:
        name: "gender", ...
        poles: the two ends, the one it points to first.
        vector: unit length, [d'].
        origin: how it was made, in words.
        detail: what else is worth knowing: prompts, shrinkage, what was taken out.

    Example:
        >>> concept = Concept("shade", ("light", "dark"), np.array([0.6, 0.8, 0.0]), "made by hand")
        >>> task = Task(("no", "yes"), np.array([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]), np.zeros(2), "made by hand")
        >>> concept.orthogonal_to(task).vector.tolist()
        [0.0, 1.0, 0.0]
    """

    name: str
    poles: tuple[str, str]
    vector: Array
    origin: str
    detail: Mapping[str, Any] = field(default_factory=dict)

    def orthogonal_to(self, task: Task) -> "Concept":
        """The part of the direction that no class of the task shares: that says the attribute and nothing else.

        Raises:
            InputError: nothing is left, as when the classes are the concept itself.
        """
        span = np.linalg.qr((task.directions - task.directions.mean(0)).T)[0][:, : len(task.classes) - 1]
        rest = self.vector - span @ (span.T @ self.vector)
        left = float(np.linalg.norm(rest))
        if left < 1e-3:
            raise InputError(
                f"nothing is left of the concept {self.name!r} once the classes are taken out: the task "
                f"({', '.join(task.classes)}) asks for the concept itself"
            )
        return replace(self, vector=rest / left, detail={**self.detail, "left_beside_the_classes": left})


def concept_from_texts(prompts: Prompts, text: TextSide) -> Concept:
    """The mean of one pole's prompts minus the other's: templates × synonyms, both poles with equally many.

    Example:
        >>> from fairhead.locate.prompts import CONCEPTS
        >>> vectors = np.random.default_rng(0).normal(size=(100, 8))
        >>> some = lambda texts: vectors[[sum(map(ord, t)) % 100 for t in texts]]
        >>> concept = concept_from_texts(CONCEPTS["gender"], some)
        >>> concept.poles, concept.vector.shape
        (('female', 'male'), (8,))
    """
    ends = []
    for pole in prompts.poles:
        ends.append(unit(np.asarray(text(prompts.texts(pole)), dtype=np.float64)).mean(0))
    vector = ends[0] - ends[1]
    length = np.linalg.norm(vector)
    if length < 1e-6:
        raise InputError(f"both poles of {prompts.name!r} have the same prompts, as the text side sees them")
    first, second = prompts.poles
    detail = {"prompts": {pole.name: list(prompts.texts(pole)) for pole in prompts.poles}}
    return Concept(prompts.name, (first.name, second.name), vector / length, "prompts", detail)


def concept_from_images(
    output: NDArray[np.floating],
    groups: NDArray[np.integer],
    labels: NDArray[np.integer],
    *,
    name: str,
    poles: tuple[str, str],
    method: str = "means",
    noun: str = "images",
) -> Concept:
    """A direction learned from outputs [n, d'] of images whose group is known: 1 for the first pole, 0 for the second.

    Groups are compared within each label, all counting the same. The method is "means" (difference of the means),
    "logistic" (a probe with a ridge), or "leace" (what linear erasure takes out: the difference, whitened).

    Example:
        >>> rng = np.random.default_rng(0)
        >>> groups = np.arange(200) % 2
        >>> output = rng.normal(size=(200, 5)) + 2 * groups[:, None] * np.eye(5)[3]
        >>> found = concept_from_images(output, groups, np.zeros(200, int), name="shade", poles=("light", "dark"))
        >>> int(np.argmax(np.abs(found.vector)))
        3
    """
    x = np.asarray(output, dtype=np.float64)
    difference, within, n_cells = _within(x, groups, labels, poles)
    detail: dict[str, Any] = {"n": len(x)}
    if method == "means":
        vector: Array = difference
    elif method == "leace":
        covariance, amount = shrunk(within.T @ within / len(x), len(x) - n_cells)
        vector = np.asarray(np.linalg.solve(covariance, difference), dtype=np.float64)
        detail["shrinkage"] = amount
    elif method == "logistic":
        centred = within + np.where(groups == 1, 0.5, -0.5)[:, None] * difference
        weights, _ = fit_logistic(centred, groups.astype(np.int64), 2)
        vector = weights[1] - weights[0]
    else:
        raise InputError(f"method is {method!r}; expected 'means', 'logistic' or 'leace'")
    if len(x) <= x.shape[1] and method != "means":
        detail["few"] = f"{len(x)} {noun} for {x.shape[1]} dimensions: shrunk, and less sure than its figures look"
    length = np.linalg.norm(vector)
    if length == 0:
        raise InputError(f"the two groups ({', '.join(poles)}) have the same outputs, so there is no direction")
    return Concept(name, poles, vector / length, f"labelled {noun} ({method})", detail)


def _within(
    x: Array, groups: NDArray[np.integer], labels: NDArray[np.integer], poles: tuple[str, str]
) -> tuple[Array, Array, int]:
    """Mean difference of the groups given the label [d'], rows less their cell's mean [n, d'], cells."""
    levels = np.unique(labels)
    within = np.empty_like(x)
    differences = []
    for label in levels:
        means = []
        for group in (1, 0):
            rows = (labels == label) & (groups == group)
            if not rows.any():
                raise InputError(
                    f"no image of {poles[1 - group]} has label {label}; both groups are needed within every label"
                )
            means.append(x[rows].mean(0))
            within[rows] = x[rows] - means[-1]
        differences.append(means[0] - means[1])
    return np.mean(differences, axis=0), within, 2 * len(levels)


@dataclass(frozen=True)
class Measure:
    """Another figure of each head, all maps [layers, heads].

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
    clusters: Clusters = None,
    names: tuple[str, str] = ("1", "0"),
    level: float = 0.95,
) -> Separation:
    """Separate the groups by each head's part along a concept direction, [n, layers, heads]; else as `score_heads`.

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
    # Cohen's d: the gap over the deviation within cells.
    weight, centred = cells.weight, cells.centred(x)
    gap, within = weight @ x, cells.within(centred)
    within[within == 0] = 1.0  # a head that writes nothing along the direction
    d = gap / within
    of_spread = ((centred / within) ** 2 - 1) / (2 * (len(x) - len(cells.counts)))
    d_errors = cluster_errors(weight[:, None] * centred / within - d * of_spread, clusters)
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
    auc_errors = cluster_errors(influence, clusters)
    # Under "no difference" the error of the gap, not that of d, decides: d's own grows with d.
    d_p = cluster_errors(weight[:, None] * centred, clusters).p_values(gap)
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

    Example:
        >>> x = np.random.default_rng(0).normal(size=(200, 1, 1))
        >>> coupling(x, -2 * x, np.zeros(200, int)).value.round(6).tolist()
        [[-1.0]]
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
