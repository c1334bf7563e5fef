"""Features that are computed once and kept on disk, in a cache that is shared by seeds, methods and experiments.

The key of an entry is made of the weights, the inputs and the precision themselves, so an entry is never out of date.
It is a folder `<key>/` with `data.bin` (the array, row after row) and `manifest.json`, made beside it and renamed when
complete: a process that is killed in the middle leaves nothing that looks finished. What it had written every few
seconds is kept in `<key>.part/`, from which the next one goes on; a week later it is removed.
"""

import hashlib
import json
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor, nn

from fairhead.data.images import Images
from fairhead.models.attached import positions_of
from fairhead.models.inputs import quiet
from fairhead.models.load import raw_bytes, weights_digest
from fairhead.store import locked, made_folder, settled, whole_folder, write_json
from fairhead.train.last_encoder import encoder_of
from fairhead.train.step import Examples, autocast

Progress = Callable[[int, int], None]  # called with (done, total)
Fill = Callable[[NDArray[Any], int], Iterable[int]]  # writes an array from a row on, and yields how many are written
_CHUNK = 512  # pictures that are decoded at a time
_EVERY = 5.0  # seconds of work that a kill may cost
_KEPT = 7 * 24 * 3600.0  # seconds after which unfinished arrays are removed
_PROGRESS = "progress.json"


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
    folder: str | os.PathLike[str],  # of the whole cache
    key: str,  # of this array, such as `key_of(...)`
    shape: tuple[int, ...],
    dtype: DTypeLike,  # numpy's type of its rows, or the name of that
    fill: Fill,  # is given the array and how many rows are written already, in an order of its own, and writes the rest
    about: Mapping[str, Any] | None = None,  # anything worth keeping in the manifest
) -> NDArray[Any]:
    """The array called `key`, mapped into memory; made by `fill` where it is not there or not whole.

    Several processes may ask for the same array at once: one makes it, the others wait.
    Writing to the array changes this process's copy only, never the file.
    """
    entry, of, size = Path(folder, key), np.dtype(dtype), math.prod(shape) * np.dtype(dtype).itemsize
    manifest = {"schema": "fairhead.cache/1", "shape": list(shape), "dtype": str(of)}

    def is_whole() -> bool:
        try:
            found = json.loads((entry / "manifest.json").read_text(encoding="utf-8"))
            return (entry / "data.bin").stat().st_size == size and found.items() >= manifest.items()
        except (OSError, ValueError, AttributeError):
            return False

    if not is_whole():  # what is whole stays as it is, and may lie in a folder that is read-only
        made_folder(folder, "give another folder, or name the cache in $FAIRHEAD_CACHE")
        with locked(folder, wait=True, name=f"{key}.lock"):
            settled(entry)
            for part in Path(folder).glob("*.part"):
                with suppress(OSError):  # another process may remove it, too
                    own = part.name != f"{key}.part" and (part / _PROGRESS).is_file()
                    if own and time.time() - part.stat().st_mtime > _KEPT:
                        shutil.rmtree(part)
            if not is_whole():
                with whole_folder(entry, _PROGRESS) as unfinished:
                    _fill_file(unfinished, shape, of, fill)
                    write_json(unfinished / "manifest.json", {**manifest, "about": dict(about or {})})
    # "c": copy on write. Torch needs writable arrays, and the cache must not change.
    return np.memmap(entry / "data.bin", dtype=of, mode="c", shape=shape)


def _fill_file(folder: Path, shape: tuple[int, ...], dtype: np.dtype[Any], fill: Fill) -> None:
    """Write `data.bin`, or what an earlier run had not written of it."""
    path, progress = folder / "data.bin", folder / _PROGRESS
    size = math.prod(shape) * dtype.itemsize
    try:
        done = int(json.loads(progress.read_text(encoding="utf-8"))["rows"])
        done = done if path.stat().st_size == size and 0 <= done <= shape[0] else 0
    except (OSError, ValueError, KeyError, TypeError):
        done = 0
    if not done:
        progress.unlink(missing_ok=True)
    with path.open("r+b" if done else "wb") as file:
        # A full disk is an error here, and would kill the process when the array is filled.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, max(1, size))
    array, written = np.memmap(path, dtype, "r+", shape=shape), time.monotonic()
    for rows in fill(array, done):
        if time.monotonic() - written >= _EVERY:
            array.flush()  # first: the file must not say more than is there
            write_json(progress, {"rows": rows})
            written = time.monotonic()
    array.flush()
    progress.unlink(missing_ok=True)


