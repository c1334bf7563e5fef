"""Bootstrap replicates: of counts of rows, and of sums over clusters.

Every figure is a function of sums over independent units: of how many rows fall in which cell, or of what the items of
a cluster add up to. A replicate draws n units with replacement, so it is a weighted sum over units. Rows that fall in
the same cell are alike: drawing them is drawing *counts* from a multinomial, which costs the same for a thousand rows
and for ten million.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairhead.errors import InputError
from fairhead.settings import Level, Replicates, Seed, check_config
from fairhead.stats import Estimate, intervals

Ints = NDArray[np.int64]
Array = NDArray[np.float64]
Statistic = Callable[[Array], Array]

# With fewer rows or items a figure is undefined; of fewer clusters than `FEW_CLUSTERS` it is marked as unstable.
MIN_ROWS, MIN_CLUSTERS, FEW_CLUSTERS = 10, 2, 10
# Fewer rows (or clusters) than this behind a rate: the figure stands, marked as unstable, and makes no headline.
STABLE_ROWS = 30

# Ideals and values of shares, such as that of preferred stereotypes, or of right answers, that are at their end.
_SETTLED = ((0.5, 0.0), (0.5, 1.0), (1.0, 1.0))
_BLOCK = 1 << 23  # numbers drawn at a time
_STREAMS, _WORTH_STREAMS = 2, 1 << 17  # of random numbers, where so many are drawn
_WORTH_THREADS = 1 << 20  # numbers; with fewer, threads wait for each other longer than they draw
_MOST_NUMBERS = 1 << 28  # replicates × cells held at once: 2 GB
_DRAWN, _KEPT = 1 << 22, 1 << 23  # draws of clusters at a time, and as many as are kept for the next figure
_LARGE = 10.0  # variance of a count
_UNITS = 16  # whose normal numbers are drawn at a time, so that they fit in a processor's cache
_LARGER = 100.0  # from here on kurtosis and rounding no longer show


@dataclass(frozen=True)
class Content:
    """What each unit adds to which cell, as (unit, cell, value) entries; units are what is resampled."""

    unit: Ints  # shape [E]
    cell: Ints  # shape [E], flat cell numbers
    value: Array | None  # shape [E]; None where every value is 1
    rows: Ints  # rows in each cell, unweighted, with the shape of the cells

    @cached_property
    def _is_a_cell_each(self) -> bool:
        """Whether each unit adds 1 to a cell of its own, in the order of cells."""
        in_order = np.array_equal(self.unit, np.arange(len(self.unit))) and bool((np.diff(self.cell) > 0).all())
        return self.value is None and in_order

    def total(self, drawn: Array) -> Array:
        """Sum cells over drawn units: [U, B] to counts [B, *cells]."""
        # The replicate axis is kept contiguous in memory though it comes first: reductions over groups are then quick.
        if self._is_a_cell_each:
            counts = drawn
            if len(drawn) < self.rows.size:
                counts = np.zeros((self.rows.size, drawn.shape[1]))
                counts[self.cell] = drawn
        else:
            from scipy.sparse import csr_array  # here: it takes longer to import than most audits to run

            value = np.ones(len(self.unit)) if self.value is None else self.value
            matrix = csr_array((value, (self.cell, self.unit)), shape=(self.rows.size, len(drawn)))
            counts = np.asarray(matrix @ drawn)
        return counts.reshape(*self.rows.shape, drawn.shape[1]).transpose(-1, *range(self.rows.ndim))


@dataclass(frozen=True)
class Sample:
    """Distinct units, how often each occurs, and what they hold.

    A unit is a cell (plain rows), a cell and a stratum of weights, or a kind of cluster.
    """

    multiplicity: Ints  # occurrences of each unit, shape [U]
    contents: tuple[Content, ...]  # one table of cells, or two for a paired comparison

    @property
    def rows(self) -> list[Ints]:
        """Rows in each cell, unweighted, one array [*cells] a table."""
        return [content.rows for content in self.contents]

    def observed(self) -> list[Array]:
        """The (weighted) counts of the sample itself, one array [*cells] a table."""
        return [content.total(self.multiplicity[:, None].astype(np.float64))[0] for content in self.contents]

    def bootstrap(self, n_boot: int, rng: np.random.Generator) -> list[Array]:
        """Counts of resampled units: one array [n_boot, *cells] a table."""
        n = int(self.multiplicity.sum())
        share, n_units = self.multiplicity / n, len(self.multiplicity)
        unit_of = np.repeat(np.arange(n_units), self.multiplicity) if n < 4 * n_units else None

        def draw(size: int, rng: np.random.Generator) -> Array:
            if unit_of is None:
                return multinomial(n, share, size, rng)
            # Nearly every unit occurs once: drawing them one by one is quicker.
            picked = unit_of[rng.integers(n, size=(size, n))] * size
            picked += np.arange(size)[:, None]
            drawn = np.bincount(picked.ravel(), minlength=size * n_units).reshape(n_units, size)
            return drawn.astype(np.float64)

        return self._blocks(n_boot, draw, rng)

    def swapped(self, n_perm: int, rng: np.random.Generator) -> list[Array]:
        """Counts after swapping the two predictions of each unit with probability ½: two arrays [n_perm, *cells].

        A unit whose two predictions are the same does not change by it and is not drawn.
        """
        first, second = self.contents
        moved = np.zeros(len(self.multiplicity), dtype=bool)
        moved[first.unit[first.cell != second.cell]] = True

        once, often = moved & (self.multiplicity == 1), moved & (self.multiplicity > 1)

        def draw(size: int, rng: np.random.Generator) -> Array:
            drawn = np.zeros((len(moved), size))
            drawn[once] = rng.integers(2, size=(int(once.sum()), size), dtype=np.int8)  # much quicker than binomial
            drawn[often] = rng.binomial(self.multiplicity[often, None], 0.5, size=(int(often.sum()), size))
            return drawn

        out, into = self._blocks(n_perm, draw, rng)
        observed_first, observed_second = self.observed()
        return [observed_first + into - out, observed_second + out - into]

    def _blocks(
        self, n_boot: int, draw: Callable[[int, np.random.Generator], Array], rng: np.random.Generator
    ) -> list[Array]:
        cells = max(content.rows.size for content in self.contents)
        if n_boot * cells > _MOST_NUMBERS:
            raise InputError(
                f"{n_boot:,} replicates of {cells:,} cells (groups × classes², or groups × bins of scores) do not fit "
                f"in {_MOST_NUMBERS >> 27} GB of memory; take fewer replicates (--n-boot), fewer groups, or one class "
                "against the rest (--positive)."
            )
        n_units = len(self.multiplicity)
        # As many streams on any machine, so that a seed gives the same figures on all of them.
        streams = rng.spawn(_STREAMS) if n_boot * n_units >= _WORTH_STREAMS else [rng]
        shares = [n_boot // len(streams) + (i < n_boot % len(streams)) for i in range(len(streams))]
        most = max(1, _BLOCK // (n_units * len(streams)))

        def stream(share: int, rng: np.random.Generator) -> list[list[Array]]:
            blocks = []
            for start in range(0, share, most):
                drawn = draw(min(most, share - start), rng)
                blocks.append([content.total(drawn) for content in self.contents])
            return blocks

        if n_boot * n_units < _WORTH_THREADS:
            parts = list(map(stream, shares, streams))
        else:
            with ThreadPoolExecutor(min(len(streams), os.cpu_count() or 1)) as pool:
                parts = list(pool.map(stream, shares, streams))
        blocks = [block for part in parts for block in part]
        return [_join(parts) for parts in zip(*blocks, strict=True)]


def _join(parts: Sequence[Array]) -> Array:
    if len(parts) == 1:
        return parts[0]
    return np.moveaxis(np.concatenate([np.moveaxis(p, 0, -1) for p in parts], axis=-1), -1, 0)


def multinomial(n: int, share: Array, size: int, rng: np.random.Generator) -> Array:
    """How often each of U units is drawn, [U, size], in `size` replicates of n draws with replacement.

    Counts of frequent units come from normal numbers, which are drawn much more quickly than binomial ones: a quantile
    of the binomial distribution is a normal one, bent for skewness and kurtosis (Cornish and Fisher) and rounded, with
    the cumulants less what rounding adds to them (Sheppard). Where the variance is 10 or more, that is the binomial
    distribution to less than a thousandth, as a test holds against SciPy's. Rare units are drawn exactly.
    """
    order = np.argsort(-share, kind="stable")  # of equal units the first comes first, on any processor
    # Of what the units before it have left, each takes its part.
    mass = np.cumsum(share[order][::-1])[::-1]
    part = share[order] / mass
    variance = n * mass * part * (1 - part)
    n_large = int(np.argmax(np.append(variance[:-1] < _LARGE, True)))
    drawn = np.empty((len(share), size))
    left, noise = np.full(size, float(n)), np.empty(size)
    for start in range(0, n_large, _UNITS):
        some = slice(start, min(start + _UNITS, n_large))
        z = rng.standard_normal((some.stop - start, size))
        bent = _bent(z, part[some, None], variance[some, None])
        for place in range(start, some.stop):
            count = drawn[order[place]]
            np.sqrt(left, out=noise)
            noise *= z[place - start]
            noise += bent[place - start]
            np.multiply(left, part[place], out=count)
            count += noise
            np.rint(count, out=count)
            if variance[place] < _LARGER:  # once in a million draws
                np.maximum(count, 0.0, out=count)
                np.minimum(count, left, out=count)
            left -= count
    rest = order[n_large:]
    if len(rest) == 1:
        drawn[rest[0]] = left
    else:
        drawn[rest] = rng.multinomial(left.astype(np.int64), share[rest] / share[rest].sum()).T
    return drawn


def _bent(z: Array, part: Array, variance: Array) -> Array:
    """What the shape of the binomial distribution adds to μ + √left·z, [U, size]; scales z, in place, for it."""
    squared = z * z
    bent = squared - 1
    bent *= (1 - 2 * part) / 6
    scale = np.sqrt(part * (1 - part))
    few: Any = (variance < _LARGER)[:, 0]
    if few.any():
        few = slice(None) if few.all() else few  # without copies
        p, v = part[few], variance[few]
        continuous = v - 1 / 12
        kurtosis = (v * (1 - 6 * p * (1 - p)) + 1 / 120) / (24 * continuous**1.5)
        skewness = (v * (1 - 2 * p)) ** 2 / (36 * continuous**2.5)
        bent[few] *= v / continuous
        bent[few] += z[few] * (squared[few] * (kurtosis - 2 * skewness) + (5 * skewness - 3 * kurtosis))
        scale[few] *= np.sqrt(continuous / v)
    z *= scale
    return bent


@dataclass(frozen=True)
class Resampling:
    """How intervals are made."""

    n_boot: Replicates = 2000  # bootstrap replicates
    seed: Seed = 0  # of the draws
    level: Level = 0.95  # confidence level
    min_items: int = MIN_ROWS  # with fewer items a score is undefined
    min_clusters: int = MIN_CLUSTERS  # so it is with fewer clusters

    def __post_init__(self) -> None:
        check_config(self)

    def estimate(
        self,
        metric: str,  # name of the score
        group_by: str | None,  # the category that it is of; None for all items
        sums: ArrayLike,  # what the items of each cluster add up to, shape [clusters, k]
        statistic: Statistic,  # the score as a function of totals, from [..., k] to [...]; NaN where it has no value
        n: int,  # number of items
        ideal: float | None = None,  # the value of a model without a preference, where there is one
        detail: Mapping[str, Any] | None = None,  # anything else worth knowing
    ) -> Estimate:
        """A score with its interval, from sums over each cluster.

        With few clusters a percentile interval is too narrow; its tails are moved outwards as Student's t demands
        (Hesterberg 2015, "What teachers should know about the bootstrap", expanded percentile interval).
        """
        table = np.asarray(sums, dtype=np.float64)
        clusters = len(table)
        known: dict[str, Any] = {"clusters": clusters, **(detail or {})}
        value = self.value(statistic, table, n)
        reason = self.why_undefined(n, clusters, value)
        if reason is not None:
            known |= {} if np.isnan(value) else {"value": value}
            return Estimate(metric, group_by, None, None, None, n, ideal, reason, detail=known)
        if clusters < FEW_CLUSTERS:
            known["unstable"] = f"only {clusters} clusters"
        if (ideal, value) in _SETTLED and (np.asarray(statistic(table)) == value).all():
            interval, method = self._exact(value, clusters), "exact (Clopper and Pearson), of clusters"
        else:
            (star,) = self.replicates(statistic, table)
            interval = self.interval(star[~np.isnan(star)], clusters)
            method = "cluster bootstrap, expanded percentile"
        known |= {"se": interval.se, "interval": method}
        low, high = min(interval.low, value), max(interval.high, value)
        mde = None if ideal is None else intervals.minimum_detectable(interval.se, self.level)
        return Estimate(metric, group_by, value, low, high, n, ideal, mde=mde, detail=known)

    def _exact(self, share: float, clusters: int) -> intervals.Interval:
        """Of a share that is 0, or 1, in every cluster: drawn again, it would always be the same."""
        reach = reach_of_equal(clusters, self.level)
        low, high = (0.0, reach) if share == 0 else (1 - reach, 1.0)
        return intervals.Interval(low, high, reach / NormalDist().inv_cdf((1 + self.level) / 2), None, "exact")

    def value(self, statistic: Statistic, sums: Array, n: int) -> float:
        """The figure of n items by their sums [clusters, k]; NaN where there is none, or too few items."""
        return float(statistic(sums.sum(axis=0))) if n >= self.min_items else np.nan

    def why_undefined(self, n: int, clusters: int, *values: float) -> str | None:
        """Why a figure of n items in so many clusters has no value or no interval; None where it has."""
        if n < self.min_items:
            return f"{n} item{'' if n == 1 else 's'}; at least {self.min_items} are needed"
        if np.isnan(values).any():
            return "no item has an answer that it could be made of"
        if clusters < MIN_CLUSTERS:
            return "all items are of one cluster, so an interval cannot be made"
        few = clusters < self.min_clusters
        return f"{clusters} clusters; at least {self.min_clusters} are needed for an interval" if few else None

    def replicates(self, statistic: Statistic, *tables: Array) -> list[Array]:
        """The figure of resampled clusters, [n_boot] for each table of sums [clusters, k]; NaN where there is none."""
        blocks = drawn_units(len(tables[0]), self.n_boot, self.seed)
        stars = [[np.asarray(statistic(drawn @ table)) for table in tables] for drawn in blocks]
        return [np.concatenate(parts) for parts in zip(*stars, strict=True)]

    def interval(self, star: Array, clusters: int) -> intervals.Interval:
        """The percentile interval of replicates [B], expanded for few clusters."""
        return intervals.percentile(star, expanded_level(self.level, clusters))


def drawn_units(units: int, n_boot: int, seed: int) -> Iterable[Array]:
    """How often each unit is drawn in each replicate, in blocks [b, units] that add up to n_boot rows."""
    # Draws depend on the number of units alone, and every figure of a benchmark asks for the same ones.
    return _kept_draws(units, n_boot, seed) if units * n_boot <= _KEPT else _draws(units, n_boot, seed)


@lru_cache(maxsize=2)
def _kept_draws(units: int, n_boot: int, seed: int) -> tuple[Array, ...]:
    return tuple(_draws(units, n_boot, seed))


def _draws(units: int, n_boot: int, seed: int) -> Iterator[Array]:
    rng = np.random.default_rng(seed)
    block = max(1, _DRAWN // units)
    for start in range(0, n_boot, block):
        size = min(block, n_boot - start)
        picked = rng.integers(units, size=(size, units)) + np.arange(size)[:, None] * units
        yield np.bincount(picked.ravel(), minlength=size * units).reshape(size, units).astype(np.float64)


def expanded_level(level: float, n: int) -> float:
    """The level at which a percentile interval of n clusters holds `level`.

    Example:
        >>> round(expanded_level(0.95, 10), 4), round(expanded_level(0.95, 100_000), 4)
        (0.9829, 0.95)
    """
    from scipy.special import ndtr, stdtrit  # here: not needed for --help

    t = stdtrit(n - 1, (1 + level) / 2) * np.sqrt(n / (n - 1))
    return float(1 - 2 * ndtr(-t))


def reach_of_equal(clusters: int, level: float = 0.95) -> float:
    """How far a share may be off that is 0, or 1, in every cluster (Clopper and Pearson): it shows no spread.

    Example:
        >>> round(reach_of_equal(10), 3)
        0.308
    """
    return float(1 - ((1 - level) / 2) ** (1 / clusters))
