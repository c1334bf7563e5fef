"""One metric of two sets of predictions on the same rows: its value on each side, and how the rates behind it moved."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.audit_results import REVERSED
from fairhead.audit.candidate_rates import contrasts_of, further_apart, signed_gap
from fairhead.audit.catalogue import Metric
from fairhead.audit.estimate import enough_rows, reach_of_change, shrunk
from fairhead.audit.metrics import NO_REPLICATE, Reduction, Rules, Stack, association_value
from fairhead.audit.ranked import CALIBRATION_BINS, binned_auc, equal_bins
from fairhead.audit.rates import Rates
from fairhead.audit.run_audit import tables_for
from fairhead.audit.score_rates import LABEL, Scores, ScoreTables
from fairhead.audit.tables import Draws, Tables
from fairhead.records import Column
from fairhead.stats import Difference, Estimate, Span, intervals
from fairhead.stats.clusters import cell_numbers, clusters_in, divide, tabulate
from fairhead.stats.paired import change_of_size, detectable_change

Array = NDArray[np.float64]

# Of more groups, each is compared with the reference only.
ALL_PAIRS = 12
# What rounding makes of no change at all.
LEAST = 1e-12
# Samples that power is reckoned from, and the largest change that is looked for, in standard errors, without a unit.
_SAMPLES, _FURTHEST = 400, 100.0


@dataclass(frozen=True)
class BinnedScores:
    """Figures of one of the two scores, from counts of (group, label, bin); the bins are those of both together."""

    groups: tuple[str, ...]  # names of the groups
    counts: Array  # (weighted) counts, shape [G, 2, K]
    star: Array  # replicates, shape [B, G, 2, K]
    rows: NDArray[np.int64]  # rows of each (group, label), shape [G, 2]
    mean: Array  # mean score in each bin, shape [K]
    clusters: NDArray[np.int64] | None  # as in `Rates`
    # Exact figures to move the binned ones to, with the spread of an AUC stretched to that without bins; None for
    # swaps, where only binned ones compare
    exact: ScoreTables | None

    def rates(self, name: str) -> Rates:
        """The rate called "AUC", "Brier" or "ECE" for all groups."""
        hat, star = self._figure(name, self.counts), self._figure(name, self.star)
        need = "rows in the smaller of its two classes" if name == "AUC" else "rows"
        rows = self.rows.min(axis=-1) if name == "AUC" else self.rows.sum(axis=-1)
        if self.exact is not None:
            exact = self.exact.rates(name).hat[0]
            wide = self.exact.auc_stretch(self.counts) if name == "AUC" else 1.0
            hat, star = exact, exact + (star - hat) * wide
        return Rates(hat[None], star[:, None], rows[None], lambda c: need, self.clusters)

    def _figure(self, name: str, counts: Array) -> Array:
        if name == "AUC":
            return binned_auc(counts[..., 1, :], counts[..., 0, :])
        total = counts.sum(axis=(-1, -2))
        if name == "Brier":
            return divide((counts * (self.mean - LABEL) ** 2).sum(axis=(-1, -2)), total)
        return divide(np.abs((counts * (LABEL - self.mean)).sum(axis=-2)).sum(axis=-1), total)


class Both(NamedTuple):
    """Tables of both predictions, with replicates or swaps, and their scores where both have one."""

    tables: Sequence[Tables]
    scores: Sequence[BinnedScores] = ()


def pair_scores(
    first: Scores, second: Scores, column: Column, draws: Draws, n_perm: int
) -> tuple[list[BinnedScores], list[BinnedScores]]:
    """Both scores resampled together, and swapped; each as a pair (a, b)."""
    both = np.concatenate([first.score, second.score])
    bins = equal_bins(both, CALIBRATION_BINS)
    mean = np.bincount(bins, both, CALIBRATION_BINS) / np.maximum(np.bincount(bins, minlength=CALIBRATION_BINS), 1)
    shape, n = (len(column.levels), 2, CALIBRATION_BINS), len(first.score)
    keys = [cell_numbers([column.codes, first.label, part], shape) for part in (bins[:n], bins[n:])]
    sample = tabulate(keys, [shape, shape], first.weight, first.cluster)
    groups = tuple(str(level) for level in column.levels)
    clusters = clusters_in(column.codes, shape[0], first.cluster)
    exact = [ScoreTables(scores, column.codes, shape[0], 1, draws.seed) for scores in (first, second)]

    def pair(stars: list[Array], move: bool) -> list[BinnedScores]:
        return [
            BinnedScores(groups, hat, star, rows.sum(axis=-1), mean, clusters, side if move else None)
            for hat, star, rows, side in zip(sample.observed(), stars, sample.rows, exact, strict=True)
        ]

    return (
        pair(sample.bootstrap(draws.n_boot, np.random.default_rng(draws.seed)), move=True),
        pair(sample.swapped(n_perm, np.random.default_rng(draws.seed)), move=False),
    )


class PairedValues(NamedTuple):
    """A metric of both predictions and of their replicates, and for folded figures how the rates themselves moved."""

    a: float
    b: float
    star_a: Array
    star_b: Array
    moved: "_Moved | None" = None

    def change(self) -> intervals.EvenTest:
        """Of b − a, where the replicates are swaps.

        Of gaps it is the largest change of any signed difference between groups. Swaps leave the sum of both models'
        differences as it is, so sizes of gaps could hardly change where both models are nearly even: tested by size, a
        change would be found too rarely.
        """
        if self.moved is None or self.moved.reduction.metric.compare == "minimum":
            return intervals.EvenTest(abs(self.b - self.a), np.abs(self.star_b - self.star_a))
        return self.moved.largest()


@dataclass(frozen=True)
class _Moved:
    """How far rates (of ratios: their logarithms) are from a to b, and in replicates."""

    reduction: Reduction
    stacks: Sequence[Stack]  # the rates themselves, a's and b's
    hats: tuple[Array, Array]  # each [R, C, G]
    stars: tuple[Array, Array]  # each [replicates that are kept, R, C, G]
    kept: NDArray[np.bool_]
    reduce: Callable[[Array], Array]
    link: Callable[[Array], Array]  # from rates to what moves: themselves, or their logarithms

    def most(self, level: float) -> float:
        """The upper end of how far they are apart."""
        moved = self.hats[1] - self.hats[0]
        return intervals.gap(moved, moved - (self.stars[1] - self.stars[0]), self.reduce, level=level).high

    def largest(self) -> intervals.EvenTest:
        """The largest move of any pair of groups, in standard errors where these differ."""
        size, draws = self.sizes(), np.full(len(self.kept), np.nan)
        draws[self.kept] = size(self.stars[1] - self.stars[0])
        return intervals.EvenTest(float(size((self.hats[1] - self.hats[0])[None])[0]), draws)

    def sizes(self) -> Callable[[Array], Array]:
        """From moves [B, R, C, G] to the largest of any pair of groups, [B], as `largest` has it."""
        se = np.maximum(np.std(self.stars[1] - self.stars[0], axis=0), LEAST)
        contrasts = contrasts_of(self.reduction, self.hats[1] - self.hats[0], se)
        if contrasts is None:
            return self.reduce
        scale = contrasts.se(se)
        return lambda moves: contrasts.largest(moves, scale)

    def correlation(self) -> float:
        """Of the signed gaps between the groups that make them, a's and b's."""
        lowest = self.reduction.metric.compare == "minimum"
        signed = []
        for hat, star in zip(self.hats, self.stars, strict=True):
            of = signed_gap(self.reduction, hat, np.maximum(np.std(star, axis=0), LEAST))
            found = (self.reduction if lowest else self.reduce)(star) if of is None else of(star)
            signed.append(found - found.mean())
        spread = float(np.linalg.norm(signed[0]) * np.linalg.norm(signed[1]))
        return float(signed[0] @ signed[1]) / spread if spread > 0 else 0.0

    @property
    def two_groups(self) -> tuple[int, ...] | None:
        """The numbers of the two groups of a single gap between two; None for other figures."""
        known = np.flatnonzero(~np.isnan(self.hats[0][0, 0]))
        single = self.hats[0].shape[:2] == (1, 1) and self.reduction.metric.compare == "spread"
        return tuple(known.tolist()) if single and len(known) == 2 else None


def paired_ends(
    metric: Metric, drawn: PairedValues, alone: tuple[Estimate, Estimate], bootstrap: intervals.Interval, level: float
) -> Span:
    """The interval of a difference.

    Smooth figures have their percentile interval. A folded figure is too large by an amount that differs between
    a and b, most of all where b is nearly even and a is not, so its interval is put together from those of a and b.
    It reaches no further than the rates of the same rows moved: |gap(b) − gap(a)| ≤ gap(b − a).
    """
    value, moved = drawn.b - drawn.a, drawn.moved
    both = _spans(alone)
    if moved is None or len(both) < 2:
        return Span(value, bootstrap.low, bootstrap.high)
    if moved.two_groups is not None:
        (a, b), (star_a, star_b) = ([_apart(of, moved.two_groups) for of in some] for some in (moved.hats, moved.stars))
        change = change_of_size(a, b, star_a, star_b, level)
        return Span(float(abs(b) - abs(a)), float(change[0]), float(change[1]))
    ends = intervals.difference(both[0], both[1], moved.correlation(), metric.ideal)
    most = moved.most(level)
    low, high = -most, most
    if metric.compare == "ratio":  # there the rates moved by factors
        low, high = drawn.a * (np.exp(-most) - 1), drawn.a * (np.exp(most) - 1)
    return Span(value, max(ends.low, float(low)), min(ends.high, float(high)))


def _spans(alone: Sequence[Estimate]) -> list[Span]:
    """The intervals of both figures, where they are without cells that are left out."""
    return [e.span for e in alone if e.span is not None and "at_most" not in e.detail]


def _apart(rates: Array, groups: tuple[int, ...]) -> Array:
    """The signed difference between two groups, [..., 1, 1, G] to [...]."""
    return np.asarray(rates[..., 0, 0, groups[0]] - rates[..., 0, 0, groups[1]])


def detectable(
    drawn: PairedValues, swapped: PairedValues, least: float, alone: Sequence[Estimate], se: float, level: float
) -> float | None:
    """The smallest change that is significant in 80 % of samples, by its interval and its test; None where none is.

    Samples have the errors that were drawn. Of a folded figure, one model has the rates of the better one, less what
    noise adds to how they differ. In the other, the groups that make the worse figure are further apart. By its test a
    change has to be as large as `least`.
    """
    moved, both = drawn.moved, _spans(alone)
    if moved is None or len(both) < 2:
        return intervals.minimum_detectable(se, level) or None
    if swapped.moved is None or se < LEAST:
        return None
    reduction, metric = moved.reduction, moved.reduction.metric
    sign, shares = -1.0 if metric.ideal else 1.0, metric.unit and not metric.scores
    better = int(sign * drawn.b < sign * drawn.a)
    one, other = (moved.stacks[k].some(np.flatnonzero(moved.kept)[:_SAMPLES]) for k in (better, 1 - better))
    rates, apart = shrunk(one.hat, one.se), further_apart(reduction, other.hat, other.se, other.effective)
    first = one.at(rates, shares)
    value, linked = reduction(first.star), moved.link(first.star)
    size = None if metric.compare == "minimum" else swapped.moved.sizes()

    def missed(theta: float) -> float:
        there = other.at(apart(rates, theta), shares)
        star = reduction(there.star)
        change = sign * (star - value)
        if moved.two_groups is None:
            found = change > reach_of_change(
                reduction, first, value, there, star, (both[better], both[1 - better]), level
            )
        else:
            a, b = (_apart(sample.star, moved.two_groups) for sample in (first, there))
            reach = NormalDist().inv_cdf((1 + level) / 2)
            found = (np.abs(b - a) > reach * np.std(b - a)) & (np.abs(b + a) > reach * np.std(b + a))
        sizes = np.abs(change) if size is None else size(moved.link(there.star) - linked)
        return 1 - np.count_nonzero(found & (sizes >= least)) / len(found)

    most = 1.0 if metric.unit else _FURTHEST * se
    theta = intervals.crossing(missed, 0.2, intervals.minimum_detectable(se, level), most, 0.0, se)
    change = abs(float(reduction(apart(rates, theta)) - reduction(rates)))
    return change if theta < most - se / 10 and change > LEAST else None


def paired_values(metric: Metric, pair: Both, rules: Rules, reference: int) -> PairedValues | str:
    """A metric of both predictions and of their replicates, or why it is undefined."""
    if metric.compare == "association":
        return _association(metric, pair.tables, rules)
    of_classes = [tables_for(metric, t, reference) for t in pair.tables]
    tables: Sequence[Tables | BinnedScores] = pair.scores if metric.scores else of_classes
    rates: list[list[Rates]] = [[t.rates(name) for name in metric.rates] for t in tables]
    small = pair.tables[0].small if metric.scores else of_classes[0].small
    # Both are judged on the same cells: those with enough rows for both.
    for kind, (one, other) in enumerate(zip(*rates, strict=True)):
        rows = np.minimum(one.rows, other.rows)
        rates[0][kind], rates[1][kind] = (replace(side, rows=rows, small=small) for side in (one, other))
    stacks = [Stack.of(metric, r, tables[0].groups, rules.min_cell) for r in rates]
    reduction = stacks[0].reduction(metric, rules)
    for stack in stacks:
        reason = stack.why_undefined(reduction, float(reduction(stack.hat)))
        if reason:
            return reason
    if not (stacks[0].kept & stacks[1].kept).any():
        return NO_REPLICATE
    a, b = (float(reduction(stack.hat)) for stack in stacks)
    stars = [np.full(len(stack.kept), np.nan) for stack in stacks]
    for star, stack in zip(stars, stacks, strict=True):
        star[stack.kept] = reduction(stack.star)
    return PairedValues(a, b, stars[0], stars[1], _moved(reduction, stacks))


def _moved(reduction: Reduction, stacks: Sequence[Stack]) -> _Moved | None:
    """How the rates behind a folded figure moved."""
    compare, floor = reduction.metric.compare, 0.5 / np.maximum(stacks[0].rows, 1)
    if compare not in ("spread", "to_overall", "ratio", "minimum", "pairwise"):
        return None
    hats = [stack.hat for stack in stacks]
    kept = stacks[0].kept & stacks[1].kept
    stars = [stack.star[kept[stack.kept]] for stack in stacks]
    reduce: Callable[[Array], Array] = reduction

    def link(rates: Array) -> Array:
        return rates if compare != "ratio" else np.log(np.maximum(rates, floor))

    if compare == "minimum":
        reduce = _largest_move
    elif compare == "ratio":
        if (reduction.multiclass != "max" and hats[0].shape[1] > 1) or min(np.nanmin(hat) for hat in hats) <= 0:
            return None
        hats, stars = [np.log(hat) for hat in hats], [link(star) for star in stars]
        reduce = reduction.gap_of_logarithms
    return _Moved(reduction, stacks, (hats[0], hats[1]), (stars[0], stars[1]), kept, reduce, link)


def _largest_move(moves: Array) -> Array:
    return np.fmax.reduce(np.abs(moves), axis=(-1, -2, -3))


def _association(metric: Metric, pair: Sequence[Tables], rules: Rules) -> PairedValues | str:
    sizes = pair[0].rows.sum(axis=(-1, -2))
    usable = enough_rows(pair[0], rules.min_cell)
    n = int(sizes[usable].sum())
    a, b = (float(association_value(metric.name, t.counts[usable], n)) for t in pair)
    if usable.sum() < 2 or np.isnan(a) or np.isnan(b):
        return "fewer than two groups, or two classes, can be compared"
    star_a, star_b = (association_value(metric.name, t.star[:, usable], n) for t in pair)
    return PairedValues(a, b, star_a, star_b)


class PairChanges(NamedTuple):
    """Changes of one group column, how many standard errors each is, and the largest by chance."""

    differences: list[Difference]
    observed: Array  # shape [changes]
    largest: Array  # in swaps, shape [B]


def pair_changes(
    group_by: str,
    drawn: Sequence[Tables],
    swapped: Sequence[Tables],
    names: Iterable[str],
    rules: Rules,
    reference: int,
) -> PairChanges:
    """Changes of rates for each pair of groups with enough rows, b minus a; the reference is second in its pairs."""
    found, observed = list[Difference](), [np.zeros(0)]
    largest = np.zeros(len(swapped[0].star))
    groups = drawn[0].groups
    for name in names:
        rates, swaps = [t.rates(name) for t in drawn], [t.rates(name) for t in swapped]
        enough = rates[0].enough(rules.min_cell) & rates[1].enough(rules.min_cell)
        classes = drawn[0].class_names(name)
        for c, label in enumerate(classes):
            known = [int(g) for g in np.flatnonzero(enough[c])]
            pairs = [(i, j) for i, j in combinations(known, 2) if len(known) <= ALL_PAIRS or reference in (i, j)]
            if not pairs:
                continue
            one, other = np.array([(j, i) if i == reference else (i, j) for i, j in pairs]).T
            (a, b), (star_a, star_b), (swap_a, swap_b) = (
                [side[..., c, one] - side[..., c, other] for side in sides]
                for sides in ([r.hat for r in rates], [r.star for r in rates], [r.star for r in swaps])
            )
            moved = swap_b - swap_a
            se = np.maximum(np.nanstd(moved, axis=0), LEAST)
            observed.append(np.abs(b - a) / se)
            largest = np.maximum(largest, np.nanmax(np.abs(moved) / se, axis=1))
            p = (1 + np.count_nonzero(~(np.abs(moved) < np.abs(b - a) - LEAST), axis=0)) / (1 + len(moved))
            star = star_b - star_a
            tails = [(1 - rules.level) / 2, (1 + rules.level) / 2]
            low, high = np.nanquantile(star, tails, axis=0)
            # The other group is ahead in b, and on neither side may the two be even.
            sides = [np.nanquantile(side, tails, axis=0).prod(axis=0) > 0 for side in (star_a, star_b)]
            turned = sides[0] & sides[1] & (a * b < 0)
            near_low, near_high = change_of_size(a, b, star_a, star_b, rules.level)
            spread = np.nanstd(star, axis=0)
            rows = np.minimum(rates[0].rows[c], rates[1].rows[c])
            units = rows if rates[0].clusters is None else np.minimum(rows, rates[0].clusters)
            for k, (i, j) in enumerate(zip(one.tolist(), other.tolist(), strict=True)):
                value, nearer = float(b[k] - a[k]), float(abs(b[k]) - abs(a[k]))
                found.append(
                    Difference(
                        name if len(classes) == 1 else f"{name}[{label}]",
                        group_by,
                        float(a[k]),
                        float(b[k]),
                        value,
                        min(float(low[k]), value),
                        max(float(high[k]), value),
                        int(rows[i] + rows[j]),
                        float(p[k]),
                        mde=detectable_change(float(spread[k]), int(min(units[i], units[j])), rules.level),
                        ideal=0.0,
                        nearer=Span(nearer, min(float(near_low[k]), nearer), max(float(near_high[k]), nearer)),
                        note=REVERSED if turned[k] else None,
                        groups=(groups[i], groups[j]),
                    )
                )
    return PairChanges(found, np.concatenate(observed), largest)


def corrected_pairs(columns: Sequence[PairChanges]) -> tuple[Difference, ...]:
    """All changes, with p corrected over pairs, rates and columns (max-T; columns count as independent)."""
    found = []
    for column in columns:
        for d, observed in zip(column.differences, column.observed.tolist(), strict=True):
            none = prod(1 - np.count_nonzero(~(c.largest < observed - LEAST)) / len(c.largest) for c in columns)
            found.append(replace(d, p_adjusted=max(d.p or 0.0, float(1 - none))))
    return tuple(found)
