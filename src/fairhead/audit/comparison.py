"""`compare`: two sets of predictions on the same rows, pairwise; both are resampled, and swapped, together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.association import enough_rows
from fairhead.audit.audit_results import Audit, Comparison, headline_of
from fairhead.audit.audited_rows import View, group_columns, join, one_group, read_both, reference_groups, with_weight
from fairhead.audit.candidate_rates import contrasts_of, signed_gap
from fairhead.audit.catalogue import Chosen, Metric, Multiclass, Reduction, choose_metrics
from fairhead.audit.estimate import NO_REPLICATE, Rules, Stack
from fairhead.audit.metrics import association_value
from fairhead.audit.own_metrics import with_own
from fairhead.audit.pair_changes import PairChanges, corrected_pairs, pair_changes
from fairhead.audit.rates import Rates, Tables, small_groups
from fairhead.audit.run_audit import Draws, audit, tables_for
from fairhead.audit.score_rates import BinnedPair, BinnedScores, pair_scores
from fairhead.errors import InputError
from fairhead.records import Column, Records
from fairhead.stats import Correction, Difference, Estimate, Span, adjust, intervals
from fairhead.stats.bootstrap import MIN_ROWS, Sample
from fairhead.stats.clusters import cell_numbers, clusters_in, tabulate
from fairhead.stats.max_t import westfall_young
from fairhead.stats.paired import change_of_size, permutation_p

Array = NDArray[np.float64]

_JUDGED = "over the cells with enough rows; one that is left out may be lower"
# What rounding makes of no change at all.
_LEAST = 1e-12
# Counts held for all swaps at once (128 MB); with very many groups and classes there are fewer swaps.
_MOST_SWAPPED = 1 << 24


def compare(
    a: Records | Any,
    b: Records | Any = None,
    *,
    group_by: str | Sequence[str] | None = None,
    intersections: bool = False,
    metrics: Chosen = None,
    n_boot: int = 2000,
    n_perm: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
    min_cell: int = MIN_ROWS,
    min_group: float = 0,
    multiclass: Multiclass = "max",
    positive: Any = None,
    reference: Mapping[str, Any] | Sequence[str] | str | None = None,
    correction: Correction | Literal["westfall-young"] = "westfall-young",
    **columns: Any,
) -> Comparison:
    """How much the gaps of two sets of predictions for the same rows differ, b minus a.

    Rows are joined on `id`; without ids they are taken in order. The interval is a bootstrap of rows with both their
    predictions (joint cells of group, label and the two predictions; or clusters). The p-value swaps the two
    predictions of each row (or cluster) at random: only rows on which they disagree matter. It is corrected over all
    differences.

    Args:
        a: the first predictions, as `audit` takes them; group, cluster and weight columns are taken from here.
        b: the second predictions; None where both are columns of one table, prediction=("old", "new").
        group_by: as in `audit`.
        intersections: as in `audit`.
        metrics: as in `audit`; those on scores need a score of the positive class on both sides (the scores of
            several classes are in the two audits only).
        n_boot: bootstrap replicates.
        n_perm: random swaps; fewer, but at least 500, where groups × classes² is above 1600.
        seed: of both.
        level: confidence level of each interval.
        min_cell: as in `audit`.
        min_group: as in `audit`.
        multiclass: as in `audit`.
        positive: as in `audit`.
        reference: as in `audit`.
        correction: "westfall-young" or "holm" (no false finding in the family; the first knows what metrics have in
            common), or "bh" (share of false findings). A metric that goes by two names counts once.
        columns: of files and data frames, as in `audit`.

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
    if correction not in ("westfall-young", "holm", "bh"):
        raise InputError(f"correction is {correction!r}; 'westfall-young', 'holm' or 'bh' was expected.")
    a, b, positive = read_both(a, b, positive, columns)
    joined = join(a, b)
    options: dict[str, Any] = {
        "group_by": group_by,
        "intersections": intersections,
        "metrics": metrics,
        "n_boot": n_boot,
        "seed": seed,
        "level": level,
        "min_cell": min_cell,
        "min_group": min_group,
        "multiclass": multiclass,
        "positive": positive,
        "reference": reference,
    }
    audits = audit(joined.a, **options), audit(joined.b, **options)
    n_rows = len(joined.a)
    joined = joined._replace(a=with_weight(joined.a), b=with_weight(joined.b))
    first, second = View.of(joined.a, positive), View.of(joined.b, positive)
    if any(view.numbers is not None or view.labels for view in (first, second)):
        raise InputError(
            "numbers, or several labels a row, are audited one set at a time; comparisons need one label a row"
        )
    binary_scores = all(view.scores is not None and view.scores.ndim == 1 for view in (first, second))
    chosen = choose_metrics(metrics, min(first.score_rates, second.score_rates, key=len))
    # Base rates are the data's: they are the same on both sides.
    chosen = [m for m in chosen if (binary_scores or not m.scores) and m.rates != ("base_rate",)]
    with_scores = any(m.scores for m in chosen)
    by: list[tuple[str | None, Column]] = [(None, one_group(len(joined.a)))]
    by += group_columns(joined.a, group_by, intersections).items()
    references = reference_groups(reference, {name: column for name, column in by if name is not None})
    draws = Draws(n_boot, seed, min_group, with_own(chosen))
    headline, tested = headline_of(chosen), list[Tested]()
    pairs: list[PairChanges] = []
    for name, column in by:
        pair = Pair.of(first, second, column, draws, n_perm, with_scores)
        rules = Rules(level, min_cell, multiclass, pair.bootstrap[0].prevalence)
        tested += [
            pair.difference(metric, rules, audits, name, references.get(name or "", 0))
            for metric in chosen
            if metric.overall == (name is None)
        ]
        if name is not None:
            names = {rate: None for m in chosen if m.name in headline for rate in m.rates if rate in draws.kinds}
            of_rates = [pair_changes(pair.bootstrap, pair.swapped, rate, rules, references[name]) for rate in names]
            pairs.append(PairChanges.joined(name, of_rates))
    differences = corrected(tested, correction)
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
    return Comparison(tuple(differences), *audits, provenance, corrected_pairs(pairs))