def decoded_pictures(
    images: Images,  # n of them
    size: int,  # height and width
    folder: Path | str | None = None,  # of the cache
    progress: Progress | None = None,
) -> NDArray[np.uint8]:
    """Pictures as bytes, [n, 3, size, size]; kept on disk where their files can be known again."""

    def fill(array: NDArray[Any], done: int) -> Iterator[int]:
        for start in range(done, len(images), _CHUNK):
            stop = min(start + _CHUNK, len(images))
            array[start:stop] = images.take(np.arange(start, stop)).as_array(size).transpose(0, 3, 1, 2)
            if progress is not None:
                progress(stop, len(images))
            yield stop

    shape, stamp = (len(images), 3, size, size), images.stamp
    if stamp is None:
        array = np.empty(shape, np.uint8)
        deque(fill(array, 0), maxlen=0)
        return array
    return cached_array(cache_folder(folder), key_of("decoded", stamp, size), shape, "uint8", fill, {"rows": shape[0]})


def frozen_features(
    model: nn.Module,  # the whole model; it runs in evaluation mode, without gradients, on the device it is on
    examples: Examples,  # inputs and labels
    folder: Path | str | None = None,  # the cache; by default `$FAIRHEAD_CACHE` or `~/.cache/fairhead`
    *,
    batch_size: int = 256,  # rows at a time
    precision: str = "no",  # "no" (32 bit) or "bf16" (autocast); features are kept in 32 bit
    progress: Progress | None = None,
) -> Examples:
    """What reaches the last encoder layer, for every example: computed once, then mapped from disk.

    Returns:
        Examples for `last_encoder(model)`: features of shape [n, T, D] as "pixel_values" or "inputs_embeds", with the
        attention mask where there is one.
    """
    encoder, first = encoder_of(model), torch.arange(1)
    last = f"{encoder.path}.{len(encoder.layers) - 1}."

    def of(rows: Tensor) -> Tensor:
        return _reaching(model, encoder.layers[-1], examples.take(rows), precision)

    def is_frozen(name: str) -> bool:  # neither the last layer nor anything after it takes part in the features
        if name.startswith(f"{encoder.path}."):
            return not name.startswith(last)
        return "embed" in name or "pre_layrnorm" in name

    frozen = {name: tensor for name, tensor in model.state_dict().items() if is_frozen(name)}
    # What hooks make of the inputs first, such as normalised pictures, by the first row; to a few digits, as devices
    # differ in the last ones.
    embedded = _reaching(model, encoder.trunk.get_submodule("embeddings"), examples.take(first), "no")
    shown = np.round(embedded.double().cpu().numpy(), 3)
    key = key_of("features", precision, _settings(model), shown, *_contents(frozen), *_contents(examples.inputs))
    about = {"model": type(model).__name__, "layers": len(encoder.layers), "precision": precision}
    features = _kept(key, of, of(first), torch.arange(len(examples)), batch_size, about, folder, progress)
    inputs = {"pixel_values" if "pixel_values" in examples.inputs else "inputs_embeds": features}
    if "attention_mask" in examples.inputs:
        inputs["attention_mask"] = examples.inputs["attention_mask"]
    return Examples(inputs, examples.labels)


class _Reached(Exception):
    """The module was reached: what follows need not be computed."""


