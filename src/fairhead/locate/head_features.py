"""One pass over the data, kept: every head's z by row, and its moments. Any concept, class or edit can be asked later.

A row costs (layers × heads × d + M × d') numbers, whatever the number of tokens: 65 kB for CLIP B/16. With a folder,
they are written as they are made, and a run that was stopped goes on where it was. Moments are sums by cell, so that
batches, processes and resumed runs simply add up.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.store import made_folder, reading, whole_file, write_json, writing

if TYPE_CHECKING:
    from torch import Tensor

    from fairhead.locate.decompose import Decomposer

Array = NDArray[np.float64]
Rows = NDArray[np.float32]
SCHEMA = "fairhead.features/1"
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
        layers, heads, d = shape
        return cls(
            np.zeros(n_cells, dtype=np.int64),
            np.zeros((n_cells, layers, heads, d)),
            np.zeros((n_cells, layers, heads, d, d)),
        )

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

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "Features":
        """Open what `collect` wrote; rows are read from disk when they are used."""
        path = Path(folder)
        meta = _meta(path)
        if meta is None:
            raise InputError(f"{path} holds no features: it has no features.json")
        if meta["done"] < meta["n"]:
            raise InputError(
                f"the features in {path} are not complete: {meta['done']} of {meta['n']} rows; run it again"
            )
        with reading(path, _CUT):
            arrays = {name: np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS}
            maps = np.load(path / "maps.npy", allow_pickle=False)
        return cls(**arrays, maps=np.broadcast_to(maps, (*arrays["heads"].shape[1:3], *maps.shape[2:])))


def collect(
    decomposer: "Decomposer",  # of the model
    # Called with the row to start at; gives the model's inputs, batch by batch, from there on
    batches: Callable[[int], Iterable[Mapping[str, "Tensor"]]],
    n: int,  # rows in all
    *,
    # Where to write them; a stopped run goes on there. None keeps them in memory.
    folder: str | os.PathLike[str] | None = None,
    # What the rows are (model, data, ids): features of something else in the folder are refused
    identity: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,  # called with (rows done, n)
) -> Features:
    """Run a model over n rows and keep their terms."""
    path = None if folder is None else Path(folder)
    plain = json.loads(json.dumps(dict(identity or {}), default=str))  # as it will be read back
    meta: dict[str, Any] = {"schema": SCHEMA, "n": n, "identity": plain, "done": 0}
    if path is not None:
        found = _meta(path)
        if found is not None and {**found, "done": 0} != meta:
            different = [k for k in ("n", "identity") if found.get(k) != meta[k]]
            raise InputError(
                f"{path} holds features of something else ({', '.join(different) or 'another version'} differ); "
                "give another folder, or remove it"
            )
        meta = found or meta
        if meta["done"] == n:
            return Features.load(path)
        made_folder(path)
    maps = decomposer.maps.float().cpu().numpy()
    if path is not None and not meta["done"]:  # after attention pooling all maps are one: it is written once
        with whole_file(path / "maps.npy") as part:
            np.save(part, maps if maps.strides[0] else maps[:1, :1])
    arrays: dict[str, Rows] = {}
    done = meta["done"]
    for batch in batches(done):
        terms = decomposer(batch)
        size = len(terms.output)
        scale = terms.scale if terms.scale is not None else terms.output.new_ones(size, decomposer.n_layers)
        made = {"heads": terms.heads, "others": terms.others, "output": terms.output, "scale": scale}
        for name, tensor in made.items():
            if name not in arrays:
                arrays[name] = _opened(path, name, (n, *tensor.shape[1:]), resumed=done > 0)
            arrays[name][done : done + size] = tensor.float().cpu().numpy()
        done += size
        if path is not None:
            _write_meta(path, arrays, {**meta, "done": done})
        if progress is not None:
            progress(done, n)
    if done != n:
        raise InputError(f"{done} rows came where {n} were announced")
    return Features(**arrays, maps=maps) if path is None else Features.load(path)


def _opened(path: Path | None, name: str, shape: tuple[int, ...], resumed: bool) -> Rows:
    if path is None:
        return np.empty(shape, dtype=np.float32)
    file = path / f"{name}.npy"
    if resumed:
        with reading(file, _CUT):  # opened to be written to, a file that is cut short would get zeros
            if np.load(file, mmap_mode="r", allow_pickle=False).shape != shape:
                raise KeyError
    with writing(file):
        if not resumed:
            with whole_file(file) as part:
                made = np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=shape)
                if hasattr(os, "posix_fallocate"):  # a full disk is an error here, and would kill the process later
                    with open(part, "r+b") as handle:
                        os.posix_fallocate(handle.fileno(), 0, made.offset + made.nbytes)
        return np.lib.format.open_memmap(file, mode="r+", dtype=np.float32, shape=shape)


def _meta(path: Path) -> dict[str, Any] | None:
    file = path / "features.json"
    if not file.exists():
        return None
    with reading(file, "cannot be read as JSON; remove the folder"):
        found = json.loads(file.read_text(encoding="utf-8"))
    counts = [found.get(name) for name in ("done", "n")] if isinstance(found, dict) else []
    if not counts or found.get("schema") != SCHEMA or not all(type(count) is int for count in counts):
        raise InputError(f"{file} is not of the form {SCHEMA}; remove the folder")
    if not 0 <= found["done"] <= found["n"]:
        raise InputError(f"{file} has {found['done']} of {found['n']} rows; remove the folder")
    return dict(found)


def _write_meta(path: Path, arrays: Mapping[str, Rows], meta: Mapping[str, Any]) -> None:
    for array in arrays.values():
        if isinstance(array, np.memmap):
            array.flush()
    write_json(path / "features.json", meta)
