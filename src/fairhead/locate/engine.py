"""`locate`: from a question to a map of heads, the heads that carry the gap, and what changes without them.

Every figure of an edit is held against random heads. A direct effect changes the heads' own terms and nothing else:
later layers and the norms' deviations stay as they were. It costs no forward pass, so hundreds of control sets take
seconds. A true forward pass (`passes.py`) lets later layers answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from fairhead.locate.ablation import Ablation, Controls, layer_matched, norm_matched
from fairhead.locate.edits import HeadEdits
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Head, HeadMap, top_heads
from fairhead.locate.locate_settings import LocatePlan
from fairhead.locate.question import Changes, Edited, Extremes, Mask, Question, Rows, Words
from fairhead.stats import Difference


@dataclass(frozen=True)
class Study:
    """The effect of one edit of the chosen heads."""

    kind: str  # of edit
    way: str  # "direct" or "forward"
    ablations: tuple[Ablation, ...]  # one a figure, against layer-matched controls
    norm_matched: tuple[Ablation, ...]  # the same against controls that write as much, where there are any
    changes: Changes  # every figure before and after, paired
    after: Array  # what was read with the heads edited

    def __getitem__(self, metric: str) -> Ablation:
        """The ablation of one figure, against layer-matched controls."""
        return next(a for a in self.ablations if a.change.metric == metric)


def study(
    edited: Edited,
    ranked: Sequence[Head],
    rows: Rows,
    controls: Controls,
    plan: LocatePlan,
    kind: str,
    way: str,
    by_norm: Controls | None = None,
) -> Study:
    """Edit the chosen heads, and controls matched by layer and by how much heads write."""
    # All at once: a true forward pass decodes the images once for all of them.
    before, after, *rest = edited([(), ranked, *controls.sets, *(() if by_norm is None else by_norm.sets)])
    changes = rows.compare(before, after, plan)
    found = rows.figures([before, *rest])
    n = 1 + len(controls.sets)
    by_layer = {name: values[1:n] - values[0] for name, values in found.items()}
    among_norm = {name: values[n:] - values[0] for name, values in found.items()}
    return Study(
        kind,
        way,
        _against(changes.differences, by_layer, ranked, controls),
        () if by_norm is None else _against(changes.differences, among_norm, ranked, by_norm),
        changes,
        np.asarray(after),
    )


def _against(
    differences: Sequence[Difference], changes: Mapping[str, Array], ranked: Sequence[Head], controls: Controls
) -> tuple[Ablation, ...]:
    """One ablation a figure, beside the changes [sets] that the controls make."""
    # A figure may have no value for some sets, as V where all predictions are the same.
    known = {name: values[~np.isnan(values)] for name, values in changes.items()}
    accuracy = next((d for d in differences if d.metric == "accuracy"), None)
    ablations = []
    for change in differences:
        if change.value is not None and len(known[change.metric]):
            others = accuracy is not None and change is not accuracy
            ablations.append(
                Ablation(
                    tuple(sorted(ranked)),
                    change,
                    controls=tuple(known[change.metric].tolist()),
                    exhaustive=controls.exhaustive,
                    accuracy=accuracy if others else None,
                    control_accuracy=tuple(known["accuracy"].tolist()) if others else (),
                )
            )
    return tuple(ablations)


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

        named = {"added": self.added, "alone": self.alone, "left_out": self.left_out}
        return {"metrics": list(self.metrics), **{name: points(curve) for name, curve in named.items()}}


def curve_sets(ranked: Sequence[Head]) -> dict[str, list[tuple[Head, ...]]]:
    """Sets of each curve: heads added one by one from none on, best first; each alone; all but one of several."""
    added = [tuple(ranked[:k]) for k in range(len(ranked) + 1)]
    left_out = [tuple(other for other in ranked if other != head) for head in ranked]
    return {"added": added, "alone": [(h,) for h in ranked], "left_out": left_out if len(ranked) > 1 else []}


def curves(edited: Edited, ranked: Sequence[Head], rows: Rows) -> Curves:
    """Add-one, single-head and leave-one-out curves of heads in the order of their rank, best first."""
    sets = curve_sets(ranked)
    every = [*chain(*sets.values())]
    found = rows.figures(edited(every))
    points = {heads: CurvePoint(heads, {n: float(found[n][i]) for n in rows.doses}) for i, heads in enumerate(every)}
    return Curves(rows.doses, **{name: tuple(points[heads] for heads in part) for name, part in sets.items()})


def single_head_effects(
    edited: Edited, shape: tuple[int, int], rows: Rows, *, kind: str = "mean", level: float = 0.95
) -> HeadMap:
    """What the gap loses when each head alone is edited in a true forward pass.

    What a head itself writes (its direct part) leaves out what later layers make of it; this does not. The price is
    one pass for each head, of `shape` [layers, heads].

    Example:
        >>> from fairhead.locate.rows import Evaluation
        >>> groups, labels = np.arange(80) % 2, (np.arange(80) // 2) % 2
        >>> rows = Evaluation(labels, ("no", "yes"), groups, ("light", "dark"), "shade")
        >>> noise = np.random.default_rng(0).normal(size=80)
        >>> def edited(sets):  # without head 1 of layer 0 the group has no say
        ...     return [np.stack([noise, 4.0 * groups * ((0, 1) not in heads)], axis=1) for heads in sets]
        >>> single_head_effects(edited, (1, 2), rows).gap.round(6).tolist()
        [[0.0, 4.0]]
    """
    every = [(Head(*head),) for head in np.ndindex(shape)]
    before, *after = (np.asarray(rows.evidence(read), dtype=np.float64) for read in edited([(), *every]))
    lost = np.stack([before - each for each in after], axis=1).reshape(len(before), *shape)
    first, second = rows.poles
    measure = f"{rows.gap_name} lost without the head ({kind}, forward pass), {first} minus {second}"
    return rows.score(lost, before, level, measure)


@dataclass
class Proof:
    """What editing the chosen heads does on the reporting half."""

    studies: list[Study] = field(default_factory=list)  # direct effects, one a kind, then those of forward passes
    curves: dict[str, Curves] = field(default_factory=dict)  # dose–response curves of the first study of either way
    passes: Edited | None = None  # the first forward passes


def prove(question: Question, ranked: tuple[Head, ...], plan: LocatePlan) -> Proof:
    """Edit the chosen heads and random ones on the reporting half, in every way that was asked for."""
    found = Proof()
    if not ranked:
        return found
    kinds = plan.kinds or question.kinds
    rows = question.rows.take(question.reported)
    how = {"draws": plan.draws, "seed": plan.seed}
    controls = layer_matched(ranked, question.shape[1], **how)
    by_norm = None if question.norms is None else norm_matched(ranked, question.norms, **how)
    for kind in kinds:
        edited = question.direct(kind, plan.seed)
        if edited is not None:
            found.studies.append(study(edited, ranked, rows, controls, plan, kind, "direct", by_norm))
            found.curves = found.curves or {"direct": curves(edited, ranked, rows)}
    for kind in question.forward_kinds(kinds) if plan.forward else ():
        edited = question.forward(question.reported, kind)
        if found.passes is None:
            found.passes = edited
            edited([*chain(*curve_sets(ranked).values()), *controls.sets])  # one sweep for all
            found.curves["forward"] = curves(edited, ranked, rows)
        # Controls matched by norm would have to start at whatever layer they lie in.
        found.studies.append(study(edited, ranked, rows, controls, plan, kind, "forward"))
    return found


@dataclass(frozen=True)
class Located:
    """What `locate` finds. Maps and figures are of the reporting half."""

    rows: Rows  # all rows, of both halves
    choosing: Mask  # those of the choosing half, [n] bool
    head_map: HeadMap  # each head's direct part in the gap, the chosen heads marked
    other_map: HeadMap  # parts of the embedding and the MLPs, [1, M]
    # What the gap loses without each head alone, in forward passes; None unless ranked by it
    effect_map: HeadMap | None
    ranked: tuple[Head, ...]  # the chosen heads, best first
    studies: tuple[Study, ...]  # effects of editing them; empty where none was chosen
    curves: Mapping[str, Curves]  # dose–response curves of the first study of either way, "direct" and "forward"
    extremes: tuple[Extremes, ...]  # rows at the ends of each chosen head
    edits: HeadEdits  # what was learned for editing heads, on the choosing half
    words: Words  # what else was found about this kind of gap, and how it is told
    notes: tuple[str, ...]  # what should be known, in sentences
    chosen_here: bool = True  # whether the heads were chosen on the choosing half, or named by whoever asked


def locate(
    question: Question, plan: LocatePlan | None = None, heads: Sequence[tuple[int, int]] | None = None
) -> Located:
    """Find the heads that carry a gap, and say what happens without them.

    Args:
        question: which gap, of what.
        plan: how.
        heads: those to test, best first, where they are known; None chooses them.
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
    proof = prove(question, ranked, plan)
    if plan.forward and (ranked or by_effect):
        notes += question.forward_notes(proof.passes)
    return Located(
        rows=question.rows,
        choosing=choosing,
        head_map=question.direct_map(~choosing & comparable, plan.level).marking(marked),
        other_map=question.direct_map(~choosing & comparable, plan.level, others=True),
        effect_map=effect_map,
        ranked=ranked,
        studies=tuple(proof.studies),
        curves=proof.curves,
        extremes=tuple(question.extremes(head, plan.extremes) for head in ranked),
        edits=question.edits,
        words=question.words(ranked, plan),
        notes=tuple(notes),
        chosen_here=heads is None,
    )
