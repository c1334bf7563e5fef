"""From rows to independent units: cells of counts, strata of weights, clusters and their sums."""

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairhead.errors import InputError
from fairhead.stats.bootstrap import Array, Content, Ints, Sample

MOST_CELLS = 1 << 22  # with more than these, only those that occur are listed
_CHUNK = 1 << 17  # rows keyed at a time: the keys of a chunk stay in cache, and memory does not grow with the file
_MOST_THREADS = 4  # that count rows
_WORTH_COUNTING = 16  # chunks; fewer are counted before threads have started
_WEIGHT_STRATA = 16  # weights of one cell are resampled in so many strata of equal size


def cell_numbers(codes: Sequence[NDArray[np.integer]], sizes: Sequence[int]) -> NDArray[np.integer]:
    """Flat cell number of each row from the codes of several columns, each [n]."""
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
    keys: Sequence[NDArray[np.integer]],  # for each table the flat cell number of each row, shape [n]
    shapes: Sequence[tuple[int, ...]],  # for each table the shape of its cells
    weight: Array | None = None,  # sampling weights, shape [n]
    cluster: NDArray[np.integer] | None = None,  # cluster numbers, shape [n]; rows of a cluster are drawn together
) -> Sample:
    """Count rows into cells."""
    sizes = [prod(shape) for shape in shapes]
    key = keys[0] if len(keys) == 1 else cell_numbers(keys, sizes)
    if cluster is not None:
        entries = _clusters(key.astype(np.int64), weight, cluster)
    elif weight is not None:
        entries = _weighted_rows(key.astype(np.int64), weight)
    else:
        entries = _plain_rows(key, prod(sizes))
    contents = []
    for cell, shape in zip(np.unravel_index(entries.key, sizes), shapes, strict=True):
        rows = np.bincount(cell, entries.rows, prod(shape)).astype(np.int64).reshape(shape)
        contents.append(Content(entries.unit, cell.astype(np.int64), entries.value, rows))
    return Sample(entries.multiplicity, tuple(contents))


class _Entries(NamedTuple):
    """(unit, key, value) entries; `rows` of the sample behind each entry."""

    multiplicity: Ints
    unit: Ints
    key: Ints
    value: Array | None
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
    """The sample behind a table of rows [*cells], where each row stands for itself."""
    cells = np.flatnonzero(rows)
    multiplicity = rows.ravel()[cells].astype(np.int64)
    return Sample(multiplicity, (Content(np.arange(len(cells)), cells, None, rows.astype(np.int64)),))


def _weighted_rows(key: Ints, weight: Array) -> _Entries:
    """Split each cell into strata of near-equal weight: the units of the weighted bootstrap.

    With at most 16 different weights in a cell nothing is lost; otherwise a stratum stands for its mean weight.
    """
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


def _clusters(key: Ints, weight: Array | None, cluster: NDArray[np.integer]) -> _Entries:
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
    rows = rows[kept]
    return _Entries(multiplicity, kept_unit, cell[kept], rows.astype(np.float64), rows * multiplicity[kept_unit])


def cluster_sums(values: ArrayLike, clusters: Sequence[Hashable]) -> Array:
    """Sum rows [n, k] over each cluster: [clusters, k], in order of first appearance.

    Example:
        >>> cluster_sums([[1, 1], [2, 1], [4, 1]], ["a", "b", "a"]).tolist()
        [[5.0, 2.0], [2.0, 1.0]]
    """
    numbers: dict[Hashable, int] = {}
    codes = [numbers.setdefault(cluster, len(numbers)) for cluster in clusters]
    table = np.asarray(values, dtype=np.float64)
    sums = np.zeros((len(numbers), table.shape[1]))
    np.add.at(sums, codes, table)
    return sums


def quotient(above: int, below: int) -> Callable[[Array], Array]:
    """A statistic of totals [..., k]: one column over another.

    Example:
        >>> quotient(1, 0)(np.array([4.0, 1.0])).item()
        0.25
    """
    return lambda totals: divide(totals[..., above], totals[..., below])


def ratio(totals: Array) -> Array:
    """First sum over second, [..., 2] to [...]: a share or a mean; NaN where the second is 0."""
    return divide(totals[..., 0], totals[..., 1])


def divide(part: Array, whole: Array) -> Array:
    """Divide, with NaN where the whole is 0."""
    if np.min(whole, initial=1) > 0:
        return np.asarray(part / whole)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(whole > 0, part / whole, np.nan)


