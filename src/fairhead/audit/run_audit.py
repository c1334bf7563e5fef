"""`audit`: from records to gaps with intervals; and a gap as a scikit-learn scorer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.audit_results import Audit, headline_of
from fairhead.audit.audited_rows import View, group_columns, one_group, read_rows, reference_groups, with_weight
from fairhead.audit.catalogue import OWN, Chosen, Metric, Multiclass, choose_metrics, with_own
from fairhead.audit.estimate import association_estimate, estimate, interval_of
from fairhead.audit.metrics import Rules, Stack, check_options
from fairhead.audit.rates import RATES, Rates
from fairhead.audit.score_rates import SCORE_GAPS, ScoreTables, curves_of
from fairhead.audit.tables import NUMBER_RATES, Drawing, Draws, Tables, count_together
from fairhead.errors import InputError
from fairhead.records import Column, Records, TableColumns, keep_freed_memory
from fairhead.report.wording import HOLDS, UNDECIDED, four_fifths
from fairhead.stats import Curves, Estimate, GroupRow, intervals
from fairhead.stats.bootstrap import MIN_ROWS, STABLE_ROWS
from fairhead.stats.clusters import clusters_in
from fairhead.stats.max_t import westfall_young

_BY_GROUP = ("base_rate", "selection_rate", "TPR", "FPR", "precision", "NPV", "accuracy")
# Numbers in a buffer of numpy's. Where two rows of replicates fit into one, a number that is the same for a whole row
# is copied as often as the row is long, and adding it takes twice as long.
_BUFFER = 512
# What is left of a rate to 1, under the name that people know it by.
_COMPLEMENTS = {"FNR": "TPR", "FDR": "precision"}


def audit(
    data: Records | Any,
    *,
    group_by: str | Sequence[str] | None = None,
    intersections: bool = False,
    metrics: Chosen = None,
    n_boot: int = 2000,
    seed: int = 0,
    level: float = 0.95,
    min_cell: int = MIN_ROWS,
    min_group: float = 0,
    multiclass: Multiclass = "max",
    positive: Any = None,
    reference: Mapping[str, Any] | Sequence[str] | str | None = None,
    **columns: Unpack[TableColumns],
) -> Audit:
    """Measure the gaps between groups, with confidence intervals.

    Count metrics are resampled as multinomial draws over (group, label, prediction) cells, which is the bootstrap over
    rows (or over clusters, if there is a cluster column) without its cost. Intervals of rates are percentile intervals.
    Intervals of gaps, ratios and worst groups come from inverting a test, because percentile intervals miss a gap
    near 0; see `fairhead.stats.intervals`.

    A rate with fewer than `min_cell` rows (or clusters) is left out of its gap, and the estimate lists it in
    `detail["excluded"]`; if fewer than two groups remain, the estimate is undefined and gives the reason. Figures by a
    column use the rows that have a group there; `provenance["audit"]["without_group"]` counts the others.

    Args:
        data: labels, predictions or scores, and group columns, as `Records`; or a file or a data frame (pandas,
            polars, Arrow or `datasets`), whose columns you name with the arguments of `Records.read`: label=,
            prediction=, score=, groups=, where=, ...
        group_by: the group columns to audit; all by default.
        intersections: also audit every combination of two or more of them.
        metrics: names in `fairhead.audit.METRICS`, "all", and results of `define_metric`; by default the headline
            metrics.
        n_boot: bootstrap replicates.
        seed: seed of the bootstrap; the same seed gives the same figures.
        level: confidence level.
        min_cell: minimum number of rows for a rate; with clusters, also the minimum number of clusters in its group.
        min_group: minimum size of a group to be included in gaps, in rows, or below 1 as a share of all rows.
        multiclass: how to combine the one-vs-rest gaps of several classes: "max" (as in DAM), "mean", or "weighted" by
            class frequency.
        positive: the positive class; by default the last of two. With more classes, that class against the rest.
        columns: arguments of `Records.read`, if `data` is a file or a data frame.
        reference: the group to compare the others of its column with: {"race": "White"}, or just "White" if only one
            column has it; by default the largest. AIF360 calls it privileged.

    Example:
        >>> import numpy as np
        >>> from fairhead.records import Column, Records
        >>> label = Column(np.tile([0, 1], 200), (0, 1))
        >>> guess = Column(np.where(np.arange(400) < 300, label.codes, 1), (0, 1))
        >>> result = audit(Records(label, guess, groups={"sex": Column(np.arange(400) // 200, ("f", "m"))}))
        >>> gap = result["DP"]
        >>> gap.value, gap.groups, 0 < gap.low < gap.value < gap.high
        (0.25, ('m', 'f'), True)
        >>> table = {"y": [0, 1] * 50, "said": [0, 1] * 40 + [1] * 20, "race": ["a"] * 50 + ["b"] * 50}
        >>> audit(table, label="y", prediction="said", groups="race")["DP"].value.__round__(3)
        0.2
    """
    records, positive = read_rows(data, positive, columns)
    check_options(n_boot, seed, level, min_cell, min_group, multiclass)
    keep_freed_memory()
    n_rows, records = len(records), with_weight(records)
    view = View.of(records, positive)
    by = group_columns(records, group_by, intersections)
    of_scores = *view.score_rates, *view.score_gaps
    chosen = choose_metrics(metrics, of_scores, view.numbers is not None, bool(view.labels))
    draws = Draws(n_boot, seed, min_group, with_own(chosen))
    counted = count_together(view, by)
    references = reference_groups(reference, by, counted)
    parts = [
        Part(view.take(column.known), name, column.complete(), draws, references[name], counted.get(name))
        for name, column in by.items()
    ]
    finer = next((part for part in parts if part.view is view), None)
    overall = Part(view, None, one_group(len(records)), draws, finer=finer)
    headline = headline_of(chosen)
    family = Family({*headline, "impact_ratio"}, len(parts))
    estimates: list[Estimate] = []
    by_group: list[GroupRow] = []
    with np.errstate():  # at its end numpy's buffers have the size that they had
        np.setbufsize(_BUFFER)
        rules = Rules(level, min_cell, multiclass, overall.tables.prevalence)
        for part in parts:
            estimates += [part.estimate(m, rules, family) for m in chosen if not m.overall]
            by_group += part.by_group(rules)
        estimates = family.corrected(estimates)
        # Shown first, made last: what was counted by group need only be added up.
        estimates = [overall.estimate(m, rules) for m in chosen if m.overall] + estimates
        scored = [part for part in parts if view.score_gaps and part.name in records.groups]
        curves = tuple(part.curves(level) for part in scored)
    without = {name: int((~column.known).sum()) for name, column in by.items() if column.known is not None}
    options = {
        "n": n_rows,
        **({"without_group": without} if without else {}),
        "n_boot": n_boot,
        "seed": seed,
        "level": level,
        "min_cell": min_cell,
        "min_group": min_group,
        "headline": headline,
        "classes": list(view.classes),
        "multiclass": multiclass if len(view.classes) > 2 or view.labels else None,
        "prediction": view.prediction_rule or records.provenance.get("prediction"),
        "reference": {part.name: part.tables.groups[part.reference] for part in parts},
    }
    return Audit(tuple(estimates), tuple(by_group), {**records.provenance, "audit": options}, curves)


@dataclass(frozen=True)
class Part:
    """One group column (or all rows as one group) and the figures drawn from it."""

    view: View  # the rows
    name: str | None  # the column's name; None for all rows
    column: Column  # the groups
    draws: Draws  # how to resample
    reference: int = 0  # the number of the group that others are seen against
    rows: NDArray[np.int64] | None = None  # by group, label and prediction, where they have been counted
    finer: "Part | None" = None  # a part whose counts, pooled, are those of this one

    @cached_property
    def tables(self) -> Tables:
        """Counts and their replicates."""
        if self.finer is not None and self.view.numbers is None and not self.view.labels:
            clusters = clusters_in(self.column.codes, len(self.column.levels), self.view.cluster)
            return replace(self.finer.tables.all_rows, clusters=clusters)
        return Drawing([self.view], self.column, self.draws, self.rows).bootstrap()[0]

    @cached_property
    def scores(self) -> ScoreTables:
        """Scores and their replicates."""
        assert self.view.ranked is not None
        draws = self.draws
        return ScoreTables(self.view.ranked, self.column.codes, len(self.column.levels), draws.n_boot, draws.seed)

    def estimate(self, metric: Metric, rules: Rules, family: "Family | None" = None) -> Estimate:
        """One metric of this column; its test of evenness goes to the family where it can make a headline."""
        if metric.compare == "association":
            return association_estimate(metric, self.tables, rules, self.name)
        tables = tables_for(metric, self.tables, self.reference)
        group_rows = tables.sizes[: len(self.column.levels)]
        known = tables.groups, self._class_names(metric), group_rows
        tests: list[intervals.EvenTest] = []
        found = estimate(metric, self._stack(metric, tables, rules), *known, rules, self.name, tests)
        if family is None or metric.name not in family.metrics:
            return found
        detail, stable, strict = dict(found.detail), found, rules
        if "unstable" in detail:
            # Thin cells make no headline: the figure without them may.
            strict, tests = replace(rules, min_cell=max(rules.min_cell, STABLE_ROWS)), []
            stable = estimate(metric, self._stack(metric, tables, strict), *known, strict, self.name, tests)
            kept = ("value", "low", "high", "n", "undefined", "mde", "groups")
            detail["stable"] = {name: vars(stable)[name] for name in kept}
            detail["most_certain"] = stable.detail.get("most_certain", [])
        if metric.name == "impact_ratio" and stable.low is not None and stable.high is not None:
            detail["four_fifths"] = four_fifths(stable.low, stable.high)
            if detail["four_fifths"] != UNDECIDED and family.columns > 1:
                # Each column may be said to pass or to fail: the error is shared between them (Bonferroni).
                level, parts = 1 - (1 - rules.level) / family.columns, self._stack(metric, tables, strict)
                holds = detail["four_fifths"] == HOLDS  # then only the lower end matters
                shared = interval_of(parts.reduction(metric, strict), parts, level, lower_alone=holds)
                detail["four_fifths"] = four_fifths(shared.low, shared.high)
        family.add(found, tests)
        return replace(found, detail=detail)

    def by_group(self, rules: Rules) -> list[GroupRow]:
        """Each group's own rates with intervals."""
        assert self.name is not None
        found: dict[str, Rates] = {}
        usual = _BY_GROUP if self.view.numbers is None else ()
        for name in (*usual, *(name for name in self.tables.kinds if name not in RATES)):
            rates = self.tables.rates(name)
            found |= self._named(name, replace(rates, small={}) if rates.small else rates)
        for name in self.view.score_rates:
            found |= self._named(name, self.scores.rates(name))
        ends = rates_ends(found, rules.level)
        sizes = self.tables.sizes
        figures = {name: self._rate_estimates(name, rates, ends[name], rules) for name, rates in found.items()}
        for name in list(figures):
            of, sign, label = name.partition("[")
            for less, more in _COMPLEMENTS.items():
                if of == more:
                    figures[less + sign + label] = [_complement(less + sign + label, rate) for rate in figures[name]]
        return [
            GroupRow(self.name, group, int(sizes[g]), {name: of_groups[g] for name, of_groups in figures.items()})
            for g, group in enumerate(self.tables.groups)
        ]

    def curves(self, level: float) -> Curves:
        """What other thresholds would give, and how well the scores are calibrated."""
        assert self.name is not None
        return curves_of(self.name, self.tables.groups, self.scores, "ECE" in self.view.score_rates, level)

    def _stack(self, metric: Metric, tables: Tables, rules: Rules) -> Stack:
        """The rates of a metric; metrics that compare the same ones alike share what is made of them."""
        key = metric.rates, metric.compare, tables.groups, rules.min_cell
        if key not in self._stacks:
            rates = [self._rate(name, tables) for name in metric.rates]
            self._stacks[key] = Stack.of(metric, rates, tables.groups, rules.min_cell)
        return self._stacks[key]

    @cached_property
    def _stacks(self) -> dict[tuple[Any, ...], Stack]:
        return {}

    def _rate(self, name: str, tables: Tables) -> Rates:
        if name in SCORE_GAPS:
            return SCORE_GAPS[name](self.scores, self.reference)
        if name in tables.kinds:
            return tables.rates(name)
        found = self.scores.rates(name)
        return replace(found, small=self.tables.small) if self.tables.small else found

    def _class_names(self, metric: Metric) -> tuple[str, ...]:
        rate = metric.rates[0]
        if rate == "sufficiency":
            return tuple(f"bin {k + 1} of the score" for k in range(10))
        if rate == "AUC" and self.view.scores is not None and self.view.scores.ndim == 2:
            return self.view.classes
        return self.tables.class_names(rate)

    def _named(self, name: str, rates: Rates) -> dict[str, Rates]:
        """One entry a class: "TPR" of a binary task, "TPR[cat]", "TPR[dog]", ... of several classes."""
        if len(rates.hat) == 1:
            return {name: rates}
        return {f"{name}[{label}]": rates.of_class(c) for c, label in enumerate(self.view.classes)}

    def _rate_estimates(self, name: str, rates: Rates, ends: NDArray[np.float64], rules: Rules) -> list[Estimate]:
        """One rate of each group, with its ends [2, G]."""
        n, values, enough = rates.rows[0].tolist(), rates.hat[0].tolist(), rates.enough(rules.min_cell)[0].tolist()
        found = []
        for g, (value, low, high) in enumerate(zip(values, *ends.tolist(), strict=True)):
            if enough[g] and value == value:  # not NaN
                found.append(Estimate(name, self.name, value, min(low, value), max(high, value), n[g], None))
            else:
                why = rates.shortage(0, g, self.tables.groups[g], rules.min_cell)
                found.append(Estimate(name, self.name, None, None, None, n[g], None, why))
        return found


@dataclass(frozen=True)
class Family:
    """The tests behind whatever an audit may call a finding: headline metrics × columns × pairs of groups."""

    metrics: set[str]
    columns: int
    tests: dict[tuple[str, str], intervals.EvenTest] = field(default_factory=dict)

    def add(self, estimate: Estimate, tests: Sequence[intervals.EvenTest]) -> None:
        """The test of a figure, where there is one."""
        if tests and estimate.group_by is not None:
            self.tests[estimate.metric, estimate.group_by] = tests[0]

    def corrected(self, estimates: Sequence[Estimate]) -> list[Estimate]:
        """The estimates, with p-values corrected over the family in their details."""
        observed, draws = [test.observed for test in self.tests.values()], [test.draws for test in self.tests.values()]
        p = westfall_young(observed, draws, [column for _, column in self.tests])
        adjusted = dict(zip(self.tests, p, strict=True))
        return [
            e
            if (e.metric, e.group_by) not in adjusted
            else replace(e, detail={**e.detail, "p_adjusted": adjusted[e.metric, e.group_by or ""]})
            for e in estimates
        ]


def _complement(name: str, rate: Estimate) -> Estimate:
    """1 less a rate."""
    if (span := rate.span) is None:
        return replace(rate, metric=name)
    return Estimate(name, rate.group_by, 1 - span.value, 1 - span.high, 1 - span.low, rate.n, rate.ideal)


def tables_for(metric: Metric, tables: Tables, reference: int) -> Tables:
    """The counts with the groups that a metric compares."""
    if metric.compare == "to_overall":
        return tables.with_overall
    if metric.name.startswith("bias_"):
        return tables.of_bias(aligned=metric.name == "bias_aligned_accuracy")
    if not metric.name.startswith("aif360."):
        return tables
    return tables.against(reference)


def rates_ends(rates: Mapping[str, Rates], level: float) -> dict[str, NDArray[np.float64]]:
    """Interval of each group's rates, each [2, G]: percentiles, or for a sum of absolute values that of a gap."""
    ends: dict[str, NDArray[np.float64]] = {}
    tails = [(1 - level) / 2, (1 + level) / 2]
    for name, rate in rates.items():
        if rate.terms is not None:
            ends[name] = np.array([rate.sum_interval(g, level)[:2] for g in range(rate.hat.shape[1])]).T
            continue
        star = rate.star[:, 0].T  # [G, B]
        if rate.clusters is not None:  # which may be few, however many rows
            hat = rate.hat[0][:, None]
            wide = hat + (star - hat) * rate.wide(level)[0][:, None]
            free = name.startswith(OWN) or name in NUMBER_RATES
            star = wide if free else np.clip(wide, 0.0, np.maximum(hat, 1.0))
        if rate.has_empty:
            star = np.where(np.isnan(star).all(axis=-1, keepdims=True), 0.0, star)
            ends[name] = np.nanquantile(star, tails, axis=-1)
        else:
            ends[name] = intervals.quantiles(star, tails)
    return ends


def scorer(
    metric: str, groups: Any, *, threshold: float | None = None, min_cell: int = MIN_ROWS
) -> Callable[[Any, Any, Any], float]:
    """A function `scorer(estimator, X, y)` as scikit-learn's `scoring=` takes it: larger is better.

    Args:
        metric: a name in `fairhead.audit.METRICS`. The score is the metric itself where 1 is ideal (accuracies,
            ratios), and minus its distance from 0 where 0 is (gaps). It is NaN where the metric is undefined.
        groups: the name of a column of X; or a pandas Series or DataFrame with the index of X, so that models need not
            see the groups. Rows without a group are left out.
        threshold: by default the estimator's own predictions are judged; with a threshold, its probabilities of the
            last class are compared with it.
        min_cell: as in `audit`.

    Example:
        >>> import pandas as pd
        >>> X = pd.DataFrame({"x": [0, 1] * 40, "race": ["a"] * 40 + ["b"] * 40})
        >>> class Always:
        ...     def predict(self, X): return np.where(X["race"] == "a", X["x"], 1)
        >>> scorer("DP", "race")(Always(), X, X["x"])
        -0.5
    """
    (chosen,) = choose_metrics([metric], ("AUC", "ECE", "Brier"))
    if chosen.overall:
        raise InputError(f"Metric {metric!r} is not about groups; scikit-learn has scorers for it.")

    def score(estimator: Any, X: Any, y: Any) -> float:  # as scikit-learn calls it
        scores = np.asarray(estimator.predict_proba(X))[:, 1] if threshold is not None or chosen.scores else None
        prediction = None if threshold is not None else np.asarray(estimator.predict(X))
        of_rows = _group_columns(groups, X)
        records = Records.from_arrays(
            np.asarray(y), prediction, scores=scores, groups=of_rows, threshold=threshold, drop_missing=True
        )
        found = audit(records, metrics=[metric], n_boot=100, min_cell=min_cell)
        values = [np.nan if e.value is None else e.value for e in found.estimates]
        # Of several group columns the worst counts.
        return min(value if chosen.ideal == 1 else -abs(value - (chosen.ideal or 0.0)) for value in values)

    return score


def _group_columns(groups: Any, X: Any) -> dict[str, Any]:
    """The groups of the rows of X, by column."""
    names = [groups] if isinstance(groups, str) else groups
    if isinstance(names, Sequence) and all(isinstance(name, str) for name in names):
        for name in names:
            if name not in X:
                raise InputError(f"X has no column {name!r}; name one of its columns, or give a Series with its index")
        return {name: np.asarray(X[name]) for name in names}
    if not hasattr(groups, "loc") or not hasattr(X, "index"):
        raise InputError("groups are names of columns of X, or a pandas Series or DataFrame with the index of X")
    of_rows = groups.loc[X.index]
    if of_rows.ndim == 1:
        return {str(groups.name or "group"): of_rows.to_numpy()}
    return {str(name): of_rows[name].to_numpy() for name in of_rows}
