"""Curves of scores by group: what other thresholds would give, ROC curves, and calibration with intervals."""

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.score_rates import ScoreTable, ScoreTables
from fairhead.stats import CalibrationPoint, Curves, GroupCurve, intervals
from fairhead.stats.clusters import divide

Array = NDArray[np.float64]

# Thresholds of a sweep, at most.
_MOST_THRESHOLDS = 41
# Rows that a point of a calibration curve needs.
_ROWS_OF_A_POINT = 10


def curves_of(group_by: str, groups: tuple[str, ...], scores: ScoreTables, probabilities: bool, level: float) -> Curves:
    """The curves of one group column, of one score."""
    table = scores.by_class[0]
    thresholds = _thresholds(table)
    mean = [
        divide(binned.sums(mass * entries.value), binned.sums(mass))
        for entries, binned in zip(table.entries, table.binned, strict=True)
        for mass in [entries.mass.sum(axis=0)]
    ]
    share, rows = _shares(table.counts), table.rows.sum(axis=-2)  # [G, K]
    if scores.scores.weight is None and scores.scores.cluster is None:
        ends = _wilson(share, rows, level)
    else:
        star = np.moveaxis(np.nan_to_num(_shares(table.star)), 0, -1)
        ends = intervals.quantiles(star, [(1 - level) / 2, (1 + level) / 2])
    found = []
    for g, (name, entries) in enumerate(zip(groups, table.entries, strict=True)):
        columns = (part.tolist() for part in (mean[g], share[g], *ends[:, g], rows[g]))
        points = [CalibrationPoint(*of) for of in zip(*columns, strict=True) if of[-1] >= _ROWS_OF_A_POINT]
        up_to, places = np.cumsum(entries.mass, axis=1), np.searchsorted(entries.value, thresholds, side="left")
        total = up_to[:, -1] if up_to.shape[1] else np.zeros(2)
        below = np.concatenate([np.zeros((2, 1)), up_to], axis=1)[:, places]
        false, true = total[:, None] - below
        curve = GroupCurve(
            name,
            int(rows[g].sum()),
            float(total[1]),
            float(total[0]),
            tuple(true.tolist()),
            tuple(false.tolist()),
            tuple(points) if probabilities else (),
        )
        found.append(curve)
    return Curves(group_by, tuple(thresholds.tolist()), tuple(found))


def _shares(counts: Array) -> Array:
    """How many of each bin are positive: [..., 2, K] to [..., K]."""
    return divide(counts[..., 1, :], counts.sum(axis=-2))


def _wilson(share: Array, rows: NDArray[np.int64], level: float) -> Array:
    """Wilson's interval of shares, lower and upper ends: [...] to [2, ...]. Much quicker than a bootstrap."""
    z2, n = NormalDist().inv_cdf((1 + level) / 2) ** 2, np.maximum(rows, 1)
    middle, reach = share + z2 / (2 * n), np.sqrt(z2 * (share * (1 - share) + z2 / (4 * n)) / n)
    return np.stack([middle - reach, middle + reach]) / (1 + z2 / n)


def _thresholds(table: ScoreTable) -> Array:
    """All scores that occur where they are few; else the edges of the groups' bins, thinned out."""
    some = [part.value[part.rows.sum(axis=0) > 0] for part in table.entries]
    if max(map(len, some)) > _MOST_THRESHOLDS:
        some = [binned.edges for binned in table.binned]
    values = np.unique(np.concatenate(some))
    kept = np.linspace(0, len(values) - 1, min(len(values), _MOST_THRESHOLDS)).round().astype(int)
    return values[kept]
