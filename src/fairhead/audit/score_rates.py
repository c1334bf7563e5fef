"""Figures that need scores: AUC, Brier score and calibration error of each group, and how far scores are apart.

Their bootstrap draws counts too. Scores are put into the 15 bins of equal mass of the calibration error, and a
replicate draws how many rows of each (group, label, bin) there are. For the calibration error nothing is lost by it.
The spread of a binned AUC or Brier score is off by a percent or so, more where all positives are few and in the highest
bins, and is stretched to what it is without bins by the ratio of their variances in closed form (DeLong's for AUC). The
observed figures are exact, or, of many rows, as good as exact: `ranked` says when. Where every group has many rows, no
counts are drawn: AUC, Brier score and the terms of the calibration error are normal, with variances in closed form.

Areas between ROC curves and distances of distributions are sums of absolute differences, Σ|term|, from the reference
group; as noise alone makes them larger than 0, their intervals look at the terms, as those of a calibration error do.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.ranked import (
    Auc,
    Binned,
    Entries,
    Ranked,
    ScoreTable,
    auc_of,
    binned_auc,
    dot,
    drawn_together,
    equal_bins,
    normal_sums,
    sums_from,
)
from fairhead.audit.rates import Rates, Terms, unsettle
from fairhead.stats import CalibrationPoint, Curves, GroupCurve, intervals
from fairhead.stats.clusters import cell_numbers, clusters_in, divide, sample_of_table, tabulate

Array = NDArray[np.float64]
Codes = NDArray[np.integer]

LABEL = np.array([[0.0], [1.0]])  # of no hits and of hits, beside counts [..., 2, K]
# Between so many false positive rates, ROC curves are compared at the middle.
_GRID = 200
# Bins of equal mass, the same for all groups: for distances of distributions, and pairs of them for sufficiency.
_BINS = 20
# Figures of so many rows in each group are as good as normal, and drawn as such, where they are so many standard errors
# away from the ends of their scale. A test holds it against counts that are drawn.
_MANY, _FAR = 2000, 8.0
# Thresholds of a sweep, at most, and rows that a point of a calibration curve needs.
_MOST_THRESHOLDS, _ROWS_OF_A_POINT = 41, 10


@dataclass(frozen=True)
class Scores:
    """The scores of an audit."""

    label: Codes  # class codes, shape [n]
    score: Array  # probability of class 1, shape [n], or of each class, shape [n, C]
    weight: Array | None = None  # shape [n], or None
    cluster: Codes | None = None  # shape [n], or None
    drawn: dict[Hashable, Array] = field(default_factory=dict)  # normal numbers; see `normal`

    @cached_property
    def by_class(self) -> list[Ranked]:
        """One entry for a binary score, otherwise each class against the rest."""
        if self.score.ndim == 1:
            return [Ranked(self.label == 1, self.score, self.weight)]
        return [Ranked(self.label == c, self.score[:, c], self.weight) for c in range(self.score.shape[1])]

    @cached_property
    def top(self) -> Ranked:
        """What calibration is about: the positive class, or the most probable one and whether it is right."""
        if self.score.ndim == 1:
            return self.by_class[0]
        best = self.score.argmax(axis=1)
        return Ranked(best == self.label, self.score[np.arange(len(best)), best], self.weight)

    def normal(self, name: str, seed: int, *shape: int) -> Array:
        """Normal numbers for a figure: those of a few groups are the first of those of many, and drawn with them."""
        key = name, seed, *shape[1:]
        if len(self.drawn.get(key, ())) < shape[0]:
            self.drawn[key] = np.random.default_rng([seed, *name.encode()]).standard_normal(shape)
        return self.drawn[key][: shape[0]]


@dataclass(frozen=True)
class ScoreTables:
    """Figures of scores for one group column, and their replicates."""

    scores: Scores  # the scores
    group: Codes  # group codes, shape [n]
    n_groups: int  # number of groups
    n_boot: int  # replicates
    seed: int  # of the replicates

    def rates(self, name: str) -> Rates:
        """The rate called "AUC", "Brier" or "ECE" for all groups."""
        found: Rates = getattr(self, f"_{name.lower()}")
        return found

    @cached_property
    def common(self) -> "CommonBins":
        """All groups in the same bins."""
        return CommonBins(self)

    @cached_property
    def clusters(self) -> NDArray[np.int64] | None:
        """Clusters with rows of each group, shape [G], as `Rates` has them."""
        return clusters_in(self.group, self.n_groups, self.scores.cluster)

    @cached_property
    def by_class(self) -> list["ScoreTable"]:
        """One table for a binary score, otherwise one for each class against the rest."""
        return [self._table(ranked) for ranked in self.scores.by_class]

    @cached_property
    def _top(self) -> "ScoreTable":
        return self.by_class[0] if self.scores.top is self.scores.by_class[0] else self._table(self.scores.top)

    def auc_stretch(self, counts: Array, number: int = 0) -> Array:
        """By how much to stretch replicates of a class's binned AUC, [G], from its counts in any bins, [G, 2, K]."""
        return _without_bins(self._exact_auc[number].variance, auc_of(counts[:, 0], counts[:, 1]).variance)

    @cached_property
    def _exact_auc(self) -> list[Auc]:
        """For each class, figures of shape [G]."""
        mass = "rows" if self.scores.weight is None else "mass"
        found = [[auc_of(*getattr(entries, mass)) for entries in table.entries] for table in self.by_class]
        return [Auc(*(np.array(part) for part in zip(*groups, strict=True))) for groups in found]

    @cached_property
    def _auc(self) -> Rates:
        hats, stars, rows = [], [], []
        for number, table in enumerate(self.by_class):
            hat, variance = self._exact_auc[number]
            smaller = table.rows.sum(axis=-1).min(axis=-1)
            star = self._normal("AUC", hat, variance, smaller, most=1.0)
            if star is None:
                binned = binned_auc(table.counts[:, 1], table.counts[:, 0])
                star = binned_auc(table.star[..., 1, :], table.star[..., 0, :])
                star = hat + (star - binned) * self.auc_stretch(table.counts, number)
            hats.append(hat)
            stars.append(star)
            rows.append(smaller)
        need = "rows in the smaller of its two classes"
        star = stars[0][:, None] if len(stars) == 1 else np.stack(stars, axis=1)
        if len(stars) > 1:
            for g in range(self.n_groups):
                both = zip(self.scores.by_class, self.by_class, strict=True)
                own, cluster = self.group == g, self.scores.cluster
                parts = [ranked.auc_parts(table.entries[g], own, cluster) for ranked, table in both]
                rng = np.random.default_rng([self.seed, *f"AUC of group {g}".encode()])
                star[..., g] = drawn_together(star[..., g], np.stack(parts), rng)
        rates = Rates(np.stack(hats), star, np.stack(rows), lambda c: need, self.clusters)
        return replace(rates, star=unsettle(rates, "AUC"))

    @cached_property
    def _brier(self) -> Rates:
        if self.scores.score.ndim == 1:
            table, goal, power = self.by_class[0], LABEL, 2
        else:  # the loss as a score, without hits
            loss = ((self.scores.score - np.eye(self.scores.score.shape[1])[self.scores.label]) ** 2).sum(axis=1)
            table = self._table(Ranked(np.zeros(len(loss), dtype=bool), loss, self.scores.weight))
            goal, power = np.zeros((2, 1)), 1
        mass = table.counts.sum(axis=(-1, -2))
        sums = _squares(table) if power == 2 else table.powers[0]
        losses = [(of.value - goal) ** power for of in table.entries]
        second = np.array([dot(of.mass * loss, loss).sum() for of, loss in zip(table.entries, losses, strict=True)])
        exact = divide(sums.sum(axis=(-1, -2)), mass)
        variance = divide(second, mass) - exact**2
        rows = table.rows.sum(axis=(-1, -2))
        star = self._normal("Brier", exact, divide(variance, mass), rows)
        if star is None:
            mean = table.mean(sums)
            hat, star = (
                divide((c * mean).sum(axis=(-1, -2)), c.sum(axis=(-1, -2))) for c in (table.counts, table.star)
            )
            binned_variance = divide((table.counts * mean**2).sum(axis=(-1, -2)), mass) - exact**2
            star = exact + (star - hat) * _without_bins(variance, binned_variance)
        return Rates(exact[None], star[:, None], rows[None], lambda c: "rows", self.clusters)

    @cached_property
    def _ece(self) -> Rates:
        table = self._top
        distance = table.mean(table.counts * LABEL - table.powers[0])
        # Bins before groups: shape [..., K, G].
        mass, rows = table.counts.sum(axis=(-1, -2)), table.rows.sum(axis=(-1, -2))
        hat = divide((table.counts * distance).sum(axis=-2), mass[:, None]).T
        if self._plain and rows.min() >= _MANY:
            square = divide(_squares(table).sum(axis=-2), mass[:, None]).T
            normal = self.scores.normal("ECE", self.seed, self.n_groups, len(hat), self.n_boot)
            star = normal_sums(hat, square, mass, normal)
        else:
            drawn = (table.star * distance).sum(axis=-2)
            star = np.swapaxes(divide(drawn, table.star.sum(axis=(-1, -2))[..., None]), -1, -2)
        error, error_star = (np.abs(terms).sum(axis=-2, keepdims=True) for terms in (hat, star))
        terms = Terms(hat, star, promised=table.promised(self.clusters is not None))
        return Rates(error, error_star, rows[None], lambda c: "rows", self.clusters, terms)

    @property
    def _plain(self) -> bool:
        return self.scores.weight is None and self.scores.cluster is None

    def _normal(
        self, name: str, hat: Array, variance: Array, rows: NDArray[np.int64], most: float = np.inf
    ) -> Array | None:
        """Normal replicates [B, G] of figures from 0 to `most`; None where rows are too few, or figures near an end."""
        room = np.minimum(hat, most - hat)
        if not (self._plain and rows.min() >= _MANY and (room**2 >= _FAR**2 * variance).all() and (variance > 0).all()):
            return None
        drawn = self.scores.normal(name, self.seed, len(hat), self.n_boot) * np.sqrt(variance)[:, None]
        drawn += hat[:, None]
        return drawn.T

    def _table(self, ranked: Ranked) -> "ScoreTable":
        entries = ranked.entries(self.group, self.n_groups)
        binned = [Binned.of(of_group) for of_group in entries]
        rows = np.stack([of_group.rows for of_group in binned])
        if self._plain:
            sample = sample_of_table(rows)
        else:
            at = np.zeros(len(ranked.score), dtype=np.int8)
            for g, of_group in enumerate(binned):
                own = np.flatnonzero(self.group == g)
                at[own] = np.searchsorted(of_group.edges, ranked.score[own], side="right")
            key = cell_numbers([self.group, ranked.hit.view(np.int8), at], rows.shape)
            sample = tabulate([key], [rows.shape], self.scores.weight, self.scores.cluster)
        table = ScoreTable(entries, binned, sample, self.n_boot, self.seed)
        if ranked.weight is None:
            return table
        squares: Array = np.bincount(key, ranked.weight**2, rows.size).astype(np.float64)
        return replace(table, squares=squares.reshape(rows.shape))


