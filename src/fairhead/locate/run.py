"""`locate`: from stored features to a map of heads, the heads that carry the gap, and what changes without them.

Heads are chosen on one half of the images; every figure that is reported comes from the other half. Only a head's texts
(TextSpan) and the images at the ends of its axis, which know no groups and no labels, are of all images.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError, did_you_mean
from fairhead.locate.alone import effect_map
from fairhead.locate.class_directions import Task
from fairhead.locate.concepts import Concept, Measure, Separation, coupling, separation
from fairhead.locate.edits import HeadEdits
from fairhead.locate.effects import Curves, DirectEffect, Edited, Evaluation, curves
from fairhead.locate.head_features import Array, Features
from fairhead.locate.head_maps import Head, HeadMap, score_heads, top_heads
from fairhead.locate.plan import LocatePlan, check_halves, halves_of
from fairhead.locate.studies import Study, study, writing
from fairhead.locate.textspan import HeadTexts, Pool, text_spans

# Rows, edits and their kind -> logits [n, C] of these rows with each of several sets of heads edited.
Forward = Callable[[NDArray[np.intp], HeadEdits, str], Edited]
_LEAST = 4  # rows of a label that each group needs in each half to be compared within that label


@dataclass(frozen=True)
class Extremes:
    """Images at the ends of a head's concept axis, by row of the features."""

    head: Head
    most: tuple[int, ...]
    least: tuple[int, ...]


@dataclass(frozen=True)
class Located:
    """What `locate` finds. Maps and figures are of the reporting half.

    Attributes:
        concept: its direction.
        task: its classes.
        positive: the class whose evidence was looked at.
        head_map: each head's part in the gap of that evidence, the chosen heads marked.
        other_map: parts of the embedding and the MLPs, [1, M].
        separation: Cohen's d and AUC along the concept.
        coupling: correlation with the class evidence.
        effect_map: what the gap loses without each head alone, in forward passes; None unless ranked by it.
        forward_curves: the dose–response curves of forward passes; None without those.
        ranked: the chosen heads, best first.
        studies: effects of editing them, one a kind; empty where none was chosen.
        curves: the dose–response curves of the first kind; None where none was chosen.
        spans: TextSpan of the chosen heads; empty without a pool.
        extremes: images at the ends of their axes.
        edits: what was learned for editing heads, on the choosing half.
        choosing: rows of the choosing half, [n] bool.
        notes: what was left out, in sentences.
        chosen_here: whether the heads were chosen on the choosing half, or named by whoever asked.
        noun: what the rows are.
        target: what the classes are of.

    Example:
        >>> found = locate(features, evaluation, task, concept)  # doctest: +SKIP
        >>> found.ranked, found.head_map.share[found.ranked[0]]  # doctest: +SKIP
        ((Head(layer=10, head=5), Head(layer=11, head=1)), 0.41)
    """

    concept: Concept
    task: Task
    positive: str
    head_map: HeadMap
    other_map: HeadMap
    separation: Separation
    coupling: Measure
    ranked: tuple[Head, ...]
    studies: tuple[Study, ...]
    curves: Curves | None
    spans: tuple[HeadTexts, ...]
    extremes: tuple[Extremes, ...]
    edits: HeadEdits
    choosing: NDArray[np.bool_]
    notes: tuple[str, ...]
    chosen_here: bool = True
    effect_map: HeadMap | None = None
    forward_curves: Curves | None = None
    noun: str = "images"
    target: str = ""

    @property
    def evidence(self) -> str:
        """The class whose evidence was looked at, in words: “yes” (Smiling)."""
        return f"“{self.positive}” ({self.target})" if self.target else f"“{self.positive}”"


