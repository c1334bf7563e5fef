"""How far predictions go along with groups: Cramér's V with its interval."""

from dataclasses import replace
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from fairhead.audit import metrics
from fairhead.audit.catalogue import Metric
from fairhead.audit.estimate import figure_of
from fairhead.audit.rate_stack import Rules
from fairhead.audit.rates import Tables
from fairhead.report.wording import in_short
from fairhead.stats import Estimate, intervals

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
    value = float(metrics.association_value(metric.name, tables.counts[usable], n))
    if usable.sum() < 2 or np.isnan(value):
        reason = in_short(short) if usable.sum() < 2 else "all rows have the same prediction or the same label"
        return Estimate(metric.name, name, None, None, None, n, metric.ideal, reason, detail=detail)
    if not usable.all():
        tables = replace(tables, counts=tables.counts[usable], star=tables.star[:, usable])
    if metric.name == "cramers_v_excess":
        by_label = metrics.cramers_v(tables.star.sum(axis=-1))
        replicates = metrics.length(tables.association, tables.predicted) - by_label
        interval = intervals.percentile(replicates[~np.isnan(replicates)], rules.level)
    else:
        interval = _length_interval(tables, rules.level)
    return figure_of(metric, name, value, n, interval, rules.level, (), detail)


def _length_interval(tables: Tables, level: float) -> intervals.Interval:
    """The interval of V, which is the length of all deviations from independence; these may be scaled, θ to V."""
    by_prediction = tables.counts.sum(axis=-2)
    hat = metrics.association(by_prediction)
    degrees = min(int((by_prediction.sum(axis=-2) > 0).sum()), len(by_prediction)) - 1
    error = hat - tables.association
    # |c·hat + error|² is a square in c.
    square, along, across = float((hat**2).sum()), (error * hat).sum(axis=(-1, -2)), (error**2).sum(axis=(-1, -2))
    observed = sqrt(square / degrees)

    def shown(theta: float) -> Array:
        scale = theta / observed
        return np.sqrt(np.maximum(scale * scale * square + 2 * scale * along + across, 0.0) / degrees)

    around = intervals.Candidates(
        at=lambda theta: hat * (theta / observed),
        signed=lambda _: along / (observed * degrees),
        shown=shown,
    )
    found = intervals.gap(hat, error, lambda rates: np.sqrt((rates**2).sum(axis=(-1, -2)) / degrees), around, level)
    return found._replace(high=min(found.high, 1.0))


def enough_rows(tables: Tables, min_cell: int) -> NDArray[np.bool_]:
    """Groups with enough rows, and enough clusters where there are clusters, shape [G]."""
    return np.asarray(tables.rates("selection_rate").enough(min_cell)[0])
