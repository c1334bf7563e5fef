"""Models of a grid: fresh vision transformers by size, and pretrained folders."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fairhead.errors import InputError, UnsupportedModel, did_you_mean
from fairhead.mitigate.attach import quietly

# Layers × heads with fresh weights; the widths are those of the DAM paper's code.
_FRESH = re.compile(r"vit-(\d+)x(\d+)")
_FRESH_SETTINGS = {"width": 768, "mlp": 768, "image_size": 64, "patch_size": 16}

# Families of two towers, and the class of the one that sees.
_TOWERS = {"clip": "CLIPVisionModelWithProjection", "siglip": "SiglipVisionModel"}

# The tower that sees, kept without the other, and the family that it is of.
_TOWERS_ALONE = {"clip_vision_model": "CLIP", "siglip_vision_model": "Siglip"}


@dataclass(frozen=True)
class Pictures:
    """How pictures are made ready: resized to `size` × `size` without cropping, then (x / 255 − mean) / std."""

    size: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Recipe:
    """A model that can be built again and again.

    Attributes:
        name: "vit-8x8" or "path:FOLDER".
        classes: names of the classes.
        settings: of fresh models: width, mlp, image_size, patch_size; of pretrained ones: image_size.

    Example:
        >>> recipe = Recipe("vit-2x4", ("no", "yes"), {"width": 16, "mlp": 16, "image_size": 8, "patch_size": 4})
        >>> type(recipe.build("image", seed=0)).__name__
        'ViTForImageClassification'
        >>> recipe.pictures().size
        8
    """

    name: str
    classes: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path | None:
        """Of a pretrained model; None for a fresh one."""
        return Path(self.name.removeprefix("path:")) if self.name.startswith("path:") else None

    def check(self) -> None:
        """Refuse a name or a setting that is not known, and a folder without a model.

        Raises:
            InputError: saying which.
        """
        known = ["image_size"] if self.folder else list(_FRESH_SETTINGS)
        for setting in self.settings:
            if setting not in known:
                raise InputError(
                    f"backbone {self.name} has no setting {setting!r}; it has {', '.join(known)}."
                    f"{did_you_mean(setting, known)}"
                )
        if self.folder and not (self.folder / "config.json").is_file():
            raise InputError(f"{self.folder} has no config.json: expected the folder of a pretrained model")
        for setting, value in self.settings.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"backbone {self.name}: {setting} is {value!r}; expected a whole number of at least 1")
        if not self.folder:
            self._check_fresh()

    def _check_fresh(self) -> None:
        shape, settings = _FRESH.fullmatch(self.name), self.all_settings()
        if not shape:
            raise InputError(
                f"there is no backbone {self.name!r}; give vit-<layers>x<heads>, such as vit-8x8, or path:FOLDER"
            )
        if int(shape[1]) < 1 or int(shape[2]) < 1:
            raise InputError(f"backbone {self.name} needs at least one layer and one head")
        divisors = {"width": (int(shape[2]), "its heads"), "image_size": (settings["patch_size"], "its patch_size")}
        for setting, (divisor, whose) in divisors.items():
            if settings[setting] % divisor:
                raise InputError(
                    f"backbone {self.name}: {setting} is {settings[setting]}; expected a multiple of {divisor}, {whose}"
                )

    def all_settings(self) -> dict[str, Any]:
        """The settings, with the defaults of a fresh model."""
        return dict(self.settings) if self.folder else {**_FRESH_SETTINGS, **self.settings}

    def pictures(self) -> Pictures:
        """How this model wants its pictures."""
        if self.folder is None:
            return Pictures(self.all_settings()["image_size"])
        wanted = _json(self.folder / "preprocessor_config.json")
        size = wanted.get("crop_size") or wanted.get("size") or _json(self.folder / "config.json").get("image_size")
        if isinstance(size, dict):
            size = size.get("height") or size.get("shortest_edge")
        size = self.settings.get("image_size", size)
        if not isinstance(size, int):
            family = _json(self.folder / "config.json").get("model_type", "unknown")
            raise InputError(
                f"{self.folder} is a {family} model and does not say how large its pictures are: give an encoder of "
                "pictures (ViT, DINOv2, CLIP), or the setting image_size"
            )
        half = [0.5] * 3
        return Pictures(size, tuple(wanted.get("image_mean", half)), tuple(wanted.get("image_std", half)))

    def build(self, kind: str, seed: int) -> Any:
        """A model with a task head, on the CPU; the same seed gives the same weights.

        Args:
            kind: "image" or "text".
            seed: of all weights that are not pretrained.
        """
        self.check()
        torch.manual_seed(seed)
        labels: dict[str, Any] = {
            "id2label": dict(enumerate(self.classes)),
            "label2id": {name: number for number, name in enumerate(self.classes)},
        }
        if self.folder is not None:
            return self._pretrained(kind, labels)
        if kind != "image":
            raise UnsupportedModel(
                f"{self.name} reads pictures and the data are {kind}s: give path:FOLDER of an encoder"
            )
        from transformers import ViTConfig, ViTForImageClassification

        shape = _FRESH.fullmatch(self.name)
        assert shape is not None  # `check` has seen to that
        fresh = self.all_settings()
        config = ViTConfig(
            num_hidden_layers=int(shape[1]),
            num_attention_heads=int(shape[2]),
            hidden_size=fresh["width"],
            intermediate_size=fresh["mlp"],
            image_size=fresh["image_size"],
            patch_size=fresh["patch_size"],
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **labels,
        )
        return normalising(ViTForImageClassification(config), self.pictures())

    def build_trunk(self, kind: str) -> Any:
        """The pretrained model without a task head, on the CPU: what its features are looked at.

        Raises:
            InputError: a fresh model has no features to look at.
        """
        self.check()
        if self.folder is None:
            raise InputError(f"{self.name} has fresh weights, and their features say nothing: give path:FOLDER")
        import transformers

        config = _json(self.folder / "config.json")
        named = [name for name in config.get("architectures") or [] if name.endswith("ModelWithProjection")]
        # CLIP was trained in the space that its projection leads to; of both towers, pictures need one.
        tower = named[0] if named else _TOWERS.get(str(config.get("model_type")), "AutoModel")
        kind_of = getattr(transformers, tower)
        with quietly():
            model = kind_of.from_pretrained(self.folder, dtype=torch.float32, local_files_only=True)
        return normalising(model, self.pictures()) if kind == "image" else model

    def _pretrained(self, kind: str, labels: Mapping[str, Any]) -> Any:
        import transformers

        assert self.folder is not None
        classes = {"image": "AutoModelForImageClassification", "text": "AutoModelForSequenceClassification"}
        auto: Any = getattr(transformers, classes[kind])
        settings: dict[str, Any] = dict(labels)
        family = str(_json(self.folder / "config.json").get("model_type"))
        if kind == "image" and family in _TOWERS_ALONE:
            # A tower on its own: the family's classifier wants it inside a configuration of both.
            name = _TOWERS_ALONE[family]
            auto = getattr(transformers, f"{name}ForImageClassification")
            tower = getattr(transformers, f"{name}VisionConfig").from_pretrained(self.folder)
            both = getattr(transformers, f"{name}Config")
            settings = {"config": both(vision_config=tower.to_dict(), **labels)}
        with quietly():
            try:
                model = auto.from_pretrained(self.folder, dtype=torch.float32, local_files_only=True, **settings)
            except ValueError as error:
                if "Unrecognized configuration class" not in str(error):
                    raise
                raise UnsupportedModel(
                    f"{self.folder} is a {family} model, which transformers has no {kind} classifier for; "
                    "give an encoder such as ViT or DINOv2 for pictures, BERT or RoBERTa for texts"
                ) from None
        if kind == "text" and family in _language_models() and _padding_token(model) is None:
            raise UnsupportedModel(
                f"{self.folder} is a {family} model without a padding token, which batches of texts need: give an "
                "encoder such as BERT or RoBERTa, or set pad_token_id in its config.json"
            )
        return normalising(model, self.pictures()) if kind == "image" else model


def normalising(model: nn.Module, pictures: Pictures) -> nn.Module:
    """Let a model take pictures as bytes [B, 3, H, W]; they are normalised on its own device, a quarter of the memory.

    Example:
        >>> seen = []
        >>> class Look(nn.Module):
        ...     def forward(self, pixel_values):
        ...         seen.append(pixel_values.flatten().tolist())
        >>> _ = normalising(Look(), Pictures(1))(pixel_values=torch.tensor([[[[0]], [[255]], [[51]]]]).byte())
        >>> [round(x, 3) for x in seen[0]]
        [-1.0, 1.0, -0.6]
    """
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


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from None
    return found if isinstance(found, dict) else {}


def _language_models() -> Collection[str]:
    """Families whose classifiers look for the last token before the padding; encoders read the first, whatever pads."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()


def _padding_token(model: Any) -> int | None:
    return getattr(model.config.get_text_config(), "pad_token_id", None)