def locate(
    features: Features,
    evaluation: Evaluation,
    task: Task,
    concept: Concept,
    *,
    pool: Pool | None = None,
    choosing: NDArray[np.bool_] | None = None,
    heads: Sequence[Head] | None = None,
    plan: LocatePlan | None = None,
    forward: Forward | None = None,
) -> Located:
    """Find the heads that carry a gap and say what happens without them, all from stored features.

    Only to rank heads by their effect are forward passes made.

    Args:
        features: of the model on n images.
        evaluation: their labels and groups; classes in the order of the task's.
        task: classes as directions.
        concept: the attribute's direction.
        pool: texts for TextSpan.
        choosing: rows to choose heads on, [n] bool; None splits in halves.
        heads: those to test, best first, where they are known; None chooses them.
        plan: how.
        forward: true forward passes over some rows (`forward_passes`), where heads are ranked by their effect.

    Raises:
        InputError: a group is absent from a half, nothing can be compared, or forward passes are needed.

    Example:
        >>> from fairhead.locate.concepts import concept_from_images
        >>> rng = np.random.default_rng(0)
        >>> groups, labels = np.arange(240) % 2, (np.arange(240) // 2) % 2
        >>> z = rng.normal(size=(240, 3, 4, 2)).astype(np.float32)  # three layers of four heads
        >>> z[:, 2, 1, 0] += 3 * groups  # one of them writes the group
        >>> maps = rng.normal(size=(3, 4, 6, 2)).astype(np.float32)
        >>> output = np.einsum("nlhd,lhod->no", z, maps)
        >>> features = Features(z, np.zeros((240, 1, 6), np.float32), output, np.ones((240, 3), np.float32), maps)
        >>> task = Task(("no", "yes"), np.stack([0 * maps[2, 1, :, 0], maps[2, 1, :, 0]]), np.zeros(2), "made")
        >>> rows = Evaluation(labels, task.classes, groups, ("light", "dark"), "shade")
        >>> concept = concept_from_images(output, groups, labels, name="shade", poles=("light", "dark"))
        >>> found = locate(features, rows, task, concept, plan=LocatePlan(count=1, draws=9, n_boot=100))
        >>> found.ranked
        (Head(layer=2, head=1),)
        >>> [(study.kind, study["DP"].percentile) for study in found.studies][:1]
        [('mean', 0.0)]
    """
    plan = plan or LocatePlan()
    if len(features) != len(evaluation) or evaluation.classes != task.classes:
        raise InputError(
            f"{len(features)} rows of features came with {len(evaluation)} of labels (classes "
            f"{', '.join(evaluation.classes)}), and a task with the classes {', '.join(task.classes)}; they must agree"
        )
    if choosing is None:
        choosing = halves_of(evaluation, plan.seed)
    compared_rows, notes = _comparable(evaluation, choosing)
    logits = task.logits(features.output)
    positive = _positive(plan, evaluation.take(choosing), logits[choosing])
    evidence_parts = task.parts(features, positive)
    concept_parts = features.parts(concept.vector[None])[..., 0]
    total = task.total(features.output, positive)

    def scored(rows: NDArray[np.bool_]) -> tuple[HeadMap, Separation, Measure]:
        part = evaluation.take(rows)
        how: dict[str, Any] = {"clusters": part.clusters, "level": plan.level}
        return (
            score_heads(evidence_parts[rows], total[rows], part.groups, part.labels, names=part.poles, **how),
            separation(concept_parts[rows], part.groups, part.labels, names=part.poles, **how),
            coupling(concept_parts[rows], evidence_parts[rows], part.labels, **how),
        )

    learning = choosing & compared_rows
    edits = HeadEdits.learn(
        features.take(learning), evaluation.groups[learning], evaluation.labels[learning], evaluation.poles
    )
    if edits.shrinkage > 0.2:
        notes.append(
            f"{edits.n} {evaluation.noun} are few for heads of {edits.means.shape[-1]} dimensions: the covariances "
            f"behind the projections were shrunk by up to {100 * edits.shrinkage:.0f} %."
        )

    def lost(half: NDArray[np.bool_]) -> HeadMap | None:
        """What the gap loses without each head, on the rows of a half that can be compared."""
        if plan.rank != "effect" or heads is not None:
            return None
        if forward is None:
            raise InputError("heads can be ranked by their effect only with forward passes (--forward)")
        rows = np.flatnonzero(half & compared_rows)
        edited = forward(rows, edits, plan.kinds[0])
        part = evaluation.take(rows)
        return effect_map(edited, features.shape, part, positive, level=plan.level, kind=plan.kinds[0])

    chooser = scored(learning)
    ranked = _choose(plan, *chooser, lost(choosing)) if heads is None else tuple(Head(*head) for head in heads)
    if heads is None and plan.rank in ("gap", "effect") and not chooser[0].has_total:
        notes.append(
            "In the choosing half the gap of the evidence as a whole cannot be told from 0 "
            f"({chooser[0].total:.3f} logits, {chooser[0].total_low:.3f} to {chooser[0].total_high:.3f}): which "
            "heads are on its side is uncertain."
        )
    reporting = ~choosing
    head_map, apart, coupled = scored(reporting & compared_rows)
    part = evaluation.take(reporting & compared_rows)
    other_map = score_heads(
        task.other_parts(features, positive)[reporting & compared_rows, None],
        total[reporting & compared_rows],
        part.groups,
        part.labels,
        clusters=part.clusters,
        names=part.poles,
        level=plan.level,
    )
    alone = lost(reporting)
    kept, judged = features.take(reporting), evaluation.take(reporting)
    studies: list[Study] = []
    dose = None
    if ranked:
        norms = writing(features)
        for kind in plan.kinds:
            effect = DirectEffect.of(kept, task, edits, kind, plan.seed)
            studies.append(study(effect, ranked, judged, norms, plan, kind, "direct"))
            if dose is None:
                dose = curves(effect, ranked, judged)
    spans: tuple[HeadTexts, ...] = ()
    if pool is not None:
        moments = features.moments(np.zeros(len(features), dtype=np.intp)).pooled(by="rows")
        spans = text_spans(
            moments, features.maps, pool, ranked or None, m=plan.m, permutations=plan.permutations, seed=plan.seed
        )
    return Located(
        concept=concept,
        task=task,
        positive=evaluation.classes[positive],
        head_map=head_map.marking(tuple(sorted(ranked))),
        other_map=other_map,
        separation=apart,
        coupling=coupled,
        ranked=ranked,
        studies=tuple(studies),
        curves=dose,
        spans=spans,
        extremes=tuple(_extremes(head, concept_parts[:, head.layer, head.head], plan.extremes) for head in ranked),
        edits=edits,
        choosing=choosing,
        notes=tuple(notes),
        noun=evaluation.noun,
        target=evaluation.target,
        chosen_here=heads is None,
        effect_map=None if alone is None else alone.marking(tuple(sorted(ranked))),
    )


