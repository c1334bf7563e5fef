"""`locate`: from a question to a map of heads, the heads that carry the gap, and what changes without them.

A question is about a gap between two poles: that in the evidence for a class between two groups of images or of texts
(`GapQuestion`), or the log-odds of pairs of texts (`PairQuestion`). Heads are chosen on one half of the rows and
reported on the other. Every figure of an edit is held against random heads. A direct effect changes the heads' own
terms and nothing else: later layers and the norms' deviations stay as they were. It costs no forward pass, so hundreds
of control sets take seconds. A full forward pass (`passes.py`) lets later layers answer.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.locate.edits import HeadEdits, check_kind
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Head, HeadMap, largest_first, mask_of, top_heads
from fairhead.locate.locate_settings import RANKS, LocatePlan, Rank
from fairhead.locate.located import Extremes, Located
from fairhead.locate.studies import (
    Controls,
    Edited,
    Mask,
    Rows,
    Study,
    curve_sets,
    curves,
    layer_matched,
    norm_matched,
    single_head_effects,
    study,
)
from fairhead.records import Records
from fairhead.stats import ALPHA, Correction, adjust

_EXACT = 16  # heads that are run, where others are estimated


class Scores(NamedTuple):
    """What heads are ranked by, with p-values before any correction: [L, H] each."""

    value: Array
    p: Array
    side: float | None = None  # the sign that is sought, or None for either

    @property
    def rank(self) -> Array:
        """Larger is better."""
        return np.abs(self.value) if self.side is None else self.value * self.side

    def confirm(self, heads: Sequence[Head], chosen: "Scores | None") -> tuple[Head, ...]:
        """Of some heads, those that are significant here and on the side that they were chosen for: Holm over them."""
        p = adjust([float(self.p[head]) for head in heads], "holm")
        side = np.full_like(self.value, 1.0 if self.side is None else self.side) if chosen is None else chosen.value
        significant = [q is not None and q <= ALPHA for q in p]
        return tuple(h for h, sure in zip(heads, significant, strict=True) if sure and self.value[h] * side[h] > 0)


class Question(ABC):
    """A gap, each head's direct contribution in it, and passes in which heads are edited."""

    located: type[Located]  # what is found, and how it is told
    kinds: tuple[str, ...]  # of edits that it knows
    learned: tuple[str, ...] = ()  # further ones, that have to be asked for
    ranks: tuple[str, ...] = RANKS  # that it knows
    correction: Correction = "bh"  # of p-values over all heads, when heads are chosen
    rows: Rows  # all n rows
    choosing: Mask  # the half that heads are chosen on, [n] bool
    comparable: Mask  # rows that a gap can be made of, [n] bool
    parts: Array  # each head's direct contribution in a row's evidence, [n, L, H]
    other_parts: Array  # those of the embedding and the MLPs, [n, M]
    total: Array  # the evidence itself, [n]
    edits: HeadEdits  # what is put in a head's place, learned on the selection half
    gains: Array | None = None  # of the heads, [L, H], where they were learned
    norms: Array | None = None  # how much each head writes, [L, H], for controls matched by it; None for none
    baselines: tuple[str, ...] = ()  # edits of the whole output, which those of heads are compared with
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
        """Each head's direct contribution in the gap of some rows, or that of the other terms as [1, M]."""
        parts = self.other_parts[:, None] if others else self.parts
        return self.rows.take(rows).score(parts[rows], self.total[rows], level)

    @classmethod
    def check(cls, plan: LocatePlan) -> None:
        """Refuse a plan that this question cannot follow."""
        if plan.rank not in (None, *cls.ranks):
            raise InputError(f"rank is {plan.rank!r}; here it is {' or '.join(cls.ranks)}")
        for kind in plan.kinds or ():
            check_kind(kind, (*cls.kinds, *cls.learned))

    def scores(self, found: HeadMap, rows: Mask, plan: LocatePlan) -> Scores:
        """What heads are ranked by on some rows, whose map is `found`: direct contributions, or effects."""
        return Scores(found.value, found.p, float(np.sign(found.total)))

    def doubts(self, direct: HeadMap, plan: LocatePlan) -> list[str]:
        """What makes the choice uncertain, in sentences."""
        return []

    def forward_kinds(self, kinds: Sequence[str]) -> Sequence[str]:
        """The kinds of edits that full forward passes are made with."""
        return kinds

    @abstractmethod
    def direct(self, kind: str, seed: int) -> Edited | None:
        """Direct effects on the reporting half; None for a kind that has none without a pass."""

    @abstractmethod
    def forward(self, rows: NDArray[np.intp], kind: str) -> Edited:
        """True forward passes over some rows; a set of heads that was run is not run again."""

    def at_output(self, kind: str, heads: Sequence[Head] | None = None) -> Edited | None:
        """What an edit of the whole output does to the reporting half, or of what some heads together add to it.

        These are baselines of edits of heads; None for none.
        """
        return None

    @property
    @abstractmethod
    def fast(self) -> bool:
        """Whether one pass for each head is affordable: on a GPU it is."""

    @property
    def default_rank(self) -> Rank:
        """What heads are ranked by where nobody says."""
        return "effect" if self.fast else "gap"

    def estimate(self, rows: NDArray[np.intp], kind: str) -> Array | None:
        """What the evidence of some rows loses without each head alone, estimated, [n, L, H]; None where it cannot."""
        return None

    @abstractmethod
    def forward_notes(self, edited: Edited | None) -> list[str]:
        """What should be known of the passes that were made over the reporting half, if any were."""

    def records(self, studies: Sequence[Study]) -> Mapping[str, Records]:
        """Predictions of the reporting half for an audit, by the name of their file; none where rows have no labels."""
        return {}

    @abstractmethod
    def extremes(self, head: Head, count: int | None) -> Extremes:
        """Rows at the ends of a head."""

    @abstractmethod
    def details(self, ranked: tuple[Head, ...], plan: LocatePlan) -> dict[str, Any]:
        """What `located` has of the selected heads beside what every gap has, by field."""


