"""One pass over the data, kept: every head's z by row, and its moments. Any concept, class or edit can be asked later.

A row costs (layers × heads × d + M × d') numbers, whatever the number of tokens: 65 kB for CLIP B/16. Moments are sums
by cell, so that batches, processes and resumed runs simply add up. Rows are kept in memory, or in a folder, where they
are written as they are made: a run that was stopped goes on there, and a later one reads them.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.store import locked, reading, whole_file, write_json, writing

if TYPE_CHECKING:
    from torch import Tensor

    from fairhead.locate.decompose import Decomposer

Array = NDArray[np.float64]
Rows = NDArray[np.float32]
# Called with the row to start at; gives the arrays of the next rows by name, each [B, ...], block by block
Blocks = Callable[[int], Iterable[Mapping[str, NDArray[Any]]]]
SCHEMA = "fairhead.features/1"
_NOTES = "features.json"
_CUT = "holds features that are cut short: remove the folder"
_CHUNK = 512
_ARRAYS = ("heads", "others", "output", "scale")


class Pooled(NamedTuple):
    """Mean and covariance of every head over a mixture of cells."""

    mean: Array  # [L, H, d]
    covariance: Array  # [L, H, d, d], of the mixture (divided by n, not n − 1)
    n: int  # rows behind it


@dataclass
class HeadMoments:
    """Sums over rows by cell (a group and a class), for all heads."""

    count: NDArray[np.int64]  # rows in each cell, [C]
    first: Array  # sums of x, [C, L, H, d]
    second: Array  # sums of x xᵀ, [C, L, H, d, d]

    @classmethod
    def empty(cls, n_cells: int, shape: Sequence[int]) -> "HeadMoments":
        """No rows yet; `shape` is (layers, heads, d)."""
        first = np.zeros((n_cells, *shape))
        return cls(np.zeros(n_cells, dtype=np.int64), first, np.zeros((*first.shape, shape[-1])))

    @classmethod
    def of(cls, x: NDArray[np.floating], cells: NDArray[np.integer], n_cells: int) -> "HeadMoments":
        """The moments of rows x [n, L, H, d] in the given cells [n]."""
        moments = cls.empty(n_cells, x.shape[1:])
        moments.add(x, cells)
        return moments

    def add(self, x: NDArray[np.floating], cells: NDArray[np.integer]) -> None:
        """Count a batch in: x [B, L, H, d], cells [B]."""
        if len(cells) != len(x) or (len(cells) and not 0 <= cells.min() <= cells.max() < len(self.count)):
            raise InputError(
                f"{len(x)} rows came with {len(cells)} cells, from 0 to {len(self.count) - 1} expected: one a row"
            )
        for cell in np.unique(cells):
            rows = np.asarray(x[cells == cell], dtype=np.float64).transpose(1, 2, 3, 0)  # [L, H, d, b]
            self.count[cell] += rows.shape[-1]
            self.first[cell] += rows.sum(-1)
            self.second[cell] += rows @ rows.swapaxes(-1, -2)

    def pooled(self, by: str = "cells") -> Pooled:
        """Mean and covariance; "cells" count the same, so that the larger group does not set the mean, or "rows" do."""
        chosen = np.flatnonzero(self.count)
        if not len(chosen):
            raise InputError("there are no rows to take moments of")
        n = self.count[chosen]
        weight = (n / n.sum() if by == "rows" else np.full(len(chosen), 1 / len(chosen))) / n
        mean = np.tensordot(weight, self.first[chosen], 1)
        second = np.tensordot(weight, self.second[chosen], 1)
        return Pooled(mean, second - mean[..., :, None] * mean[..., None, :], int(n.sum()))

    def means(self) -> Array:
        """Mean of every cell, [C, L, H, d]; NaN where a cell has no rows."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.first / self.count[:, None, None, None]


