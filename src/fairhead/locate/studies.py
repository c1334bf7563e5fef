"""What edits of heads do: the figures before and after, random heads beside them, and single heads taken out."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.audit_results import Comparison
from fairhead.errors import InputError
from fairhead.locate.ablation import Ablation, Controls, layer_matched, norm_matched
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Head, HeadMap, largest_first
from fairhead.locate.locate_settings import LocatePlan
from fairhead.stats import Difference

if TYPE_CHECKING:
    from fairhead.locate.engine import Question
    from fairhead.locate.pair_rows import TextPairs
    from fairhead.locate.rows import Evaluation

# Who is compared, and the figures that an edit may change. A *read* is what one pass says of all rows: logits [n, C],
# or the sums behind the figures of pairs, [n, 7].
Rows: TypeAlias = "Evaluation | TextPairs"
# Sets of heads -> what is read with each of them edited; the empty set is the model as it is.
Edited = Callable[[Sequence[Sequence[tuple[int, int]]]], Sequence[Array]]
Mask = NDArray[np.bool_]
_EXACT = 16  # heads that are run, where others are estimated


class Changes(NamedTuple):
    """What an edit did to the figures of some rows, paired."""

    differences: tuple[Difference, ...]  # one a figure
    comparison: Comparison | None = None  # the same as an audit has it, where rows have labels and groups
    # Accuracy by class and group, as (class, group, change), where rows have them
    by_cell: tuple[tuple[str, str, Difference], ...] = ()


@dataclass(frozen=True)
class Study:
    """The effect of one edit of the chosen heads."""

    kind: str  # of edit
    way: str  # "direct" or "forward"; of baselines "together" or "output"
    ablations: tuple[Ablation, ...]  # one a figure, against layer-matched controls
    norm_matched: tuple[Ablation, ...]  # the same against controls that write as much, where there are any
    changes: Changes  # every figure before and after, paired
    before: Array  # what was read of the model as it is
    after: Array  # what was read with the heads edited
    reported: Changes | None = None  # of a baseline: from it to the edit of heads that is reported, paired

    def __getitem__(self, metric: str) -> Ablation:
        """The ablation of one figure, against layer-matched controls."""
        return next(a for a in self.ablations if a.change.metric == metric)

    def change(self, metric: str) -> Difference | None:
        """One figure before and after; None where it has no value."""
        return next((d for d in self.changes.differences if d.metric == metric and d.value is not None), None)


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
        np.asarray(before),
        np.asarray(after),
    )


def restudied(study: Study, rows: Rows, after: Array, plan: LocatePlan) -> Study:
    """The same study with figures of another pass over the edited model, as of one that was saved and loaded."""
    changes = rows.compare(study.before, after, plan)
    new = {change.metric: change for change in changes.differences}

    def updated(ablations: Sequence[Ablation]) -> tuple[Ablation, ...]:
        return tuple(
            replace(a, change=new[a.change.metric], accuracy=None if a.accuracy is None else new["accuracy"])
            for a in ablations
        )

    return replace(
        study,
        ablations=updated(study.ablations),
        norm_matched=updated(study.norm_matched),
        changes=changes,
        after=after,
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
        if change.value is not None and len(known.get(change.metric, ())):
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
    edited: Edited,
    shape: tuple[int, int],
    rows: Rows,
    *,
    kind: str = "mean",
    level: float = 0.95,
    heads: Sequence[Head] | None = None,
    estimate: Array | None = None,
) -> HeadMap:
    """What the gap loses when each head alone is edited in a true forward pass.

    What a head itself writes (its direct part) leaves out what later layers make of it; this does not. The price is
    one pass for each head, of `shape` [layers, heads]; or for some `heads` alone, where there is an `estimate`
    [n, layers, heads] for the others.
    """
    run = [Head(*head) for head in np.ndindex(shape)] if heads is None else list(heads)
    before, *after = (np.asarray(rows.evidence(read), dtype=np.float64) for read in edited([(), *zip(run)]))
    lost = np.zeros((len(before), *shape)) if estimate is None else estimate.copy()
    for head, each in zip(run, after, strict=True):
        lost[:, head.layer, head.head] = before - each
    first, second = rows.poles
    how = "forward pass" if heads is None else f"forward passes of {len(run)} heads, others estimated"
    measure = f"{rows.gap_name} lost without the head ({kind}, {how}), {first} minus {second}"
    return rows.score(lost, before, level, measure)


def effects(
    question: "Question", rows: Mask, plan: LocatePlan, kind: str, exact: tuple[Head, ...] | None = None
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
        exact = tuple(largest_first(np.abs(first.gap))[:most])
    return single_head_effects(passes, question.shape, of, heads=exact, estimate=estimate, **how), exact


@dataclass
class Proof:
    """What editing the chosen heads does on the reporting half."""

    studies: list[Study] = field(default_factory=list)  # direct effects, one a kind, baselines, forward passes
    curves: dict[str, Curves] = field(default_factory=dict)  # dose–response curves of the first study of either way
    passes: Edited | None = None  # the first forward passes
    notes: list[str] = field(default_factory=list)  # what should be known, in sentences


def prove(question: "Question", ranked: tuple[Head, ...], plan: LocatePlan) -> Proof:
    """Edit the chosen heads and random ones on the reporting half, in every way that was asked for."""
    found = Proof()
    if not ranked:
        return found
    kinds = plan.kinds or question.kinds
    rows = question.rows.take(question.reported)
    how = {"draws": plan.draws, "seed": plan.seed}
    controls, by_norm = Controls((), exhaustive=False), None
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
    for kind in question.baselines(kinds):
        reported = (forward or found.studies)[0]
        found.studies += _baselines(question, kind, ranked, reported, plan)
    found.studies += forward
    return found


def _baselines(
    question: "Question", kind: str, ranked: tuple[Head, ...], reported: Study, plan: LocatePlan
) -> Iterator[Study]:
    """One edit of what the chosen heads together add to the output, and of the whole, beside the reported edit."""
    rows, none = question.rows.take(question.reported), Controls((), exhaustive=False)
    for way, part in (("together", ranked), ("output", None)):
        edited = question.at_output(kind, part)
        if edited is not None:
            found = study(edited, ranked, rows, none, plan, kind, way)
            yield replace(found, reported=rows.compare(found.after, reported.after, plan))
