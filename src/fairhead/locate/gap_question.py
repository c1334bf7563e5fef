"""The gap between two groups in the evidence for a class, of images or of texts, asked of stored features."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairhead.audit import compare
from fairhead.audit.audit_results import Comparison
from fairhead.audit.catalogue import table_metrics
from fairhead.errors import InputError, did_you_mean
from fairhead.locate.class_directions import Task, evidence_of
from fairhead.locate.concepts import Concept, Measure, Separation, coupling, separation
from fairhead.locate.edits import HeadEdits, check_kind
from fairhead.locate.engine import Study
from fairhead.locate.gap_words import GapWords
from fairhead.locate.head_features import Array, Features, Pooled
from fairhead.locate.head_maps import Head, HeadMap, score_heads
from fairhead.locate.passes import RowPasses
from fairhead.locate.question import Changes, Edited, Extremes, LocatePlan, Mask, Question, halves
from fairhead.locate.textspan import HeadTexts, Pool, text_spans
from fairhead.records import Column, Records
from fairhead.stats import Difference, adjust

MEASURED = ("accuracy", "DP", "EOd", "cramers_v", "cramers_v_corrected", "cramers_v_excess", "worst_group_accuracy")
MIN_CELL = 10  # rows behind a rate, at least
_LEAST = 4  # rows of a label that each group needs in each half to be compared within that label
_EXTREMES = 4


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
        positive: the class whose evidence is looked at.

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
    positive: int = 1

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def gap_name(self) -> str:
        """What the gap is of."""
        return "evidence gap"

    @property
    def doses(self) -> tuple[str, ...]:
        """The figures of dose–response curves."""
        return ("DP", "EOd", "cramers_v", "accuracy")

    def take(self, rows: NDArray[Any]) -> "Evaluation":
        """The chosen rows: positions, or a mask."""
        ids, clusters = (None if x is None else x[rows] for x in (self.ids, self.clusters))
        return replace(self, labels=self.labels[rows], groups=self.groups[rows], ids=ids, clusters=clusters)

    def score(self, parts: Array, total: Array, level: float = 0.95, measure: str | None = None) -> HeadMap:
        """The gap between the groups given the label, in parts [n, layers, heads] of a whole [n]."""
        how: dict[str, Any] = {"clusters": self.clusters, "names": self.poles, "level": level, "measure": measure}
        return score_heads(parts, total, self.groups, self.labels, **how)

    def evidence(self, read: Array) -> Array:
        """The evidence for the positive class in logits [n, C], [n]."""
        return evidence_of(read, self.positive)

    def figures(self, reads: Sequence[Array]) -> Mapping[str, Array]:
        """The metrics of several logits [n, C], each [k]."""
        return table_metrics(np.stack([self.counts(logits) for logits in reads]), MEASURED, MIN_CELL)

    def compare(self, before: Array, after: Array, plan: LocatePlan) -> Changes:
        """All metrics of two logits [n, C], and accuracy in every cell."""
        comparison = compared(before, after, self, n_boot=plan.n_boot, seed=plan.seed)
        cells = accuracy_by_cell(before, after, self, n_boot=plan.n_boot, seed=plan.seed)
        return Changes(comparison.differences, comparison, cells)

    def records(self, logits: Array) -> Records:
        """Logits [n, C] as records for an audit."""
        return Records(
            label=Column(self.labels.astype(np.int32), self.classes),
            prediction=Column(logits.argmax(1).astype(np.int32), self.classes),
            groups={self.group_by: Column(1 - self.groups.astype(np.int32), self.poles)},
            id=self.ids,
            cluster=self._cluster,
        )

    def right(self, logits: Array) -> Records:
        """Whether logits [n, C] are right, as records without groups: their accuracy is that of the classes."""
        right = (logits.argmax(1) == self.labels).astype(np.int32)
        truth, levels = np.ones_like(right), ("wrong", "right")
        return Records(Column(truth, levels), Column(right, levels), groups={}, id=self.ids, cluster=self._cluster)

    @property
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


def accuracy_by_cell(
    before: Array, after: Array, evaluation: Evaluation, *, n_boot: int = 2000, seed: int = 0
) -> tuple[tuple[str, str, Difference], ...]:
    """(class, group, change of accuracy) of every cell, paired, with its interval; p corrected over cells (Holm)."""
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
    return tuple((*cell, replace(d, p_adjusted=p)) for cell, d, p in zip(cells, differences, adjusted, strict=True))


def compared(before: Array, after: Array, evaluation: Evaluation, *, n_boot: int = 2000, seed: int = 0) -> Comparison:
    """All metrics before and after an edit, paired."""
    how: dict[str, Any] = {"group_by": evaluation.group_by, "metrics": list(MEASURED), "min_cell": MIN_CELL}
    two = evaluation.records(before), evaluation.records(after)
    return compare(*two, n_boot=n_boot, n_perm=2000, seed=seed, **how)


def halves_of(evaluation: Evaluation, seed: int = 0) -> Mask:
    """The choosing half that is taken by default, [n] bool; a group that is absent from a half is refused.

    Example:
        >>> labels, groups = np.arange(8) % 2, np.arange(8) // 4
        >>> int(halves_of(Evaluation(labels, ("no", "yes"), groups, ("f", "m"), "sex")).sum())
        4
    """
    choosing = halves(2 * evaluation.labels + evaluation.groups, evaluation.clusters, seed)
    check_halves(evaluation, choosing)
    return choosing


def check_halves(evaluation: Evaluation, choosing: Mask) -> None:
    """Refuse halves of which one has a single group."""
    for half, name in ((choosing, "choosing"), (~choosing, "reporting")):
        for group, pole in ((1, evaluation.poles[0]), (0, evaluation.poles[1])):
            if not (evaluation.groups[half] == group).any():
                raise InputError(
                    f"{pole} has none of the {int(half.sum())} {evaluation.noun} of the {name} half; both groups are "
                    f"needed in both: use more {evaluation.noun}"
                )


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


class GapQuestion(Question):
    """The gap between two groups in the evidence for a class.

    Args:
        features: of the model on n rows.
        evaluation: their labels and groups; classes in the order of the task's.
        task: classes as directions.
        concept: the attribute's direction.
        choosing: rows to choose heads on, [n] bool; None splits in halves.
        positive: the class whose evidence is looked at; None for the one with the largest gap of selection rates in
            the choosing half (of two classes, the last).
        pool: texts for TextSpan.
        passes: true forward passes over some rows; None where none are asked for.
        seed: of the halves.

    Raises:
        InputError: a group is absent from a half, or nothing can be compared.

    Example:
        >>> question = GapQuestion(features, evaluation, task, concept)  # doctest: +SKIP
        >>> locate(question, LocatePlan(count=2)).ranked  # doctest: +SKIP
        (Head(layer=10, head=5), Head(layer=11, head=1))
    """

    kinds = ("mean", "zero", "resample", "project")

    def __init__(
        self,
        features: Features,
        evaluation: Evaluation,
        task: Task,
        concept: Concept,
        *,
        choosing: Mask | None = None,
        positive: str | None = None,
        pool: Pool | None = None,
        passes: RowPasses | None = None,
        seed: int = 0,
    ) -> None:
        if len(features) != len(evaluation) or evaluation.classes != task.classes:
            raise InputError(
                f"{len(features)} rows of features came with {len(evaluation)} of labels (classes "
                f"{', '.join(evaluation.classes)}), and a task with the classes {', '.join(task.classes)}; they must "
                "agree"
            )
        self.features, self.task, self.concept, self.pool, self.passes = features, task, concept, pool, passes
        self.choosing = halves_of(evaluation, seed) if choosing is None else choosing
        self.comparable, notes = _comparable(evaluation, self.choosing)
        seen = evaluation.take(self.choosing)
        number = _positive(positive, seen, task.logits(features.output[self.choosing]))
        self.rows: Evaluation = replace(evaluation, positive=number)
        self.parts, self.other_parts = task.parts(features, number), task.other_parts(features, number)
        self.total = task.total(features.output, number)
        self.along = features.parts(concept.vector[None])[..., 0]  # the concept, [n, L, H]
        learning = self.choosing & self.comparable
        part = evaluation.take(learning)
        self.edits = HeadEdits.learn(features.take(learning), part.groups, part.labels, part.poles)
        if self.edits.shrinkage > 0.2:
            notes.append(
                f"{self.edits.n} {evaluation.noun} are few for heads of {self.edits.means.shape[-1]} dimensions: the "
                f"covariances behind the projections were shrunk by up to {100 * self.edits.shrinkage:.0f} %."
            )
        self.notes = tuple(notes)

    @cached_property
    def moments(self) -> Pooled:
        """Of all heads, over all rows."""
        return self.features.moments(np.zeros(len(self.features), dtype=np.intp)).pooled(by="rows")

    @cached_property
    def norms(self) -> Array:  # type: ignore[override]
        """How much each head writes: root of the mean squared length of its centred term, [L, H]."""
        maps = self.features.maps
        gram = np.einsum("lhod,lhoe->lhde", maps, maps, optimize=True)
        return np.sqrt(np.maximum(np.einsum("lhde,lhde->lh", gram, self.moments.covariance), 0.0))

    def measures(self, rows: Mask, level: float) -> tuple[Separation, Measure]:
        """How well heads tell the groups of some rows apart along the concept, and its coupling with the evidence."""
        part = self.rows.take(rows)
        how: dict[str, Any] = {"clusters": part.clusters, "level": level}
        return (
            separation(self.along[rows], part.groups, part.labels, names=part.poles, **how),
            coupling(self.along[rows], self.parts[rows], part.labels, **how),
        )

    def ranking(self, direct: HeadMap, rows: Mask, plan: LocatePlan) -> tuple[Array, Array]:
        """By the gap, or by how well heads tell the groups apart along the concept."""
        if plan.rank in ("gap", "effect"):
            return super().ranking(direct, rows, plan)
        apart, coupled = self.measures(rows, plan.level)
        size = np.abs(apart.d.value)
        return size * np.abs(coupled.value) if plan.rank == "bias" else size, apart.d.p_adjusted

    def doubts(self, direct: HeadMap, plan: LocatePlan) -> list[str]:
        """Whether there is a gap at all in the choosing half."""
        if plan.rank not in ("gap", "effect") or direct.has_total:
            return []
        return [
            "In the choosing half the gap of the evidence as a whole is not significant "
            f"({direct.total:.3f} logits, {direct.total_low:.3f} to {direct.total_high:.3f}): which "
            "heads are on its side is uncertain."
        ]

    def forward_kinds(self, kinds: Sequence[str]) -> Sequence[str]:
        """The first alone: each is a pass over the images for every control."""
        return kinds[:1]

    def direct(self, kind: str, seed: int) -> Edited:
        """Logits of the reporting half, from stored features."""
        return DirectEffect.of(self.features.take(~self.choosing), self.task, self.edits, kind, seed)

    def forward(self, rows: NDArray[np.intp], kind: str) -> Edited:
        """Logits of some rows, by the model itself."""
        if self.passes is None:
            raise InputError("this question was asked without the model: give it forward passes")
        return self.passes(rows, self.edits, kind)

    def forward_notes(self, edited: Edited | None) -> list[str]:
        """Where heads were edited, and what TF32 changed."""
        assert self.passes is not None
        notes, rows = list(self.passes.notes), self.reported
        if self.passes.in_tf32:
            (plain,) = (edited or self.forward(rows, self.kinds[0]))([()])
            moved = int((plain.argmax(1) != self.task.logits(self.features.output[rows]).argmax(1)).sum())
            notes.append(
                f"Forward passes ran in TF32: {moved} of {len(rows)} predictions of the model as it is differ from "
                "those in float32."
            )
        return notes

    def records(self, studies: Sequence[Study]) -> Mapping[str, Records]:
        """As the model is, and with the heads edited: in a forward pass where there is one, else the first kind."""
        judged = self.rows.take(self.reported)
        found = {"records": judged.records(self.task.logits(self.features.output[self.reported]))}
        if studies:
            main = next((s for s in studies if s.way == "forward"), studies[0])
            found["records-edited"] = judged.records(main.after)
        return found

    def extremes(self, head: Head, count: int | None) -> Extremes:
        """Rows at the ends of its concept axis, which knows no groups: of both halves."""
        return Extremes.of(head, self.along[:, head.layer, head.head], count or _EXTREMES)

    def words(self, ranked: tuple[Head, ...], plan: LocatePlan) -> GapWords:
        """Separation and coupling of all heads on the reporting half; TextSpan of the chosen ones, on all rows."""
        apart, coupled = self.measures(~self.choosing & self.comparable, plan.level)
        spans: tuple[HeadTexts, ...] = ()
        if self.pool is not None:
            how: dict[str, Any] = {"m": plan.m, "permutations": plan.permutations, "seed": plan.seed}
            spans = text_spans(self.moments, self.features.maps, self.pool, ranked or None, **how)
        positive = self.rows.classes[self.rows.positive]
        return GapWords(self.concept, self.task, positive, self.rows.target, apart, coupled, spans)


def _comparable(evaluation: Evaluation, choosing: Mask) -> tuple[Mask, list[str]]:
    """Rows whose label both groups have in both halves, [n] bool, and a sentence about those left out."""
    check_halves(evaluation, choosing)
    cell = 2 * evaluation.labels + evaluation.groups
    size = 2 * len(evaluation.classes)
    counts = np.stack([np.bincount(cell[half], minlength=size) for half in (choosing, ~choosing)])
    enough = counts.reshape(2, -1, 2).min((0, 2)) >= _LEAST  # [classes]
    if not enough.any():
        raise InputError(
            f"no class has {_LEAST} {evaluation.noun} of both {evaluation.poles[0]} and {evaluation.poles[1]} in both "
            f"halves, so the groups cannot be compared within a class: use more {evaluation.noun}"
        )
    left = [name for name, kept in zip(evaluation.classes, enough, strict=True) if not kept]
    notes = [f"Too few {evaluation.noun} to compare groups within: {', '.join(left)}."] if left else []
    return enough[evaluation.labels], notes


def _positive(wanted: str | None, evaluation: Evaluation, logits: Array) -> int:
    names = evaluation.classes
    if wanted is not None:
        if wanted not in names:
            near = did_you_mean(wanted, list(names))
            raise InputError(f"there is no class {wanted!r}; there are {', '.join(names)}.{near}")
        return names.index(wanted)
    if len(names) == 2:
        return 1
    predicted = evaluation.counts(logits).sum(1)  # [2, C]
    rates = predicted / predicted.sum(1, keepdims=True)
    return int(np.argmax(np.abs(rates[0] - rates[1])))
