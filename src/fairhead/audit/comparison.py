"""Two sets of predictions: `compare` on the same rows, pairwise, and `drift` on different ones.

On the same rows both are resampled, and swapped, together.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.audit_results import REVERSED, Audit, Comparison, headline_of
from fairhead.audit.audited_rows import View, group_columns, join, one_group, read_both, reference_groups, with_weight
from fairhead.audit.catalogue import METRICS, Chosen, Metric, Multiclass, choose_metrics, with_own
from fairhead.audit.metrics import Rules
from fairhead.audit.paired_values import (
    ALL_PAIRS,
    Both,
    PairChanges,
    corrected_pairs,
    detectable,
    pair_changes,
    pair_scores,
    paired_ends,
    paired_values,
)
from fairhead.audit.run_audit import audit
from fairhead.audit.tables import Drawing, Draws
from fairhead.errors import InputError
from fairhead.records import Column, Records, TableColumns
from fairhead.stats import ALPHA, Correction, Difference, Estimate, Span, adjust, intervals
from fairhead.stats.bootstrap import MIN_ROWS
from fairhead.stats.intervals import difference, minimum_detectable
from fairhead.stats.max_t import westfall_young
from fairhead.stats.paired import permutation_p

Array = NDArray[np.float64]

# Rates of groups that drift follows beside the gaps: a gap that turns around may stay as large as it was.
_FOLLOWED = ("selection_rate", "TPR", "FPR", "accuracy")
# Why a small p may stand beside an interval that holds 0: it is of more than the size of the figure.
_OF_GROUPS = "p is of a change between any two groups; the interval, of the size of this figure, holds 0"
_OF_ROWS = "p is of the hypothesis that both predict alike; the interval, of the size of this figure, holds 0"
_JUDGED = "over the cells with enough rows; one that is left out may be lower"


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
    **columns: Unpack[TableColumns],
) -> Comparison:
    """Compare the gaps of two sets of predictions for the same rows, b minus a.

    Rows are joined on `id`, or in order if there are no ids. The interval comes from a bootstrap of rows with both of
    their predictions (joint cells of group, label and the two predictions; or clusters). The p-value comes from a
    permutation test that swaps the two predictions of each row (or cluster) at random; only rows on which they disagree
    matter. It is corrected over all differences.

    Args:
        a: the first predictions, in any form that `audit` accepts; also provides group, cluster and weight columns.
        b: the second predictions; None if both are columns of one table, prediction=("old", "new").
        group_by: as in `audit`.
        intersections: as in `audit`.
        metrics: as in `audit`; metrics of scores need a score of the positive class on both sides (scores of several
            classes are only in the two audits).
        n_boot: bootstrap replicates.
        n_perm: permutations; fewer, but at least 500, if groups × classes² is above 1600.
        seed: seed of bootstrap and permutations.
        level: confidence level of each interval.
        min_cell: as in `audit`.
        min_group: as in `audit`.
        multiclass: as in `audit`.
        positive: as in `audit`.
        reference: as in `audit`.
        correction: "westfall-young" or "holm" (family-wise error; the first accounts for correlated metrics), or "bh"
            (false discovery rate). A metric with two names counts once.
        columns: columns of files and data frames, as in `audit`.

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
        raise InputError(f"correction is {correction!r}; expected 'westfall-young', 'holm' or 'bh'.")
    if not isinstance(n_perm, int | np.integer) or n_perm < 100:
        raise InputError(f"n_perm is {n_perm!r}; at least 100 permutations are needed for a p-value.")
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
    binary_scores = all(view.scores is not None and view.scores.ndim == 1 for view in (first, second))
    score_rates = min(first.score_rates, second.score_rates, key=len)
    chosen = choose_metrics(metrics, score_rates, first.numbers is not None, bool(first.labels))
    # Base rates are the data's: they are the same on both sides.
    chosen = [m for m in chosen if (binary_scores or not m.scores) and m.rates != ("base_rate",)]
    with_scores = any(m.scores for m in chosen)
    by: list[tuple[str | None, Column]] = [(None, one_group(len(joined.a)))]
    by += group_columns(joined.a, group_by, intersections).items()
    references = reference_groups(reference, {name: column for name, column in by if name is not None}, {})
    draws = Draws(n_boot, seed, min_group, with_own(chosen))
    headline, tested = headline_of(chosen), list[Tested]()
    pairs: list[PairChanges] = []
    for name, column in by:
        pair = Pair.of(first, second, column, draws, n_perm, with_scores)
        rules = Rules(level, min_cell, multiclass, pair.bootstrap.tables[0].prevalence)
        tested += [
            pair.difference(metric, rules, audits, name, references.get(name or "", 0))
            for metric in chosen
            if metric.overall == (name is None)
        ]
        if name is not None:
            drawn, swapped = pair.bootstrap.tables, pair.swapped.tables
            names = {rate: None for m in chosen if m.name in headline for rate in m.rates if rate in drawn[0].kinds}
            pairs.append(pair_changes(name, drawn, swapped, names, rules, references[name]))
    differences = [_explained(found) for found in corrected(tested, correction)]
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


