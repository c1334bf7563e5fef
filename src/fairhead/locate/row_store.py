"""Arrays with a row for each row of the data, made block by block and kept: in memory, or in a folder.

In a folder they are written as they are made: a run that was stopped goes on there, and a later one reads them.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.store import locked, reading, whole_file, write_json, writing

SCHEMA = "fairhead.features/1"
_NOTES = "features.json"
_CUT = "holds features that are cut short: remove the folder"
Arrays = dict[str, NDArray[Any]]


def keep_rows(
    # Called with the row to start at; gives the arrays of the next rows by name, each [B, ...], block by block
    blocks: Callable[[int], Iterable[Mapping[str, NDArray[Any]]]],
    names: Iterable[str],  # of the arrays
    n: int,  # rows in all
    *,
    folder: str | os.PathLike[str] | None = None,  # where to write them; None keeps them in memory
    # What the rows are (model, data, ids): arrays of something else in the folder are refused
    identity: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,  # called with (rows done, n)
) -> Arrays:
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
    blocks: Callable[[int], Iterable[Mapping[str, NDArray[Any]]]],
    n: int,
    path: Path | None,
    notes: Mapping[str, Any],
    progress: Callable[[int, int], None] | None,
) -> Arrays:
    arrays: Arrays = {}
    start = done = notes["done"]
    for block in blocks(done):
        size = 0
        for name, rows in block.items():
            if name not in arrays:
                shape = n, *rows.shape[1:]
                made = (
                    np.empty(shape, rows.dtype) if path is None else _opened(path, name, shape, rows.dtype, start > 0)
                )
                arrays[name] = made
            size = len(rows)
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


def _opened(path: Path, name: str, shape: tuple[int, ...], dtype: Any, resumed: bool) -> NDArray[Any]:
    file = path / f"{name}.npy"
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