def shrunk(covariance: Array, n: int) -> tuple[Array, float]:
    """A covariance that can be inverted though there are few rows: shrunk towards its mean variance, and how far.

    The amount is the oracle-approximating one of Chen, Wiesel, Eldar and Hero (2010), which needs only the covariance
    itself and n. Covariances [..., d, d] share no amount; the largest is returned.
    """
    d = covariance.shape[-1]
    trace = np.trace(covariance, axis1=-2, axis2=-1)
    alpha = (covariance**2).mean((-1, -2))
    mu = trace / d
    with np.errstate(invalid="ignore", divide="ignore"):
        amount = np.where(alpha == mu**2 / d, 1.0, np.minimum(1.0, (alpha + mu**2) / ((n + 1.0) * (alpha - mu**2 / d))))
    identity = np.eye(d) * mu[..., None, None]
    matrix = (1 - amount)[..., None, None] * covariance + amount[..., None, None] * identity
    return matrix, float(np.max(amount))


@dataclass(frozen=True)
class Features:
    """Terms of n outputs, by row."""

    heads: Rows  # z of every head, [n, L, H, d]
    others: Rows  # terms of embedding, MLPs (and a pool's), [n, M, d']
    output: Rows  # the model's outputs, [n, d']
    scale: Rows  # [n, L]; a head's own output is z / scale. All 1 after a pool.
    maps: Rows  # [L, H, d', d], from z to a head's term

    def __len__(self) -> int:
        return len(self.output)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads."""
        return self.heads.shape[1], self.heads.shape[2]

    def take(self, rows: NDArray[Any]) -> "Features":
        """The chosen rows: positions, or a mask."""
        return Features(self.heads[rows], self.others[rows], self.output[rows], self.scale[rows], self.maps)

    def parts(self, directions: NDArray[np.floating]) -> Array:
        """Each head's part in output · direction: directions [k, d'] to [n, L, H, k]."""
        wanted = np.asarray(directions, dtype=np.float32)
        through = np.einsum("ko,lhod->lhdk", wanted, self.maps, optimize=True)
        out = np.empty((len(self), *self.shape, len(directions)))
        for start in range(0, len(self), _CHUNK):
            rows = slice(start, start + _CHUNK)
            out[rows] = (self.heads[rows].transpose(1, 2, 0, 3) @ through).transpose(2, 0, 1, 3)
        return out

    def outputs(self, rows: slice = slice(None)) -> Rows:
        """The heads' own outputs, before any norm: [n, L, H, d]."""
        return self.heads[rows] / self.scale[rows][:, :, None, None]

    def moments(self, cells: NDArray[np.integer], n_cells: int | None = None, *, own: bool = False) -> HeadMoments:
        """First and second moments by cell, of z or (`own`) of the heads' own outputs."""
        found = HeadMoments.empty(int(cells.max()) + 1 if n_cells is None else n_cells, self.heads.shape[1:])
        for start in range(0, len(self), _CHUNK):
            rows = slice(start, start + _CHUNK)
            found.add(self.outputs(rows) if own else self.heads[rows], cells[rows])
        return found


def collect(
    decomposer: "Decomposer",  # of the model
    # Called with the row to start at; gives the model's inputs, batch by batch, from there on
    batches: Callable[[int], Iterable[Mapping[str, "Tensor"]]],
    n: int,  # rows in all
    **kept: Any,  # folder, identity and progress, as `keep_rows` takes them
) -> Features:
    """Run a model over n rows and keep their terms."""

    def blocks(start: int) -> Iterator[Mapping[str, Rows]]:
        for batch in batches(start):
            terms = decomposer(batch)
            one = terms.output.new_ones(len(terms.output), decomposer.n_layers)
            made = (terms.heads, terms.others, terms.output, one if terms.scale is None else terms.scale)
            yield {name: x.float().cpu().numpy() for name, x in zip(_ARRAYS, made, strict=True)}

    return Features(**keep_rows(blocks, _ARRAYS, n, **kept), maps=decomposer.maps.float().cpu().numpy())