class ClusterErrors(NamedTuple):
    """Standard errors of k sums over rows, shape [k], and the independent clusters that they rest on.

    Tests and intervals are Student's, with `degrees` of freedom: one less than there are clusters, or, of differences
    between the means of cells, those of Welch and Satterthwaite.
    """

    se: Array
    clusters: int
    degrees: Array | float

    def reach(self, level: float = 0.95) -> Array:
        """Half the width of the intervals, [k]."""
        from scipy.special import stdtrit  # here: not needed for --help

        return np.asarray(stdtrit(self.degrees, (1 + level) / 2) * self.se)

    def p_values(self, distance: Array) -> Array:
        """Two-sided, of distances [k] from the null; what has no error is certain, or it is 0."""
        from scipy.special import stdtr

        with np.errstate(divide="ignore", invalid="ignore"):
            t = np.where(self.se > 0, np.abs(distance) / self.se, np.where(distance == 0, 0.0, np.inf))
        return np.asarray(2 * stdtr(self.degrees, -t))


def cluster_errors(
    influence: Array, clusters: NDArray[Any] | None = None, cells: NDArray[np.integer] | None = None
) -> ClusterErrors:
    """Standard errors of sums whose rows may depend on each other in any way within a cluster.

    `influence` [n, k] is what each row adds to the error of each sum; without `clusters` [n] all rows are independent.
    Where rows were centred by the mean of their cell, say so with `cells` [n]: each cell then has the unbiased variance
    of its own m clusters, m / (m − 1) times the mean square, and the degrees of freedom are Satterthwaite's. Of two
    cells of independent rows that is Welch's test.
    """
    unit = np.arange(len(influence)) if clusters is None else np.unique(clusters, return_inverse=True)[1]
    n_units = int(unit.max(initial=-1)) + 1
    if n_units < 2:
        raise InputError("all rows belong to one cluster; at least two are needed to say how sure a figure is")
    if cells is None:
        summed = _sums_of(influence, unit, n_units)
        return ClusterErrors(np.sqrt((summed**2).sum(0) * n_units / (n_units - 1)), n_units, n_units - 1)
    # A cluster's rows in one cell are one summand of that cell; a cluster may have several.
    part, member = np.unique(np.stack([cells, unit]), axis=1, return_inverse=True)
    in_cell = np.unique(part[0], return_inverse=True)[1]
    size = np.bincount(in_cell)
    if size.min() < 2:
        raise InputError("a cell has rows of a single cluster; at least two are needed to say how sure its mean is")
    summed = _sums_of(influence, member.ravel(), len(in_cell)) * np.sqrt(size / (size - 1))[in_cell][:, None]
    by_cell = _sums_of(summed**2, in_cell, len(size))  # [cells, k]
    variance = (_sums_of(summed, part[1], n_units) ** 2).sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        degrees = by_cell.sum(0) ** 2 / (by_cell**2 / (size - 1)[:, None]).sum(0)
    # Clusters that lie in several cells are fewer than the cells' own summands.
    return ClusterErrors(np.sqrt(variance), n_units, np.fmin(degrees, n_units - 1))


def _sums_of(values: Array, number: NDArray[np.integer], count: int) -> Array:
    """Rows [n, k] added up by number, [count, k]."""
    if len(values) == count:
        return values[np.argsort(number)]
    found = np.zeros((count, values.shape[1]))
    np.add.at(found, number, values)
    return found


class ClusterMeans(NamedTuple):
    """Means with intervals and one-sided tests that they are above 0, [k] each; NaN where nothing can be said."""

    value: Array
    low: Array
    high: Array
    t: Array
    p: Array


def cluster_means(values: Array, clusters: Sequence[Hashable], level: float = 0.95) -> ClusterMeans:
    """Means of [n, k] over n rows by Student's t, clusters as units.

    Example:
        >>> found = cluster_means(np.array([[1.0], [2.0], [3.0]]), "abc")
        >>> [round(float(part[0]), 3) for part in found]
        [2.0, -0.484, 4.484, 3.464, 0.037]
    """
    from scipy.special import stdtr

    mean = values.mean(axis=0)
    if len(set(clusters)) < 2:
        nothing = np.full(mean.shape, np.nan)
        return ClusterMeans(mean, nothing, nothing, nothing, nothing)
    errors = cluster_errors((values - mean) / len(values), np.array(list(clusters)))
    reach = errors.reach(level)
    t = np.divide(mean, errors.se, out=np.full(mean.shape, np.nan), where=errors.se > 1e-12)
    return ClusterMeans(mean, mean - reach, mean + reach, t, stdtr(errors.clusters - 1, -t))
