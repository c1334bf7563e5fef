"""q, k and the first token's attention of a model on a data set, through the tap."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairhead.data import Examples, Images, read_labelled
from fairhead.errors import InputError, UnsupportedModel, did_you_mean
from fairhead.heads import Tap
from fairhead.models import LoadedModel, open_model
from fairhead.models.attached import positions_of
from fairhead.models.inputs import Pictures, normalising, tokens_of

Array = NDArray[np.float64]
Progress = Callable[[int, int], None]
_BATCH = 64


@dataclass(frozen=True)
class Rows:
    """Rows of a data set with the group of each."""

    examples: Examples  # inputs and labels
    groups: NDArray[np.integer]  # [n], into `names`
    names: tuple[str, ...]  # of the groups
    column: str  # what they are groups by


def read_rows(
    spec: str,
    column: str | None = None,
    options: Mapping[str, Any] | None = None,
    part: str = "test",
    limit: int | None = None,
    seed: int = 0,
) -> Rows:
    """Rows of one part of a data set, drawn at random where there are more than `limit`."""
    dataset = read_labelled(spec, **(options or {}))
    columns = list(dataset.attributes.columns)
    name = columns[0] if column is None and columns else column
    if name not in columns:
        near = did_you_mean(str(name), columns)
        raise InputError(f"{spec} has no group column {name!r}; there are {', '.join(columns) or 'none'}.{near}")
    examples = dataset.examples(part)
    if limit is not None and limit < len(examples):
        examples = examples.take(np.sort(np.random.default_rng(seed).permutation(len(examples))[:limit]))
    groups = dataset.groups(examples.ids)[name]
    return Rows(examples, groups.codes, tuple(str(level) for level in groups.levels), name)


class Seen(NamedTuple):
    """What one layer of a model did with the rows."""

    q: Array  # of the chosen token, [n, H, d]
    k: Array  # of the chosen token, [n, H, d]
    looks: Array  # what the first token looks at, averaged over heads, [n, T]
    layer: int  # its number
    name: str  # of the attention module
    patch_grid: tuple[int, int] | None  # rows and columns of patches, for pictures


@torch.inference_mode()
def look(
    folder: Path | str,  # of a Hugging Face model, with a method of this library in it or not
    examples: Examples,  # what to run it on
    layer: int = -1,  # which attention layer; −1 for the last
    token: int = 0,  # whose q and k are kept
    device: str = "cpu",  # where to run
    max_length: int = 128,  # tokens that texts are cut and padded to
    progress: Progress | None = None,  # called with (done, total)
) -> Seen:
    """Run a model over rows and keep what one attention layer did."""
    loaded = open_model(folder, device=device, dtype="float32")
    model = loaded.model
    inputs, grid = _inputs(loaded, examples, max_length)
    kept: dict[str, list[Tensor]] = {"q": [], "k": [], "weights": []}
    with Tap(model, layers=layer) as tap:
        site = tap.sites[0]
        readings = {what: tap.read(what, tokens=0 if what == "weights" else token) for what in kept}
        for start in range(0, len(examples), _BATCH):
            model(**{name: tensor.to(device) for name, tensor in inputs(start, start + _BATCH).items()})
            for what, reading in readings.items():
                kept[what].append(reading[site.layer].float().cpu())
            if progress is not None:
                progress(min(start + _BATCH, len(examples)), len(examples))
    q, k, weights = (torch.cat(kept[what]).double() for what in ("q", "k", "weights"))
    if k.shape[1] != q.shape[1]:  # heads that share a key
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    looks = weights.mean(1)
    if grid is not None and looks.shape[1] < grid[0] * grid[1] + 1:
        raise UnsupportedModel(
            f"layer {site.layer} of {type(model).__name__} sees {looks.shape[1]} tokens, fewer than the patches of a "
            "picture: its maps cannot be drawn"
        )
    return Seen(q.numpy(), k.numpy(), looks.numpy(), site.layer, site.name, grid)


def _inputs(
    loaded: LoadedModel, examples: Examples, max_length: int
) -> tuple[Callable[[int, int], dict[str, Tensor]], tuple[int, int] | None]:
    """What gives the model's inputs for rows from start to end, and the grid of patches of a picture."""
    if isinstance(examples.inputs, Images):
        pictures = Pictures.of(loaded.files("image processor"))
        normalising(loaded.model, pictures)
        images = examples.inputs
        config = getattr(loaded.model.config, "vision_config", loaded.model.config)
        patch = getattr(config, "patch_size", None)
        side = pictures.size // patch if isinstance(patch, int) else None

        def pixels(start: int, end: int) -> dict[str, Tensor]:
            array = images.take(np.arange(start, min(end, len(images)))).as_array(pictures.size)
            return {"pixel_values": torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2)))}

        return pixels, None if side is None else (side, side)
    texts = list(examples.inputs)
    length = positions_of(loaded.model) or max_length
    return lambda start, end: tokens_of(loaded.tokenizer, texts[start:end], length), None
