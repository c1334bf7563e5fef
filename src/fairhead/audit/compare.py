"""`compare`: two sets of predictions on the same rows, pairwise."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit import intervals
from fairhead.audit.association import association_value
from fairhead.audit.catalogue import Metric
from fairhead.audit.counts import Sample, cell_numbers, tabulate
from fairhead.audit.estimate import Rules, Stack
from fairhead.audit.rates import Rates, Tables
from fairhead.audit.reduction import Multiclass, Reduction
from fairhead.audit.results import Audit, Comparison, Difference, Estimate
from fairhead.audit.run import (
    MIN_CELL,
    View,
    audit,
    choose_metrics,
    group_columns,
    one_group,
    privileged_group,
    tables_for,
)
from fairhead.errors import InputError
from fairhead.records import Column, Records

Array = NDArray[np.float64]
Correction = Literal["holm", "bh"]


def compare(
    a: Records,
    b: Records,
    *,
    group_by: str | Sequence[str] | None = None,
    intersections: bool = False,
    metrics: Sequence[str] | str | None = None,
    n_boot: int = 2000,
    n_perm: int = 10_000,
    seed: int = 0,
    level: float = 0.95,
    min_cell: int = MIN_CELL,
    multiclass: Multiclass = "max",
    positive: Any = None,
    privileged: Mapping[str, Any] | None = None,
    correction: Correction = "holm",
) -> Comparison:
    """How much the gaps of two sets of predictions for the same rows differ, b minus a.

    Rows are joined on `id`; without ids they are taken in order. The interval is a bootstrap of rows with both their
    predictions (joint cells of group, label and the two predictions; or clusters). The p-value swaps the two
    predictions of each row (or cluster) at random: only rows on which they disagree matter. It is corrected over all
    differences.

    Args:
        a: the first predictions; group, cluster and weight columns are taken from here.
        b: the second predictions.
        group_by: as in `audit`.
        intersections: as in `audit`.
        metrics: as in `audit`; metrics on scores are in the two audits, without a paired difference.
        n_boot: bootstrap replicates.
        n_perm: random swaps.
        seed: of both.
        level: confidence level of each interval.
        min_cell: as in `audit`.
        multiclass: as in `audit`.
        positive: as in `audit`.
        privileged: as in `audit`.
        correction: "holm" (no false finding in the family) or "bh" (share of false findings).

    Example:
        >>> from fairhead.records import Column, Records
        >>> label, sex = Column(np.tile([0, 1], 200), (0, 1)), Column(np.arange(400) // 200, ("f", "m"))
        >>> first = Records(label, Column(np.where(np.arange(400) < 300, label.codes, 1), (0, 1)), groups={"sex": sex})
        >>> second = Records(label, label, groups={"sex": sex})
        >>> difference = compare(first, second, metrics=["DP"]).differences[0]
        >>> difference.value, difference.p < 0.001
        (-0.25, True)
    """
    if correction not in ("holm", "bh"):
        raise InputError(f"correction is {correction!r}; 'holm' or 'bh' was expected.")
    joined = join(a, b)
    options: dict[str, Any] = {
        "group_by": group_by,
        "intersections": intersections,
        "metrics": metrics,
        "n_boot": n_boot,
        "seed": seed,
        "level": level,
        "min_cell": min_cell,
        "multiclass": multiclass,
        "positive": positive,
        "privileged": privileged,
    }
    audits = audit(joined.a, **options), audit(joined.b, **options)
    first, second = View.of(joined.a, positive), View.of(joined.b, positive)
    rules = Rules(level, min_cell, multiclass, first.prevalence)
    chosen = choose_metrics(metrics, has_scores=first.scores is not None)
    # Base rates are the data's: they are the same on both sides.
    chosen = [m for m in chosen if not m.scores and m.rates != ("base_rate",)]
    columns: list[tuple[str | None, Column]] = [(None, one_group(len(joined.a)))]
    columns += group_columns(joined.a, group_by, intersections).items()
    differences: list[Difference] = []
    for name, column in columns:
        privileged_index = None if name is None else privileged_group(name, column, privileged)
        pair = _Pair.of(first, second, column, n_boot, n_perm, seed)
        differences += [
            pair.difference(metric, rules, audits, name, privileged_index)
            for metric in chosen
            if metric.overall == (name is None)
        ]
    adjusted = adjust([d.p for d in differences], correction)
    differences = [replace(d, p_adjusted=p) for d, p in zip(differences, adjusted, strict=True)]
    provenance = {
        "a": dict(a.provenance),
        "b": dict(b.provenance),
        "n": len(joined.a),
        "joined_on": "id" if a.id is not None else "row order",
        "only_in_a": joined.only_in_a,
        "only_in_b": joined.only_in_b,
        "n_boot": n_boot,
        "n_perm": n_perm,
        "seed": seed,
        "level": level,
        "correction": correction,
    }
    return Comparison(tuple(differences), *audits, provenance)


class Joined(NamedTuple):
    """Two sets of records with the same rows in the same order, and the rows that were in one only."""

    a: Records
    b: Records
    only_in_a: int
    only_in_b: int


def join(a: Records, b: Records) -> Joined:
    """Bring two sets of records to the same rows in the same order, with the same classes and a's groups.

    Example:
        >>> one = Records(Column(np.array([0, 1]), (0, 1)), id=np.array([7, 8]))
        >>> other = Records(Column(np.array([1, 0, 1]), (0, 1)), id=np.array([9, 7, 8]))
        >>> joined = join(one, other)
        >>> joined.b.id.tolist(), joined.only_in_a, joined.only_in_b
        ([7, 8], 0, 1)
    """
    only_in_a = only_in_b = 0
    if (a.id is None) != (b.id is None):
        raise InputError("Only one of the two sets of records has ids; give both an id column, or neither.")
    if a.id is None or b.id is None:
        if len(a) != len(b):
            raise InputError(f"Without ids both must have the same rows, but a has {len(a)} and b has {len(b)}.")
    else:
        for side, ids in (("a", a.id), ("b", b.id)):
            _refuse_duplicates(side, ids)
        _, in_a, in_b = np.intersect1d(a.id, b.id, assume_unique=True, return_indices=True)
        if not len(in_a):
            raise InputError(f"No id is in both: the first of a is {a.id[0]!r}, the first of b is {b.id[0]!r}.")
        only_in_a, only_in_b = len(a) - len(in_a), len(b) - len(in_b)
        in_order = np.argsort(in_a)
        a, b = a.take(in_a[in_order]), b.take(in_b[in_order])
    classes = tuple(dict.fromkeys((*a.classes, *b.classes)))
    if classes != a.classes or classes != b.classes:
        classes = tuple(sorted(classes)) if len({type(c) for c in classes}) == 1 else classes
        a, b = _with_classes(a, classes), _with_classes(b, classes)
    different = np.flatnonzero(a.label.codes != b.label.codes)
    if len(different):
        which = f"row {different[0]}" if a.id is None else f"id {a.id[different[0]]}"
        raise InputError(
            f"{len(different)} of {len(a)} joined rows have another label in b than in a; the first has {which}. "
            "Both must be predictions for the same labels."
        )
    return Joined(a, replace(b, groups=a.groups, cluster=a.cluster, weight=a.weight), only_in_a, only_in_b)


def _refuse_duplicates(side: str, ids: NDArray[Any]) -> None:
    values, first, counts = np.unique(ids, return_index=True, return_counts=True)
    if len(values) < len(ids):
        twice = int(np.argmin(np.where(counts > 1, first, len(ids))))
        raise InputError(
            f"Id {values[twice]} occurs {counts[twice]} times in {side}, "
            f"and {int((counts > 1).sum())} ids occur more than once; a comparison needs one row an id."
        )


def _with_classes(records: Records, classes: tuple[Any, ...]) -> Records:
    def recode(column: Column) -> Column:
        number = np.array([classes.index(level) for level in column.levels], dtype=np.int32)
        return Column(number[column.codes], classes)

    prediction = None if records.prediction is None else recode(records.prediction)
    return replace(records, label=recode(records.label), prediction=prediction)


def adjust(p: Sequence[float | None], correction: Correction) -> list[float | None]:
    """Correct p-values over a family; those that are None take no part.

    Example:
        >>> adjust([0.01, 0.04, None], "holm")
        [0.02, 0.04, None]
        >>> adjust([0.01, 0.04, None], "bh")
        [0.02, 0.04, None]
    """
    tested = [i for i, value in enumerate(p) if value is not None]
    values = np.array([p[i] for i in tested], dtype=np.float64)
    order = np.argsort(values, kind="stable")
    m = len(values)
    if correction == "holm":
        steps = np.maximum.accumulate(values[order] * (m - np.arange(m)))
    else:
        steps = np.minimum.accumulate((values[order] * m / np.arange(1, m + 1))[::-1])[::-1]
    adjusted: list[float | None] = [None] * len(p)
    for i, step in zip(order, steps, strict=True):
        adjusted[tested[i]] = float(min(step, 1.0))
    return adjusted


@dataclass(frozen=True)
class _Pair:
    """Tables of both predictions, for the bootstrap and for the swaps."""

    bootstrap: tuple[Tables, Tables]
    swapped: tuple[Tables, Tables]

    @classmethod
    def of(cls, first: View, second: View, column: Column, n_boot: int, n_perm: int, seed: int) -> "_Pair":
        n_classes = len(first.classes)
        shape = (len(column.levels), n_classes, n_classes)
        keys = [cell_numbers([column.codes, first.label, view.prediction], shape) for view in (first, second)]
        sample: Sample = tabulate(keys, [shape, shape], first.weight, first.cluster)
        groups = tuple(str(level) for level in column.levels)
        observed = sample.observed()

        def tables(stars: list[Array]) -> tuple[Tables, Tables]:
            one, other = (
                Tables(groups, first.classes, hat, star, content.rows, settled=True)
                for hat, star, content in zip(observed, stars, sample.contents, strict=True)
            )
            return one, other

        return cls(
            tables(sample.bootstrap(n_boot, np.random.default_rng(seed))),
            tables(sample.swapped(n_perm, np.random.default_rng(seed))),
        )

    def difference(
        self, metric: Metric, rules: Rules, audits: tuple[Audit, Audit], name: str | None, privileged: int | None
    ) -> Difference:
        """One metric, b minus a."""
        drawn = _values(metric, self.bootstrap, rules, privileged)
        n = int(self.bootstrap[0].rows.sum())
        if isinstance(drawn, str):
            return Difference(metric.name, name, None, None, None, None, None, n, None, None, drawn, None, metric.ideal)
        swapped = _values(metric, self.swapped, rules, privileged)
        assert not isinstance(swapped, str)
        value = drawn.b - drawn.a
        star = drawn.star_b - drawn.star_a
        interval = intervals.percentile(star[~np.isnan(star)], rules.level)
        ends = _ends(metric, drawn, (audits[0][metric.name, name], audits[1][metric.name, name]), interval, rules.level)
        by_chance = np.abs(swapped.star_b - swapped.star_a)
        # A swap that leaves no value counts against the finding.
        as_large = np.count_nonzero(~(by_chance < abs(value) - 1e-12))
        return Difference(
            metric.name,
            name,
            drawn.a,
            drawn.b,
            value,
            min(ends.low, value) + 0.0,  # never -0.0
            max(ends.high, value),
            n,
            (1 + int(as_large)) / (1 + len(by_chance)),
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


def _ends(
    metric: Metric, drawn: _Values, alone: tuple[Estimate, Estimate], bootstrap: intervals.Interval, level: float
) -> intervals.Ends:
    """The interval of a difference.

    Smooth figures have their percentile interval. A folded figure is too large by an amount that differs between
    a and b, most of all where b is nearly even and a is not, so its interval is put together from those of a and b.
    It reaches no further than the rates of the same rows moved: |gap(b) − gap(a)| ≤ gap(b − a).
    """
    value = drawn.b - drawn.a
    both = [e for e in alone if e.value is not None and e.low is not None and e.high is not None]
    if drawn.most is None or len(both) < 2:
        return intervals.Ends(value, bootstrap.low, bootstrap.high)
    one, other = (intervals.Ends(e.value or 0.0, e.low or 0.0, e.high or 0.0) for e in both)
    known = ~np.isnan(drawn.star_a) & ~np.isnan(drawn.star_b)
    spread = float(np.std(drawn.star_a[known]) * np.std(drawn.star_b[known]))
    covariance = float(np.cov(drawn.star_a[known], drawn.star_b[known], bias=True)[0, 1])
    ends = intervals.difference(one, other, covariance / spread if spread > 0 else 0.0, metric.ideal)
    most = drawn.most(level)
    low, high = -most, most
    if metric.compare == "ratio":  # there the rates moved by factors
        low, high = drawn.a * (np.exp(-most) - 1), drawn.a * (np.exp(most) - 1)
    return intervals.Ends(value, max(ends.low, float(low)), min(ends.high, float(high)))


def _values(metric: Metric, pair: tuple[Tables, Tables], rules: Rules, privileged: int | None) -> _Values | str:
    """A metric of both predictions and of their replicates, or why it is undefined."""
    if metric.compare == "association":
        return _association(metric, pair, rules)
    tables = [tables_for(metric, t, privileged) for t in pair]
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
    return lambda level: intervals.gap(hats[1] - hats[0], stars[1] - stars[0], reduce, level=level).high


def _largest_move(moves: Array) -> Array:
    return np.fmax.reduce(np.abs(moves), axis=(-1, -2, -3))


def _association(metric: Metric, pair: tuple[Tables, Tables], rules: Rules) -> _Values | str:
    sizes = pair[0].rows.sum(axis=(-1, -2))
    usable = sizes >= rules.min_cell
    n = int(sizes[usable].sum())
    a, b = (float(association_value(metric.name, t.counts[usable], n)) for t in pair)
    if usable.sum() < 2 or np.isnan(a) or np.isnan(b):
        return "fewer than two groups, or two classes, can be compared"
    star_a, star_b = (association_value(metric.name, t.star[:, usable], n) for t in pair)
    return _Values(a, b, star_a, star_b)
