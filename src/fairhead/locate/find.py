"""`locate`: from a question to a map of heads, the heads that carry the gap, and what changes without them.

Heads are chosen on one half of the rows; every figure that is reported comes from the other half.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fairhead.locate.edits import HeadEdits
from fairhead.locate.head_maps import Head, HeadMap, top_heads
from fairhead.locate.prove import Curves, Proof, Study, prove, single_head_effects
from fairhead.locate.question import Extremes, LocatePlan, Mask, Question, Rows

if TYPE_CHECKING:
    from fairhead.locate.located_report import Words


@dataclass(frozen=True)
class Located:
    """What `locate` finds. Maps and figures are of the reporting half.

    Attributes:
        rows: all rows, of both halves.
        choosing: those of the choosing half, [n] bool.
        head_map: each head's direct part in the gap, the chosen heads marked.
        other_map: parts of the embedding and the MLPs, [1, M].
        effect_map: what the gap loses without each head alone, in forward passes; None unless ranked by it.
        ranked: the chosen heads, best first.
        studies: effects of editing them; empty where none was chosen.
        curves: dose–response curves of the first direct effect; None where there is none.
        forward_curves: those of the first forward pass.
        extremes: rows at the ends of each chosen head.
        edits: what was learned for editing heads, on the choosing half.
        words: what else was found about this kind of gap, and how it is told.
        notes: what should be known, in sentences.
        chosen_here: whether the heads were chosen on the choosing half, or named by whoever asked.

    Example:
        >>> found = locate(question)  # doctest: +SKIP
        >>> found.ranked, found.head_map.share[found.ranked[0]]  # doctest: +SKIP
        ((Head(layer=10, head=5), Head(layer=11, head=1)), 0.41)
    """

    rows: Rows
    choosing: Mask
    head_map: HeadMap
    other_map: HeadMap
    effect_map: HeadMap | None
    ranked: tuple[Head, ...]
    studies: tuple[Study, ...]
    curves: Curves | None
    forward_curves: Curves | None
    extremes: tuple[Extremes, ...]
    edits: HeadEdits
    words: "Words"
    notes: tuple[str, ...]
    chosen_here: bool = True


def locate(
    question: Question, plan: LocatePlan | None = None, heads: Sequence[tuple[int, int]] | None = None
) -> Located:
    """Find the heads that carry a gap, and say what happens without them.

    Args:
        question: which gap, of what.
        plan: how.
        heads: those to test, best first, where they are known; None chooses them.

    Raises:
        InputError: the question cannot be asked in this way, or nothing can be compared.

    Example:
        >>> from fairhead.locate import Evaluation, Features, GapQuestion, Task, concept_from_images
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
        >>> found = locate(GapQuestion(features, rows, task, concept), LocatePlan(count=1, draws=9, n_boot=100))
        >>> found.ranked
        (Head(layer=2, head=1),)
        >>> [(study.kind, study["DP"].percentile) for study in found.studies][:1]
        [('mean', 0.0)]
    """
    plan = plan or LocatePlan()
    question.check(plan)
    choosing, comparable = question.choosing, question.comparable
    notes = list(question.notes)
    kind = (plan.kinds or question.kinds)[0]

    def lost(half: Mask) -> HeadMap:
        rows = np.flatnonzero(half & comparable)
        passes = question.forward(rows, kind)
        return single_head_effects(passes, question.shape, question.rows.take(rows), kind=kind, level=plan.level)

    by_effect = plan.rank == "effect" and heads is None
    if heads is None:
        direct = question.direct_map(choosing & comparable, plan.level)
        notes += question.doubts(direct, plan)
        rank, p = question.ranking(lost(choosing) if by_effect else direct, choosing & comparable, plan)
        per_layer = plan.per_layer or max(1, question.shape[1] // 4)
        ranked = top_heads(rank, p, plan.count, plan.alpha, per_layer)
    else:
        ranked = tuple(Head(*head) for head in heads)
    marked = tuple(sorted(ranked))
    effect_map = lost(~choosing).marking(marked) if by_effect else None
    proof = prove(question, ranked, plan) if ranked else Proof()
    if plan.forward and (ranked or by_effect):
        notes += question.forward_notes(proof.passes)
    return Located(
        rows=question.rows,
        choosing=choosing,
        head_map=question.direct_map(~choosing & comparable, plan.level).marking(marked),
        other_map=question.direct_map(~choosing & comparable, plan.level, others=True),
        effect_map=effect_map,
        ranked=ranked,
        studies=proof.studies,
        curves=proof.curves,
        forward_curves=proof.forward_curves,
        extremes=tuple(question.extremes(head, plan.extremes) for head in ranked),
        edits=question.edits,
        words=question.words(ranked, plan),
        notes=tuple(notes),
        chosen_here=heads is None,
    )
