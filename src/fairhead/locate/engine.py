"""`locate`: from a question to a map of heads, the heads that carry the gap, and what changes without them.

Heads are chosen on one half of the rows and reported on the other. Every figure of an edit is held against random
heads. A direct effect changes the heads' own terms and what a classifier makes of them: later layers and the norms'
deviations stay as they were. It costs no forward pass, so hundreds of control sets take seconds. A full forward pass
(`passes.py`) lets later layers answer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from fairhead import __version__
from fairhead.errors import InputError
from fairhead.locate.edits import GROUPLESS_KINDS, parsed
from fairhead.locate.gap_question import GapQuestion
from fairhead.locate.head_maps import Head, HeadMap, gained, largest_first, mask_of, top_heads
from fairhead.locate.locate_settings import LocatePlan, Source
from fairhead.locate.located import Located
from fairhead.locate.question import Question, compare_models
from fairhead.locate.rows import Evaluation
from fairhead.locate.session import open_question
from fairhead.locate.studies import (
    Controls,
    Edited,
    Mask,
    Study,
    curve_sets,
    curves,
    layer_matched,
    norm_matched,
    single_head_effects,
    study,
)
from fairhead.locate.target import find_dose
from fairhead.models.places import config_of, find
from fairhead.report.model_card import name_of
from fairhead.stats import adjust

_EXACT = 16  # heads that are run, where others are estimated
OTHER_HALF = (
    "The heads were chosen on other rows than the selection half of this run: some of those reported on here may have "
    "been used for the choice. With the data, limit and seed of that run, the halves are the same."
)


def answer(
    source: Source,  # model, data and what is asked of them
    plan: LocatePlan,  # how heads are chosen and tested
    *,
    heads: Sequence[tuple[int, int]] | None = None,  # to be tested; None chooses them
    gains: Sequence[float] | None = None,  # of these, where the edit is that; None learns them
    chosen_on: str | None = None,  # a hash of the rows that these were chosen on, where it is known
    features: str | None = None,  # folder that keeps the heads' terms
    progress: Callable[[str, int, int], None] | None = None,  # called with (stage, done, all)
    provenance: Mapping[str, Any] | None = None,  # anything else worth keeping, such as the command
) -> Located[Any]:
    """Ask a question and answer it."""
    if source.against is not None:  # a mistake there should not wait for the work
        config_of(find(source.against))
    question = open_question(source, plan, features, progress, heads, gains)
    found = locate(question, plan, heads if question.gains is None else gained(question.gains))
    if plan.target is not None and found.ranked and isinstance(question, GapQuestion) and question.gains is None:
        found = replace(found, doses=find_dose(question, found.ranked, plan))
    if source.against is not None:
        rows = question.rows
        positive = rows.classes[rows.positive] if isinstance(rows, Evaluation) else None
        same = replace(source, model=source.against, against=None, evidence=positive, beside=None)
        folder = None if features is None else f"{features}-against"
        other = open_question(same, replace(plan, rank="gap", forward=False, kinds=None), folder, progress)
        found = replace(found, against=compare_models(question, other, name_of(source.against), plan.level))
    if chosen_on is not None:
        moved = chosen_on != found.half_sha256
        found = replace(
            found, origin="taken from a head map", notes=(*found.notes, OTHER_HALF) if moved else found.notes
        )
    return replace(found, provenance={"version": __version__, **(provenance or {}), **question.provenance})


def locate(
    question: Question[Any], plan: LocatePlan | None = None, heads: Sequence[tuple[int, int]] | None = None
) -> Located[Any]:
    """Find the heads that carry a gap, or test known `heads` (best first), and say what happens without them."""
    plan = plan or LocatePlan()
    plan = replace(plan, rank=plan.rank or question.default_rank)
    question.check(plan)
    learning, telling = (half & question.comparable for half in (question.choosing, ~question.choosing))
    notes = list(question.notes)
    # Erasure and gains fitted to the groups of these rows would find an effect in noise.
    kind = next((k for k in plan.kinds or question.kinds if parsed(k)[0] in GROUPLESS_KINDS), "mean")

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
    found: Located[Any] = question.located(
        question=question,
        plan=plan,
        head_map=head_map,
        other_map=question.direct_map(telling, plan.level, others=True),
        effect_map=effect_map,
        exact=exact,
        ranked=ranked,
        studies=tuple(proof.studies),
        curves=proof.curves,
        extremes=tuple(question.extremes(head, plan.extremes) for head in ranked),
        notes=tuple(notes),
        confirmed=confirmed,
        chosen_here=heads is None,
        **question.details(ranked, plan),
    )
    return found


def effects(
    question: Question[Any], rows: Mask, plan: LocatePlan, kind: str, exact: tuple[Head, ...] | None = None
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


def prove(question: Question[Any], ranked: tuple[Head, ...], plan: LocatePlan) -> Proof:
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
