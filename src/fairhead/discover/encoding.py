"""One vector a row: by a pretrained encoder as it is, or from a file of features that are ready."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairhead.data import Dataset, Images
from fairhead.data import Examples as Published
from fairhead.data.ready_features import ReadyFeatures
from fairhead.errors import InputError
from fairhead.models.fresh import Recipe, is_ready
from fairhead.models.inputs import normalising, tokenizer_of, tokens_of
from fairhead.models.load import device_named, open_model
from fairhead.train import Examples
from fairhead.train.cache import cache_folder, cached_array, key_of
from fairhead.train.features import encode

# Called with (stage, done, all).
Tell = Callable[[str, int, int], None]

_CHUNK = 512  # pictures that are decoded at a time


def features_of(
    encoder: str,
    data: Dataset,
    *,
    max_length: int = 128,
    device: str = "auto",
    cache: str | Path | None = None,
    progress: Tell | None = None,
) -> Tensor:
    """The features of all rows of a data set, [n, D]: computed once, then mapped from disk.

    Args:
        encoder: a folder or a name of the hub, whose task head is left out; or "features:FILE.npz".
        data: pictures or texts.
        max_length: tokens that texts are cut to.
        device: where to compute.
        cache: folder for decoded pictures and features.
        progress: called with (stage, done, all).

    Raises:
        InputError: the encoder reads something else than the data are, or its features are not finite.
    """
    tell = progress or (lambda stage, done, total: None)
    if is_ready(encoder):
        found = torch.from_numpy(ReadyFeatures.read(encoder).of(data.all))
    else:
        found = _encoded(encoder, data, max_length, device, cache, tell)
    lost = torch.nonzero(~found.isfinite().all(1)).flatten()
    if len(lost):
        raise InputError(
            f"{encoder}: the features of {len(lost)} of {len(found)} rows are not finite (NaN or infinite); the first "
            f"are those of {data.all.ids[int(lost[0])]}"
        )
    return found


def _encoded(encoder: str, data: Dataset, max_length: int, device: str, cache: str | Path | None, tell: Tell) -> Tensor:
    recipe, pictures = Recipe(encoder, data.classes), isinstance(data.all.inputs, Images)
    recipe.check()
    if recipe.place is None:
        raise InputError(f"{encoder} has fresh weights, and their features say nothing: give a pretrained encoder")
    model = open_model(encoder, "encoder", dtype="float32").model
    reads_pictures = getattr(model, "main_input_name", "") == "pixel_values"
    if reads_pictures != pictures:
        reads, have = ("pictures", "texts") if reads_pictures else ("texts", "pictures")
        such = "CLIP, DINOv2, ViT" if pictures else "BERT, MiniLM, RoBERTa"
        raise InputError(f"{encoder} reads {reads} and the data are {have}: give an encoder of {have} ({such})")
    if pictures:
        model = normalising(model, recipe.pictures())
        inputs = {"pixel_values": torch.from_numpy(_pixels(data.all, recipe.pictures().size, cache, tell))}
    else:
        most = getattr(model.config, "max_position_embeddings", max_length)
        inputs = tokens_of(tokenizer_of(recipe.place), data.all.inputs, min(max_length, most))
    examples = Examples(inputs, torch.from_numpy(data.all.labels))
    return encode(model.to(device_named(device)), examples, cache, lambda done, total: tell("encode", done, total))


def _pixels(every: Published, size: int, cache: str | Path | None, tell: Tell) -> NDArray[Any]:
    """Pictures as bytes, [n, 3, size, size]; kept on disk where their files can be known again."""
    images = every.inputs
    assert isinstance(images, Images)

    def fill(array: NDArray[Any]) -> None:
        for start in range(0, len(images), _CHUNK):
            rows = np.arange(start, min(start + _CHUNK, len(images)))
            array[rows] = images.take(rows).as_array(size).transpose(0, 3, 1, 2)
            tell("decode", int(rows[-1]) + 1, len(images))

    shape = (len(images), 3, size, size)
    if images.stamp is None:
        array = np.empty(shape, np.uint8)
        fill(array)
        return array
    key = key_of("channels first", images.stamp, size, every.ids.tolist())
    return cached_array(cache_folder(cache), key, shape, "uint8", fill, {"rows": len(images)})
