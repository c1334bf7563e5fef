"""`locate`: from a question to a map of heads, the heads that carry the gap, and what changes without them.

Heads are chosen on one half of the rows and reported on the other. Every figure of an edit is held against random
heads. A direct effect changes the heads' own terms and what a classifier makes of them: later layers and the norms'
deviations stay as they were. It costs no forward pass, so hundreds of control sets take seconds. A full forward pass
(`passes.py`) lets later layers answer.

Where a gap is to be brought down to a target, every edit (kinds, numbers of heads and strengths) is tried on the
selection half. Of those that are predicted to reach the wanted gap in new rows as well (`Evaluation.predicted`), the
most accurate one is chosen, and reported on the other half with intervals, beside those that no other edit beats in
both gap and accuracy. Group-aware gains (`gains.py`) are one more, with their figures out of fold.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np

from fairhead import __version__
from fairhead.errors import InputError
from fairhead.locate.edits import GROUPLESS_KINDS, parsed
from fairhead.locate.gains import GroupAwareGains, learn_group_aware_gains
from fairhead.locate.gap_question import GapQuestion
from fairhead.locate.head_maps import Head, HeadMap, gained, largest_first, mask_of, top_heads
from fairhead.locate.locate_settings import LocatePlan, Source
from fairhead.locate.located import Located
from fairhead.locate.question import Question, compare_models
from fairhead.locate.rows import SURE, Evaluation
from fairhead.locate.session import open_question
from fairhead.locate.studies import (
    Changes,
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
    written,
)
from fairhead.models.places import config_of, find
from fairhead.report.model_card import name_of
from fairhead.report.page import Sentence
from fairhead.report.sections.bench_block import EditFront, Frontier, Point
from fairhead.report.sections.plain import PlainTable, PlainTables
from fairhead.report.wording import from_to, is_share, metric_name, scale_for, signed
from fairhead.stats import Difference, adjust

_EXACT = 16  # heads that are run, where others are estimated
STRENGTHS = (0.25, 0.5, 0.75, 1.0)
COUNTS = (1, 2, 3, 4, 6, 8, 12)
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
        other = open_question(same, replace(plan, rank="gap", forward=False, kinds=None), features, progress)
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


@dataclass(frozen=True)
class Dose:
    """One edit: how it fares on the selection half, and, where it was run there, on the other."""

    kind: str  # with its strength behind @
    heads: tuple[Head, ...]
    gap: float  # on the selection half
    accuracy: float
    upper: float  # the end of the gap that is predicted for new rows
    gains: tuple[float, ...] = ()  # of the heads, where the kind is "gain"
    changes: Changes | None = None  # on the reporting half, against the model as it is

    def change(self, metric: str) -> Difference | None:
        """One figure of the reporting half, before and after."""
        return None if self.changes is None else self.changes.change(metric)

    def beats(self, other: "Dose") -> bool:
        """Whether it is as good in gap, accuracy and number of heads, and better in one."""
        at_least = self.gap <= other.gap and self.accuracy >= other.accuracy
        return at_least and (
            self.gap < other.gap or self.accuracy > other.accuracy or len(self.heads) < len(other.heads)
        )


@dataclass(frozen=True)
class Doses:
    """All edits that were tried."""

    metric: str
    target: float  # share of the gap that may be left
    before: float  # the gap of the model as it is, on the selection half
    tried: tuple[Dose, ...]
    chosen: Dose | None  # with its figures on the other half; None where no edit reaches the target
    front: tuple[Dose, ...]  # those that no other beats on the selection half, with their figures on the other

    def verdict(self) -> Sentence:
        """What was chosen, and whether the other half confirms it."""
        name, share = metric_name(self.metric), round(100 * self.target)
        goal = f"predicted to bring {name} down to {share} % in {100 * SURE:.0f} % of new samples."
        if self.chosen is None:
            return Sentence(f"None of {len(self.tried)} edits is {goal}", "unclear")
        gap, accuracy = self.chosen.change(self.metric), self.chosen.change("accuracy")
        if gap is None or gap.a is None or gap.b is None or accuracy is None or accuracy.value is None:
            return Sentence(f"{name} of the chosen edit is undefined on the other half: too few rows.", "unclear")
        reached, name = abs(gap.b) <= self.target * abs(gap.a), f"{self.chosen.kind} of {_many(self.chosen)}"
        return Sentence(
            f"Of {len(self.tried)} edits, {name} is the cheapest that is {goal} On the reporting half it goes "
            f"{from_to(gap.metric, gap.a, gap.b)} ({'confirmed' if reached else 'not reached'}), and accuracy changes "
            f"by {signed(100 * accuracy.value, 1)} points.",
            "good" if reached else "unclear",
        )

    def sections(self) -> list[PlainTables]:
        """The front and the chosen edit, on the reporting half: for the page and for the terminal."""
        rows, points = [], []
        for dose in self.front:
            gap, accuracy = dose.change(self.metric), dose.change("accuracy")
            name = f"{dose.kind}, {_many(dose)}{' (chosen)' if dose is self.chosen else ''}"
            after = "–" if gap is None or gap.b is None else scale_for(gap.metric).number(gap.b)
            rows.append([name, after, written(gap), written(accuracy)])
            x, y = _ends(accuracy), _ends(gap)
            if x and y:
                plain = Point("as it is", x[0], x[0], x[0], y[0], y[0], y[0])
                points.append(Point(name, x[1], x[2], x[3], y[1], y[2], y[3]))
        unit = ", %" if is_share(self.metric) else ""
        columns = ["edit", f"{metric_name(self.metric)}{unit}", "change", "change of accuracy, points"]
        caption = "Edits that no other beats on the selection half, with their figures on the reporting half."
        tables = [PlainTable(caption=caption, columns=columns, rows=rows)]
        title = "The cheapest edit that reaches the wanted gap"
        if not points:
            return [PlainTables(title=title, tables=tables)]
        return [EditFront(title=title, tables=tables, frontier=Frontier.of(self.metric, [plain, *points], ""))]

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""

        def of(dose: Dose) -> dict[str, Any]:
            changes = (dose.change(name) for name in (self.metric, "accuracy"))
            figures: dict[str, Any] = {"gap": dose.gap, "accuracy": dose.accuracy}
            figures["upper"] = dose.upper if np.isfinite(dose.upper) else None
            figures |= {"gains": list(dose.gains)} if dose.gains else {}
            reported = {"reported": [d.to_dict() for d in changes if d is not None]}
            return {"kind": dose.kind, "heads": [list(h) for h in dose.heads], **figures, **reported}

        return {
            "metric": self.metric,
            "target": self.target,
            "before": self.before,
            "tried": len(self.tried),
            "chosen": None if self.chosen is None else of(self.chosen),
            "front": [of(dose) for dose in self.front],
        }


def _many(dose: Dose) -> str:
    return f"{len(dose.heads)} head{'' if len(dose.heads) == 1 else 's'}"


def _ends(change: Difference | None) -> tuple[float, ...]:
    """A figure before and after, and the interval of its change put where it was before; () where undefined."""
    if change is None or change.a is None or change.b is None or change.low is None or change.high is None:
        return ()
    return change.a, change.b, max(0.0, change.a + change.low), change.a + change.high


def group_aware_gains(question: GapQuestion, plan: LocatePlan) -> GroupAwareGains | None:
    """Group-aware gains, where passes edit every token and there are rows enough."""
    if question.passes is None or question.passes.everywhere is None:
        return None
    try:
        return learn_group_aware_gains(question, plan)
    except InputError as error:  # too few rows for this edit leave the others as they are
        logging.getLogger("fairhead").warning("group-aware gains were not tried: %s", error)
        return None


def find_dose(
    question: GapQuestion,
    ranked: Sequence[Head],  # best first
    plan: LocatePlan,  # with the metric, and the share of it that may be left
    *,
    kinds: Sequence[str] = ("mean", "project", "splince"),
    gains: bool | None = None,
    strengths: Sequence[float] = STRENGTHS,
    counts: Sequence[int] = COUNTS,
) -> Doses:
    """Try every kind, number of the ranked heads and strength in full forward passes.

    Group-aware gains are tried, too, where passes are fast (on a GPU) or they are asked for.
    """
    metric, new = plan.target_metric, len(question.reported)
    choosing, heads = np.flatnonzero(question.choosing), tuple(ranked)
    sizes = sorted({min(count, len(heads)) for count in counts})
    rows, tried, before = question.rows.take(choosing), [], float("nan")
    for kind in (f"{kind}@{strength:g}" if strength != 1 else kind for kind in kinds for strength in strengths):
        sets = [heads[:size] for size in sizes]
        plain, *reads = question.forward(choosing, kind)([(), *sets])
        figures = rows.figures([plain, *reads])
        before = float(figures[metric][0])
        for some, read, gap, accuracy in zip(sets, reads, figures[metric][1:], figures["accuracy"][1:], strict=True):
            if np.isfinite(gap):
                tried.append(Dose(kind, some, abs(gap), accuracy, rows.predicted(plain, read, plan, new)))
    learned = group_aware_gains(question, plan) if (question.fast if gains is None else gains) else None
    if learned is not None and learned.heads:
        question = question.with_gains(learned.values)
        gained = tuple(float(learned.values[head]) for head in learned.heads)
        tried.append(Dose("gain", learned.heads, learned.gap, learned.accuracy, learned.upper, gained))
    reach = [dose for dose in tried if dose.upper <= plan.share_left * abs(before)]
    chosen = max(reach, key=lambda dose: (dose.accuracy, -len(dose.heads)), default=None)
    front = sorted((d for d in tried if not any(other.beats(d) for other in tried)), key=lambda d: d.gap)
    wanted = [*dict.fromkeys([*front, *([] if chosen is None else [chosen])])]
    reporting, reported = question.rows.take(question.reported), {}
    for kind in dict.fromkeys(dose.kind for dose in wanted):
        of_kind = [dose for dose in wanted if dose.kind == kind]
        plain, *after = question.forward(question.reported, kind)([(), *(dose.heads for dose in of_kind)])
        for dose, read in zip(of_kind, after, strict=True):
            reported[dose] = replace(dose, changes=reporting.compare(plain, read, plan))
    found = tuple(reported[dose] for dose in wanted)
    return Doses(metric, plan.share_left, before, tuple(tried), None if chosen is None else reported[chosen], found)
