"""From rows to counts, and from counts to bootstrap replicates.

Every figure of an audit is a function of how many rows fall in which cell (group, true class, predicted class). Counts
add up over chunks, files and machines; and drawing rows with replacement is drawing *counts* from a multinomial, which
costs the same for a thousand rows and for ten million.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairhead.audit.draws import multinomial
from fairhead.errors import InputError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_CHUNK = 1 << 17  # rows keyed at a time: the keys of a chunk stay in cache, and memory does not grow with the file
_MOST_THREADS = 4  # that count rows
_WORTH_COUNTING = 16  # chunks; fewer are counted before threads have started
_BLOCK = 1 << 23  # numbers drawn at a time
_STREAMS = 2  # of random numbers, which threads draw from
_WORTH_THREADS = 1 << 17  # numbers; drawing fewer takes less than starting a thread
MOST_CELLS = 1 << 22  # with more than these, only those that occur are listed
_MOST_NUMBERS = 1 << 28  # replicates × cells held at once: 2 GB
_WEIGHT_STRATA = 16  # weights of one cell are resampled in so many strata of equal size


@dataclass(frozen=True)
class Content:
    """What each unit adds to which cell, as (unit, cell, value) entries; units are what is resampled.

    Attributes:
        unit: shape [E].
        cell: shape [E], flat cell numbers.
        value: shape [E]; None where every value is 1.
        rows: rows in each cell, unweighted, with the shape of the cells.
    """

    unit: Ints
    cell: Ints
    value: Floats | None
    rows: Ints

    @cached_property
    def _is_a_cell_each(self) -> bool:
        """Whether each unit adds 1 to a cell of its own, in the order of cells."""
        in_order = np.array_equal(self.unit, np.arange(len(self.unit))) and bool((np.diff(self.cell) > 0).all())
        return self.value is None and in_order

    def total(self, drawn: Floats) -> Floats:
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

    Attributes:
        multiplicity: occurrences of each unit, shape [U].
        contents: one table of cells, or two for a paired comparison.
    """

    multiplicity: Ints
    contents: tuple[Content, ...]

    def observed(self) -> list[Floats]:
        """The (weighted) counts of the sample itself, one array [*cells] a table."""
        return [content.total(self.multiplicity[:, None].astype(np.float64))[0] for content in self.contents]

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
        share, n_units = self.multiplicity / n, len(self.multiplicity)
        unit_of = np.repeat(np.arange(n_units), self.multiplicity) if n < 4 * n_units else None

        def draw(size: int, rng: np.random.Generator) -> Floats:
            if unit_of is None:
                return multinomial(n, share, size, rng)
            # Nearly every unit occurs once: drawing them one by one is quicker.
            picked = unit_of[rng.integers(n, size=(size, n))] * size
            picked += np.arange(size)[:, None]
            drawn = np.bincount(picked.ravel(), minlength=size * n_units).reshape(n_units, size)
            return drawn.astype(np.float64)

        return self._blocks(n_boot, draw, rng)

    def swapped(self, n_perm: int, rng: np.random.Generator) -> list[Floats]:
        """Counts after swapping the two predictions of each unit with probability ½: two arrays [n_perm, *cells].

        A unit whose two predictions are the same does not change by it and is not drawn.

        Example:
            >>> sample = tabulate([np.array([0, 0, 1]), np.array([1, 0, 1])], [(2,), (2,)])
            >>> a, b = sample.swapped(4, np.random.default_rng(0))
            >>> (a + b).tolist()
            [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0], [3.0, 3.0]]
        """
        first, second = self.contents
        moved = np.zeros(len(self.multiplicity), dtype=bool)
        moved[first.unit[first.cell != second.cell]] = True

        once, often = moved & (self.multiplicity == 1), moved & (self.multiplicity > 1)

        def draw(size: int, rng: np.random.Generator) -> Floats:
            drawn = np.zeros((len(moved), size))
            drawn[once] = rng.integers(2, size=(int(once.sum()), size), dtype=np.int8)  # much quicker than binomial
            drawn[often] = rng.binomial(self.multiplicity[often, None], 0.5, size=(int(often.sum()), size))
            return drawn

        out, into = self._blocks(n_perm, draw, rng)
        observed_first, observed_second = self.observed()
        return [observed_first + into - out, observed_second + out - into]

    def _blocks(
        self, n_boot: int, draw: Callable[[int, np.random.Generator], Floats], rng: np.random.Generator
    ) -> list[Floats]:
        cells = max(content.rows.size for content in self.contents)
        if n_boot * cells > _MOST_NUMBERS:
            raise InputError(
                f"{n_boot:,} replicates of {cells:,} cells (groups × classes², or groups × bins of scores) do not fit "
                f"in {_MOST_NUMBERS >> 27} GB of memory; take fewer replicates (--n-boot), fewer groups, or one class "
                "against the rest (--positive)."
            )
        n_units = len(self.multiplicity)
        # As many streams on any machine, so that a seed gives the same figures on all of them.
        streams = rng.spawn(_STREAMS) if n_boot * n_units >= _WORTH_THREADS else [rng]
        shares = [n_boot // len(streams) + (i < n_boot % len(streams)) for i in range(len(streams))]
        most = max(1, _BLOCK // (n_units * len(streams)))

        def stream(share: int, rng: np.random.Generator) -> list[list[Floats]]:
            blocks = []
            for start in range(0, share, most):
                drawn = draw(min(most, share - start), rng)
                blocks.append([content.total(drawn) for content in self.contents])
            return blocks

        if len(streams) == 1:
            blocks = stream(n_boot, rng)
        else:
            with ThreadPoolExecutor(min(len(streams), os.cpu_count() or 1)) as pool:
                blocks = [block for part in pool.map(stream, shares, streams) for block in part]
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
    n, n_cells = len(codes[0]), prod(sizes)
    small = np.int16 if n_cells < 1 << 15 else np.int32 if n_cells < 1 << 31 else np.int64
    key: NDArray[np.integer] = np.empty(n, dtype=small)
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
    key = keys[0] if len(keys) == 1 else cell_numbers(keys, sizes)
    if cluster is not None:
        entries = _clusters(key.astype(np.int64), weight, cluster)
    elif weight is not None:
        entries = _weighted_rows(key.astype(np.int64), weight)
    else:
        entries = _plain_rows(key, prod(sizes))
    contents = [
        _content(entries, cell, shape) for cell, shape in zip(np.unravel_index(entries.key, sizes), shapes, strict=True)
    ]
    return Sample(entries.multiplicity, tuple(contents))


@dataclass(frozen=True)
class _Entries:
    """(unit, key, value) entries; `rows` of the sample behind each entry."""

    multiplicity: Ints
    unit: Ints
    key: Ints
    value: Floats | None
    rows: Ints


def clusters_in(group: NDArray[np.integer], n_groups: int, cluster: NDArray[np.integer] | None) -> Ints | None:
    """Clusters that have rows in each group, shape [G], from codes of shape [n]; None where rows stand for themselves.

    Example:
        >>> clusters_in(np.array([0, 0, 1]), 2, np.array([5, 6, 6])).tolist()
        [2, 1]
    """
    if cluster is None:
        return None
    pairs = np.unique(cell_numbers([cluster, group], (int(cluster.max()) + 1, n_groups)))
    return np.bincount(pairs % n_groups, minlength=n_groups)


def _content(entries: _Entries, cell: NDArray[np.integer], shape: tuple[int, ...]) -> Content:
    in_cell = np.bincount(cell, weights=entries.rows, minlength=prod(shape)).astype(np.int64).reshape(shape)
    return Content(entries.unit, cell.astype(np.int64), entries.value, in_cell)


def _plain_rows(key: NDArray[np.integer], n_cells: int) -> _Entries:
    """Each cell that occurs is a unit."""
    if n_cells > MOST_CELLS:
        cells, multiplicity = np.unique(key, return_counts=True)
    else:
        total = count_rows([key], (n_cells,))
        cells = np.flatnonzero(total)
        multiplicity = total[cells]
    return _Entries(multiplicity, np.arange(len(cells)), cells.astype(np.int64), None, multiplicity)


def count_rows(codes: Sequence[NDArray[np.integer]], sizes: tuple[int, ...]) -> Ints:
    """Rows in each cell, of the shape `sizes`, from the codes of several columns, each [n].

    Example:
        >>> count_rows([np.array([0, 1, 1]), np.array([2, 1, 1])], (2, 3)).tolist()
        [[0, 0, 1], [0, 2, 0]]
    """
    n_cells = prod(sizes)

    def count(rows: slice) -> Ints:
        return np.bincount(cell_numbers([column[rows] for column in codes], sizes), minlength=n_cells)

    return sum(over_chunks(count, len(codes[0]), 4 * n_cells), np.zeros(n_cells, dtype=np.int64)).reshape(sizes)


def over_chunks(work: Callable[[slice], Any], n: int, at_least: int = 0) -> Iterator[Any]:
    """What `work` makes of some of n rows at a time, in order; of many rows by several threads.

    Example:
        >>> list(over_chunks(lambda rows: rows.stop, 5))
        [5]
    """
    step = max(_CHUNK, at_least)
    chunks = [slice(start, min(start + step, n)) for start in range(0, n, step)]
    if len(chunks) < _WORTH_COUNTING:
        yield from map(work, chunks)
    else:
        with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
            yield from pool.map(work, chunks)


def sample_of_table(rows: NDArray[np.integer]) -> Sample:
    """The sample behind a table of rows [*cells], where each row stands for itself.

    Example:
        >>> sample_of_table(np.array([[2, 0], [0, 1]])).observed()[0].tolist()
        [[2.0, 0.0], [0.0, 1.0]]
    """
    cells = np.flatnonzero(rows)
    multiplicity = rows.ravel()[cells].astype(np.int64)
    return Sample(multiplicity, (Content(np.arange(len(cells)), cells, None, rows.astype(np.int64)),))


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
