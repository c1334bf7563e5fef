"""What editing the chosen heads does: every metric before and after, held against random heads."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fairhead.audit.results import Comparison
from fairhead.audit.tables import table_metrics
from fairhead.locate.ablation import Ablation, Controls, layer_matched, norm_matched
from fairhead.locate.effects import (
    MEASURED,
    MIN_CELL,
    CellChange,
    Edited,
    Evaluation,
    accuracy_by_cell,
    compared,
)
from fairhead.locate.head_features import Array, Features
from fairhead.locate.head_maps import Head
from fairhead.locate.plan import LocatePlan


@dataclass(frozen=True)
class Study:
    """The effect of one edit of the chosen heads.

    Attributes:
        kind: of edit.
        way: "direct" or "forward".
        comparison: every metric before and after, paired.
        ablations: one a metric, against layer-matched controls.
        norm_matched: the same against norm-matched ones; empty for forward passes, which would have to start at
            whatever layer those lie in.
        by_cell: change of accuracy by class and group.
        after: the logits with the heads edited, [n, C].

    Example:
        >>> located.studies[0]["cramers_v"].change.value  # doctest: +SKIP
        -0.019
    """

    kind: str
    way: str
    comparison: Comparison
    ablations: tuple[Ablation, ...]
    norm_matched: tuple[Ablation, ...]
    by_cell: tuple[CellChange, ...]
    after: Array

    def __getitem__(self, metric: str) -> Ablation:
        """The ablation of one metric, against layer-matched controls."""
        return next(a for a in self.ablations if a.change.metric == metric)


def study(
    edited: Edited,
    ranked: Sequence[Head],
    evaluation: Evaluation,
    norms: Array,
    plan: LocatePlan,
    kind: str,
    way: str,
) -> Study:
    """Edit the chosen heads and the controls.

    Args:
        edited: gives the logits [n, C] with each of several sets of heads edited.
        ranked: the chosen heads.
        evaluation: the rows.
        norms: how much each head writes, [L, H] (`writing`).
        plan: draws, replicates and seed.
        kind: of edit.
        way: "direct" or "forward".

    Example:
        >>> from fairhead.locate.effects import DirectEffect
        >>> groups, labels = np.arange(80) % 2, (np.arange(80) // 2) % 2
        >>> change = np.zeros((80, 2, 4, 2))
        >>> change[:, 1, 0, 1] = -4.0 * groups  # without this head the group has no say
        >>> before = np.stack([np.ones(80), 4.0 * groups], 1)
        >>> rows = Evaluation(labels, ("no", "yes"), groups, ("f", "m"), "sex")
        >>> plan = LocatePlan(n_boot=100)
        >>> found = study(DirectEffect(before, change), [Head(1, 0)], rows, np.ones((2, 4)), plan, "mean", "direct")
        >>> found["DP"].change.a, found["DP"].change.b, found["DP"].percentile
        (1.0, 0.0, 0.0)
    """
    by_layer = layer_matched(ranked, norms.shape[1], draws=plan.draws, seed=plan.seed)
    by_norm = None if way == "forward" else norm_matched(ranked, norms, draws=plan.draws, seed=plan.seed)
    norm_sets = () if by_norm is None else by_norm.sets
    # All at once: a true forward pass decodes the images once for all of them.
    before, after, *rest = edited([(), ranked, *by_layer.sets, *norm_sets])
    comparison = compared(before, after, evaluation, n_boot=plan.n_boot, seed=plan.seed)
    tables = np.stack([evaluation.counts(logits) for logits in (before, *rest)])
    among_layer, among_norm = tables[: 1 + len(by_layer.sets)], tables[[0, *range(1 + len(by_layer.sets), len(tables))]]
    return Study(
        kind,
        way,
        comparison,
        _against(comparison, among_layer, ranked, by_layer),
        () if by_norm is None else _against(comparison, among_norm, ranked, by_norm),
        accuracy_by_cell(before, after, evaluation, n_boot=plan.n_boot, seed=plan.seed),
        np.asarray(after),
    )


def _against(comparison: Comparison, tables: Array, ranked: Sequence[Head], controls: Controls) -> tuple[Ablation, ...]:
    """One ablation a metric; tables [1 + sets, 2, C, C], that of the model as it is first."""
    found = table_metrics(tables, MEASURED, MIN_CELL)
    changes = {name: values[1:] - values[0] for name, values in found.items()}
    # A figure may have no value for some sets, as V where all predictions are the same.
    changes = {name: values[~np.isnan(values)] for name, values in changes.items()}
    differences = {d.metric: d for d in comparison.differences}
    return tuple(
        Ablation(
            tuple(sorted(ranked)),
            differences[name],
            controls=tuple(changes[name].tolist()),
            exhaustive=controls.exhaustive,
            accuracy=None if name == "accuracy" else differences["accuracy"],
            control_accuracy=() if name == "accuracy" else tuple(changes["accuracy"].tolist()),
        )
        for name in MEASURED
        if differences[name].value is not None and len(changes[name])
    )


def writing(features: Features) -> Array:
    """How much each head writes: root of the mean squared length of its centred term, [L, H]."""
    pooled = features.moments(np.zeros(len(features), dtype=np.intp)).pooled(by="rows")
    gram = np.einsum("lhod,lhoe->lhde", features.maps, features.maps, optimize=True)
    return np.sqrt(np.maximum(np.einsum("lhde,lhde->lh", gram, pooled.covariance), 0.0))
