"""Counts of one group column and their replicates: of classes, of several labels a row, or sums of predicted numbers.

Each is drawn by rows (or clusters) with replacement, and of two sets of predictions also by swapping them at random.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.audited_rows import View
from fairhead.audit.metrics import association, pooled
from fairhead.audit.rates import RATES, Kind, Margins, Rates, unsettle
from fairhead.errors import InputError
from fairhead.records import Column
from fairhead.stats.bootstrap import Content, Sample
from fairhead.stats.clusters import (
    MOST_CELLS,
    cell_numbers,
    clusters_in,
    count_rows,
    divide,
    sample_of_table,
    tabulate,
)

Array = NDArray[np.float64]

# From so many rows on, sums of numbers are as good as normal, and drawn as such: row by row would take minutes.
_MANY = 20_000
# Cells of all group columns together, where they are counted at once.
_FEW_CELLS = 1 << 14
# Patterns of labels and predictions are told apart as whole numbers of 64 bits, some of which the groups need.
_MOST_BITS = 48
# Counts held for all swaps at once (128 MB); with very many groups and classes there are fewer swaps.
_MOST_SWAPPED = 1 << 24


@dataclass(frozen=True)
class Tables:
    """Counts of one group column and everything drawn from them."""

    groups: tuple[str, ...]  # names of the groups
    classes: tuple[str, ...]  # names of the classes (with two, the second is the positive one) or of several labels
    counts: Array  # (weighted) counts, shape [G, C, C]; of labels [G, L, 2, 2]; of numbers sums of powers [G, 6]
    star: Array  # replicates, shape [B, ...]
    rows: NDArray[np.int64]  # rows in each cell, unweighted, with the shape of the counts
    settled: bool = False  # leave rates of exactly 0 or 1 without a spread of their own
    # Clusters with rows of each group, shape [G]; None where rows stand for themselves
    clusters: NDArray[np.int64] | None = None
    small: Mapping[int, str] = field(default_factory=dict)  # groups that take no part in gaps, and why
    kinds: Mapping[str, Kind] = field(default_factory=lambda: RATES)  # the rates by name
    margins: type[Any] = Margins  # what the rates are functions of: `Margins`, `LabelMargins` or `Moments`

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Rows of each group, shape [G]."""
        return np.asarray(self._row_margins.total[0], dtype=np.int64)

    @property
    def prevalence(self) -> Array:
        """Share of each class or label, shape [C]."""
        true = self._margins[0].true.sum(axis=-1)
        return np.asarray(true / max(true.sum(), 1.0))

    def rates(self, name: str) -> Rates:
        """The rate called `name` for all groups."""
        if name not in self._rates:
            self._rates[name] = self._rate(name, self.kinds[name])
        return self._rates[name]

    @cached_property
    def _rates(self) -> dict[str, Rates]:
        return {}

    def _rate(self, name: str, kind: Kind) -> Rates:
        some = self._classes(kind)
        hat, star = (kind.rate(m if kind.classes == "none" else m.of_classes(some)) for m in self._margins)
        rows, names = kind.rows(self._row_margins)[some].astype(np.int64), self.classes[some]
        rates = Rates(hat, star, rows, lambda c: kind.need.format(names[c]), self.clusters, None, self.small)
        # What is no share has no spread to be given where it is 0 or 1.
        keep = self.settled or (kind.own and bool((hat > 1).any() or (hat < 0).any()))
        settled = star if keep else unsettle(rates, name)
        return rates if settled is star else replace(rates, star=settled)

    def _classes(self, kind: Kind) -> slice:
        """The classes that a rate runs over: of two, the positive one."""
        one = kind.classes == "positive" and len(self.classes) == 2 and self.margins is Margins
        return slice(1, 2) if one else slice(None)

    def class_names(self, name: str) -> tuple[str, ...]:
        """The classes that the first axis of this rate runs over."""
        none = name not in self.kinds or self.kinds[name].classes == "none"
        return ("",) if none else self.classes[self._classes(self.kinds[name])]

    @cached_property
    def _margins(self) -> tuple[Any, Any]:
        return self.margins.of(self.counts), self.margins.of(self.star)

    @cached_property
    def _row_margins(self) -> Any:
        return self.margins.of(np.asarray(self.rows, dtype=np.float64))

    @cached_property
    def predicted(self) -> Array:
        """Rows of each group predicted to be of each class, in replicates, shape [B, G, C]."""
        return self.star.sum(axis=-2)

    @cached_property
    def association(self) -> Array:
        """How far these are from independent of the groups, as `metrics.association` has it, shape [B, C, G]."""
        return association(self.predicted)

    @cached_property
    def with_overall(self) -> "Tables":
        """The groups, and all rows as one more group."""
        with_all = self._map(lambda counts: np.concatenate([counts, pooled(counts)], axis=-3), *self.groups, "overall")
        return replace(with_all, small=self.small)

    @cached_property
    def all_rows(self) -> "Tables":
        """All groups as one."""
        return self._map(pooled, "all")

    def against(self, privileged: int) -> "Tables":
        """All other groups pooled, against the privileged one."""

        def pool(counts: NDArray[Any]) -> NDArray[Any]:
            one = counts[..., privileged : privileged + 1, :, :]
            return np.concatenate([pooled(counts) - one, one], axis=-3)

        return self._map(pool, "not " + self.groups[privileged], self.groups[privileged])

    def of_bias(self, aligned: bool) -> "Tables":
        """As one group, the rows whose label is more frequent in their group than in all rows, or the others."""
        expected = self.rows.sum(axis=(-1, -2))[:, None] * (self.rows.sum(axis=(0, -1)) / self.rows.sum())
        chosen = ((self.rows.sum(axis=-1) > expected) == aligned)[..., None]
        found = self._map(lambda counts: pooled(counts * chosen), "aligned" if aligned else "conflicting")
        # At least as many clusters as the group with the most of them has.
        return found if self.clusters is None else replace(found, clusters=self.clusters.max(keepdims=True))

    def _map(self, change: Callable[[NDArray[Any]], NDArray[Any]], *groups: str) -> "Tables":
        # A cluster may have rows in several groups that become one: then this is an upper bound.
        clusters = None if self.clusters is None else change(self.clusters[:, None, None])[:, 0, 0]
        counts, star, rows = (change(table) for table in (self.counts, self.star, self.rows))
        return replace(self, groups=groups, counts=counts, star=star, rows=rows, clusters=clusters, small={})


