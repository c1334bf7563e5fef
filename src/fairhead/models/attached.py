"""What fairhead adds to the models of transformers: methods inside of them, and linear classifiers of features.

A note of the method (its name and its settings) travels among the model's weights, beside what the method has learnt.
So it is stored wherever those weights are: anything that saves the model saves it (`save`, `save_pretrained`, a
`Trainer`), and saving another model to the same folder removes it.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ImageClassifierOutput

from fairhead.errors import InputError, check_known
from fairhead.models.places import TRAINING_ROWS, quietly, read_json, with_training_rows
from fairhead.report.model_card import CARD, Card, is_ours
from fairhead.settings import check_config
from fairhead.store import filling

# The methods that a model can carry, by the name of the child module that they add to it -> their settings.
ATTACHABLE = {
    "dam": "fairhead.mitigate.dam:DAM",
    "encoder_layer": "fairhead.mitigate.encoder_layer:EncoderLayer",
    "self_debias": "fairhead.mitigate.without_training:SelfDebias",
}

FEATURES = "features"  # the name of the input of a `LinearHead`
_NOTE = "fairhead"  # the child module that says which method a model carries
_NOTE_KEY = f"{_NOTE}._extra_state"
# Files of versions that kept a method beside the weights, where it outlived them.
_FILES_BEFORE = ("fairhead.json", "fairhead.safetensors", "fairhead-self-debias.json")


def attach(model: Any, method: Any, tokenizer: Any = None) -> Any:
    """Attach a method to a Hugging Face model, so that any training of the model also trains the method.

    The method is saved with the model's own weights, and `load` restores both. The model's own loss includes the term
    of the method whenever the model is in training mode and receives labels.

    Args:
        model: a model with a task head.
        method: the method's settings, such as `DAM()`.
        tokenizer: the model's tokenizer, for methods that put words before a text (`SelfDebias`).

    Returns:
        The same model; for a method that acts on a language model's output, a model that wraps it.

    Raises:
        UnsupportedModel: the family cannot carry the method.
        InputError: the model already has a method, or a setting of this one is out of range.

    Example:
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> from fairhead.mitigate import DAM, attach
        >>> config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=16)
        >>> model = attach(ViTForImageClassification(config), DAM())
        >>> [name for name, _ in model.named_children()]
        ['vit', 'classifier', 'dam', 'fairhead']
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"the model is {model!r}; expected a model object: fairhead.load gives one")
    if method_of(model) is not None:
        raise InputError(f"this {type(model).__name__} carries {method_of(model)} already: start from a fresh model")
    name, needs_tokenizer = type(method).__name__, getattr(method, "needs_tokenizer", False)
    if _name_of(method) is None:
        raise InputError(f"{name} is not a method that a model can carry; these are: {', '.join(ATTACHABLE)}")
    if needs_tokenizer and tokenizer is None:
        raise InputError(f"{name} puts words before a text: give attach the model's tokenizer as well")
    check_config(method)
    carrier = method.attach(model, tokenizer) if needs_tokenizer else method.attach(model)
    if carrier is not model:
        carrier.method = method
        return carrier
    model.add_module(_NOTE, _Note(method))
    model.register_load_state_dict_pre_hook(_with_own_names)
    for part, child in model.named_children():
        if part in ATTACHABLE:  # in the mode of the rest
            child.train(model.training)
    return model


def method_of(model: nn.Module) -> Any:
    """The method that `attach` has put into a model, or None."""
    found = getattr(model._modules.get(_NOTE, model), "method", None)
    return found if _name_of(found) is not None else None


def within(model: Any) -> Any:
    """The model whose weights are kept: the one inside, where a method stands around it."""
    return model.base if method_of(model) is not None and _NOTE not in model._modules else model


def refuse_method(model: nn.Module, what: str) -> None:
    """Raise where a model carries a method, which `what` would leave out."""
    method = method_of(model)
    if method is not None:
        raise InputError(
            f"this model carries {type(method).__name__}, which {what} would leave out: give the model it was made from"
        )


def positions_of(model: nn.Module) -> int | None:
    """The tokens that every batch must have for the model's method, which keeps statistics for each; None for any."""
    found = (getattr(model._modules.get(name), "positions", None) for name in ATTACHABLE)
    return next((positions for positions in found if positions is not None), None)


class _Note(nn.Module):
    """Which method a model carries, kept among its weights."""

    def __init__(self, method: Any) -> None:
        super().__init__()
        self.method = method

    def get_extra_state(self) -> Tensor:
        return _as_tensor(self.method)

    def set_extra_state(self, state: Tensor) -> None:
        """Ignore it: training may continue from weights of a run with other settings."""


