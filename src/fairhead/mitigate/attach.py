"""Putting a method into a model, and keeping such a model on disk (safetensors and JSON)."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fairhead.errors import InputError, UnsupportedModel, did_you_mean
from fairhead.heads import find_sites
from fairhead.mitigate.dam import DAM
from fairhead.mitigate.encoder_layer import EncoderLayer
from fairhead.settings import check_config
from fairhead.train.step import say_once

Attachable = DAM | EncoderLayer

# The methods that live inside a model, by the name of the child module that they add to it.
ATTACHABLE: dict[str, type[Attachable]] = {"dam": DAM, "encoder_layer": EncoderLayer}

_METHOD_SETTINGS = "fairhead.json"
_METHOD_WEIGHTS = "fairhead.safetensors"
_NOTE = "fairhead"  # the child module that says which method a model carries

Model = TypeVar("Model", bound=nn.Module)


def attach(model: Model, method: Attachable) -> Model:
    """Put a method into a Hugging Face model, in place; whatever trains that model then trains the method.

    What the method adds is saved with the model's own weights, whoever saves them (`save`, `save_pretrained`, a
    `Trainer`), and `load` gives the model back. The method's term is in the model's own loss whenever the model is in
    training mode and is given labels.

    Args:
        model: a model with a task head.
        method: the method's configuration, such as `DAM()`.

    Returns:
        The same model.

    Raises:
        UnsupportedModel: the family cannot carry the method.
        InputError: a method is attached already, or a setting of this one is out of its range.

    Example:
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> from fairhead.mitigate import DAM, attach
        >>> config = ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=16)
        >>> model = attach(ViTForImageClassification(config), DAM())
        >>> [name for name, _ in model.named_children()]
        ['vit', 'classifier', 'dam', 'fairhead']
    """
    if method_of(model) is not None:
        raise InputError(f"this {type(model).__name__} carries {method_of(model)} already: start from a fresh model")
    check_config(method)
    _require_encoder(model)
    method.attach(model)
    model.add_module(_NOTE, _Note(method))
    return model


def method_of(model: nn.Module) -> Attachable | None:
    """The method that `attach` has put into a model, or None."""
    note = model._modules.get(_NOTE)
    return note.method if isinstance(note, _Note) else None


def _require_encoder(model: nn.Module) -> None:
    """Refuse decoders by name: their first token, which DAM reads, sees nothing but itself."""
    for site in find_sites(model):
        if getattr(site.module, "is_causal", False) or getattr(site.module, "is_decoder", False):
            raise UnsupportedModel(
                f"{type(model).__name__} is no encoder: tokens of {site.family} see only those before them, and the "
                "first one, which DAM reads, only itself. Give an encoder: ViT, DINOv2, CLIP vision, BERT, RoBERTa, "
                "DistilBERT or ModernBERT"
            )


class _Note(nn.Module):
    """Which method a model carries, kept among its weights: there it travels with whatever saves them."""

    def __init__(self, method: Attachable) -> None:
        super().__init__()
        self.method = method

    def get_extra_state(self) -> Tensor:
        """The settings as bytes of JSON: safetensors keep tensors only."""
        return torch.frombuffer(bytearray(_as_json(self.method).encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing: weights of a run with other settings may be gone on from."""