@dataclass(frozen=True)
class Draws:
    """How many replicates, from which seed; which groups take part in gaps; the rates by name."""

    n_boot: int
    seed: int
    min_group: float = 0
    kinds: Mapping[str, Kind] = field(default_factory=lambda: RATES)


class Drawing:
    """The rows of one group column, of one set of predictions or two, to be drawn again and to be swapped."""

    def __init__(
        self, views: Sequence[View], column: Column, draws: Draws, rows: NDArray[np.int64] | None = None
    ) -> None:
        self._views, self._column, self._draws = views, column, draws
        view, n_groups = views[0], len(column.levels)
        self.clusters = clusters_in(column.codes, n_groups, view.cluster)
        self._sample: Sample | NumberSample
        self._kinds: Mapping[str, Kind] = draws.kinds
        self._margins: type[Any] = Margins
        if view.numbers is not None:
            self._sample = NumberSample(views, column.codes, n_groups)
            self._kinds, self._margins = NUMBER_RATES, Moments
        elif view.labels:
            self._sample = _label_sample(views, column.codes, n_groups)
            self._kinds, self._margins = {**draws.kinds, "accuracy": Kind(LabelMargins.accuracy)}, LabelMargins
        else:
            self._sample = sample_of_table(rows) if rows is not None else _class_sample(views, column.codes, n_groups)

    def bootstrap(self) -> list[Tables]:
        """Tables, one for each set of predictions, with replicates of rows drawn with replacement."""
        return self._tables(self._sample.bootstrap(self._draws.n_boot, np.random.default_rng(self._draws.seed)))

    def swapped(self, n_perm: int) -> list[Tables]:
        """Both tables, with the two predictions of each row (or cluster) swapped with probability ½ for replicates."""
        if isinstance(self._sample, Sample):
            n_perm = max(500, min(n_perm, _MOST_SWAPPED // self._sample.rows[0].size))
        return self._tables(self._sample.swapped(n_perm, np.random.default_rng(self._draws.seed)))

    def _tables(self, stars: Sequence[Array]) -> list[Tables]:
        groups, view = tuple(str(level) for level in self._column.levels), self._views[0]
        classes = view.classes if view.numbers is None else ("a number",)
        settled = view.numbers is not None or len(self._views) > 1
        known: dict[str, Any] = {"kinds": self._kinds, "margins": self._margins, "clusters": self.clusters}
        found = [
            Tables(groups, classes, hat, star, rows, settled, **known)
            for hat, star, rows in zip(self._sample.observed(), stars, self._sample.rows, strict=True)
        ]
        small = small_groups(found[0].sizes, self._draws.min_group)
        return [replace(table, small=small) for table in found]


def small_groups(rows: NDArray[np.int64], min_group: float) -> dict[int, str]:
    """Groups of fewer rows [G] than asked for, a number or a share of all of them, and how many they have.

    Example:
        >>> small_groups(np.array([970, 30]), 0.05)
        {1: 'has 30 rows; min_group leaves out groups of fewer than 50'}
    """
    least = min_group * rows.sum() if min_group < 1 else min_group
    why = f"rows; min_group leaves out groups of fewer than {np.ceil(least):.0f}"
    return {int(g): f"has {rows[g]} {why}" for g in np.flatnonzero(rows < least)}


def count_together(view: View, columns: Mapping[str, Column]) -> dict[str, NDArray[np.int64]]:
    """Rows by group, label and prediction, [G, C, C], of each column, counted at once; none where they cannot be."""
    shape = (*(len(column.levels) for column in columns.values()), len(view.classes), len(view.classes))
    plain = view.weight is None and view.cluster is None and view.numbers is None and not view.labels
    if not plain or prod(shape) > _FEW_CELLS or any(column.known is not None for column in columns.values()):
        return {}
    rows = count_rows([*(column.codes for column in columns.values()), view.label, view.prediction], shape)
    every = set(range(len(columns)))
    return {name: rows.sum(axis=tuple(every - {own})) for own, name in enumerate(columns)}


def _class_sample(views: Sequence[View], group: NDArray[np.integer], n_groups: int) -> Sample:
    """Rows by group, label and prediction."""
    view, shape = views[0], (n_groups, len(views[0].classes), len(views[0].classes))
    columns = [[group, view.label, of.prediction] for of in views]
    if len(views) == 1 and view.weight is None and view.cluster is None and prod(shape) <= MOST_CELLS:
        return sample_of_table(count_rows(columns[0], shape))
    return tabulate([cell_numbers(of, shape) for of in columns], [shape] * len(views), view.weight, view.cluster)


class LabelMargins(Margins):
    """Margins of each of several labels a row."""

    @classmethod
    def of(cls, counts: Array) -> Margins:
        """From counts [..., G, L, 2, 2] of group, label, true or not, and predicted or not."""
        true, predicted, hits = counts[..., 1, :].sum(axis=-1), counts[..., 1].sum(axis=-1), counts[..., 1, 1]
        total = counts[..., 0, :, :].sum(axis=(-1, -2))[..., None, :]
        return cls(true.swapaxes(-1, -2), predicted.swapaxes(-1, -2), hits.swapaxes(-1, -2), total)

    def accuracy(self) -> Array:
        """The share of labels that are predicted right (1 − Hamming loss), [..., 1, G]."""
        right = self.total - self.true - self.predicted + 2 * self.hits
        return divide(right, self.total + 0 * right).mean(axis=-2, keepdims=True)


def _label_sample(views: Sequence[View], group: NDArray[np.integer], n_groups: int) -> Sample:
    """Rows by their patterns of labels and predictions; the views have the same labels."""
    n_labels, sets, view = len(views[0].labels), len(views), views[0]
    bits = 1 + sets
    if n_labels > _MOST_BITS // bits:
        raise InputError(f"{n_labels} labels are named; at most {_MOST_BITS // bits} can be audited at once")
    key = group.astype(np.int64)
    for k, (true, _) in enumerate(view.labels):
        for bit in (true, *(of.labels[k][1] for of in views)):
            key = key * 2 + bit
    kinds, unit = np.unique(key, return_inverse=True)
    pattern = (kinds[:, None] >> (bits * np.arange(n_labels)[::-1])) & ((1 << bits) - 1)  # [kinds, L]
    first = (kinds >> (bits * n_labels))[:, None] * n_labels + np.arange(n_labels)
    times, shape = np.bincount(unit, minlength=len(kinds)), (n_groups, n_labels, 2, 2)
    own, weight = np.arange(len(kinds)), None
    plain = view.weight is None and view.cluster is None
    if not plain:
        own = np.arange(len(key)) if view.cluster is None else np.unique(view.cluster, return_inverse=True)[1]
        weight = None if view.weight is None else np.repeat(view.weight, n_labels)
    contents = []
    for k in range(sets):
        # Which label, true or not, predicted or not.
        cells = first * 4 + 2 * (pattern >> sets) + ((pattern >> (sets - 1 - k)) & 1)
        rows = np.bincount(cells.ravel(), np.repeat(times, n_labels), prod(shape)).reshape(shape)
        cell = (cells if plain else cells[unit]).ravel()
        contents.append(Content(np.repeat(own, n_labels), cell, weight, rows.astype(np.int64)))
    return Sample(times if plain else np.ones(int(own.max()) + 1, dtype=np.int64), tuple(contents))


class Moments(NamedTuple):
    """Sums over the rows of each group where numbers are predicted, each [..., 1, G]; e is predicted minus true."""

    total: Array
    error: Array  # of e
    size: Array  # of |e|
    square: Array  # of e²
    true: Array  # of the true number
    true_square: Array  # of its square

    @classmethod
    def of(cls, sums: Array) -> "Moments":
        """From sums [..., G, 6]."""
        return cls(*np.moveaxis(sums, -1, 0)[..., None, :])

    def r2(self) -> Array:
        """1 − squared errors over squared distances from the group's own mean."""
        return 1 - divide(self.square, self.true_square - divide(self.true**2, self.total))


NUMBER_RATES = {
    "mean_error": Kind(lambda m: divide(m.error, m.total)),
    "MAE": Kind(lambda m: divide(m.size, m.total)),
    "RMSE": Kind(lambda m: np.sqrt(np.maximum(divide(m.square, m.total), 0.0))),
    "R2": Kind(Moments.r2),
}


class NumberSample:
    """Rows with true and predicted numbers, by group codes [n]; drawn as a `Sample` is."""

    def __init__(self, views: Sequence[View], group: NDArray[np.integer], n_groups: int) -> None:
        self._powers = [_powers(view) for view in views]
        self._group, self._sizes = group, np.bincount(group, minlength=n_groups)
        cluster = views[0].cluster
        self._unit = None if cluster is None else np.unique(cluster, return_inverse=True)[1]
        self.rows = [np.repeat(self._sizes[:, None], len(Moments._fields), axis=1) for _ in views]

    def observed(self) -> list[Array]:
        """Sums of powers of each set of predictions, [G, 6]."""
        n_groups = len(self._sizes)
        return [np.stack([np.bincount(self._group, p, n_groups) for p in of.T], axis=-1) for of in self._powers]

    def bootstrap(self, n_boot: int, rng: np.random.Generator) -> list[Array]:
        """Sums [n_boot, G, 6] of rows drawn with replacement within each group, or of clusters."""
        star = self._drawn(np.hstack(self._powers), n_boot, rng, swaps=False)
        return np.split(star, len(self._powers), axis=-1)

    def swapped(self, n_perm: int, rng: np.random.Generator) -> list[Array]:
        """Sums [n_perm, G, 6] after swapping the two predictions of each row, or cluster, with probability ½."""
        (one, other), (first, second) = self.observed(), self._powers
        moved = self._drawn(second - first, n_perm, rng, swaps=True)
        return [one + moved, other - moved]

    def _drawn(self, values: Array, size: int, rng: np.random.Generator, swaps: bool) -> Array:
        """Sums [size, G, K] of values [n, K] over rows drawn with replacement, or over rows that a coin picks."""
        k, n_groups = values.shape[1], len(self._sizes)
        if self._unit is not None:
            cells = self._group[:, None] * k + np.arange(k)
            shape = np.zeros((n_groups, k), dtype=np.int64)
            content = Content(np.repeat(self._unit, k), cells.ravel(), values.ravel(), shape)
            units = int(self._unit.max()) + 1
            if not swaps:
                return Sample(np.ones(units, dtype=np.int64), (content,)).bootstrap(size, rng)[0]
            blocks = np.array_split(np.arange(size), max(1, size * units >> 22))
            return np.concatenate([content.total(_coins(rng, units, len(b)).astype(np.float64)) for b in blocks])
        found = np.zeros((size, n_groups, k))
        for g, n in enumerate(self._sizes.tolist()):
            own = values[self._group == g]
            if n > _MANY:
                # The covariance of a sum of n rows is n times that of a row; of one over coins, a quarter of Σ v vᵀ.
                total = own.sum(axis=0)
                mean, spread = (total / 2, own.T @ own / 4) if swaps else (total, n * np.cov(own.T, bias=True))
                of_axis, axes = np.linalg.eigh(spread)  # it may be singular
                root = axes * np.sqrt(np.maximum(of_axis, 0.0))
                found[:, g] = mean + rng.standard_normal((size, k)) @ root.T
            elif n:
                for block in np.array_split(np.arange(size), max(1, size * n >> 22)):
                    drawn = _coins(rng, len(block), n) if swaps else rng.multinomial(n, np.full(n, 1 / n), len(block))
                    found[block, g] = drawn @ own
        return found


def _powers(view: View) -> Array:
    """What each row adds to the `Moments`, [n, 6]."""
    assert view.numbers is not None
    # The distance of a mean from the true numbers' mean is what R² needs: shifted, squares lose no digits.
    numbers, weight = view.numbers, view.weight
    true, error = numbers[:, 0] - numbers[:, 0].mean(), numbers[:, 1] - numbers[:, 0]
    powers = np.stack([np.ones_like(true), error, np.abs(error), error**2, true, true**2], axis=-1)
    return powers if weight is None else powers * weight[:, None]


def _coins(rng: np.random.Generator, *shape: int) -> NDArray[np.int8]:
    return rng.integers(2, size=shape, dtype=np.int8)
