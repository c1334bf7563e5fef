"""`compare`: two sets of predictions on the same rows, pairwise."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fairhead.audit.estimate import Rules
from fairhead.audit.join import join
from fairhead.audit.paired import Pair
from fairhead.audit.reduction import Multiclass
from fairhead.audit.results import Comparison
from fairhead.audit.run import (
    MIN_CELL,
    View,
    audit,
    choose_metrics,
    group_columns,
    one_group,
    privileged_group,
    with_weight,
)
from fairhead.errors import InputError
from fairhead.records import Column, Records
from fairhead.stats import Correction, Difference, adjust


def compare(
    a: Records,
    b: Records,
    *,
    group_by: str | Sequence[str] | None = None,
    intersections: bool = False,
    metrics: Sequence[str] | str | None = None,
    n_boot: int = 2000,
    n_perm: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
    min_cell: int = MIN_CELL,
    multiclass: Multiclass = "max",
    positive: Any = None,
    privileged: Mapping[str, Any] | None = None,
    correction: Correction = "holm",
) -> Comparison:
    """How much the gaps of two sets of predictions for the same rows differ, b minus a.

    Rows are joined on `id`; without ids they are taken in order. The interval is a bootstrap of rows with both their
    predictions (joint cells of group, label and the two predictions; or clusters). The p-value swaps the two
    predictions of each row (or cluster) at random: only rows on which they disagree matter. It is corrected over all
    differences.

    Args:
        a: the first predictions; group, cluster and weight columns are taken from here.
        b: the second predictions.
        group_by: as in `audit`.
        intersections: as in `audit`.
        metrics: as in `audit`; those on scores need a score of the positive class on both sides (the scores of
            several classes are in the two audits only).
        n_boot: bootstrap replicates.
        n_perm: random swaps; fewer, but at least 500, where groups × classes² is above 1600.
        seed: of both.
        level: confidence level of each interval.
        min_cell: as in `audit`.
        multiclass: as in `audit`.
        positive: as in `audit`.
        privileged: as in `audit`.
        correction: "holm" (no false finding in the family) or "bh" (share of false findings).

    Example:
        >>> import numpy as np
        >>> from fairhead.records import Column, Records
        >>> label, sex = Column(np.tile([0, 1], 200), (0, 1)), Column(np.arange(400) // 200, ("f", "m"))
        >>> first = Records(label, Column(np.where(np.arange(400) < 300, label.codes, 1), (0, 1)), groups={"sex": sex})
        >>> second = Records(label, label, groups={"sex": sex})
        >>> difference = compare(first, second, metrics=["DP"]).differences[0]
        >>> difference.value, difference.p < 0.001
        (-0.25, True)
    """
    if correction not in ("holm", "bh"):
        raise InputError(f"correction is {correction!r}; 'holm' or 'bh' was expected.")
    joined = join(a, b)
    options: dict[str, Any] = {
        "group_by": group_by,
        "intersections": intersections,
        "metrics": metrics,
        "n_boot": n_boot,
        "seed": seed,
        "level": level,
        "min_cell": min_cell,
        "multiclass": multiclass,
        "positive": positive,
        "privileged": privileged,
    }
    audits = audit(joined.a, **options), audit(joined.b, **options)
    n_rows = len(joined.a)
    joined = joined._replace(a=with_weight(joined.a), b=with_weight(joined.b))
    first, second = View.of(joined.a, positive), View.of(joined.b, positive)
    binary_scores = all(view.scores is not None and view.scores.ndim == 1 for view in (first, second))
    chosen = choose_metrics(metrics, has_scores=first.scores is not None and second.scores is not None)
    # Base rates are the data's: they are the same on both sides.
    chosen = [m for m in chosen if (binary_scores or not m.scores) and m.rates != ("base_rate",)]
    with_scores = any(m.scores for m in chosen)
    columns: list[tuple[str | None, Column]] = [(None, one_group(len(joined.a)))]
    columns += group_columns(joined.a, group_by, intersections).items()
    differences: list[Difference] = []
    for name, column in columns:
        privileged_index = None if name is None else privileged_group(name, column, privileged)
        pair = Pair.of(first, second, column, n_boot, n_perm, seed, with_scores)
        rules = Rules(level, min_cell, multiclass, pair.bootstrap[0].prevalence)
        differences += [
            pair.difference(metric, rules, audits, name, privileged_index)
            for metric in chosen
            if metric.overall == (name is None)
        ]
    adjusted = adjust([d.p for d in differences], correction)
    differences = [replace(d, p_adjusted=p) for d, p in zip(differences, adjusted, strict=True)]
    provenance = {
        "a": dict(a.provenance),
        "b": dict(b.provenance),
        "n": n_rows,
        "joined_on": "id" if a.id is not None else "row order",
        "only_in_a": joined.only_in_a,
        "only_in_b": joined.only_in_b,
        "n_boot": n_boot,
        "n_perm": n_perm,
        "seed": seed,
        "level": level,
        "correction": correction,
    }
    return Comparison(tuple(differences), *audits, provenance)