def locate(
    question: Question, plan: LocatePlan | None = None, heads: Sequence[tuple[int, int]] | None = None
) -> Located:
    """Find the heads that carry a gap, or test known `heads` (best first), and say what happens without them."""
    plan = plan or LocatePlan()
    plan = replace(plan, rank=plan.rank or question.default_rank)
    question.check(plan)
    learning, telling = (half & question.comparable for half in (question.choosing, ~question.choosing))
    notes = list(question.notes)
    kind = (plan.kinds or question.kinds)[0]

    by_effect = plan.rank == "effect" and heads is None
    chosen, exact = None, None
    if heads is None:
        direct = question.direct_map(learning, plan.level)
        notes += question.doubts(direct, plan)
        if by_effect:
            direct, exact = effects(question, learning, plan, kind)
        chosen = question.scores(direct, learning, plan)
        if exact is not None:  # an estimate chooses no head
            chosen = chosen._replace(p=np.where(mask_of(exact, question.shape), chosen.p, 1.0))
        p = np.array(adjust(chosen.p.ravel().tolist(), question.correction), dtype=np.float64).reshape(question.shape)
        per_layer = plan.per_layer or max(1, question.shape[1] // 4)
        ranked = top_heads(chosen.rank, p, plan.count, plan.alpha, per_layer)
    else:
        ranked = tuple(Head(*head) for head in heads)
    marked = tuple(sorted(ranked))
    effect_map = None
    if by_effect:
        effect_map = replace(effects(question, telling, plan, kind, exact)[0], selected=marked)
    head_map = replace(question.direct_map(telling, plan.level), selected=marked)
    confirmed = question.scores(effect_map or head_map, telling, plan).confirm(ranked, chosen)
    proof = prove(question, ranked, plan)
    notes += proof.notes
    if plan.forward and (ranked or by_effect):
        notes += question.forward_notes(proof.passes)
    return question.located(
        rows=question.rows,
        choosing=question.choosing,
        head_map=head_map,
        other_map=question.direct_map(telling, plan.level, others=True),
        effect_map=effect_map,
        exact=exact,
        ranked=ranked,
        studies=tuple(proof.studies),
        curves=proof.curves,
        extremes=tuple(question.extremes(head, plan.extremes) for head in ranked),
        edits=question.edits,
        notes=tuple(notes),
        gains=question.gains,
        confirmed=confirmed,
        chosen_here=heads is None,
        **question.details(ranked, plan),
    )


def effects(
    question: Question, rows: Mask, plan: LocatePlan, kind: str, exact: tuple[Head, ...] | None = None
) -> tuple[HeadMap, tuple[Head, ...] | None]:
    """What the gap of some rows loses without each head alone, and the heads that were run; None for all.

    One pass a head is affordable on a GPU. Elsewhere all heads are estimated (attribution patching), and those with
    the largest estimates are run; or the `exact` ones, which were chosen so on other rows.
    """
    at = np.flatnonzero(rows)
    of, passes = question.rows.take(at), question.forward(at, kind)
    how: dict[str, Any] = {"kind": kind, "level": plan.level}
    most = plan.exact or (None if question.fast else _EXACT)
    estimate = None if most is None or most >= question.parts[0].size else question.estimate(at, kind)
    if estimate is None:
        return single_head_effects(passes, question.shape, of, **how), None
    if exact is None:
        # Of either sign: where a head saturates what comes after it, the slope there says little about the effect.
        first = of.score(estimate, estimate.sum((1, 2)), plan.level)
        exact = tuple(largest_first(np.abs(first.value))[:most])
    return single_head_effects(passes, question.shape, of, heads=exact, estimate=estimate, **how), exact


@dataclass
class Proof:
    """What editing the selected heads does on the reporting half."""

    studies: list[Study] = field(default_factory=list)  # direct effects, one a kind, baselines, forward passes
    curves: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the first study of either way
    passes: Edited | None = None  # the first forward passes
    notes: list[str] = field(default_factory=list)  # what should be known, in sentences


def prove(question: Question, ranked: tuple[Head, ...], plan: LocatePlan) -> Proof:
    """Edit the selected heads and random ones on the reporting half, in every way that was asked for."""
    found = Proof()
    if not ranked:
        return found
    kinds = plan.kinds or question.kinds
    rows = question.rows.take(question.reported)
    how = {"draws": plan.draws, "seed": plan.seed}
    controls, by_norm = Controls(), None
    try:
        controls = layer_matched(ranked, question.shape[1], **how)
        by_norm = None if question.norms is None else norm_matched(ranked, question.norms, **how)
    except InputError as error:  # as where all heads of a layer were named
        found.notes.append(f"Not compared with random heads: {error}.")
    for kind in kinds:
        edited = question.direct(kind, plan.seed)
        if edited is not None:
            found.studies.append(study(edited, ranked, rows, controls, plan, kind, "direct", by_norm))
            found.curves = found.curves or {"direct": curves(edited, ranked, rows)}
    forward: list[Study] = []
    for kind in question.forward_kinds(kinds) if plan.forward else ():
        edited = question.forward(question.reported, kind)
        if found.passes is None:
            found.passes = edited
            edited([*chain(*curve_sets(ranked).values()), *controls.sets])  # one sweep for all
            found.curves["forward"] = curves(edited, ranked, rows)
        # Controls matched by norm would have to start at whatever layer they lie in.
        forward.append(study(edited, ranked, rows, controls, plan, kind, "forward"))
    reported = [*forward, *found.studies][:1]
    for kind in question.baselines:
        for way, part in (("together", ranked), ("output", None)):
            edited = question.at_output(kind, part)
            if edited is not None:
                one = study(edited, ranked, rows, Controls(), plan, kind, way)
                beside = rows.compare(one.after, reported[0].after, plan)
                found.studies.append(replace(one, reported=beside))
    found.studies += forward
    return found
