"""Arrays that are made once and kept on disk: they appear whole or not at all, and are mapped, not read.

An entry is a folder `<key>/` with `data.bin` (the array, row after row) and `manifest.json`. It is made in a folder
beside it and renamed when complete, so that a process killed in the middle leaves nothing that looks finished.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairhead.data.images import Images
from fairhead.store import locked, made_folder, settled, whole_folder, write_json

_SCHEMA = "fairhead.cache/1"
_CHUNK = 512  # pictures that are decoded at a time

# Writes its rows into the array and reports (done, total) on the way.
Fill = Callable[[NDArray[Any]], None]


def cache_folder(folder: Path | str | None = None) -> Path:
    """Where cached arrays go: the folder given, `$FAIRHEAD_CACHE`, or `~/.cache/fairhead`.

    Example:
        >>> cache_folder("scratch").name
        'scratch'
    """
    return Path(folder or os.environ.get("FAIRHEAD_CACHE") or Path.home() / ".cache" / "fairhead")


def key_of(*parts: Any) -> str:
    """A short name for what an array was made from: JSON values, and arrays by their bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype.str}{part.shape}".encode())
            digest.update(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data)
        else:
            digest.update(json.dumps(part, sort_keys=True, default=str).encode())
        digest.update(b"\0")
    return digest.hexdigest()


def cached_array(
    folder: Path | str,  # of the whole cache
    key: str,  # of this array, such as `key_of(...)`
    shape: tuple[int, ...],  # of the array
    dtype: str,  # numpy's name of its type
    fill: Fill,  # is given the empty array and writes every row of it
    about: Mapping[str, Any] | None = None,  # anything worth keeping in the manifest
) -> NDArray[Any]:
    """The array called `key`, mapped into memory; made by `fill` where it is not there or not whole.

    Several processes may ask for the same array at once: one makes it, the others wait.
    Writing to the array changes this process's copy only, never the file.
    """
    manifest = {"schema": _SCHEMA, "shape": list(shape), "dtype": dtype}
    entry = Path(folder, key)
    if not _is_whole(entry, manifest):  # what is whole stays as it is, and may lie in a folder that is read-only
        made_folder(folder, "name another in $FAIRHEAD_CACHE")
        with locked(folder, wait=True, name=f"{key}.lock"):
            if not _is_whole(settled(entry), manifest):
                _make(entry, manifest, dict(about or {}), fill)
    # "c": copy on write. Torch wants arrays that it may write to, and nobody should change the cache.
    return np.memmap(entry / "data.bin", dtype=dtype, mode="c", shape=shape)


def decoded_pictures(
    images: Images,  # n of them
    size: int,  # height and width
    folder: Path | str | None = None,  # of the cache
    progress: Callable[[int, int], None] | None = None,  # called with (done, total) while pictures are decoded
) -> NDArray[np.uint8]:
    """Pictures as bytes, [n, 3, size, size]; kept on disk where their files can be known again."""

    def fill(array: NDArray[Any]) -> None:
        for start in range(0, len(images), _CHUNK):
            rows = np.arange(start, min(start + _CHUNK, len(images)))
            array[rows] = images.take(rows).as_array(size).transpose(0, 3, 1, 2)
            if progress is not None:
                progress(int(rows[-1]) + 1, len(images))

    shape, stamp = (len(images), 3, size, size), images.stamp
    if stamp is None:
        array = np.empty(shape, np.uint8)
        fill(array)
        return array
    return cached_array(cache_folder(folder), key_of("decoded", stamp, size), shape, "uint8", fill, {"rows": shape[0]})


def _is_whole(entry: Path, manifest: Mapping[str, Any]) -> bool:
    try:
        found = json.loads((entry / "manifest.json").read_text(encoding="utf-8"))
        size = (entry / "data.bin").stat().st_size
    except (OSError, ValueError):
        return False
    expected = int(np.prod(manifest["shape"])) * np.dtype(manifest["dtype"]).itemsize
    return size == expected and all(found.get(name) == value for name, value in manifest.items())


def _make(entry: Path, manifest: Mapping[str, Any], about: Mapping[str, Any], fill: Fill) -> None:
    with whole_folder(entry) as unfinished:
        shape, dtype = tuple(manifest["shape"]), np.dtype(manifest["dtype"])
        with (unfinished / "data.bin").open("wb") as file:
            # A full disk is an error here, and would kill the process when the array is filled.
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, max(1, math.prod(shape) * dtype.itemsize))
        array = np.memmap(unfinished / "data.bin", dtype, "r+", shape=shape)
        fill(array)
        array.flush()
        del array
        write_json(unfinished / "manifest.json", {**manifest, "about": about})
