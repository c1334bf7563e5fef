"""Methods compared over seeds: a figure's spread from training apart from its spread from the test sample.

Two kinds of chance are in a table of methods. *Training*: another seed gives another model. *Test sampling*: other test
rows give other figures for the same model, and where all seeds share a test set they all err together, so that more
seeds do not help. Here both are kept apart and added up:

    variance of a mean over S seeds  =  (spread between seeds − what test sampling adds to it) / S  +  test sampling

The test part comes from one bootstrap of test *units* (ids, or clusters) that all methods and seeds go through
together: pairs stay pairs, whether the seeds share one test set, have one each, or overlap.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.audited_rows import View, group_columns
from fairhead.audit.catalogue import METRICS, choose_metrics
from fairhead.audit.metrics import Reduction, Rules, Stack
from fairhead.audit.tables import Tables
from fairhead.errors import InputError, did_you_mean
from fairhead.records import Records
from fairhead.stats import Difference, intervals
from fairhead.stats.bootstrap import MIN_ROWS, drawn_units
from fairhead.stats.clusters import cell_numbers

Array = NDArray[np.float64]


@dataclass(frozen=True)
class SeedFigure:
    """One metric of one method over its seeds."""

    metric: str  # its name
    by_seed: Mapping[int, float]  # value for each seed
    mean: float | None  # over seeds; None when undefined
    sd: float | None  # standard deviation over seeds; None with a single seed
    low: float | None  # lower end of the test-sampling interval of the mean (these models, other test rows)
    high: float | None  # upper end
    n: int  # test rows, averaged over seeds
    undefined: str | None = None  # why there is no value, or None
    excluded: tuple[str, ...] = ()  # cells with too few rows, which some seed goes without, each with its reason

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "by_seed": {str(seed): value for seed, value in self.by_seed.items()}}


@dataclass(frozen=True)
class SeedDifference(Difference):
    """One metric of two methods on the same seeds and test rows, b minus a; figures are means over seeds."""

    methods: tuple[str, str] = ("", "")  # the two
    by_seed: Mapping[int, float] = field(default_factory=dict)  # difference for each seed that both have
    # Standard error of the mean difference, from training and test sampling together; None with a single seed, where
    # the spread between seeds cannot be known
    se: float | None = None
    se_test: float | None = None  # the part of it that more seeds would not change

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a and b are the methods."""
        content = {**super().to_dict(), "a": self.methods[0], "b": self.methods[1], "outcome": self.outcome}
        return {**content, "by_seed": {str(seed): value for seed, value in self.by_seed.items()}}


class _Drawn(NamedTuple):
    """A metric of one run: its value, its replicates [B] (NaN where a cell was empty), and the rates behind them."""

    value: float
    star: Array
    stack: Stack
    reduction: Reduction