def keep_rows(
    blocks: Blocks,
    names: Iterable[str],  # of the arrays
    n: int,  # rows in all
    *,
    folder: str | os.PathLike[str] | None = None,  # where to write them; None keeps them in memory
    # What the rows are (model, data, ids): arrays of something else in the folder are refused
    identity: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,  # called with (rows done, n)
) -> dict[str, NDArray[Any]]:
    """Make arrays of n rows, or read those that the folder has: each [n, ...]."""
    if folder is None:
        return _filled(blocks, n, None, {"done": 0}, progress)
    path = Path(folder)
    plain = json.loads(json.dumps(dict(identity or {}), default=str))  # as it will be read back
    # Whoever comes second waits, and then reads what the first has written; a folder that is read-only has all of it.
    read_only = path.is_dir() and not os.access(path, os.W_OK)
    with nullcontext() if read_only else locked(path, wait=True):
        notes = _noted(path, {"schema": SCHEMA, "n": n, "identity": plain, "done": 0})
        if notes["done"] < n:
            _filled(blocks, n, path, notes, progress)
    with reading(path, _CUT):
        return {name: np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in names}


def _filled(
    blocks: Blocks,
    n: int,
    path: Path | None,
    notes: Mapping[str, Any],
    progress: Callable[[int, int], None] | None,
) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {}
    start = done = notes["done"]
    for block in blocks(done):
        size = len(next(iter(block.values())))
        for name, rows in block.items():
            if name not in arrays:
                shape = n, *rows.shape[1:]
                if path is None:
                    arrays[name] = np.empty(shape, rows.dtype)
                else:
                    arrays[name] = _opened(path / f"{name}.npy", shape, rows.dtype, start > 0)
            arrays[name][done : done + size] = rows
        done += size
        if path is not None:
            for array in arrays.values():
                if isinstance(array, np.memmap):
                    array.flush()
            write_json(path / _NOTES, {**notes, "done": done})
        if progress is not None:
            progress(done, n)
    if done != n:
        raise InputError(f"{done} rows came where {n} were announced")
    return arrays


def _opened(file: Path, shape: tuple[int, ...], dtype: Any, resumed: bool) -> NDArray[Any]:
    if resumed:
        with reading(file, _CUT):  # opened to be written to, a file that is cut short would get zeros
            if np.load(file, mmap_mode="r", allow_pickle=False).shape != shape:
                raise KeyError
    with writing(file):
        if not resumed:
            with whole_file(file) as part:
                made = np.lib.format.open_memmap(part, mode="w+", dtype=dtype, shape=shape)
                if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and would kill the process later
                    with open(part, "r+b") as handle:
                        os.posix_fallocate(handle.fileno(), 0, made.offset + made.nbytes)
        return np.lib.format.open_memmap(file, mode="r+", dtype=dtype, shape=shape)


def _noted(path: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """How far an earlier run came, or a fresh start."""
    file = path / _NOTES
    if not file.exists():
        return fresh
    with reading(file, "cannot be read as JSON; remove the folder"):
        found = json.loads(file.read_text(encoding="utf-8"))
    counts = [found.get(name) for name in ("done", "n")] if isinstance(found, dict) else []
    if not counts or found.get("schema") != SCHEMA or not all(type(count) is int for count in counts):
        raise InputError(f"{file} is not of the form {SCHEMA}; remove the folder")
    if not 0 <= found["done"] <= found["n"]:
        raise InputError(f"{file} has {found['done']} of {found['n']} rows; remove the folder")
    if {**found, "done": 0} != fresh:
        different = [key for key in ("n", "identity") if found.get(key) != fresh[key]]
        raise InputError(
            f"{path} holds features of something else ({', '.join(different) or 'another version'} differ); give "
            "another folder, or remove it"
        )
    return dict(found)
