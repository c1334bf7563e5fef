"""What an edit of heads does to predictions, and its direct effect from stored features.

A direct effect changes the heads' own terms and nothing else: later layers and the norms' deviations stay as they were.
It costs no forward pass, so hundreds of control sets take seconds. A true forward pass (`passes.py`) lets later layers
answer.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit import compare
from fairhead.audit.results import Comparison
from fairhead.audit.tables import table_metrics
from fairhead.locate.class_directions import Task
from fairhead.locate.edits import HeadEdits, check_kind
from fairhead.locate.head_features import Array, Features
from fairhead.locate.head_maps import Head
from fairhead.records import Column, Records
from fairhead.stats import Difference, adjust

MEASURED = ("accuracy", "DP", "EOd", "cramers_v", "cramers_v_corrected", "cramers_v_excess", "worst_group_accuracy")
MIN_CELL = 10  # rows behind a rate, at least

# Sets of heads -> logits [n, C] with each of them edited; the empty set is the model as it is.
Edited = Callable[[Sequence[Sequence[tuple[int, int]]]], Sequence[Array]]


@dataclass(frozen=True)
class Evaluation:
    """Rows whose predictions are compared: who they are and what they should be called.

    Attributes:
        labels: class numbers, [n].
        classes: names.
        groups: 1 for the first pole and 0 for the second, [n].
        poles: names of the groups, that of group 1 first.
        group_by: the group column's name.
        ids: [n], or None.
        clusters: rows with one number belong together, [n]; or None.
        noun: what the rows are, in words: "images" or "texts".
        target: what the classes are of, in words: "age", "Smiling".

    Example:
        >>> labels, groups = np.array([0, 1, 1, 0]), np.array([1, 1, 0, 0])
        >>> rows = Evaluation(labels, ("no", "yes"), groups, ("female", "male"), "gender")
        >>> logits = np.array([[2.0, 1.0], [0.0, 1.0], [3.0, 1.0], [1.0, 0.0]])
        >>> rows.counts(logits)[1].tolist()             # of men: labels × predictions
        [[1.0, 0.0], [1.0, 0.0]]
    """

    labels: NDArray[np.integer]
    classes: tuple[str, ...]
    groups: NDArray[np.integer]
    poles: tuple[str, str]
    group_by: str
    ids: NDArray[Any] | None = None
    clusters: NDArray[np.integer] | None = None
    noun: str = "images"
    target: str = ""

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: NDArray[Any]) -> "Evaluation":
        """The chosen rows."""
        return Evaluation(
            self.labels[rows],
            self.classes,
            self.groups[rows],
            self.poles,
            self.group_by,
            None if self.ids is None else self.ids[rows],
            None if self.clusters is None else self.clusters[rows],
            self.noun,
            self.target,
        )

    def records(self, logits: Array) -> Records:
        """Logits [n, C] as records for an audit."""
        return Records(
            label=Column(self.labels.astype(np.int32), self.classes),
            prediction=Column(logits.argmax(1).astype(np.int32), self.classes),
            groups={self.group_by: Column(1 - self.groups.astype(np.int32), self.poles)},
            id=self.ids,
            cluster=self._cluster(),
        )

    def right(self, logits: Array) -> Records:
        """Whether logits [n, C] are right, as records without groups: their accuracy is that of the classes."""
        right = (logits.argmax(1) == self.labels).astype(np.int32)
        levels = ("wrong", "right")
        return Records(
            label=Column(np.ones_like(right), levels),
            prediction=Column(right, levels),
            groups={},
            id=self.ids,
            cluster=self._cluster(),
        )

    def _cluster(self) -> Column | None:
        if self.clusters is None:
            return None
        levels, codes = np.unique(self.clusters, return_inverse=True)
        return Column(codes, tuple(levels.tolist()))

    def counts(self, logits: Array) -> Array:
        """Rows by group, label and prediction, [2, C, C]."""
        c = len(self.classes)
        cell = ((1 - self.groups) * c + self.labels) * c + logits.argmax(1)
        return np.bincount(cell, minlength=2 * c * c).reshape(2, c, c).astype(np.float64)


@dataclass(frozen=True)
class DirectEffect:
    """Logits, and what each head's edit would change in them if nothing else changed.

    Attributes:
        before: [n, C].
        change: [n, L, H, C].

    Example:
        >>> effect = DirectEffect(np.zeros((5, 2)), np.ones((5, 3, 4, 2)))
        >>> effect.without([(2, 0), (1, 3)])[0].tolist()
        [2.0, 2.0]
    """

    before: Array
    change: Array

    @classmethod
    def of(cls, features: Features, task: Task, edits: HeadEdits, kind: str = "mean", seed: int = 0) -> "DirectEffect":
        """The direct effect of one kind of edit on every head."""
        check_kind(kind)
        before = task.logits(features.output)
        layers, heads = features.shape
        order = np.random.default_rng(seed).permutation(len(features))
        change = np.empty((len(features), layers, heads, len(task.classes)))
        for layer in range(layers):
            scale = np.asarray(features.scale[:, layer], dtype=np.float64)[:, None, None]
            own = np.asarray(features.heads[:, layer], dtype=np.float64) / scale
            moved = (edits.outputs(kind, own, layer, order) - own) * scale  # [n, H, d]
            change[:, layer] = task.push(features, layer, moved)
        return cls(before, change)

    def __call__(self, sets: Sequence[Sequence[tuple[int, int]]]) -> list[Array]:
        """Logits with each set of heads edited, [n, C]."""
        return [self.without(heads) for heads in sets]

    def without(self, heads: Sequence[tuple[int, int]]) -> Array:
        """Logits with some heads edited, [n, C]."""
        logits = self.before.copy()
        for layer, head in heads:
            logits += self.change[:, layer, head]
        return logits


@dataclass(frozen=True)
class CellChange:
    """The change of accuracy in one cell of label and group."""

    label: str
    group: str
    change: Difference


def accuracy_by_cell(
    before: Array, after: Array, evaluation: Evaluation, *, n_boot: int = 2000, seed: int = 0
) -> tuple[CellChange, ...]:
    """Change of accuracy in every class and group, paired, with its interval; p corrected over the cells (Holm)."""
    cells, differences = [], []
    for number, label in enumerate(evaluation.classes):
        for group, pole in ((1, evaluation.poles[0]), (0, evaluation.poles[1])):
            rows = np.flatnonzero((evaluation.labels == number) & (evaluation.groups == group))
            if len(rows):
                # Within a cell there is right and wrong, and no other class: tables of 2 instead of C.
                right = (evaluation.take(rows).right(logits[rows]) for logits in (before, after))
                found = compare(*right, metrics=["accuracy"], n_boot=n_boot, n_perm=2000, seed=seed)
                cells.append((label, pole))
                differences.append(found.differences[0])
    adjusted = adjust([d.p for d in differences], "holm")
    return tuple(
        CellChange(*cell, replace(d, p_adjusted=p)) for cell, d, p in zip(cells, differences, adjusted, strict=True)
    )


def compared(before: Array, after: Array, evaluation: Evaluation, *, n_boot: int = 2000, seed: int = 0) -> Comparison:
    """All metrics before and after an edit, paired."""
    return compare(
        evaluation.records(before),
        evaluation.records(after),
        group_by=evaluation.group_by,
        metrics=list(MEASURED),
        n_boot=n_boot,
        n_perm=2000,
        seed=seed,
        min_cell=MIN_CELL,
    )


@dataclass(frozen=True)
class CurvePoint:
    """Heads edited together, and the figures then."""

    heads: tuple[Head, ...]
    figures: Mapping[str, float]


@dataclass(frozen=True)
class Curves:
    """How the effect grows: heads added one by one (best first), each alone, and all but one."""

    metrics: tuple[str, ...]
    added: tuple[CurvePoint, ...]
    alone: tuple[CurvePoint, ...]
    left_out: tuple[CurvePoint, ...]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""

        def points(curve: Sequence[CurvePoint]) -> list[dict[str, Any]]:
            return [{"heads": [list(h) for h in p.heads], **p.figures} for p in curve]

        return {
            "metrics": list(self.metrics),
            "added": points(self.added),
            "alone": points(self.alone),
            "left_out": points(self.left_out),
        }


def curves(
    edited: Edited,
    ranked: Sequence[Head],
    evaluation: Evaluation,
    names: Sequence[str] = ("DP", "EOd", "cramers_v", "accuracy"),
) -> Curves:
    """Add-one, single-head and leave-one-out curves of heads in the order of their rank.

    Args:
        edited: logits [n, C] with each of several sets of heads edited.
        ranked: best first.
        evaluation: the rows.
        names: metrics.
    """
    sets = curve_sets(ranked)
    every = [*sets.added, *sets.alone, *sets.left_out]  # at once: a true forward pass decodes the images once for all
    tables = np.stack([evaluation.counts(logits) for logits in edited(every)])
    found = table_metrics(tables, names, MIN_CELL)
    points = iter([CurvePoint(heads, {name: float(found[name][i]) for name in names}) for i, heads in enumerate(every)])
    return Curves(tuple(names), *(tuple(itertools.islice(points, len(part))) for part in sets))


class CurveSets(NamedTuple):
    """Heads edited together along each curve."""

    added: list[tuple[Head, ...]]
    alone: list[tuple[Head, ...]]
    left_out: list[tuple[Head, ...]]


def curve_sets(ranked: Sequence[Head]) -> CurveSets:
    """Heads added one by one, best first and none at the start; each alone; all but one, where there are several.

    Example:
        >>> sets = curve_sets([Head(1, 0), Head(0, 2)])
        >>> len(sets.added), sets.left_out[0]
        (3, (Head(layer=0, head=2),))
    """
    added = [tuple(ranked[:k]) for k in range(len(ranked) + 1)]
    left_out = [tuple(other for other in ranked if other != head) for head in ranked]
    return CurveSets(added, [(head,) for head in ranked], left_out if len(ranked) > 1 else [])
