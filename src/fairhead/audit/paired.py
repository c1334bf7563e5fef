"""Paired differences of one group column: both predictions resampled, and swapped, together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.association import association_value, enough_rows
from fairhead.audit.catalogue import Metric
from fairhead.audit.estimate import NO_REPLICATE, Rules, Stack
from fairhead.audit.paired_scores import BinnedPair, BinnedScores, pair_scores
from fairhead.audit.rates import Rates, Tables
from fairhead.audit.reduction import Reduction
from fairhead.audit.results import Audit
from fairhead.audit.run import View, tables_for
from fairhead.records import Column
from fairhead.stats import Difference, Estimate, Span, intervals
from fairhead.stats.bootstrap import Sample
from fairhead.stats.clusters import cell_numbers, clusters_in, tabulate
from fairhead.stats.paired import permutation_p

Array = NDArray[np.float64]

# Counts held for all swaps at once (128 MB); with very many groups and classes there are fewer swaps.
_MOST_SWAPPED = 1 << 24


@dataclass(frozen=True)
class Pair:
    """Tables of both predictions, for the bootstrap and for the swaps."""

    bootstrap: tuple[Tables, Tables]
    swapped: tuple[Tables, Tables]
    score_bootstrap: BinnedPair | None = None
    score_swapped: BinnedPair | None = None

    @classmethod
    def of(
        cls, first: View, second: View, column: Column, n_boot: int, n_perm: int, seed: int, with_scores: bool
    ) -> "Pair":
        """Draw both."""
        n_classes = len(first.classes)
        shape = (len(column.levels), n_classes, n_classes)
        keys = [cell_numbers([column.codes, first.label, view.prediction], shape) for view in (first, second)]
        n_perm = max(500, min(n_perm, _MOST_SWAPPED // prod(shape)))
        sample: Sample = tabulate(keys, [shape, shape], first.weight, first.cluster)
        groups = tuple(str(level) for level in column.levels)
        clusters = clusters_in(column.codes, shape[0], first.cluster)
        observed = sample.observed()

        def tables(stars: list[Array]) -> tuple[Tables, Tables]:
            one, other = (
                Tables(groups, first.classes, hat, star, content.rows, settled=True, clusters=clusters)
                for hat, star, content in zip(observed, stars, sample.contents, strict=True)
            )
            return one, other

        drawn = tables(sample.bootstrap(n_boot, np.random.default_rng(seed)))
        swapped = tables(sample.swapped(n_perm, np.random.default_rng(seed)))
        if not with_scores or first.ranked is None or second.ranked is None:
            return cls(drawn, swapped)
        return cls(drawn, swapped, *pair_scores(first.ranked, second.ranked, column, n_boot, n_perm, seed))

    def difference(
        self, metric: Metric, rules: Rules, audits: tuple[Audit, Audit], name: str | None, privileged: int | None
    ) -> Difference:
        """One metric, b minus a."""
        pair, swaps = self.bootstrap, self.swapped
        scores, score_swaps = self.score_bootstrap, self.score_swapped
        drawn = _values(metric, pair, scores, rules, privileged)
        n = int(self.bootstrap[0].rows.sum())
        if isinstance(drawn, str):
            return Difference(metric.name, name, None, None, None, None, None, n, None, None, drawn, None, metric.ideal)
        swapped = _values(metric, swaps, score_swaps, rules, privileged)
        value = drawn.b - drawn.a
        star = drawn.star_b - drawn.star_a
        interval = intervals.percentile(star[~np.isnan(star)], rules.level)
        ends = _ends(metric, drawn, (audits[0][metric.name, name], audits[1][metric.name, name]), interval, rules.level)
        return Difference(
            metric.name,
            name,
            drawn.a,
            drawn.b,
            value,
            min(ends.low, value) + 0.0,  # never -0.0
            max(ends.high, value),
            n,
            1.0 if isinstance(swapped, str) else swapped.p_value(),
            None,
            None,
            intervals.minimum_detectable(interval.se, rules.level),
            metric.ideal,
        )


class _Values(NamedTuple):
    """A metric of both predictions and of their replicates, and how far apart the rates themselves are at most."""

    a: float
    b: float
    star_a: Array
    star_b: Array
    most: Callable[[float], float] | None = None

    def p_value(self) -> float:
        """Of b − a, where the replicates are swaps."""
        return permutation_p(abs(self.b - self.a), np.abs(self.star_b - self.star_a))


def _ends(
    metric: Metric, drawn: _Values, alone: tuple[Estimate, Estimate], bootstrap: intervals.Interval, level: float
) -> Span:
    """The interval of a difference.

    Smooth figures have their percentile interval. A folded figure is too large by an amount that differs between
    a and b, most of all where b is nearly even and a is not, so its interval is put together from those of a and b.
    It reaches no further than the rates of the same rows moved: |gap(b) − gap(a)| ≤ gap(b − a).
    """
    value = drawn.b - drawn.a
    both = [e for e in alone if e.value is not None and e.low is not None and e.high is not None]
    if drawn.most is None or len(both) < 2:
        return Span(value, bootstrap.low, bootstrap.high)
    one, other = (Span(e.value or 0.0, e.low or 0.0, e.high or 0.0) for e in both)
    known = ~np.isnan(drawn.star_a) & ~np.isnan(drawn.star_b)
    spread = float(np.std(drawn.star_a[known]) * np.std(drawn.star_b[known]))
    covariance = float(np.cov(drawn.star_a[known], drawn.star_b[known], bias=True)[0, 1])
    ends = intervals.difference(one, other, covariance / spread if spread > 0 else 0.0, metric.ideal)
    most = drawn.most(level)
    low, high = -most, most
    if metric.compare == "ratio":  # there the rates moved by factors
        low, high = drawn.a * (np.exp(-most) - 1), drawn.a * (np.exp(most) - 1)
    return Span(value, max(ends.low, float(low)), min(ends.high, float(high)))


def _values(
    metric: Metric, pair: tuple[Tables, Tables], scores: BinnedPair | None, rules: Rules, privileged: int | None
) -> _Values | str:
    """A metric of both predictions and of their replicates, or why it is undefined."""
    if metric.compare == "association":
        return _association(metric, pair, rules)
    tables: Sequence[Tables | BinnedScores] = [tables_for(metric, t, privileged) for t in pair]
    if metric.scores:
        assert scores is not None
        tables = scores
    rates: list[list[Rates]] = [[t.rates(name) for name in metric.rates] for t in tables]
    # Both are judged on the same cells: those with enough rows for both.
    for kind, (one, other) in enumerate(zip(*rates, strict=True)):
        rows = np.minimum(one.rows, other.rows)
        rates[0][kind], rates[1][kind] = replace(one, rows=rows), replace(other, rows=rows)
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
    return _Values(a, b, stars[0], stars[1], _most(reduction, stacks))


def _most(reduction: Reduction, stacks: Sequence[Stack]) -> Callable[[float], float] | None:
    """The upper end of how far the rates of a and b are apart, for figures that are folded."""
    compare = reduction.metric.compare
    if compare not in ("spread", "to_overall", "ratio", "minimum"):
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
    moved = hats[1] - hats[0]
    return lambda level: intervals.gap(moved, moved - (stars[1] - stars[0]), reduce, level=level).high


def _largest_move(moves: Array) -> Array:
    return np.fmax.reduce(np.abs(moves), axis=(-1, -2, -3))


def _association(metric: Metric, pair: tuple[Tables, Tables], rules: Rules) -> _Values | str:
    sizes = pair[0].rows.sum(axis=(-1, -2))
    usable = enough_rows(pair[0], rules.min_cell)
    n = int(sizes[usable].sum())
    a, b = (float(association_value(metric.name, t.counts[usable], n)) for t in pair)
    if usable.sum() < 2 or np.isnan(a) or np.isnan(b):
        return "fewer than two groups, or two classes, can be compared"
    star_a, star_b = (association_value(metric.name, t.star[:, usable], n) for t in pair)
    return _Values(a, b, star_a, star_b)