def _squares(table: ScoreTable) -> Array:
    """What the squared distances of scores from their labels add up to in each bin, [G, 2, K]."""
    first, second = table.powers
    return second + LABEL * (table.counts - 2 * first)


def _without_bins(variance: Array, binned: Array) -> Array:
    """By how much to stretch replicates of binned scores, [G], which have not seen that the rows of a bin differ.

    With 15 bins this is a matter of a percent or so; where one bin holds nearly all positives, there is no limit to it.
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        factor = np.sqrt(variance / binned)
    return np.where(np.isfinite(factor) & (binned > 0), np.maximum(factor, 0.5), 1.0)


def abroca(scores: ScoreTables, reference: int) -> Rates:
    """Area between each group's ROC curve and that of the reference group (ABROCA, Gardner et al. 2019)."""
    table = scores.by_class[0]
    at = (np.arange(_GRID) + 0.5) / _GRID
    exact = np.stack([_roc_at(entries, at) for entries in table.entries], axis=-1)  # [grid, G]
    binned, star = (np.stack(_binned_rocs(counts, at), axis=-1) for counts in (table.counts[None], table.star))
    star = exact + star - binned
    rows = table.rows.sum(axis=-1).min(axis=-1)
    need = "rows in the smaller of the two classes, in it or in the reference group"
    return _against(exact / _GRID, star / _GRID, rows, need, scores, reference)


