"""Models to be trained: fresh vision transformers by size, and pretrained ones with a fresh task head."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fairhead.data.images import PREFIX, ReadyFeatures
from fairhead.errors import InputError, UnsupportedModel, check_known
from fairhead.models.inputs import Pictures, normalising
from fairhead.models.load import open_model, read_weights
from fairhead.models.places import MOST_LAYERS, Place, config_of, find

# Layers × heads with fresh weights; the widths are those of the DAM paper's code.
_FRESH = re.compile(r"vit-(\d+)x(\d+)")
_FRESH_SETTINGS = {"width": 768, "mlp": 768, "image_size": 64, "patch_size": 16}
_MOST_WEIGHTS = 10**10

# The tower that sees, kept without the other, and the family that it is of.
_TOWERS_ALONE = {"clip_vision_model": "CLIP", "siglip_vision_model": "Siglip"}


def is_ready(name: str) -> bool:
    """Whether a name says where features are that have been computed already: "features:FILE.npz"."""
    return name.startswith(PREFIX)


def is_fresh(name: str) -> bool:
    """Whether a name asks for fresh weights."""
    return _FRESH.fullmatch(name) is not None


@dataclass(frozen=True)
class Recipe:
    """A model that can be built again and again."""

    name: str  # "vit-8x8", or a pretrained model as `fairhead.load` takes it ("path:FOLDER" says that it is a folder)
    classes: tuple[str, ...]  # names of the classes
    # Of fresh models: width, mlp, image_size, patch_size; of pretrained ones: image_size
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def place(self) -> Place | None:
        """The files of a pretrained model; None for a fresh one."""
        if is_fresh(self.name) or is_ready(self.name):
            return None
        try:
            return find(self.name)
        except InputError:
            if self.name.startswith(("path:", "hub:")) or "/" in self.name:
                raise
        raise InputError(
            f"there is no model {self.name!r} here: give a folder, hub:OWNER/NAME of the Hugging Face hub, "
            "features:FILE.npz, or vit-<layers>x<heads> for fresh weights, such as vit-8x8"
        )

    def check(self) -> None:
        """Refuse a name or a setting that is not known, and a folder without a model."""
        shape = _FRESH.fullmatch(self.name)
        if is_ready(self.name):
            ReadyFeatures.read(self.name)
            known = []
        else:
            known = list(_FRESH_SETTINGS) if self.place is None else ["image_size"]
        for setting, value in self.settings.items():
            check_known(setting, known, f"backbone {self.name} has no setting {setting!r}; it has")
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"backbone {self.name}: {setting} is {value!r}; expected a whole number of at least 1")
        if shape is None:
            return
        if int(shape[1]) < 1 or int(shape[2]) < 1:
            raise InputError(f"backbone {self.name} needs at least one layer and one head")
        settings = self.all_settings()
        layers, width, patch = int(shape[1]), settings["width"], settings["patch_size"]
        divisors = {"width": (int(shape[2]), "its heads"), "image_size": (patch, "its patch_size")}
        for setting, (divisor, whose) in divisors.items():
            if settings[setting] % divisor:
                raise InputError(
                    f"backbone {self.name}: {setting} is {settings[setting]}; expected a multiple of {divisor}, {whose}"
                )
        tokens = (settings["image_size"] // patch) ** 2
        size = layers * width * (4 * width + 2 * settings["mlp"]) + width * (tokens + 3 * patch**2)
        if layers > MOST_LAYERS:
            raise InputError(f"backbone {self.name} would have {layers:,} layers: at most {MOST_LAYERS:,}")
        if size > _MOST_WEIGHTS:
            raise InputError(f"backbone {self.name} would have {size:,} weights, too many to train: make it smaller")

    def all_settings(self) -> dict[str, Any]:
        """The settings, with the defaults of a fresh model."""
        return {**(_FRESH_SETTINGS if is_fresh(self.name) else {}), **self.settings}

    def pictures(self) -> Pictures:
        """How this model wants its pictures."""
        if self.place is None:
            return Pictures(self.all_settings()["image_size"])
        return Pictures.of(self.place, self.settings.get("image_size"))

    def build(self, kind: str, seed: int, *, head_only: bool = False) -> Any:
        """A model of the kind "image" or "text" with a task head, on the CPU; a seed gives the same weights again.

        With `head_only`, only the last layer will be trained, and new layers before it pass their input on.
        """
        self.check()
        if is_ready(self.name):
            raise UnsupportedModel(
                f"{self.name} has features, not a model: a linear head is trained on them (train=head)"
            )
        torch.manual_seed(seed)
        labels: dict[str, Any] = {
            "id2label": dict(enumerate(self.classes)),
            "label2id": {name: number for number, name in enumerate(self.classes)},
        }
        if self.place is not None:
            return self._pretrained(self.place, kind, labels, head_only)
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
        """The pretrained model without a task head, on the CPU: for its features."""
        self.check()
        if self.place is None:
            raise InputError(f"{self.name} has fresh weights, and their features say nothing: give path:FOLDER")
        model = open_model(self.name, "encoder", dtype="float32").model
        return normalising(model, self.pictures()) if kind == "image" else model

    def _pretrained(self, place: Place, kind: str, labels: Mapping[str, Any], head_only: bool) -> Any:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        config = config_of(place)
        family, settings = str(config.model_type), dict(labels)
        name = {"image": "AutoModelForImageClassification", "text": "AutoModelForSequenceClassification"}[kind]
        tower = _TOWERS_ALONE.get(family) if kind == "image" else None
        if tower is not None:
            # A tower on its own: the family's classifier wants it inside a configuration of both.
            name = f"{tower}ForImageClassification"
            settings = {"config": getattr(transformers, f"{tower}Config")(vision_config=config.to_dict(), **labels)}
        if config.architectures == [f"{tower}VisionModel"]:  # saved without the name that it has in the classifier
            model = getattr(transformers, name)(settings["config"])
            model.vision_model = read_weights(place, type(model.vision_model), torch.float32)
        else:
            how = {"fresh_head": True, "pass_through": head_only, **settings}
            model = read_weights(place, getattr(transformers, name), torch.float32, **how)
        # Classifiers of language models look for the last token before the padding; encoders read the first.
        padding = getattr(model.config.get_text_config(), "pad_token_id", None)
        if kind == "text" and family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and padding is None:
            raise UnsupportedModel(
                f"{place.name} is a {family} model without a padding token, which batches of texts need: give an "
                "encoder such as BERT or RoBERTa, or set pad_token_id in its config.json"
            )
        return normalising(model, self.pictures()) if kind == "image" else model
