"""Arrays that are made once and kept on disk: they appear whole or not at all, and are mapped, not read.

An entry is a folder `<key>/` with `data.bin` (the array, row after row) and `manifest.json`. It is made in a folder
beside it and renamed when complete, so that a process killed in the middle leaves nothing that looks finished.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError

_SCHEMA = "fairhead.cache/1"

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
    """A short name for what an array was made from: JSON values, and arrays by their bytes.

    Example:
        >>> key_of("vit", np.arange(3)) == key_of("vit", np.arange(3))
        True
        >>> key_of("vit", np.arange(3)) == key_of("vit", np.arange(3.0))
        False
    """
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
    folder: Path | str,
    key: str,
    shape: tuple[int, ...],
    dtype: str,
    fill: Fill,
    about: Mapping[str, Any] | None = None,
) -> NDArray[Any]:
    """The array called `key`, mapped into memory; made by `fill` where it is not there or not whole.

    Several processes may ask for the same array at once: one makes it, the others wait.

    Args:
        folder: of the whole cache.
        key: of this array, such as `key_of(...)`.
        shape: of the array.
        dtype: numpy's name of its type.
        fill: is given the empty array and writes every row of it.
        about: anything worth keeping in the manifest.

    Returns:
        The array. Writing to it changes this process's copy only, never the file.

    Raises:
        InputError: the folder cannot be written.

    Example:
        >>> import tempfile
        >>> def fill(array):
        ...     array[:] = [1, 2, 3]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = cached_array(folder, "numbers", (3,), "int64", fill).tolist()
        ...     again = cached_array(folder, "numbers", (3,), "int64", lambda array: None).tolist()
        >>> first == again == [1, 2, 3]
        True
    """
    folder = Path(folder)
    manifest = {"schema": _SCHEMA, "shape": list(shape), "dtype": dtype}
    entry = folder / key
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f"{key}.lock"):
            if not _is_whole(entry, manifest):
                _make(entry, manifest, dict(about or {}), fill)
    except OSError as error:
        reason = error.strerror or error
        raise InputError(
            f"cannot write the cache {str(folder)!r}: {reason}; name another in $FAIRHEAD_CACHE"
        ) from error
    # "c": copy on write. Torch wants arrays that it may write to, and nobody should change the cache.
    return np.memmap(entry / "data.bin", dtype=dtype, mode="c", shape=shape)


def _is_whole(entry: Path, manifest: Mapping[str, Any]) -> bool:
    try:
        found = json.loads((entry / "manifest.json").read_text(encoding="utf-8"))
        size = (entry / "data.bin").stat().st_size
    except (OSError, ValueError):
        return False
    expected = int(np.prod(manifest["shape"])) * np.dtype(manifest["dtype"]).itemsize
    return size == expected and all(found.get(name) == value for name, value in manifest.items())


def _make(entry: Path, manifest: Mapping[str, Any], about: Mapping[str, Any], fill: Fill) -> None:
    unfinished = entry.with_name(f"{entry.name}.part")
    for leftover in (unfinished, entry):  # of a process that was killed: the lock is ours, so nobody uses them
        shutil.rmtree(leftover, ignore_errors=True)
    unfinished.mkdir()
    array = np.memmap(unfinished / "data.bin", manifest["dtype"], "w+", shape=tuple(manifest["shape"]))
    fill(array)
    array.flush()
    del array
    text = json.dumps({**manifest, "about": about}, indent=1, default=str)
    (unfinished / "manifest.json").write_text(text + "\n", encoding="utf-8")
    unfinished.rename(entry)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock that the system releases when its process ends, however it ends."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows: two processes may do the same work, and the later rename fails loudly
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