class Pair(NamedTuple):
    """Both predictions of one group column, resampled and swapped."""

    bootstrap: Both
    swapped: Both

    @classmethod
    def of(cls, first: View, second: View, column: Column, draws: Draws, n_perm: int, with_scores: bool) -> "Pair":
        """Draw both."""
        first, second, column = first.take(column.known), second.take(column.known), column.complete()
        drawing = Drawing([first, second], column, draws)
        drawn, swapped = drawing.bootstrap(), drawing.swapped(n_perm)
        if not with_scores or first.ranked is None or second.ranked is None:
            return cls(Both(drawn), Both(swapped))
        scores = pair_scores(first.ranked, second.ranked, column, draws, len(swapped[0].star))
        return cls(Both(drawn, scores[0]), Both(swapped, scores[1]))

    def difference(
        self, metric: Metric, rules: Rules, audits: tuple[Audit, Audit], name: str | None, reference: int
    ) -> "Tested":
        """One metric, b minus a."""
        drawn = paired_values(metric, self.bootstrap, rules, reference)
        n, block = int(self.bootstrap.tables[0].sizes.sum()), (name, metric.scores)
        if isinstance(drawn, str):
            nothing = Difference(
                metric.name, name, None, None, None, None, None, n, undefined=drawn, ideal=metric.ideal
            )
            return Tested(nothing, None, block)
        swapped = paired_values(metric, self.swapped, rules, reference)
        test = None if isinstance(swapped, str) else swapped.change()
        value, star = drawn.b - drawn.a, drawn.star_b - drawn.star_a
        interval = intervals.percentile(star[~np.isnan(star)], rules.level)
        one, other = (of[metric.name, name] for of in audits)
        ends, mde = paired_ends(metric, drawn, (one, other), interval, rules.level), None
        if test is not None and not isinstance(swapped, str):
            by_chance = float(np.nanquantile(test.draws, 1 - ALPHA))
            mde = detectable(drawn, swapped, by_chance, (one, other), interval.se, rules.level)
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
            mde=mde,
            ideal=metric.ideal,
            note=_JUDGED if "at_most" in one.detail else None,
        )
        return Tested(found, test, block)


def _explained(found: Difference) -> Difference:
    """With a note where p is small and the interval holds 0."""
    p = 1.0 if found.p_adjusted is None else found.p_adjusted
    if p >= ALPHA or found.outcome != "not significant":
        return found
    why = _OF_ROWS if found.group_by is None or found.metric.startswith("worst_") else _OF_GROUPS
    return replace(found, note="; ".join(filter(None, [found.note, why])))


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
        p = westfall_young([t.observed for t in tests], [t.draws for t in tests], [t.block for t in able])
        adjusted = dict(zip([id(t.difference) for t in able], p, strict=True))
        return [replace(d, p_adjusted=None if d.p is None else adjusted.get(id(d), 1.0)) for d in found]
    names = [(d.group_by, d.p, d.a, d.b) for d in found]
    once = list(dict.fromkeys(names))
    by_name = dict(zip(once, adjust([p for _, p, _, _ in once], "bh" if correction == "bh" else "holm"), strict=True))
    return [replace(d, p_adjusted=by_name[name]) for d, name in zip(found, names, strict=True)]


def drift(a: Records | Any, b: Records | Any, *, correction: Correction = "holm", **options: Any) -> Comparison:
    """How much gaps and rates of groups differ between two samples of different rows, b minus a.

    The samples are independent of each other, so the interval of a difference is put together from those of both sides
    (MOVER, Zou and Donner 2008), and its p-value follows from where that interval would end at 0. P-values are
    corrected over all differences. For predictions of the same rows use `compare`, which is much sharper.

    Args:
        a: the earlier rows, as `audit` takes them: records, a file or a data frame.
        b: the later rows, with the same classes and group columns; groups need not be the same.
        correction: of p-values: "holm" or "bh".
        options: as `audit` takes them.

    Example:
        >>> before, after = ["a"] * 90 + ["b"] * 90, ["a"] * 90 + ["b"] * 90
        >>> old = Records.from_arrays([0, 1] * 90, [0, 1] * 90, groups={"g": before})
        >>> new = Records.from_arrays([0, 1] * 90, [0, 1] * 45 + [1] * 90, groups={"g": after})
        >>> gap = next(d for d in drift(old, new, metrics=["DP"]).differences if d.metric == "DP")
        >>> gap.a, gap.b, gap.outcome
        (0.0, 0.5, 'worse')
    """
    first, second = audit(a, **options), audit(b, **options)
    classes, others = (found.provenance["audit"]["classes"] for found in (first, second))
    if set(classes) != set(others):
        raise InputError(f"a has the classes {classes} and b has {others}; expected the same")
    level = first.provenance["audit"]["level"]
    found = _adjusted([_difference(*pair, level) for pair in _pairs(first, second)], correction)
    pairs = _adjusted(list(_signed_changes(first, second, level)), correction)
    provenance = {
        "a": {name: value for name, value in first.provenance.items() if name != "audit"},
        "b": {name: value for name, value in second.provenance.items() if name != "audit"},
        "level": level,
        "correction": correction,
        "paired": False,
    }
    return Comparison(tuple(found), first, second, provenance, tuple(pairs))


