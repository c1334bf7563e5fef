"""What makes a model's inputs ready: tokenizers, image processors, and pictures as bytes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fairhead.errors import InputError
from fairhead.models.places import Place, read_beside, read_json, reading
from fairhead.store import write_json

_PROCESSOR = "preprocessor_config.json"
# Families that take pictures of one size; others fit their positions to any.
_ONE_SIZE = ("vit", "deit", "clip", "clip_vision_model", "siglip", "siglip_vision_model")
# Families whose positions begin behind that of the padding: so many fewer tokens fit.
_AFTER_PADDING = {"camembert", "data2vec-text", "ibert", "longformer", "luke", "mpnet", "roberta"}
_AFTER_PADDING |= {"roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"}


def tokenizer_of(place: Place) -> Any:
    """The tokenizer beside a model."""
    from transformers import AutoTokenizer

    return read_beside(place, "the tokenizer", AutoTokenizer, place.holding("tokenizer.json", "tokenizer_config.json"))


def processor_of(place: Place) -> Any:
    """The image processor beside a model, on Pillow; tried on a picture, as its settings may be anything."""
    from PIL import Image
    from transformers import AutoImageProcessor

    what = "the image processor"
    found = read_beside(place, what, AutoImageProcessor, place.holding(_PROCESSOR), backend="pil")
    with reading(place, what), np.errstate(all="raise"):
        made = found([Image.new("RGB", (32, 32), "white")], return_tensors="pt")
    config = read_json(place.folder / "config.json")
    tower = config.get("vision_config") or config
    own, given = tower.get("image_size"), list(made["pixel_values"].shape[-2:])
    if tower.get("model_type", config.get("model_type")) in _ONE_SIZE and isinstance(own, int) and given != [own, own]:
        raise InputError(
            f"{place.name}: {_PROCESSOR} makes pictures of {given[1]} × {given[0]} pixels, and the model takes "
            f"{own} × {own} only: set its size (and crop_size) to {own}"
        )
    return found


def text_columns(text: Any) -> tuple[str, ...]:
    """A text, or the premise and the hypothesis of a pair."""
    return (text.premise, text.hypothesis) if hasattr(text, "premise") else (str(text),)


def text_length(config: Any, wanted: int) -> int:
    """How many tokens of a text a model reads: as many as wanted, or as its positions allow.

    Example:
        >>> from transformers import BertConfig, RobertaConfig
        >>> text_length(BertConfig(), 128), text_length(BertConfig(), 1024), text_length(RobertaConfig(), 1024)
        (128, 512, 510)
    """
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or most < 1:
        return wanted
    return min(wanted, most - (config.pad_token_id + 1 if config.model_type in _AFTER_PADDING else 0))


def tokens_of(tokenizer: Any, texts: Sequence[Any], length: int) -> dict[str, Tensor]:
    """Texts, or pairs with a premise and a hypothesis, as tokens [n, length]: one length for all.

    DAM keeps statistics for each position, so that every batch needs as many.
    """
    columns = (list(column) for column in zip(*map(text_columns, texts), strict=True))
    return dict(tokenizer(*columns, padding="max_length", truncation=True, max_length=length, return_tensors="pt"))


@dataclass(frozen=True)
class Pictures:
    """How pictures are made ready: resized to `size` × `size` without cropping, then (x / 255 − mean) / std."""

    size: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def of(cls, place: Place, size: int | None = None) -> "Pictures":
        """As the model of a folder wants them; `size` replaces the size that it names."""
        wanted, config = read_json(place.holding(_PROCESSOR) / _PROCESSOR), read_json(place.folder / "config.json")
        found = size or wanted.get("crop_size") or wanted.get("size") or config.get("image_size")
        if isinstance(found, dict):
            found = found.get("height") or found.get("shortest_edge")
        if not isinstance(found, int) or found < 1:
            raise InputError(
                f"{place.name} is a {config.get('model_type', 'unknown')} model and does not say how large its "
                "pictures are: give an encoder of pictures (ViT, DINOv2, CLIP), or the setting image_size"
            )
        mean, std = (wanted.get(name, [0.5] * 3) for name in ("image_mean", "image_std"))
        try:
            ready = Pictures(found, tuple(map(float, mean)), tuple(map(float, std)))
        except (TypeError, ValueError):
            ready = Pictures(found, (), ())
        if not len(ready.mean) == len(ready.std) == 3 or not all(map(math.isfinite, ready.mean)) or min(ready.std) <= 0:
            raise InputError(
                f"{place.name}: {_PROCESSOR} has image_mean {mean!r} and image_std {std!r}; three numbers each are "
                "expected, the latter above 0"
            )
        return ready

    def save(self, folder: Path) -> None:
        """Write the same for the image processors of transformers."""
        settings = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": self.size, "width": self.size},
            "resample": 2,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
        }
        write_json(folder / _PROCESSOR, settings)


def normalising(model: nn.Module, pictures: Pictures) -> nn.Module:
    """Let a model take pictures as bytes [B, 3, H, W], a quarter of the memory, and normalise them on its device."""
    model.register_forward_pre_hook(_normaliser(pictures), with_kwargs=True)
    return model


def _normaliser(pictures: Pictures) -> Callable[..., Any]:
    # One number where the channels agree: a constant of the graph instead of a tensor on some device.
    even = len(set(pictures.mean)) == len(set(pictures.std)) == 1

    @cache  # to send them at every step would be to wait for the device, which a recorded step cannot
    def constants(device: torch.device) -> tuple[Tensor, Tensor]:
        mean, std = (torch.tensor(x, device=device).view(-1, 1, 1) for x in (pictures.mean, pictures.std))
        return mean, std

    def normalise(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        pixels = kwargs.get("pixel_values")
        if not isinstance(pixels, Tensor) or pixels.dtype != torch.uint8:
            return None
        if even:
            ready = pixels.float() * (1 / (255 * pictures.std[0])) - pictures.mean[0] / pictures.std[0]
        else:
            mean, std = constants(pixels.device)
            ready = (pixels.float() / 255 - mean) / std
        return args, {**kwargs, "pixel_values": ready}

    return normalise