def score_distance(scores: ScoreTables, reference: int) -> Rates:
    """Wasserstein-1 distance of each group's scores from those of the reference group."""
    common = scores.common
    hat, star = (common.areas_below(counts.sum(axis=-2)) for counts in (common.counts[None], common.star))
    rows, need = common.rows.sum(axis=(-1, -2)), "rows in it or in the reference group"
    return _against(hat[0], star, rows, need, scores, reference)


def sufficiency(scores: ScoreTables, reference: int) -> Rates:
    """P(y = 1 | bin) of each group in bins of the score that all groups share, [bins, G]."""
    common = scores.common
    counts, stars, rows = (
        of.reshape(*of.shape[:-1], _BINS // 2, 2).sum(axis=-1) for of in (common.counts, common.star, common.rows)
    )
    hat, star = (_shares(of).swapaxes(-1, -2) for of in (counts, stars))
    return Rates(hat, star, rows.sum(axis=-2).T, lambda _: "rows in a bin of the score", scores.clusters)


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


def _roc_at(entries: Entries, at: Array) -> Array:
    """The true positive rate of a group at false positive rates [grid]."""
    x, y = (np.concatenate([[0.0], divide(np.cumsum(part), np.asarray(part.sum()))]) for part in entries.mass[:, ::-1])
    return np.full(len(at), np.nan) if np.isnan(x + y).any() else np.interp(at, x, y)


def _binned_rocs(counts: Array, at: Array) -> list[Array]:
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


class CommonBins:
    """Counts of all groups in the same bins of the score."""

    def __init__(self, scores: ScoreTables) -> None:
        ranked = scores.scores.by_class[0]
        bins = equal_bins(ranked.score, _BINS)
        shape = (scores.n_groups, 2, _BINS)
        key = cell_numbers([scores.group, ranked.hit.view(np.int8), bins], shape)
        sample = tabulate([key], [shape], scores.scores.weight, scores.scores.cluster)
        self.rows, self.counts = sample.rows[0], sample.observed()[0]
        self.star = sample.bootstrap(scores.n_boot, np.random.default_rng(scores.seed))[0]
        # The ends of each bin, and the mean score of each group in it.
        self.low = ranked.score.min()
        self.top = np.full(_BINS, -np.inf)
        np.maximum.at(self.top, bins, ranked.score)
        self.top = np.maximum(np.maximum.accumulate(self.top), self.low)
        weight = np.ones(len(bins)) if ranked.weight is None else ranked.weight
        cells = cell_numbers([scores.group, bins], (scores.n_groups, _BINS))
        mass, total = (
            np.bincount(cells, part, scores.n_groups * _BINS).reshape(scores.n_groups, _BINS)
            for part in (weight, weight * ranked.score)
        )
        self.mean = np.where(mass > 0, total / np.where(mass > 0, mass, 1.0), self.top)

    def areas_below(self, counts: Array) -> Array:
        """Within each bin the area below the distribution function, from counts [B, G, K]: [B, K, G]."""
        share = divide(counts, counts.sum(axis=-1, keepdims=True))
        width = np.diff(self.top, prepend=self.low)
        before = np.cumsum(share, axis=-1) - share
        return np.swapaxes(before * width + share * (self.top - self.mean), -1, -2)


def curves_of(group_by: str, groups: tuple[str, ...], scores: ScoreTables, probabilities: bool, level: float) -> Curves:
    """The curves of one group column, of one score."""
    table = scores.by_class[0]
    thresholds = _thresholds(table)
    mean = divide(table.powers[0].sum(axis=-2), table.counts.sum(axis=-2))
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
        places = np.searchsorted(entries.value, thresholds, side="left")
        # Of the rows between two thresholds, which are far fewer sums than one for each score.
        between = sums_from(np.concatenate([entries.mass, np.zeros((2, 1))], axis=1), places)
        false, true = np.cumsum(between[:, ::-1], axis=1)[:, ::-1]
        negatives, positives = entries.mass.sum(axis=1).tolist()
        hits, misses = tuple(true.tolist()), tuple(false.tolist())
        calibration = tuple(points) if probabilities else ()
        found.append(GroupCurve(name, int(rows[g].sum()), positives, negatives, hits, misses, calibration))
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
    occurs = [part.rows.any(axis=0) for part in table.entries]
    if max(map(np.count_nonzero, occurs)) > _MOST_THRESHOLDS:
        some = [binned.edges for binned in table.binned]
    else:
        some = [part.value[of] for part, of in zip(table.entries, occurs, strict=True)]
    values = np.unique(np.concatenate(some))
    kept = np.linspace(0, len(values) - 1, min(len(values), _MOST_THRESHOLDS)).round().astype(int)
    return values[kept]
