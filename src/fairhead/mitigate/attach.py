"""Putting a method into a model, and keeping such a model on disk (safetensors and JSON)."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from fairhead.errors import InputError, did_you_mean
from fairhead.mitigate.dam import DAM
from fairhead.mitigate.encoder_layer import EncoderLayer
from fairhead.settings import check_config

Attachable = DAM | EncoderLayer

# The methods that live inside a model, by the name of the child module that they add to it.
ATTACHABLE: dict[str, type[Attachable]] = {"dam": DAM, "encoder_layer": EncoderLayer}

_METHOD_SETTINGS = "fairhead.json"
_METHOD_WEIGHTS = "fairhead.safetensors"
_METHOD = "_fairhead_method"

Model = TypeVar("Model", bound=nn.Module)


def attach(model: Model, method: Attachable) -> Model:
    """Put a method into a Hugging Face model, in place; whatever trains that model then trains the method.

    What the method adds is saved with the model's own weights, and its term is in the model's own loss whenever
    the model is in training mode and is given labels.

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
        ['vit', 'classifier', 'dam']
    """
    if method_of(model) is not None:
        raise InputError(f"this {type(model).__name__} carries {method_of(model)} already: start from a fresh model")
    check_config(method)
    method.attach(model)
    model.__dict__[_METHOD] = method
    return model


def method_of(model: nn.Module) -> Attachable | None:
    """The method that `attach` has put into a model, or None."""
    return model.__dict__.get(_METHOD)


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
    method = method_of(model)
    if method is None:
        model.save_pretrained(folder)
        return
    name = _name_of(method)
    weights = model.state_dict()
    of_method = {key: tensor.contiguous() for key, tensor in weights.items() if key.split(".")[0] in ATTACHABLE}
    own = {key: tensor for key, tensor in weights.items() if key not in of_method}
    model.save_pretrained(folder, state_dict=own)
    save_file(of_method, folder / _METHOD_WEIGHTS)
    text = json.dumps({"method": name, "settings": asdict(method)}, indent=2)
    (folder / _METHOD_SETTINGS).write_text(text + "\n", encoding="utf-8")


def load(folder: Path | str) -> nn.Module:
    """Read back what `save` wrote: the same outputs, in evaluation mode. See `save` for an example.

    Raises:
        InputError: the folder has no model, or names a method that is not known.
    """
    import transformers
    from safetensors.torch import load_file

    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json: expected a folder that fairhead.mitigate.save has written")
    (architecture,) = transformers.AutoConfig.from_pretrained(folder).architectures
    model: nn.Module = getattr(transformers, architecture).from_pretrained(folder)
    if (folder / _METHOD_SETTINGS).is_file():
        saved = json.loads((folder / _METHOD_SETTINGS).read_text(encoding="utf-8"))
        name = saved["method"]
        if name not in ATTACHABLE:
            raise InputError(
                f"{folder / _METHOD_SETTINGS} names the method {name!r}; known: {', '.join(ATTACHABLE)}."
                + did_you_mean(name, list(ATTACHABLE))
            )
        attach(model, ATTACHABLE[name](**saved["settings"]))
        learnt = load_file(folder / _METHOD_WEIGHTS)
        own = model.state_dict().keys()
        expected = {key for key in own if key.split(".")[0] in ATTACHABLE}
        if expected != learnt.keys():
            odd = sorted(expected ^ learnt.keys())
            raise InputError(f"{folder / _METHOD_WEIGHTS} does not belong to its settings: {odd[0]!r} is in one only")
        model.load_state_dict(learnt, strict=False)
    return model.eval()


def _name_of(method: Attachable) -> str:
    return next(name for name, kind in ATTACHABLE.items() if isinstance(method, kind))