def _with_own_names(model: Any, state: dict[str, Tensor], prefix: str, *more: Any) -> None:
    """Give the weights of a `Trainer`'s checkpoint the names that they have in the model.

    transformers writes the weights of some families (ViT, DINOv2) under other names. A Trainer that resumes, or loads
    its best model, reads them as they are, and goes on with random weights for what it does not find.
    """
    own: dict[str, Tensor] = {} if prefix or _NOTE_KEY not in state else model.state_dict()
    lacking = own.keys() - state.keys()
    if not lacking:
        return
    from transformers.core_model_loading import revert_weight_conversion

    names = {tensor.data_ptr(): name for name, tensor in own.items() if name in lacking}
    for written, tensor in revert_weight_conversion(model, own).items():
        if written in state and tensor.data_ptr() in names:
            name = names[tensor.data_ptr()]
            state[name] = state.pop(written)
            lacking.discard(name)
    if lacking:
        raise InputError(
            f"the checkpoint lacks {len(lacking)} weights that this {type(model).__name__} needs, such as "
            f"{min(lacking)}: give a checkpoint of the same model, or start from one with fairhead.load"
        )


def save(model: Any, folder: Path | str, *beside: Callable[[Path], Any]) -> None:
    """Write a Hugging Face model to a folder, with the method attached to it if there is one.

    It is an ordinary Hugging Face folder; what a method has learnt is among the weights, where transformers passes it
    over and `load` finds it. A run that is stopped leaves no half of a model.

    Args:
        model: a plain one, or what `attach` returned.
        folder: where to; a model that is there already is replaced.
        beside: write what belongs to it into a folder, such as the `save_pretrained` of its tokenizer.

    Example:
        >>> import tempfile, torch
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> from fairhead.mitigate import DAM, attach, load, save
        >>> shape = dict(image_size=4, patch_size=2, num_channels=1, hidden_size=8, intermediate_size=8)
        >>> model = ViTForImageClassification(ViTConfig(num_hidden_layers=1, num_attention_heads=2, **shape))
        >>> model = attach(model, DAM()).eval()
        >>> picture = torch.zeros(1, 1, 4, 4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save(model, folder)
        ...     again = load(folder)
        >>> torch.equal(model(picture).logits, again(picture).logits)
        True
    """
    folder, written, weights = Path(folder), within(model), None
    if written is not model:
        weights = {**written.state_dict(), _NOTE_KEY: _as_tensor(method_of(model))}
    with filling(folder) as part, quietly():
        written.save_pretrained(part, state_dict=weights)
        for write in (with_training_rows(written), *beside):
            write(part)
        if not (part / CARD).exists() and (is_ours(folder) or not (folder / CARD).exists()):
            _plain_card(model).write(part)
        # Of the model that was there nothing may be taken for a part of this one.
        for pattern in ("config.json", "model.safetensors*", "model-*-of-*.safetensors", TRAINING_ROWS, *_FILES_BEFORE):
            for old in folder.glob(pattern):
                old.unlink()


