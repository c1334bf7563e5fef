"""From rows to counts, and from counts to bootstrap replicates.

Every figure of an audit is a function of how many rows fall in which cell (group, true class, predicted class). Counts
add up over chunks, files and machines; and drawing rows with replacement is drawing *counts* from a multinomial, which
costs the same for a thousand rows and for ten million.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_CHUNK = 1 << 18  # rows keyed at a time: the keys of a chunk stay in cache, and memory does not grow with the file
_BLOCK = 1 << 23  # numbers drawn at a time
_WEIGHT_STRATA = 16  # weights of one cell are resampled in so many strata of equal size


@dataclass(frozen=True)
class Content:
    """What each unit adds to which cell, as (unit, cell, value) entries sorted by cell; units are what is resampled.

    Attributes:
        unit: shape [E].
        cell: shape [E], flat cell numbers, ascending.
        value: shape [E]; None where every value is 1.
        rows: rows in each cell, unweighted, with the shape of the cells.
    """

    unit: Ints
    cell: Ints
    value: Floats | None
    rows: Ints

    def total(self, draws: Ints) -> Floats:
        """Sum cells over drawn units: draws [B, U] to counts [B, *cells]."""
        # The replicate axis is kept contiguous in memory though it comes first: reductions over groups are then quick.
        drawn = np.ascontiguousarray(draws.T)[self.unit].astype(np.float64)
        if self.value is not None:
            drawn *= self.value[:, None]
        starts = np.flatnonzero(np.diff(self.cell, prepend=-1))
        if len(starts) < len(self.cell):
            drawn = np.add.reduceat(drawn, starts, axis=0)
        counts = np.zeros((self.rows.size, len(draws)))
        counts[self.cell[starts]] = drawn
        return np.moveaxis(counts.reshape(*self.rows.shape, len(draws)), -1, 0)


@dataclass(frozen=True)
class Sample:
    """Distinct units, how often each occurs, and what they hold.

    A unit is a cell (plain rows), a cell and a stratum of weights, or a kind of cluster.

    Attributes:
        multiplicity: occurrences of each unit, shape [U].
        contents: one table of cells, or two for a paired comparison.
    """

    multiplicity: Ints
    contents: tuple[Content, ...]

    def observed(self) -> list[Floats]:
        """The (weighted) counts of the sample itself, one array [*cells] a table."""
        return [content.total(self.multiplicity[None])[0] for content in self.contents]

    def bootstrap(self, n_boot: int, rng: np.random.Generator) -> list[Floats]:
        """Counts of resampled units: one array [n_boot, *cells] a table.

        Example:
            >>> sample = tabulate([np.array([0, 0, 1, 3])], [(2, 2)])
            >>> sample.observed()[0].tolist()
            [[2.0, 1.0], [0.0, 1.0]]
            >>> sample.bootstrap(5, np.random.default_rng(0))[0].sum(axis=(1, 2)).tolist()
            [4.0, 4.0, 4.0, 4.0, 4.0]
        """
        n = int(self.multiplicity.sum())
        share = self.multiplicity / n
        return self._blocks(n_boot, lambda size: [rng.multinomial(n, share, size=size)] * len(self.contents))

    def _blocks(self, n_boot: int, draw: Callable[[int], list[Ints]]) -> list[Floats]:
        entries = max(len(self.multiplicity), *(len(content.unit) for content in self.contents))
        size = max(1, min(n_boot, _BLOCK // max(entries, 1)))
        blocks = []
        for start in range(0, n_boot, size):
            draws = draw(min(size, n_boot - start))
            blocks.append([content.total(d) for content, d in zip(self.contents, draws, strict=True)])
        return [_join(parts) for parts in zip(*blocks, strict=True)]


def _join(parts: Sequence[Floats]) -> Floats:
    if len(parts) == 1:
        return parts[0]
    return np.moveaxis(np.concatenate([np.moveaxis(p, 0, -1) for p in parts], axis=-1), -1, 0)


def cell_numbers(codes: Sequence[NDArray[np.integer]], sizes: Sequence[int]) -> NDArray[np.integer]:
    """Flat cell number of each row from the codes of several columns, each [n].

    Example:
        >>> cell_numbers([np.array([0, 1]), np.array([2, 1])], (2, 3)).tolist()
        [2, 4]
    """
    n = len(codes[0])
    key: NDArray[np.integer] = np.empty(n, dtype=np.int32 if prod(sizes) < 1 << 31 else np.int64)
    for start in range(0, n, _CHUNK):
        part = slice(start, start + _CHUNK)
        number = codes[0][part].astype(key.dtype)
        for other, size in zip(codes[1:], sizes[1:], strict=True):
            number *= size
            number += other[part]
        key[part] = number
    return key


def tabulate(
    keys: Sequence[NDArray[np.integer]],
    shapes: Sequence[tuple[int, ...]],
    weight: Floats | None = None,
    cluster: NDArray[np.integer] | None = None,
) -> Sample:
    """Count rows into cells.

    Args:
        keys: for each table the flat cell number of each row, shape [n].
        shapes: for each table the shape of its cells.
        weight: sampling weights, shape [n].
        cluster: cluster numbers, shape [n]; rows of a cluster are drawn together.

    Example:
        >>> tabulate([np.array([0, 1, 1])], [(2,)], cluster=np.array([5, 5, 7])).multiplicity.tolist()
        [1, 1]
    """
    sizes = [prod(shape) for shape in shapes]
    if weight is None and cluster is None:
        joint = _count(keys, sizes)
        cells = np.flatnonzero(joint)
        tables = np.unravel_index(cells, sizes)
        units = np.arange(len(cells))
        contents = [
            _content(units, table, None, joint[cells], shape) for table, shape in zip(tables, shapes, strict=True)
        ]
        return Sample(joint[cells], tuple(contents))
    key = np.asarray(keys[0], dtype=np.int64)
    for other, size in zip(keys[1:], sizes[1:], strict=True):
        key = key * size + other
    strata = _weighted_rows(key, weight) if cluster is None else _clusters(key, weight, cluster)
    tables = np.unravel_index(strata.key, sizes)
    contents = [
        _content(strata.unit, table, strata.value, strata.rows, shape)
        for table, shape in zip(tables, shapes, strict=True)
    ]
    return Sample(strata.multiplicity, tuple(contents))


@dataclass(frozen=True)
class _Entries:
    """(unit, key, value) entries; `rows` of the sample behind each entry."""

    multiplicity: Ints
    unit: Ints
    key: Ints
    value: Floats | None
    rows: Ints


def _count(keys: Sequence[NDArray[np.integer]], sizes: Sequence[int]) -> Ints:
    total = np.zeros(prod(sizes), dtype=np.int64)
    for start in range(0, len(keys[0]), _CHUNK):
        part = slice(start, start + _CHUNK)
        key = keys[0][part].astype(np.int64)
        for other, size in zip(keys[1:], sizes[1:], strict=True):
            key = key * size + other[part]
        total += np.bincount(key, minlength=len(total))
    return total


def _content(
    unit: Ints, cell: NDArray[np.integer], value: Floats | None, rows: Ints, shape: tuple[int, ...]
) -> Content:
    order = np.argsort(cell, kind="stable")
    in_cell = np.bincount(cell, weights=rows, minlength=prod(shape)).astype(np.int64).reshape(shape)
    return Content(unit[order], cell[order].astype(np.int64), None if value is None else value[order], in_cell)


def _weighted_rows(key: Ints, weight: Floats | None) -> _Entries:
    """Split each cell into strata of near-equal weight: the units of the weighted bootstrap.

    With at most 16 different weights in a cell nothing is lost; otherwise a stratum stands for its mean weight.
    """
    assert weight is not None
    order = np.lexsort((weight, key))
    key, weight = key[order], weight[order]
    new_cell = np.flatnonzero(np.diff(key, prepend=-1))
    size = np.diff(new_cell, append=len(key))
    rank = np.arange(len(key)) - np.repeat(new_cell, size)
    stratum = rank * _WEIGHT_STRATA // np.repeat(size, size)
    # Equal weights share a stratum: the first one's.
    same = (np.diff(key, prepend=-1) == 0) & (np.diff(weight, prepend=np.nan) == 0)
    first = np.maximum.accumulate(np.where(same, 0, np.arange(len(key))))
    stratum = stratum[first]
    new_unit = np.flatnonzero((np.diff(key, prepend=-1) != 0) | (np.diff(stratum, prepend=-1) != 0))
    multiplicity = np.diff(new_unit, append=len(key))
    value = np.add.reduceat(weight, new_unit) / multiplicity
    return _Entries(multiplicity, np.arange(len(new_unit)), key[new_unit], value, multiplicity)


def _clusters(key: Ints, weight: Floats | None, cluster: NDArray[np.integer]) -> _Entries:
    """Turn clusters into units; without weights, those with the same counts are one that occurs several times."""
    _, number = np.unique(cluster, return_inverse=True)
    order = np.lexsort((key, number))
    key, number = key[order], number[order]
    new = np.flatnonzero((np.diff(key, prepend=-1) != 0) | (np.diff(number, prepend=-1) != 0))
    rows = np.diff(new, append=len(key))
    unit, cell = number[new], key[new]
    n_clusters = int(number[-1]) + 1
    if weight is not None:
        return _Entries(np.ones(n_clusters, np.int64), unit, cell, np.add.reduceat(weight[order], new), rows)
    # Clusters are compared by a 64-bit sum of random numbers, one a cell: equal counts, equal sums.
    code = np.random.default_rng(0).integers(1 << 63, size=int(cell.max()) + 1, dtype=np.uint64)
    starts = np.flatnonzero(np.diff(unit, prepend=-1))
    mark = np.add.reduceat(code[cell] * rows.astype(np.uint64), starts)
    _, first, multiplicity = np.unique(mark, return_index=True, return_counts=True)
    new_number = np.full(n_clusters, -1)
    new_number[first] = np.arange(len(first))
    kept = new_number[unit] >= 0
    kept_unit = new_number[unit[kept]]
    return _Entries(
        multiplicity, kept_unit, cell[kept], rows[kept].astype(np.float64), rows[kept] * multiplicity[kept_unit]
    )
