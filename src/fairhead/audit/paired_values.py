"""One metric of two sets of predictions on the same rows: its value on each side, and how the rates behind it moved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.candidate_rates import contrasts_of, signed_gap
from fairhead.audit.catalogue import Metric
from fairhead.audit.estimate import enough_rows
from fairhead.audit.metrics import NO_REPLICATE, Reduction, Rules, Stack, association_value
from fairhead.audit.rates import Rates
from fairhead.audit.run_audit import tables_for
from fairhead.audit.score_rates import BinnedPair, BinnedScores
from fairhead.audit.tables import Tables
from fairhead.stats import Estimate, Span, intervals
from fairhead.stats.paired import change_of_size

Array = NDArray[np.float64]

# What rounding makes of no change at all.
LEAST = 1e-12


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
    hats: tuple[Array, Array]  # each [R, C, G]
    stars: tuple[Array, Array]  # each [replicates that are kept, R, C, G]
    kept: NDArray[np.bool_]
    reduce: Callable[[Array], Array]

    def most(self, level: float) -> float:
        """The upper end of how far they are apart."""
        moved = self.hats[1] - self.hats[0]
        return intervals.gap(moved, moved - (self.stars[1] - self.stars[0]), self.reduce, level=level).high

    def largest(self) -> intervals.EvenTest:
        """The largest move of any pair of groups, in standard errors where these differ."""
        moved, star = self.hats[1] - self.hats[0], self.stars[1] - self.stars[0]
        se = np.maximum(np.std(star, axis=0), LEAST)
        contrasts = contrasts_of(self.reduction, moved, se)
        draws = np.full(len(self.kept), np.nan)
        if contrasts is None:
            draws[self.kept] = self.reduce(star)
            return intervals.EvenTest(float(self.reduce(moved)), draws)
        scale = contrasts.se(se)
        draws[self.kept] = contrasts.largest(star, scale)
        return intervals.EvenTest(float(contrasts.largest(moved[None], scale)[0]), draws)

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

    def two_groups(self, level: float) -> Span | None:
        """The interval of the change of one gap between two groups; None for any other figure."""
        known = np.flatnonzero(~np.isnan(self.hats[0][0, 0]))
        if self.hats[0].shape[:2] != (1, 1) or len(known) != 2 or self.reduction.metric.compare != "spread":
            return None
        a, b = (np.asarray(hat[0, 0, known[0]] - hat[0, 0, known[1]]) for hat in self.hats)
        star_a, star_b = (star[:, 0, 0, known[0]] - star[:, 0, 0, known[1]] for star in self.stars)
        low, high = change_of_size(a, b, star_a, star_b, level)
        return Span(float(abs(b) - abs(a)), float(low), float(high))


def paired_ends(
    metric: Metric, drawn: PairedValues, alone: tuple[Estimate, Estimate], bootstrap: intervals.Interval, level: float
) -> Span:
    """The interval of a difference.

    Smooth figures have their percentile interval. A folded figure is too large by an amount that differs between
    a and b, most of all where b is nearly even and a is not, so its interval is put together from those of a and b.
    It reaches no further than the rates of the same rows moved: |gap(b) − gap(a)| ≤ gap(b − a).
    """
    value = drawn.b - drawn.a
    both = [e for e in alone if e.value is not None and e.low is not None and "at_most" not in e.detail]
    if drawn.moved is None or len(both) < 2:
        return Span(value, bootstrap.low, bootstrap.high)
    two = drawn.moved.two_groups(level)
    if two is not None:
        return two
    one, other = (Span(e.value or 0.0, e.low or 0.0, e.high or 0.0) for e in both)
    ends = intervals.difference(one, other, drawn.moved.correlation(), metric.ideal)
    most = drawn.moved.most(level)
    low, high = -most, most
    if metric.compare == "ratio":  # there the rates moved by factors
        low, high = drawn.a * (np.exp(-most) - 1), drawn.a * (np.exp(most) - 1)
    return Span(value, max(ends.low, float(low)), min(ends.high, float(high)))


def paired_values(
    metric: Metric, pair: tuple[Tables, Tables], scores: BinnedPair | None, rules: Rules, reference: int
) -> PairedValues | str:
    """A metric of both predictions and of their replicates, or why it is undefined."""
    if metric.compare == "association":
        return _association(metric, pair, rules)
    tables: Sequence[Tables | BinnedScores] = [tables_for(metric, t, reference) for t in pair]
    if metric.scores:
        assert scores is not None
        tables = scores
    rates: list[list[Rates]] = [[t.rates(name) for name in metric.rates] for t in tables]
    # Both are judged on the same cells: those with enough rows for both.
    for kind, (one, other) in enumerate(zip(*rates, strict=True)):
        rows = np.minimum(one.rows, other.rows)
        rates[0][kind], rates[1][kind] = (replace(side, rows=rows, small=pair[0].small) for side in (one, other))
    stacks = [Stack.of(metric, r, tables[0].groups, rules.min_cell) for r in rates]
    reduction = stacks[0].reduction(metric, rules)
    for stack in stacks:
        reason = stack.why_undefined(reduction)
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
    compare = reduction.metric.compare
    if compare not in ("spread", "to_overall", "ratio", "minimum", "pairwise"):
        return None
    hats = [stack.hat for stack in stacks]
    kept = stacks[0].kept & stacks[1].kept
    stars = [stack.star[kept[stack.kept]] for stack in stacks]
    reduce: Callable[[Array], Array] = reduction
    if compare == "minimum":
        reduce = _largest_move
    elif compare == "ratio":
        if (reduction.multiclass != "max" and hats[0].shape[1] > 1) or min(np.nanmin(hat) for hat in hats) <= 0:
            return None
        floor = 0.5 / np.maximum(stacks[0].rows, 1)
        hats, stars = [np.log(hat) for hat in hats], [np.log(np.maximum(star, floor)) for star in stars]
        reduce = reduction.gap_of_logarithms
    return _Moved(reduction, (hats[0], hats[1]), (stars[0], stars[1]), kept, reduce)


def _largest_move(moves: Array) -> Array:
    return np.fmax.reduce(np.abs(moves), axis=(-1, -2, -3))


def _association(metric: Metric, pair: tuple[Tables, Tables], rules: Rules) -> PairedValues | str:
    sizes = pair[0].rows.sum(axis=(-1, -2))
    usable = enough_rows(pair[0], rules.min_cell)
    n = int(sizes[usable].sum())
    a, b = (float(association_value(metric.name, t.counts[usable], n)) for t in pair)
    if usable.sum() < 2 or np.isnan(a) or np.isnan(b):
        return "fewer than two groups, or two classes, can be compared"
    star_a, star_b = (association_value(metric.name, t.star[:, usable], n) for t in pair)
    return PairedValues(a, b, star_a, star_b)
