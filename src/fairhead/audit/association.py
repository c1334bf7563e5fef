"""Cramér's V between group and prediction, with intervals."""

import numpy as np
from numpy.typing import NDArray

from fairhead.audit import intervals, metrics
from fairhead.audit.catalogue import Metric
from fairhead.audit.estimate import Rules, in_short
from fairhead.audit.rates import Tables
from fairhead.audit.results import Estimate

Array = NDArray[np.float64]


def association_estimate(metric: Metric, tables: Tables, rules: Rules, name: str | None) -> Estimate:
    """One of the three association metrics of a group column.

    V is a length, so it is folded like a gap and gets its interval like one. The bias-corrected V estimates the same
    quantity as the plain one and shares its interval.
    """
    sizes = tables.rows.sum(axis=(-1, -2))
    usable = enough_rows(tables, rules.min_cell)
    n = int(sizes[usable].sum())
    detail: dict[str, object] = {"definition": metric.definition}
    selected = tables.rates("selection_rate")
    short = [selected.shortage(0, int(g), tables.groups[g], rules.min_cell) for g in np.flatnonzero(~usable)]
    if short:
        detail |= {"n_undefined": len(short), "excluded": short}
    value = float(association_value(metric.name, tables.counts[usable], n))
    if usable.sum() < 2 or np.isnan(value):
        reason = in_short(short) if usable.sum() < 2 else "all rows have the same prediction or the same label"
        return Estimate(metric.name, name, None, None, None, n, metric.ideal, reason, detail=detail)
    star = tables.star[:, usable]
    if metric.name == "cramers_v_excess":
        replicates = association_value(metric.name, star, n)
        interval = intervals.percentile(replicates[~np.isnan(replicates)], rules.level)
    else:
        by_prediction = tables.counts[usable].sum(axis=-2)
        degrees = min(int((by_prediction.sum(axis=-2) > 0).sum()), int(usable.sum())) - 1

        def length(deviation: Array) -> Array:
            return np.sqrt((deviation**2).sum(axis=(-1, -2)) / degrees)

        interval = intervals.gap(
            metrics.association(by_prediction), metrics.association(star.sum(axis=-2)), length, level=rules.level
        )
        interval = interval._replace(high=min(interval.high, 1.0))
    detail |= {"se": interval.se, "interval": interval.method}
    if interval.null is not None:
        detail["expected_if_even"] = interval.null
    return Estimate(
        metric.name,
        name,
        value,
        min(interval.low, value),
        max(interval.high, value),
        n,
        metric.ideal,
        mde=intervals.minimum_detectable(interval.se, rules.level),
        detail=detail,
    )


def enough_rows(tables: Tables, min_cell: int) -> NDArray[np.bool_]:
    """Groups with enough rows, and enough clusters where there are clusters, shape [G]."""
    return np.asarray(tables.rates("selection_rate").enough(min_cell)[0])


def association_value(name: str, counts: Array, n: int) -> Array:
    """The metric itself: counts [..., G, C, C] of n rows to [...].

    Example:
        >>> association_value("cramers_v_excess", np.ones((2, 2, 2)), 8).item()
        0.0
    """
    by_prediction = counts.sum(axis=-2)
    if name == "cramers_v":
        return metrics.cramers_v(by_prediction)
    if name == "cramers_v_corrected":
        return metrics.cramers_v_corrected(by_prediction, n)
    return metrics.cramers_v(by_prediction) - metrics.cramers_v(counts.sum(axis=-1))
