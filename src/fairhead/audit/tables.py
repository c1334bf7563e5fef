"""Metrics of many tables at once, without intervals: what hundreds of control sets need, in one sweep of numpy."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fairhead.audit import metrics
from fairhead.audit.association import association_value
from fairhead.audit.catalogue import METRICS
from fairhead.audit.reduction import Reduction

Array = NDArray[np.float64]


def table_metrics(counts: Array, names: Sequence[str], min_cell: int = 10) -> dict[str, Array]:
    """Metrics as an audit defines them, of tables that all have the same rows.

    Args:
        counts: rows by group, label and prediction, [S, G, C, C]. Tables may differ in the predictions alone.
        names: metrics of counts: accuracy, gaps, worst groups, associations.
        min_cell: a rate of fewer rows is undefined.

    Returns:
        By name, [S]; NaN where a table leaves a metric undefined.

    Example:
        >>> table = np.array([[[40.0, 10.0], [10.0, 40.0]], [[25.0, 25.0], [25.0, 25.0]]])
        >>> {name: round(float(value[0]), 3) for name, value in table_metrics(table[None], ["accuracy", "EOd"]).items()}
        {'accuracy': 0.65, 'EOd': 0.3}
    """
    n = int(counts[0].sum())
    recall = metrics.true_positive_rate(counts)
    rates = {
        "selection_rate": metrics.selection_rate(counts),
        "TPR": recall,
        "FPR": metrics.false_positive_rate(counts),
        "recall": recall,
    }
    # The rows behind each rate are those of the labels, the same in every table.
    true = counts[0].sum(-1).T  # [C, G]
    total = true.sum(0)
    rows = {"selection_rate": total + 0 * true, "TPR": true, "recall": true, "FPR": total - true}
    found = {}
    for name in names:
        metric = METRICS[name]
        if name == "accuracy":
            found[name] = metrics.accuracy(metrics.pooled(counts))[..., 0]
        elif metric.compare == "association":
            found[name] = association_value(name, counts, n)
        else:
            stacked = np.stack([np.where(rows[r] >= min_cell, rates[r], np.nan) for r in metric.rates], axis=1)
            if counts.shape[-1] == 2 and metric.compare != "minimum":
                stacked = stacked[..., 1:, :]  # of two classes the positive one
            found[name] = Reduction(metric, "max", np.ones(stacked.shape[-2]))(stacked)
    return found
