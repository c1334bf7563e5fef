"""`locate`: from a question to a map of heads, the heads that carry the gap, and what changes without them.

A question is about a gap between two poles: that in the evidence for a class between two groups of images or of texts
(`GapQuestion`), or the log-odds of pairs of texts (`PairQuestion`). Heads are chosen on one half of the rows and
reported on the other. Every figure of an edit is held against random heads. A direct effect changes the heads' own
terms and nothing else: later layers and the norms' deviations stay as they were. It costs no forward pass, so hundreds
of control sets take seconds. A true forward pass (`passes.py`) lets later layers answer.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.audit_results import Comparison
from fairhead.errors import InputError
from fairhead.locate.ablation import Ablation, Controls, layer_matched, norm_matched
from fairhead.locate.edits import HeadEdits, check_kind
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Head, HeadMap, top_heads
from fairhead.locate.locate_settings import RANKS, LocatePlan
from fairhead.records import Records
from fairhead.stats import Difference

if TYPE_CHECKING:
    from fairhead.locate.gap_words import GapWords
    from fairhead.locate.pair_question import PairWords
    from fairhead.locate.rows import Evaluation, TextPairs

# Who is compared, and the figures that an edit may change. A *read* is what one pass says of all rows: logits [n, C],
# or the sums behind the figures of pairs, [n, 7].
Rows: TypeAlias = "Evaluation | TextPairs"
# What else was found about a kind of gap, and how the report tells it.
Words: TypeAlias = "GapWords | PairWords"
# Sets of heads -> what is read with each of them edited; the empty set is the model as it is.
Edited = Callable[[Sequence[Sequence[tuple[int, int]]]], Sequence[Array]]
Mask = NDArray[np.bool_]


class Changes(NamedTuple):
    """What an edit did to the figures of some rows, paired."""

    differences: tuple[Difference, ...]  # one a figure
    comparison: Comparison | None = None  # the same as an audit has it, where rows have labels and groups
    # Accuracy by class and group, as (class, group, change), where rows have them
    by_cell: tuple[tuple[str, str, Difference], ...] = ()


class Extremes(NamedTuple):
    """Rows at the ends of a head, by position: most towards the first pole, and towards the second."""

    head: Head
    most: tuple[int, ...]
    least: tuple[int, ...]

    @classmethod
    def of(cls, head: Head, parts: Array, count: int, rows: NDArray[np.intp] | None = None) -> "Extremes":
        """Of the head's parts [n]; `rows` [n] are their positions."""
        order = np.argsort(parts, kind="stable")
        order = order if rows is None else rows[order]
        return cls(head, tuple(order[::-1][:count].tolist()), tuple(order[:count].tolist()))


class Question(ABC):
    """A gap, each head's direct part in it, and passes in which heads are edited."""

    kinds: tuple[str, ...]  # of edits that it knows
    ranks: tuple[str, ...] = RANKS  # that it knows
    rows: Rows  # all n rows
    choosing: Mask  # the half that heads are chosen on, [n] bool
    comparable: Mask  # rows that a gap can be made of, [n] bool
    parts: Array  # each head's direct part in a row's evidence, [n, L, H]
    other_parts: Array  # those of the embedding and the MLPs, [n, M]
    total: Array  # the evidence itself, [n]
    edits: HeadEdits  # what is put in a head's place, learned on the choosing half
    norms: Array | None = None  # how much each head writes, [L, H], for controls matched by it; None for none
    notes: tuple[str, ...] = ()  # what was left out, in sentences

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads."""
        return self.parts.shape[1], self.parts.shape[2]

    @property
    def reported(self) -> NDArray[np.intp]:
        """Positions of the reporting half."""
        return np.flatnonzero(~self.choosing)

    def direct_map(self, rows: Mask, level: float, others: bool = False) -> HeadMap:
        """Each head's direct part in the gap of some rows, or that of the other terms as [1, M]."""
        parts = self.other_parts[:, None] if others else self.parts
        return self.rows.take(rows).score(parts[rows], self.total[rows], level)

    @classmethod
    def check(cls, plan: LocatePlan) -> None:
        """Refuse a plan that this question cannot follow."""
        if plan.rank not in cls.ranks:
            raise InputError(f"rank is {plan.rank!r}; here it is {' or '.join(cls.ranks)}")
        for kind in plan.kinds or ():
            check_kind(kind, cls.kinds)

    def ranking(self, direct: HeadMap, rows: Mask, plan: LocatePlan) -> tuple[Array, Array]:
        """What heads are ranked by on the choosing half, larger being better, and corrected p-values: [L, H] each."""
        return direct.gap * np.sign(direct.total), direct.p_adjusted

    def doubts(self, direct: HeadMap, plan: LocatePlan) -> list[str]:
        """What makes the choice uncertain, in sentences."""
        return []

    def forward_kinds(self, kinds: Sequence[str]) -> Sequence[str]:
        """The kinds of edits that true forward passes are made with."""
        return kinds

    @abstractmethod
    def direct(self, kind: str, seed: int) -> Edited | None:
        """Direct effects on the reporting half; None for a kind that has none without a pass."""

    @abstractmethod
    def forward(self, rows: NDArray[np.intp], kind: str) -> Edited:
        """True forward passes over some rows; a set of heads that was run is not run again."""

    @abstractmethod
    def forward_notes(self, edited: Edited | None) -> list[str]:
        """What should be known of the passes that were made over the reporting half, if any were."""

    def records(self, studies: "Sequence[Study]") -> Mapping[str, Records]:
        """Predictions of the reporting half for an audit, by the name of their file; none where rows have no labels."""
        return {}

    @abstractmethod
    def extremes(self, head: Head, count: int | None) -> Extremes:
        """Rows at the ends of a head."""

    @abstractmethod
    def words(self, ranked: tuple[Head, ...], plan: LocatePlan) -> Words:
        """What else is to be told of the chosen heads, and how the report calls things."""


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
    """Find the heads that carry a gap, or test known `heads` (best first), and say what happens without them."""
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