def _comparable(evaluation: Evaluation, choosing: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], list[str]]:
    """Rows whose label both groups have in both halves, [n] bool, and a sentence about those left out."""
    check_halves(evaluation, choosing)
    kept = []
    for label in range(len(evaluation.classes)):
        sizes = [
            int(((evaluation.labels == label) & (evaluation.groups == group) & half).sum())
            for group in (0, 1)
            for half in (choosing, ~choosing)
        ]
        if min(sizes) >= _LEAST:
            kept.append(label)
    if not kept:
        raise InputError(
            f"no class has {_LEAST} {evaluation.noun} of both {evaluation.poles[0]} and {evaluation.poles[1]} in both "
            f"halves, so the groups cannot be compared within a class: use more {evaluation.noun}"
        )
    left = [name for i, name in enumerate(evaluation.classes) if i not in kept]
    notes = [f"Too few {evaluation.noun} to compare groups within: {', '.join(left)}."] if left else []
    return np.isin(evaluation.labels, kept), notes


def _positive(plan: LocatePlan, evaluation: Evaluation, logits: Array) -> int:
    names = evaluation.classes
    if plan.positive is not None:
        if plan.positive not in names:
            raise InputError(
                f"there is no class {plan.positive!r}; there are {', '.join(names)}."
                f"{did_you_mean(plan.positive, list(names))}"
            )
        return names.index(plan.positive)
    if len(names) == 2:
        return 1
    predicted = evaluation.counts(logits).sum(1)  # [2, C]
    rates = predicted / predicted.sum(1, keepdims=True)
    return int(np.argmax(np.abs(rates[0] - rates[1])))


def _choose(
    plan: LocatePlan, head_map: HeadMap, apart: Separation, coupled: Measure, alone: HeadMap | None
) -> tuple[Head, ...]:
    per_layer = plan.per_layer or max(1, head_map.gap.shape[1] // 4)
    if plan.rank in ("gap", "effect"):
        part = head_map if alone is None else alone
        rank, p = part.gap * np.sign(part.total), part.p_adjusted
    else:
        rank, p = np.abs(apart.d.value), apart.d.p_adjusted
        if plan.rank == "bias":
            rank = rank * np.abs(coupled.value)
    return top_heads(rank, p, plan.count, plan.alpha, per_layer)


def _extremes(head: Head, parts: Array, count: int) -> Extremes:
    order = np.argsort(parts, kind="stable")
    return Extremes(head, tuple(order[::-1][:count].tolist()), tuple(order[:count].tolist()))
