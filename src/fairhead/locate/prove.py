"""What editing heads does: every figure before and after, held against random heads, and how the effect grows.

A direct effect changes the heads' own terms and nothing else: later layers and the norms' deviations stay as they were.
It costs no forward pass, so hundreds of control sets take seconds. A true forward pass (`passes.py`) lets later layers
answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from fairhead.audit.results import Comparison
from fairhead.locate.ablation import Ablation, Controls, layer_matched, norm_matched
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Head, HeadMap
from fairhead.locate.question import Changes, Edited, LocatePlan, Question, Rows
from fairhead.stats import Difference


@dataclass(frozen=True)
class Study:
    """The effect of one edit of the chosen heads.

    Attributes:
        kind: of edit.
        way: "direct" or "forward".
        ablations: one a figure, against layer-matched controls.
        norm_matched: the same against norm-matched ones, where there are any.
        changes: every figure before and after, paired.
        after: what was read with the heads edited.

    Example:
        >>> located.studies[0]["cramers_v"].change.value  # doctest: +SKIP
        -0.019
    """

    kind: str
    way: str
    ablations: tuple[Ablation, ...]
    norm_matched: tuple[Ablation, ...]
    changes: Changes
    after: Array

    @property
    def comparison(self) -> Comparison | None:
        """The changes as an audit has them."""
        return self.changes.comparison

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
    """Edit the chosen heads and the controls.

    Args:
        edited: what is read with each of several sets of heads edited.
        ranked: the chosen heads.
        rows: what is read of.
        controls: matched by layer.
        plan: replicates and seed.
        kind: of edit.
        way: "direct" or "forward".
        by_norm: controls matched by how much heads write.

    Example:
        >>> from fairhead.locate.gap_question import DirectEffect, Evaluation
        >>> groups, labels = np.arange(80) % 2, (np.arange(80) // 2) % 2
        >>> change = np.zeros((80, 2, 4, 2))
        >>> change[:, 1, 0, 1] = -4.0 * groups  # without this head the group has no say
        >>> effect = DirectEffect(np.stack([np.ones(80), 4.0 * groups], 1), change)
        >>> rows = Evaluation(labels, ("no", "yes"), groups, ("f", "m"), "sex")
        >>> chosen = [Head(1, 0)]
        >>> found = study(effect, chosen, rows, layer_matched(chosen, 4), LocatePlan(n_boot=100), "mean", "direct")
        >>> found["DP"].change.a, found["DP"].change.b, found["DP"].percentile
        (1.0, 0.0, 0.0)
    """
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


def curves(edited: Edited, ranked: Sequence[Head], rows: Rows) -> Curves:
    """Add-one, single-head and leave-one-out curves of heads in the order of their rank.

    Args:
        edited: what is read with each of several sets of heads edited.
        ranked: best first.
        rows: what is read of.
    """
    sets = curve_sets(ranked)
    every = [heads for part in sets for heads in part]
    found = rows.figures(edited(every))
    points = iter(
        [CurvePoint(heads, {name: float(found[name][i]) for name in rows.doses}) for i, heads in enumerate(every)]
    )
    return Curves(rows.doses, *(tuple(islice(points, len(part))) for part in sets))


def single_head_effects(
    edited: Edited, shape: tuple[int, int], rows: Rows, *, kind: str = "mean", level: float = 0.95
) -> HeadMap:
    """What the gap loses when each head alone is edited in a true forward pass.

    What a head itself writes (its direct part) leaves out what later layers make of it; this does not. The price is
    one pass for each head.

    Args:
        edited: what is read with each of several sets of heads edited.
        shape: layers and heads.
        rows: what is read of.
        kind: of edit, for the words.
        level: of the intervals.

    Example:
        >>> from fairhead.locate.gap_question import Evaluation
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


class Proof(NamedTuple):
    """What editing the chosen heads does on the reporting half.

    Attributes:
        studies: direct effects, one a kind, then those of forward passes.
        curves: the dose–response curves of the first direct effect; None without one.
        forward_curves: those of the first forward pass.
        passes: the first forward pass.
    """

    studies: tuple[Study, ...] = ()
    curves: Curves | None = None
    forward_curves: Curves | None = None
    passes: Edited | None = None


def prove(question: Question, ranked: tuple[Head, ...], plan: LocatePlan) -> Proof:
    """Edit the chosen heads and random ones on the reporting half, in every way that was asked for."""
    kinds = plan.kinds or question.kinds
    rows = question.rows.take(question.reported)
    how = {"draws": plan.draws, "seed": plan.seed}
    controls = layer_matched(ranked, question.shape[1], **how)
    by_norm = None if question.norms is None else norm_matched(ranked, question.norms, **how)
    found = Proof()
    for kind in kinds:
        edited = question.direct(kind, plan.seed)
        if edited is not None:
            made = study(edited, ranked, rows, controls, plan, kind, "direct", by_norm)
            found = found._replace(studies=(*found.studies, made), curves=found.curves or curves(edited, ranked, rows))
    for kind in question.forward_kinds(kinds) if plan.forward else ():
        edited = question.forward(question.reported, kind)
        edited([heads for part in curve_sets(ranked) for heads in part] + list(controls.sets))  # one sweep for all
        # Controls matched by norm would have to start at whatever layer they lie in.
        made = study(edited, ranked, rows, controls, plan, kind, "forward")
        found = found._replace(
            studies=(*found.studies, made),
            forward_curves=found.forward_curves or curves(edited, ranked, rows),
            passes=found.passes or edited,
        )
    return found