def _adjusted(found: Sequence[Difference], correction: Correction) -> list[Difference]:
    return [replace(d, p_adjusted=p) for d, p in zip(found, adjust([d.p for d in found], correction), strict=True)]


def _pairs(a: Audit, b: Audit) -> Iterator[tuple[str, str | None, Estimate, Estimate]]:
    """Figures that both audits have: name, of what, and both."""
    later = {(e.metric, e.group_by): e for e in b.estimates}
    for e in a.estimates:
        if (e.metric, e.group_by) in later:
            yield e.metric, e.group_by, e, later[e.metric, e.group_by]
    rows = {(row.group_by, row.group): row for row in b.by_group}
    for row in a.by_group:
        other = rows.get((row.group_by, row.group))
        if other is not None:
            for rate in _FOLLOWED:
                if rate in row.rates and rate in other.rates:
                    yield rate, f"{row.group_by}: {row.group}", row.rates[rate], other.rates[rate]


def _signed_changes(a: Audit, b: Audit, level: float) -> Iterator[Difference]:
    """How the signed difference between two groups changed, in each rate behind the headline gaps.

    Of many groups each is compared with the reference only.
    """
    options = a.provenance["audit"]
    behind = {rate for metric in options["headline"] if metric in METRICS for rate in METRICS[metric].rates}
    later = {(row.group_by, row.group): row.rates for row in b.by_group}
    for column, reference in options["reference"].items():
        rows = [row for row in a.by_group if row.group_by == column and (column, row.group) in later]
        for pair in combinations(rows, 2):
            if len(rows) > ALL_PAIRS and reference not in (pair[0].group, pair[1].group):
                continue
            two, one = sorted(pair, key=lambda row: row.group != reference)  # the reference is second
            for name in (name for name in one.rates if name.partition("[")[0] in behind):
                figures = [one.rates, two.rates, later[column, one.group], later[column, two.group]]
                rates = [known[name] for known in figures if name in known]
                spans = [rate.span for rate in rates if rate.span is not None]
                if len(spans) < len(figures):
                    continue
                before, after = (difference(spans[k + 1], spans[k], 0.0, None) for k in (0, 2))
                sure = all(side.low > 0 or side.high < 0 for side in (before, after))
                note = REVERSED if sure and before.value * after.value < 0 else None
                found = _changed(name, column, before, after, sum(rate.n for rate in rates), 0.0, None, level)
                yield replace(found, note=note, groups=(one.group, two.group))


def _difference(metric: str, of: str | None, a: Estimate, b: Estimate, level: float) -> Difference:
    n, one, other = a.n + b.n, a.span, b.span
    if one is None or other is None:
        why = "; ".join(f"in {side}: {e.undefined}" for side, e in (("A", a), ("B", b)) if e.undefined)
        return Difference(metric, of, a.value, b.value, None, None, None, n, undefined=why, ideal=a.ideal)
    return _changed(metric, of, one, other, n, a.ideal, a.ideal, level)


def _changed(
    metric: str, of: str | None, one: Span, other: Span, n: int, ideal: float | None, folded: float | None, level: float
) -> Difference:
    """The change from one figure to another; `folded` is where such figures are folded, if anywhere."""
    found = difference(one, other, 0.0, folded)
    # The standard error on the side of 0, as far as the interval says; half the width where there is no difference.
    normal = NormalDist()
    reach = (found.value - found.low if found.value > 0 else found.high - found.value) or (found.high - found.low) / 2
    se = reach / normal.inv_cdf((1 + level) / 2)
    p = 1.0 if found.value == 0 else 0.0 if se == 0 else 2 * normal.cdf(-abs(found.value) / se)
    ends = found.value, found.low, found.high
    mde = minimum_detectable(se, level)
    return Difference(metric, of, one.value, other.value, *ends, n, p, None, None, mde, ideal)
