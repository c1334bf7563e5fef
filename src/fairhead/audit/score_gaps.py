"""How far the scores of groups are apart: areas between ROC curves, distances of distributions, and sufficiency.

The first two are sums of absolute differences, Σ|term|, from the reference group; as noise alone makes them larger than
0, their intervals look at the terms, as those of a calibration error do. Observed figures are exact up to the grid;
replicates are drawn as counts of (group, label, bin).
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.ranked import Entries
from fairhead.audit.rates import Rates, Terms
from fairhead.audit.score_rates import ScoreTables, bins_of_sorted
from fairhead.stats.clusters import cell_numbers, divide, tabulate

Array = NDArray[np.float64]

# Between these false positive rates, ROC curves are compared at the middle.
_GRID = 200
# Bins of equal mass, the same for all groups: for distances of distributions, and pairs of them for sufficiency.
_BINS = 20


def abroca(scores: ScoreTables, reference: int) -> Rates:
    """Area between each group's ROC curve and that of the reference group (ABROCA, Gardner et al. 2019)."""
    table = scores.by_class[0]
    at = (np.arange(_GRID) + 0.5) / _GRID
    exact = np.stack([_curve_at(*_roc(entries), at) for entries in table.entries], axis=-1)  # [grid, G]
    binned, star = (np.stack(_curves(counts, at), axis=-1) for counts in (table.counts[None], table.star))
    star = exact + star - binned
    rows = table.rows.sum(axis=-1).min(axis=-1)
    need = "rows in the smaller of the two classes, in it or in the reference group"
    return _against(exact / _GRID, star / _GRID, rows, need, scores, reference)


def score_distance(scores: ScoreTables, reference: int) -> Rates:
    """Wasserstein-1 distance of each group's scores from those of the reference group."""
    common = _Common.of(scores)
    hat, star = (common.areas_below(counts.sum(axis=-2)) for counts in (common.counts[None], common.star))
    return _against(
        hat[0], star, common.rows.sum(axis=(-1, -2)), "rows in it or in the reference group", scores, reference
    )


def sufficiency(scores: ScoreTables, reference: int) -> Rates:
    """P(y = 1 | bin) of each group in bins of the score that all groups share, [bins, G]."""
    common = _Common.of(scores)
    pairs = (*common.counts.shape[:-1], _BINS // 2, 2)
    rows = common.rows.reshape(pairs).sum(axis=-1).sum(axis=-2).T
    hat, star = (
        np.swapaxes(divide(counts[..., 1, :], counts.sum(axis=-2)), -1, -2)
        for counts in (
            common.counts.reshape(pairs).sum(axis=-1),
            common.star.reshape(len(common.star), *pairs).sum(axis=-1),
        )
    )
    return Rates(hat, star, rows, lambda _: "rows in a bin of the score", scores.clusters)


SCORE_GAPS: Mapping[str, Callable[[ScoreTables, int], Rates]] = {
    "ABROCA": abroca,
    "score_distance": score_distance,
    "sufficiency": sufficiency,
}


def _against(hat: Array, star: Array, rows: NDArray[np.int64], need: str, scores: ScoreTables, reference: int) -> Rates:
    """Sums of absolute differences from the reference group, of terms [K, G] and replicates [B, K, G]."""
    one = slice(reference, reference + 1)
    hat, star = hat - hat[:, one], star - star[..., one]
    both = np.minimum(rows, rows[reference])[None]
    sums, sums_star = (np.abs(terms).sum(axis=-2, keepdims=True) for terms in (hat, star))
    return Rates(sums, sums_star, both, lambda _: need, scores.clusters, Terms(hat, star, curve=True))


def _roc(entries: Entries) -> tuple[Array, Array]:
    """False and true positive rates from the highest score down, each [E + 1], from (0, 0) to (1, 1)."""
    down, up = entries.mass[:, ::-1]
    return tuple(  # type: ignore[return-value]
        np.concatenate([[0.0], divide(np.cumsum(part), np.asarray(part.sum()))]) for part in (down, up)
    )


def _curve_at(x: Array, y: Array, at: Array) -> Array:
    return np.interp(at, x, y) if not np.isnan(y).any() and not np.isnan(x).any() else np.full(len(at), np.nan)


def _curves(counts: Array, at: Array) -> list[Array]:
    """ROC curves of counts [B, G, 2, K] at false positive rates [grid]: for each group [B, grid]."""
    found = []
    for g in range(counts.shape[1]):
        from_above = np.cumsum(counts[:, g, :, ::-1], axis=-1)
        x, y = (
            np.concatenate([np.zeros((len(part), 1)), divide(part, part[:, -1:])], axis=-1)
            for part in (from_above[:, 0], from_above[:, 1])
        )
        # The segment that holds each place: as many ends lie to the left of it.
        left = np.minimum((x[:, 1:, None] <= at).sum(axis=1), x.shape[1] - 2)
        x0, x1, y0, y1 = (np.take_along_axis(ends, left + step, axis=1) for ends in (x, y) for step in (0, 1))
        found.append(y0 + (y1 - y0) * np.clip(divide(at - x0, x1 - x0), 0.0, 1.0))
    return found


class _Common:
    """Counts of all groups in the same bins of the score."""

    def __init__(self, scores: ScoreTables) -> None:
        ranked = scores.scores.by_class[0]
        order = np.argsort(ranked.score, kind="stable")
        bins = np.empty(len(order), dtype=np.int8)
        bins[order] = bins_of_sorted(ranked.score[order], _BINS)
        shape = (scores.n_groups, 2, _BINS)
        key = cell_numbers([scores.group, ranked.hit.view(np.int8), bins], shape)
        sample = tabulate([key], [shape], scores.scores.weight, scores.scores.cluster)
        self.rows = sample.contents[0].rows
        self.counts = sample.observed()[0]
        self.star = sample.bootstrap(scores.n_boot, np.random.default_rng(scores.seed))[0]
        # The ends of each bin, and the mean score of each group in it.
        ends = [ranked.score[bins == k] for k in range(_BINS)]
        tops = np.array([part.max() if len(part) else np.nan for part in ends])
        self.top = np.fmax.accumulate(np.where(np.isnan(tops), -np.inf, tops))
        self.top[np.isinf(self.top)] = ranked.score.min()
        weight = np.ones(len(order)) if ranked.weight is None else ranked.weight
        cells = cell_numbers([scores.group, bins], (scores.n_groups, _BINS))
        mass, total = (
            np.bincount(cells, part, scores.n_groups * _BINS).reshape(scores.n_groups, _BINS)
            for part in (weight, weight * ranked.score)
        )
        self.mean = np.where(mass > 0, total / np.where(mass > 0, mass, 1.0), self.top)
        self.low = ranked.score.min()

    @classmethod
    def of(cls, scores: ScoreTables) -> "_Common":
        """Made once for a group column."""
        if "common" not in scores.kept:
            scores.kept["common"] = cls(scores)
        return scores.kept["common"]

    def areas_below(self, counts: Array) -> Array:
        """Within each bin the area below the distribution function, from counts [B, G, K]: [B, K, G]."""
        share = divide(counts, counts.sum(axis=-1, keepdims=True))
        width = np.diff(self.top, prepend=self.low)
        before = np.cumsum(share, axis=-1) - share
        return np.swapaxes(before * width + share * (self.top - self.mean), -1, -2)