@dataclass(frozen=True)
class SeedPool:
    """Records of several methods, each trained with several seeds, resampled together."""

    runs: Mapping[str, Mapping[int, Records]]  # method -> seed -> records, with ids
    group_by: str  # the group column of the gaps
    n_boot: int = 2000  # bootstrap replicates
    seed: int = 0  # of the bootstrap
    level: float = 0.95  # confidence level
    min_cell: int = MIN_ROWS  # rows that a rate needs

    def figure(self, method: str, metric: str) -> SeedFigure:
        """One metric of one method: mean, spread over seeds, and test-sampling interval."""
        drawn = self._drawn(method, metric)
        n = self._rows(method)
        if isinstance(drawn, str):
            return SeedFigure(metric, {}, None, None, None, None, n, drawn)
        values = np.array([d.value for d in drawn.values()])
        low, high = self._test_interval(list(drawn.values()))
        by_seed = {seed: d.value for seed, d in drawn.items()}
        mean, sd = float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else None
        excluded = tuple(dict.fromkeys(reason for d in drawn.values() for reason in d.stack.excluded))
        return SeedFigure(metric, by_seed, mean, sd, min(low, mean), max(high, mean), n, excluded=excluded)

    def difference(self, a: str, b: str, metric: str) -> SeedDifference:
        """One metric of two methods, pairwise: same seeds, same test rows."""
        one, other = self._drawn(a, metric), self._drawn(b, metric)
        known: dict[str, Any] = {"metric": metric, "group_by": self.group_by, "ideal": METRICS[metric].ideal}
        known |= {"methods": (a, b), "n": self._rows(b), **dict.fromkeys(("a", "b", "value", "low", "high"))}
        if isinstance(one, str) or isinstance(other, str):
            return SeedDifference(**known, undefined=one if isinstance(one, str) else str(other))
        seeds = sorted(one.keys() & other.keys())
        if not seeds:
            return SeedDifference(**known, undefined="the two have no seed in common")
        values = np.array([other[s].value - one[s].value for s in seeds])
        stars = np.stack([other[s].star - one[s].star for s in seeds])  # [S, B]
        stars = stars[:, ~np.isnan(stars).any(axis=0)]
        value = float(values.mean())
        known |= {"by_seed": dict(zip(seeds, values.tolist(), strict=True)), "value": value}
        known |= {side: float(np.mean([drawn[s].value for s in seeds])) for side, drawn in (("a", one), ("b", other))}
        spread = _spread(values, stars)
        if spread is None:
            known |= {"se_test": float(stars.mean(axis=0).std())}
            return SeedDifference(**known, undefined="one seed: the spread of training is unknown")
        known |= {"se": spread.se, "se_test": spread.test}
        if spread.se == 0:
            # The same answers everywhere: nothing says how large a difference would have shown.
            return SeedDifference(**known | {"low": value, "high": value}, p=float(value == 0))
        from scipy.stats import t as student

        reach = float(student.ppf((1 + self.level) / 2, spread.df)) * spread.se
        known |= {"low": value - reach, "high": value + reach}
        p = float(2 * student.sf(abs(value) / spread.se, spread.df))
        return SeedDifference(**known, p=p, mde=reach + float(student.ppf(0.8, spread.df)) * spread.se)

    def _rows(self, method: str) -> int:
        """Test rows, averaged over seeds."""
        return round(float(np.mean([len(records) for records in self.runs[method].values()])))

    def _test_interval(self, drawn: Sequence[_Drawn]) -> tuple[float, float]:
        """The interval of the mean over seeds if other rows had been drawn for the test."""
        metric = drawn[0].reduction.metric
        if metric.compare == "spread":
            # A mean of gaps is folded as each of them is: see `intervals`.
            kept = np.logical_and.reduce([d.stack.kept for d in drawn])
            hat = np.stack([d.stack.hat for d in drawn])
            star = np.stack([d.stack.star[kept[d.stack.kept]] for d in drawn], axis=1)
            found = intervals.gap(hat, hat - star, lambda r: drawn[0].reduction(r).mean(axis=-1), level=self.level)
            return max(found.low, 0.0), min(found.high, 1.0)
        star = np.mean([d.star for d in drawn], axis=0)
        interval = intervals.percentile(star[~np.isnan(star)], self.level)
        return interval.low, interval.high

    def _drawn(self, method: str, metric: str) -> dict[int, _Drawn] | str:
        """Each seed's value and replicates, or why there are none."""
        if method not in self.runs:
            near = did_you_mean(method, list(self.runs))
            raise InputError(f"there is no method {method!r}; there are {', '.join(self.runs)}.{near}")
        (chosen,) = choose_metrics(metric, score_rates=())
        found: dict[int, _Drawn] = {}
        for seed, tables in self._tables[method].items():
            used = tables.all_rows if chosen.overall else tables
            stack = Stack.of(chosen, [used.rates(name) for name in chosen.rates], used.groups, self.min_cell)
            reduction = stack.reduction(chosen, self._rules)
            reason = stack.why_undefined(reduction, float(reduction(stack.hat)))
            if reason:
                return f"seed {seed}: {reason}"
            star = np.full(self.n_boot, np.nan)
            star[stack.kept] = reduction(stack.star)
            found[seed] = _Drawn(float(reduction(stack.hat)), star, stack, reduction)
        return found

    @cached_property
    def _rules(self) -> Rules:
        first = next(iter(next(iter(self._tables.values())).values()))
        return Rules(self.level, self.min_cell, "max", first.prevalence)

    @cached_property
    def _tables(self) -> dict[str, dict[int, Tables]]:
        """Counts [G, C, C] of every run and their replicates, from one bootstrap of the units of all runs."""
        from scipy.sparse import csr_array

        named = [(method, seed, records) for method, seeds in self.runs.items() for seed, records in seeds.items()]
        if not named:
            raise InputError("there is no run to compare")
        classes = named[0][2].classes
        columns = [group_columns(records, self.group_by, False)[self.group_by] for _, _, records in named]
        # A small test set may lack a group that others have.
        groups = sorted({level for column in columns for level in column.levels})
        shape = (len(groups), len(classes), len(classes))
        units, keys = [], []
        for (method, seed, records), column in zip(named, columns, strict=True):
            rows = records.with_known([self.group_by])
            if rows.id is None:
                raise InputError(f"{method}, seed {seed}: records need ids, so that runs can be paired")
            if records.classes != classes:
                raise InputError(f"{method}, seed {seed}: has the classes {records.classes}; other runs have {classes}")
            group = np.array([groups.index(level) for level in column.levels])[column.complete().codes]
            view = View.of(rows)
            units.append(rows.id if rows.cluster is None else rows.cluster.values())
            keys.append(cell_numbers([group, view.label, view.prediction], shape))
        names, unit = np.unique(np.concatenate(units), return_inverse=True)
        run = np.repeat(np.arange(len(named)), [len(key) for key in keys])
        cells = int(np.prod(shape))
        cell = run * cells + np.concatenate(keys)
        content = csr_array((np.ones(len(cell)), (cell, unit)), shape=(len(named) * cells, len(names)))
        observed: Array = np.asarray(content.sum(axis=1)).reshape(len(named), *shape)
        drawn = drawn_units(len(names), self.n_boot, self.seed)
        star = np.concatenate([np.asarray(content @ times.T) for times in drawn], axis=1)
        star = np.moveaxis(star.reshape(len(named), *shape, self.n_boot), -1, 1)  # [runs, B, G, C, C]
        tables: dict[str, dict[int, Tables]] = {}
        known = tuple(map(str, groups)), tuple(map(str, classes))
        for (method, seed, _), counts, replicates in zip(named, observed, star, strict=True):
            tables.setdefault(method, {})[seed] = Tables(*known, counts, replicates, counts.astype(np.int64))
        return tables


class _Spread(NamedTuple):
    """Standard error of a mean over seeds, its test-sampling part, and its degrees of freedom."""

    se: float
    test: float
    df: float


def _spread(values: Array, stars: Array) -> _Spread | None:
    """Add up both kinds of chance: values [S] and their replicates [S, B], as the head of this module says."""
    seeds = len(values)
    if seeds < 2:
        return None
    between = float(values.var(ddof=1))
    # What other test rows alone would add to the spread between seeds: all of it where each seed has its own rows.
    by_test = float((stars - stars.mean(axis=1, keepdims=True)).var(axis=0, ddof=1).mean())
    test = float(stars.mean(axis=0).var())
    between = max(between, by_test)
    total = (between - by_test) / seeds + test
    # Satterthwaite: of the three parts only the spread between seeds rests on few numbers. Where each seed has its
    # own rows this is the paired t-test.
    df = np.inf if between == 0 else (seeds - 1) * (seeds * total / between) ** 2
    return _Spread(float(np.sqrt(total)), float(np.sqrt(test)), float(df))
