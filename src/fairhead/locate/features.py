"""One pass over the data, kept: every head's z by row. Any concept, class or ablation can then be asked for later.

A row costs (layers × heads × d + M × d') numbers, whatever the number of tokens: 65 kB for CLIP B/16. With a folder,
they are written as they are made, and a run that was stopped goes on where it was.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.locate.moments import HeadMoments

if TYPE_CHECKING:
    from torch import Tensor

    from fairhead.locate.decompose import Decomposer

Array = NDArray[np.float64]
Rows = NDArray[np.float32]
SCHEMA = "fairhead.features/1"
_CHUNK = 512
_ARRAYS = ("heads", "others", "output", "scale")


@dataclass(frozen=True)
class Features:
    """Terms of n outputs, by row.

    Attributes:
        heads: z of every head, [n, L, H, d].
        others: terms of embedding, MLPs (and a pooler's), [n, M, d'].
        output: the model's outputs, [n, d'].
        scale: [n, L]; a head's own output is z / scale. All 1 after a pooler.
        maps: [L, H, d', d], from z to a head's term.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> z, maps = (rng.normal(size=s).astype(np.float32) for s in ((9, 2, 3, 4), (2, 3, 8, 4)))
        >>> output = np.einsum("nlhd,lhod->no", z, maps)
        >>> features = Features(z, np.zeros((9, 1, 8), np.float32), output, np.ones((9, 2), np.float32), maps)
        >>> parts = features.parts(np.eye(8)[:1])       # each head's part in the output's first number
        >>> bool(np.allclose(parts.sum((1, 2))[:, 0], output[:, 0], atol=1e-5))
        True
    """

    heads: Rows
    others: Rows
    output: Rows
    scale: Rows
    maps: Rows

    def __len__(self) -> int:
        return len(self.output)

    @property
    def shape(self) -> tuple[int, int]:
        """Layers and heads."""
        return self.heads.shape[1], self.heads.shape[2]

    def take(self, rows: NDArray[Any]) -> "Features":
        """The chosen rows: positions, or a mask."""
        return Features(self.heads[rows], self.others[rows], self.output[rows], self.scale[rows], self.maps)

    def through(self, directions: NDArray[np.floating]) -> Rows:
        """Directions [k, d'] of the output as the heads' own: [L, H, k, d]."""
        return np.einsum("ko,lhod->lhkd", np.asarray(directions, dtype=np.float32), self.maps, optimize=True)

    def parts(self, directions: NDArray[np.floating]) -> Array:
        """Each head's part in output · direction: directions [k, d'] to [n, L, H, k]."""
        through = self.through(directions).swapaxes(-1, -2)  # [L, H, d, k]
        out = np.empty((len(self), *self.shape, len(directions)))
        for start in range(0, len(self), _CHUNK):
            rows = slice(start, start + _CHUNK)
            out[rows] = (self.heads[rows].transpose(1, 2, 0, 3) @ through).transpose(2, 0, 1, 3)
        return out

    def other_parts(self, directions: NDArray[np.floating]) -> Array:
        """The other terms' parts in output · direction: [n, M, k]."""
        return np.asarray(self.others, dtype=np.float64) @ np.asarray(directions, dtype=np.float64).T

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
    def joined(cls, parts: Sequence["Features"]) -> "Features":
        """Rows of several processes, one after the other."""
        if not parts or any(part.maps.shape != parts[0].maps.shape for part in parts):
            raise InputError("features of different models cannot be joined")
        arrays = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
        return cls(**arrays, maps=parts[0].maps)

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
        arrays = {name: np.load(path / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS}
        maps = np.load(path / "maps.npy", allow_pickle=False)
        return cls(**arrays, maps=np.broadcast_to(maps, (*arrays["heads"].shape[1:3], *maps.shape[2:])))


def collect(
    decomposer: "Decomposer",
    batches: Callable[[int], Iterable[Mapping[str, "Tensor"]]],
    n: int,
    *,
    folder: str | os.PathLike[str] | None = None,
    identity: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Features:
    """Run a model over n rows and keep their terms.

    Args:
        decomposer: of the model.
        batches: called with the row to start at; gives the model's inputs, batch by batch, from there on.
        n: rows in all.
        folder: where to write them; a stopped run goes on there. None keeps them in memory.
        identity: what the rows are (model, data, ids): features of something else in the folder are refused.
        progress: called with (rows done, n).

    Example:
        >>> import torch
        >>> from transformers import ViTConfig, ViTModel
        >>> from fairhead.locate import Decomposer
        >>> shape = dict(image_size=4, patch_size=2, hidden_size=8, intermediate_size=8)
        >>> model = ViTModel(ViTConfig(num_hidden_layers=3, num_attention_heads=2, **shape)).eval()
        >>> images = torch.randn(10, 3, 4, 4)
        >>> batches = lambda start: ({"pixel_values": images[i : i + 4]} for i in range(start, 10, 4))
        >>> collect(Decomposer(model), batches, 10).heads.shape
        (10, 3, 2, 4)
    """
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
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{path} cannot be a folder for features: {error.strerror or error}") from None
    maps = decomposer.maps.float().cpu().numpy()
    if path is not None:  # after a pooler all maps are one: it is written once
        np.save(path / "maps.npy", maps if decomposer.pool is None else maps[:1, :1])
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
    return np.lib.format.open_memmap(
        path / f"{name}.npy", mode="r+" if resumed else "w+", dtype=np.float32, shape=shape
    )


def _meta(path: Path) -> dict[str, Any] | None:
    file = path / "features.json"
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise InputError(f"{file} is not of the form {SCHEMA}; remove the folder")
    return found


def _write_meta(path: Path, arrays: Mapping[str, Rows], meta: Mapping[str, Any]) -> None:
    for array in arrays.values():
        if isinstance(array, np.memmap):
            array.flush()
    beside = path / ".features.json.tmp"
    beside.write_text(json.dumps(meta, ensure_ascii=False), encoding="utf-8")
    os.replace(beside, path / "features.json")