@dataclass(frozen=True)
class Pair:
    """Tables of both predictions, for the bootstrap and for the swaps."""

    bootstrap: tuple[Tables, Tables]
    swapped: tuple[Tables, Tables]
    score_bootstrap: BinnedPair | None = None
    score_swapped: BinnedPair | None = None

    @classmethod
    def of(cls, first: View, second: View, column: Column, draws: Draws, n_perm: int, with_scores: bool) -> "Pair":
        """Draw both."""
        n_classes = len(first.classes)
        shape = (len(column.levels), n_classes, n_classes)
        keys = [cell_numbers([column.codes, first.label, view.prediction], shape) for view in (first, second)]
        n_perm = max(500, min(n_perm, _MOST_SWAPPED // prod(shape)))
        sample: Sample = tabulate(keys, [shape, shape], first.weight, first.cluster)
        groups = tuple(str(level) for level in column.levels)
        clusters = clusters_in(column.codes, shape[0], first.cluster)
        observed, rows, seed = sample.observed(), sample.contents[0].rows, draws.seed
        small = small_groups(rows.sum(axis=(-1, -2)), draws.min_group)

        def tables(stars: list[Array]) -> tuple[Tables, Tables]:
            one, other = (
                Tables(groups, first.classes, hat, star, content.rows, True, clusters, small, draws.kinds)
                for hat, star, content in zip(observed, stars, sample.contents, strict=True)
            )
            return one, other

        drawn = tables(sample.bootstrap(draws.n_boot, np.random.default_rng(seed)))
        swapped = tables(sample.swapped(n_perm, np.random.default_rng(seed)))
        if not with_scores or first.ranked is None or second.ranked is None:
            return cls(drawn, swapped)
        return cls(drawn, swapped, *pair_scores(first.ranked, second.ranked, column, draws.n_boot, n_perm, seed))

    def difference(
        self, metric: Metric, rules: Rules, audits: tuple[Audit, Audit], name: str | None, reference: int
    ) -> "Tested":
        """One metric, b minus a."""
        pair, swaps = self.bootstrap, self.swapped
        scores, score_swaps = self.score_bootstrap, self.score_swapped
        drawn = _values(metric, pair, scores, rules, reference)
        n = int(self.bootstrap[0].rows.sum())
        if isinstance(drawn, str):
            none = Difference(metric.name, name, None, None, None, None, None, n, None, None, drawn, None, metric.ideal)
            return Tested(none, None, (name, metric.scores))
        swapped = _values(metric, swaps, score_swaps, rules, reference)
        value = drawn.b - drawn.a
        star = drawn.star_b - drawn.star_a
        interval = intervals.percentile(star[~np.isnan(star)], rules.level)
        ends = _ends(metric, drawn, (audits[0][metric.name, name], audits[1][metric.name, name]), interval, rules.level)
        test = None if isinstance(swapped, str) else swapped.change()
        found = Difference(
            metric.name,
            name,
            drawn.a,
            drawn.b,
            value,
            min(ends.low, value) + 0.0,  # never -0.0
            max(ends.high, value),
            n,
            1.0 if test is None else permutation_p(test.observed, test.draws),
            None,
            None,
            intervals.minimum_detectable(interval.se, rules.level),
            metric.ideal,
            note=_JUDGED if "at_most" in audits[0][metric.name, name].detail else None,
        )
        return Tested(found, test, (name, metric.scores))


class Tested(NamedTuple):
    """A difference, its test by swaps, and which swaps those are."""

    difference: Difference
    test: intervals.EvenTest | None
    block: tuple[str | None, bool]


def corrected(tested: Sequence[Tested], correction: str) -> list[Difference]:
    """Differences with p-values corrected over all of them; one that goes by several names counts once."""
    found = [t.difference for t in tested]
    if correction == "westfall-young":
        able = [t for t in tested if t.test is not None]
        tests = [t.test for t in able if t.test is not None]
        p = westfall_young([t.observed - _LEAST for t in tests], [t.draws for t in tests], [t.block for t in able])
        adjusted = dict(zip([id(t.difference) for t in able], p, strict=True))
        return [replace(d, p_adjusted=None if d.p is None else adjusted.get(id(d), 1.0)) for d in found]
    names = [(d.group_by, d.p, d.a, d.b) for d in found]
    once = list(dict.fromkeys(names))
    by_name = dict(zip(once, adjust([p for _, p, _, _ in once], "bh" if correction == "bh" else "holm"), strict=True))
    return [replace(d, p_adjusted=by_name[name]) for d, name in zip(found, names, strict=True)]


class _Values(NamedTuple):
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
        se = np.maximum(np.std(star, axis=0), _LEAST)
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
            of = signed_gap(self.reduction, hat, np.maximum(np.std(star, axis=0), _LEAST))
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


def _ends(
    metric: Metric, drawn: _Values, alone: tuple[Estimate, Estimate], bootstrap: intervals.Interval, level: float
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


def _values(
    metric: Metric, pair: tuple[Tables, Tables], scores: BinnedPair | None, rules: Rules, reference: int
) -> _Values | str:
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
    return _Values(a, b, stars[0], stars[1], _moved(reduction, stacks))


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


def _association(metric: Metric, pair: tuple[Tables, Tables], rules: Rules) -> _Values | str:
    sizes = pair[0].rows.sum(axis=(-1, -2))
    usable = enough_rows(pair[0], rules.min_cell)
    n = int(sizes[usable].sum())
    a, b = (float(association_value(metric.name, t.counts[usable], n)) for t in pair)
    if usable.sum() < 2 or np.isnan(a) or np.isnan(b):
        return "fewer than two groups, or two classes, can be compared"
    star_a, star_b = (association_value(metric.name, t.star[:, usable], n) for t in pair)
    return _Values(a, b, star_a, star_b)