def _reaching(model: nn.Module, part: nn.Module, batch: Examples, precision: str) -> Tensor:
    """The first tensor that a part of the model is given for one batch: [B, T, D] for an encoder layer."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args, kwargs.get("hidden_states"), *kwargs.values())
        kept.append(next(x for x in given if isinstance(x, Tensor)))
        raise _Reached

    hook = part.register_forward_pre_hook(keep, with_kwargs=True)
    device = next(model.parameters()).device
    try:
        with quiet(model), autocast(device, precision):
            model(**batch.to(device).inputs)
    except _Reached:
        pass
    finally:
        hook.remove()
    return kept[0]


def encode(
    model: nn.Module, examples: Examples, folder: Path | str | None = None, progress: Progress | None = None
) -> Tensor:
    """One vector per row by a model without a task head, [n, D] on the CPU: computed once, then mapped from disk.

    The model runs in evaluation mode on the device it is on; `folder` and `progress` are those of `frozen_features`.
    """
    device = next(model.parameters()).device

    def features(part: Examples) -> Tensor:
        inputs = part.to(device).inputs
        return pooled(model(**inputs), inputs.get("attention_mask"))

    return kept_features("encoded", model, examples, features, folder, progress)


def kept_features(
    what: str,
    model: nn.Module,
    examples: Examples,
    features: Callable[[Examples], Tensor],
    folder: Path | str | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """What `features` gives for the rows, [n, D] on the CPU; kept under `what`, the model's weights and the inputs.

    Texts of like length go together, without the padding that none of them needs.
    """
    mask = examples.inputs.get("attention_mask")
    order = torch.arange(len(examples)) if mask is None else mask.sum(1).argsort(stable=True).cpu()
    fixed = mask is None or positions_of(model) is not None

    def of(rows: Tensor) -> Tensor:
        part = examples.take(rows)
        with quiet(model):
            return features(part if fixed else _unpadded(part)).float().cpu()

    # The first row as well, to a few digits: what hooks make of the inputs, such as normalised pictures, is in it.
    first = of(torch.arange(1))
    shown = np.round(first.double().numpy(), 2)
    key = key_of(what, weights_digest(model), _settings(model), shown, *_contents(examples.inputs))
    about = {"model": type(model).__name__, "what": what}
    return _kept(key, of, first, order, 128, about, folder, progress)


def _unpadded(part: Examples) -> Examples:
    """The texts without padding beyond the end of the longest."""
    mask = part.inputs["attention_mask"]
    end = int(mask.sum(0).nonzero().max()) + 1
    inputs = {name: given[:, :end] if given.shape == mask.shape else given for name, given in part.inputs.items()}
    return Examples(inputs, part.labels)


def _kept(
    key: str,
    of: Callable[[Tensor], Tensor],  # gives the features of some rows
    first: Tensor,  # those of the first, [1, ...]
    order: Tensor,  # in which the n rows are best read
    batch_size: int,
    about: dict[str, Any],
    folder: Path | str | None,
    progress: Progress | None,
) -> Tensor:
    """The features of n rows in 32 bits, [n, ...]: computed once, then mapped from disk."""
    n = len(order)

    def fill(array: NDArray[Any], done: int) -> Iterator[int]:
        for start in range(done, n, batch_size):
            rows = order[start : start + batch_size]
            array[rows.numpy()] = of(rows).float().cpu().numpy()
            if progress is not None:
                progress(start + len(rows), n)
            yield start + len(rows)

    shape, about = (n, *first.shape[1:]), {**about, "rows": n}
    return torch.from_numpy(cached_array(cache_folder(folder), key, shape, "float32", fill, about))


def pooled(output: Any, mask: Tensor | None) -> Tensor:
    """One vector per row, [B, D]: CLIP's embedding, the mean over a text's tokens, or a picture's first token.

    `output` is that of a model without a task head; `mask` [B, T] is 1 where a token of a text is real.
    """
    if mask is not None:
        weight = mask[..., None].to(output.last_hidden_state.dtype)
        total: Tensor = (output.last_hidden_state * weight).sum(1)
        return total / weight.sum(1).clamp(min=1)
    for name in ("image_embeds", "pooler_output"):
        found: Tensor | None = getattr(output, name, None)
        if found is not None:
            return found
    first: Tensor = output.last_hidden_state[:, 0]
    return first


def _settings(model: nn.Module) -> dict[str, Any]:
    """What the weights do not show, such as the number of heads; the task head and names have no part in features."""
    config: Any = getattr(model, "config", None)
    apart = ("_", "id2label", "label2id", "problem_type", "architectures", "transformers")
    settings = {} if config is None else config.to_dict()
    return {name: value for name, value in settings.items() if not name.startswith(apart)}


def _contents(tensors: Mapping[str, Tensor]) -> Iterator[Any]:
    """Names, shapes and bytes, for a key."""
    for name, tensor in sorted(tensors.items()):
        yield f"{name} {tuple(tensor.shape)}"
        yield raw_bytes(tensor)