def save(model: Any, folder: Path | str) -> None:
    """Write a Hugging Face model to a folder, with the method attached to it if there is one.

    The model itself is an ordinary Hugging Face folder (config.json, model.safetensors); a method adds its settings
    (fairhead.json) and what it has learnt (fairhead.safetensors).

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
    from safetensors.torch import save_file

    folder = Path(folder)
    for name in (_METHOD_SETTINGS, _METHOD_WEIGHTS):  # of another model that was kept here before
        (folder / name).unlink(missing_ok=True)
    method = method_of(model)
    if method is None:
        model.save_pretrained(folder)
        return
    weights = model.state_dict()
    of_method = {key: tensor.contiguous() for key, tensor in weights.items() if _is_of_method(key)}
    own = {key: tensor for key, tensor in weights.items() if key not in of_method and key != _NOTE_KEY}
    model.save_pretrained(folder, state_dict=own)
    save_file(of_method, folder / _METHOD_WEIGHTS)
    (folder / _METHOD_SETTINGS).write_text(_as_json(method) + "\n", encoding="utf-8")


def load(folder: Path | str) -> nn.Module:
    """Read back a model that `save`, its own `save_pretrained` or a `Trainer` wrote: the same outputs.

    It comes in evaluation mode. See `save` for an example. The `from_pretrained` of transformers leaves the method out.

    Raises:
        InputError: the folder has no model, or names a method that is not known.
    """
    import transformers

    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json: expected a folder that fairhead.mitigate.save has written")
    named = transformers.AutoConfig.from_pretrained(folder).architectures or ["no class"]
    kind = getattr(transformers, named[0], None)
    if kind is None:
        raise InputError(f"{folder / 'config.json'} names {named[0]} as the model's class, which transformers lacks")
    kept = _kept_method(folder)
    with quietly():  # on what `kept` has and the model itself has not
        found = kind.from_pretrained(folder, output_loading_info=True)
    model: nn.Module = found[0]
    missing: list[str] = sorted(found[1]["missing_keys"])
    if missing:
        say_once(
            f"{folder} lacks weights of {type(model).__name__} ({len(missing)}, such as {missing[0]}): random ones"
        )
    if kept is not None:
        attach(model, kept.method)
        expected = {key for key in model.state_dict() if _is_of_method(key)}
        if expected != kept.weights.keys():
            odd = sorted(expected ^ kept.weights.keys())
            raise InputError(
                f"{kept.source} does not belong to its settings: {odd[0]!r} is in one only. Files of two models are "
                "mixed there, or another version of fairhead wrote them: train and save the model anew"
            )
        model.load_state_dict(kept.weights, strict=False)
    return model.eval()


class _Kept(NamedTuple):
    """A method on disk: its settings, what it has learnt, and the file that says so."""

    method: Attachable
    weights: dict[str, Tensor]
    source: Path


def _kept_method(folder: Path) -> _Kept | None:
    """The method beside a model (of `save`), or among its weights (of whatever else saves models)."""
    from safetensors import safe_open
    from safetensors.torch import load_file

    weights: dict[str, Tensor] = {}
    source = folder
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as opened:
            keys: list[str] = opened.keys()
            ours = [key for key in keys if _is_of_method(key) or key == _NOTE_KEY]
            weights |= {key: opened.get_tensor(key) for key in ours}
            source = file if ours else source
    note = weights.pop(_NOTE_KEY, None)
    if note is not None:  # first: whoever wrote these weights may have left older files of `save` beside them
        return _Kept(_from_json(bytes(note.tolist()).decode(), source), weights, source)
    if weights:
        raise InputError(f"{source} has weights of a method ({min(weights)!r}) and not its settings: {_SAVE_ANEW}")
    apart, learnt = folder / _METHOD_SETTINGS, folder / _METHOD_WEIGHTS
    if not apart.is_file():
        return None
    if not learnt.is_file():
        raise InputError(f"{apart} is there and {learnt.name} is not: copy the folder again, whole")
    return _Kept(_from_json(apart.read_text(encoding="utf-8"), apart), load_file(learnt), learnt)


_NOTE_KEY = f"{_NOTE}._extra_state"
_SAVE_ANEW = "save the model with fairhead.mitigate.save"


def _is_of_method(key: str) -> bool:
    return key.split(".")[0] in ATTACHABLE


def _as_json(method: Attachable) -> str:
    name = next(name for name, kind in ATTACHABLE.items() if isinstance(method, kind))
    return json.dumps({"method": name, "settings": asdict(method)}, indent=2)


def _from_json(text: str, source: Path) -> Attachable:
    try:
        saved = json.loads(text)
        name, settings = saved["method"], dict(saved["settings"])
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{source} does not name a method and its settings: {_SAVE_ANEW}") from None
    if name not in ATTACHABLE:
        known = list(ATTACHABLE)
        raise InputError(f"{source} names the method {name!r}; known: {', '.join(known)}.{did_you_mean(name, known)}")
    kind = ATTACHABLE[name]
    for option in settings.keys() - {setting.name for setting in fields(kind)}:
        raise InputError(f"{source} has a setting {option!r} that {name!r} has not: another version wrote it")
    return kind(**settings)


@contextmanager
def quietly() -> Iterator[None]:
    """Without transformers' bars, and without its list of weights that are meant to be new, or to be left over."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