def _plain_card(model: Any) -> Card:
    """The README of a model that fairhead has not measured."""
    method, name = method_of(model), type(within(model)).__name__
    return Card(
        title=f"{name}{'' if method is None else f' with {type(method).__name__}'}",
        done="It was saved by fairhead, which measured nothing of it: `fairhead audit` and `fairhead lm suite` do.",
        findings=(),
        data="no data",
        carries=None if method is None else type(method).__name__,
    )


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder that transformers reads weights from."""
    single = folder / "model.safetensors"
    shards = set(read_json(folder / f"{single.name}.index.json").get("weight_map", {}).values())
    return [single] if single.is_file() else [folder / name for name in sorted(shards)]


def carries_method(folder: Path) -> bool:
    """Whether the weights of a folder carry a method; they are not loaded."""
    from safetensors import safe_open

    def note_in(file: Path) -> bool:
        with safe_open(file, "pt") as opened:
            return _NOTE_KEY in opened.keys()  # noqa: SIM118 - it is no dictionary

    return any(map(note_in, weight_files(folder)))


def with_method(model: nn.Module, folder: Path, tokenizer: Callable[[], Any]) -> nn.Module:
    """The model with the method that the weights of its folder carry, if any; `tokenizer` is called if it needs one."""
    from safetensors import safe_open

    weights: dict[str, Tensor] = {}  # what the method has learnt, by the names in the model
    source = folder / "model.safetensors"
    for file in weight_files(folder):
        with safe_open(file, "pt") as opened:
            keys: list[str] = opened.keys()
            weights |= {key: opened.get_tensor(key) for key in keys if _is_of_method(key) or key == _NOTE_KEY}
    note = weights.pop(_NOTE_KEY, None)
    before = next((folder / name for name in _FILES_BEFORE if (folder / name).is_file()), None)
    if note is None and weights:
        raise InputError(f"{source} has weights of a method ({min(weights)!r}) and not its settings: save it again")
    if note is None and before is not None:
        raise InputError(
            f"{before} is of a version of fairhead that kept methods beside the weights, and does not say whether it "
            "belongs to these: delete it if the model is meant to be plain, or train and save the model again"
        )
    if note is None:
        return model
    method = _from_json(bytes(note.tolist()).decode(errors="replace"), source)
    own = tokenizer() if getattr(method, "needs_tokenizer", False) else None
    carrier: nn.Module = attach(model, method, own)
    odd = {key for key in carrier.state_dict() if _is_of_method(key)} ^ weights.keys()
    if odd:
        raise InputError(
            f"{source}: weights and settings of {_name_of(method)} do not belong together: {min(odd)!r} is in one "
            "only. Another version of fairhead wrote them: train and save the model again"
        )
    carrier.load_state_dict(weights, strict=False)
    return carrier


def _is_of_method(key: str) -> bool:
    return key.split(".")[0] in ATTACHABLE


def _name_of(method: Any) -> str | None:
    kind = f"{type(method).__module__}:{type(method).__qualname__}"
    return next((name for name, path in ATTACHABLE.items() if path == kind), None)


def _as_tensor(method: Any) -> Tensor:
    """Name and settings as bytes of JSON: safetensors keep tensors only."""
    text = json.dumps({"method": _name_of(method), "settings": asdict(method)}, indent=2)
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _from_json(text: str, source: Path) -> Any:
    try:
        saved = json.loads(text)
        name, settings = saved["method"], dict(saved["settings"])
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{source} does not name a method and its settings: save it again") from None
    check_known(name, ATTACHABLE, f"{source} names the method {name!r}; known:")
    kind = resolve_name(ATTACHABLE[name])
    for option in settings.keys() - {setting.name for setting in fields(kind)}:
        raise InputError(f"{source} has a setting {option!r} that {name!r} has not: another version wrote it")
    return kind(**{option: tuple(value) if isinstance(value, list) else value for option, value in settings.items()})


class LinearHeadConfig(PreTrainedConfig):
    """How many features there are; the classes are `id2label`, as in every classifier."""

    model_type = "fairhead_linear_head"

    def __init__(self, hidden_size: int = 1, **more: Any) -> None:
        """`hidden_size` features."""
        self.hidden_size = hidden_size
        super().__init__(**more)


class LinearHead(PreTrainedModel):
    """Logits of standardised features: what a network's last layer is, without the network.

    Mean and scale of the features are kept with the weights, so that a penalty treats all features alike; `layer` folds
    them into one linear layer, for a network that ends in it.
    """

    config_class = LinearHeadConfig
    main_input_name = FEATURES
    base_model_prefix = ""

    mean: Tensor
    scale: Tensor

    def __init__(self, config: LinearHeadConfig) -> None:
        """Zero weights, features as they are."""
        super().__init__(config)
        self.register_buffer("mean", torch.zeros(config.hidden_size))
        self.register_buffer("scale", torch.ones(config.hidden_size))
        self.last = nn.Linear(config.hidden_size, len(config.id2label or {}))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
        elif isinstance(module, LinearHead):
            nn.init.zeros_(module.mean)
            nn.init.ones_(module.scale)

    @classmethod
    def of(cls, features: Tensor, classes: Sequence[str]) -> "LinearHead":
        """Zero weights; mean and scale are those of `features`, [n, D]."""
        check_features(features, "training")
        head = cls(LinearHeadConfig(features.shape[1], id2label=dict(enumerate(classes))))
        scale, largest = features.float().std(0), features.float().abs().amax(0)
        head.mean.copy_(features.float().mean(0))
        # A column that is constant but for rounding says nothing: divided by 1, its weight stays near zero.
        head.scale.copy_(torch.where(scale > 1e-6 * largest, scale, 1.0))
        return head

    def standardised(self, features: Tensor) -> Tensor:
        """[n, D], each column with mean 0 and variance 1 over the rows that it was made for."""
        return (features.float() - self.mean) / self.scale

    def forward(self, features: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        """`.logits` [n, C], and `.loss` where labels are given."""
        logits: Any = self.last(self.standardised(features))
        loss: Any = None if labels is None else cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)

    def layer(self) -> tuple[Tensor, Tensor]:
        """Weight [C, D] and bias [C] of the same function of the features as they are."""
        weight = self.last.weight.detach() / self.scale
        return weight, self.last.bias.detach() - weight @ self.mean


def check_features(features: Tensor, what: str) -> None:
    """Refuse features that are not finite numbers, or all alike."""
    if features.dim() != 2:
        raise InputError(f"the {what} features have the shape {list(features.shape)}; expected [rows, columns]")
    check_finite(features, what)
    if len(features) > 1 and torch.equal(features.amin(0), features.amax(0)):
        raise InputError(f"the {what} features are the same in every row: this encoder says nothing about these inputs")


def check_finite(features: Tensor, what: str) -> None:
    """Refuse features [n, D] that are not finite numbers."""
    finite = features.isfinite()
    if not finite.all():
        column = int((~finite).any(0).nonzero()[0])
        raise InputError(
            f"column {column} of the {what} features is not finite in {int((~finite[:, column]).sum())} of "
            f"{len(features)} rows: check the encoder, or leave those rows out"
        )


AutoConfig.register(LinearHeadConfig.model_type, LinearHeadConfig)
AutoModelForImageClassification.register(LinearHeadConfig, LinearHead)
