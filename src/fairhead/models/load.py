"""Loading a model with whatever it carries: a method that `attach` put into it, edits, LoRA adapters.

A model is a folder, a name on the Hugging Face hub that is in the local cache, or a live `nn.Module`. All weights come
through one call of `from_pretrained`, as safetensors and without remote code; what is missing, misshapen or not finite
is refused by its name.
"""

import hashlib
import json
import os
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fairhead.errors import FairheadError, InputError, UnsupportedModel
from fairhead.models.attached import LinearHead, method_of, save, with_method, within
from fairhead.models.places import (
    ADAPTER,
    Place,
    config_of,
    find,
    origin,
    processor_of,
    quietly,
    read_json,
    reading,
    tokenizer_of,
)

DType = Literal["auto", "stored", "float32", "bfloat16", "float16"]
# "any": the class that the folder names. "image": the same, if it reads pictures. "text": a classifier of texts.
# "causal": a language model. "encoder": without a task head.
Kind = Literal["any", "image", "text", "causal", "encoder"]
LoadIn = Literal["8bit", "4bit"]
Model = str | os.PathLike[str] | nn.Module

_AUTO = {
    "text": "AutoModelForSequenceClassification",
    "causal": "AutoModelForCausalLM",
    "encoder": "AutoModel",
    # What LoRA's configuration calls tasks.
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "CAUSAL_LM": "AutoModelForCausalLM",
}
# CLIP was trained in the space that its projection leads to; of two towers, pictures need one.
_TOWERS = {"clip": "CLIPVisionModelWithProjection", "siglip": "SiglipVisionModel"}
_ADAPTER_WEIGHTS, _IN_ADAPTER = "adapter_model.safetensors", "base_model.model."


def load(model: Model, *, device: str = "cpu", dtype: DType = "stored", download: bool = False) -> nn.Module:
    """Load a model in evaluation mode, with any method attached to it, so that it gives the outputs it was saved with.

    Args:
        model: a folder written by `save`, `save_pretrained`, a `Trainer` or PEFT; a hub name in the local cache; or a
            model object, which is returned.
        device: "cpu", "cuda", "cuda:1", ...; "auto" uses a GPU if there is one.
        dtype: "float32", "bfloat16" or "float16"; "stored" is that of the file; "auto" is float32 on a CPU and bfloat16
            on a GPU.
        download: download a model that is not in the local cache. "hub:NAME" does the same.

    Raises:
        InputError: there is no model, or weights of it are missing, misshapen or not finite.

    Example:
        >>> load("no/such/folder")
        Traceback (most recent call last):
            ...
        fairhead.errors.InputError: no/such/folder: expected a folder with a model (config.json); it is not there
    """
    return open_model(model, device=device, dtype=dtype, download=download).model


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, with what makes its inputs ready."""

    model: Any  # with the method that it carries
    place: Place | None  # its files; None for a live model that knows of none
    given: Mapping[str, Any]  # its tokenizer and processor, where they do not come from there

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        found: torch.device = next(self.model.parameters()).device
        return found

    @cached_property
    def tokenizer(self) -> Any:
        """Its tokenizer."""
        return self.given.get("tokenizer") or tokenizer_of(self.files("tokenizer"))

    @cached_property
    def processor(self) -> Any:
        """Its image processor."""
        return self.given.get("processor") or processor_of(self.files("processor"))

    def files(self, what: str) -> Place:
        """Where `what` is to be found."""
        if self.place is None:
            raise InputError(f"this {type(self.model).__name__} was not loaded from a folder: give its {what} as well")
        return self.place

    def fingerprint(self) -> str:
        """A hash of the configuration, the weights and the method that the model carries."""
        config = self.model.config.to_dict()
        own = {name: value for name, value in config.items() if name not in ("_name_or_path", "transformers_version")}
        text = json.dumps(own, sort_keys=True, default=str) + str(method_of(self.model)) + weights_digest(self.model)
        return hashlib.sha256(text.encode()).hexdigest()


def open_model(
    model: Model,
    kind: Kind = "any",  # what is expected of it
    *,
    device: str = "cpu",
    dtype: DType = "stored",
    download: bool = False,
    tokenizer: Any = None,  # of a live model; otherwise that of the folder, as is the processor
    processor: Any = None,
    device_map: str | None = None,  # how accelerate spreads layers over several GPUs: auto, balanced or sequential
    load_in: LoadIn | None = None,  # round the weights of linear layers to so many bits, by bitsandbytes on a GPU
) -> LoadedModel:
    """What `load` gives, with its files, tokenizer and image processor, to run it on data.

    A live model stays where it is and as it is. One that is of another kind is an `UnsupportedModel`.
    """
    given = {"tokenizer": tokenizer, "processor": processor}
    if isinstance(model, nn.Module):
        return LoadedModel(model.eval(), origin(model), given)
    target = device_named(device)
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "stored": None}
    known["auto"] = torch.float32 if target.type == "cpu" else torch.bfloat16
    if dtype not in known:
        raise InputError(f"dtype {dtype!r} is not known; expected one of {', '.join(known)}")
    place = find(model, download)
    placing = _placing(place, target, device_map, load_in)
    found = read_weights(place, class_of(place, kind), known[dtype], kind, **placing).eval()
    off = [where for where in getattr(found, "hf_device_map", {}).values() if str(where) in ("cpu", "disk")]
    if off and target.type != "cpu":
        raise InputError(
            f"{place.name} does not fit: {len(off)} of its parts would lie outside the GPUs; load it in 8bit"
        )
    return LoadedModel(found if placing else found.to(target), place, given)


def _placing(place: Place, target: torch.device, device_map: str | None, load_in: LoadIn | None) -> dict[str, Any]:
    """Arguments of `from_pretrained` for the placement and quantization of weights; none for a plain model."""
    settings: dict[str, Any] = {} if device_map is None else {"device_map": device_map}
    if load_in is None:
        return settings
    if target.type != "cuda":
        raise InputError(f"loading in {load_in} needs a CUDA GPU, and the device is {target}: use --dtype bfloat16")
    if find_spec("bitsandbytes") is None:
        raise InputError(f"loading in {load_in} needs bitsandbytes, not installed here: pip install bitsandbytes")
    if place.adapter is not None:
        raise InputError(
            f"{place.name} is a LoRA adapter, which cannot be merged into {load_in} weights: merge it first"
        )
    bits = {f"load_in_{load_in}": True, "bnb_4bit_compute_dtype": torch.bfloat16}
    rounding = transformers.BitsAndBytesConfig(**bits)
    return {"device_map": {"": target}, **settings, "quantization_config": rounding}


def class_of(place: Place, kind: Kind) -> Any:
    """The class of transformers that a model is loaded as; what is of another kind is refused."""
    config = config_of(place)
    named = [config.architectures] if isinstance(config.architectures, str) else config.architectures
    named = [*map(str, named)] if isinstance(named, list) else []
    task = None if place.adapter is None else read_json(place.adapter / ADAPTER).get("task_type")
    if kind == "causal":  # an encoder would be loaded too, with an output layer of random numbers
        causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        causal -= set() if getattr(config, "is_decoder", False) else {"BertLMHeadModel", "RobertaForCausalLM"}
        if named and not causal & set(named):
            raise UnsupportedModel(
                f"{place.name}: holds a {named[0]}; expected a causal language model (such as LlamaForCausalLM)"
            )
    if kind == "encoder":
        projected = [name for name in named if name.endswith("ModelWithProjection")]
        return getattr(transformers, projected[0] if projected else _TOWERS.get(config.model_type, _AUTO[kind]))
    if kind in _AUTO or task in _AUTO:
        return getattr(transformers, _AUTO[kind if kind in _AUTO else str(task)])
    name = named[0] if named else "AutoModel" if kind == "image" else "no class"
    found = LinearHead if name == LinearHead.__name__ else getattr(transformers, name, None)
    if name != "AutoModel" and not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise InputError(f"{place.folder / 'config.json'} names {name} as the model's class, which transformers lacks")
    reads = getattr(found, "main_input_name", "pixel_values")
    if kind == "image" and reads != "pixel_values" and not hasattr(config, "vision_config"):
        raise InputError(f"{place.name} holds a {name}, which reads {reads} and no images")
    return found


def read_weights(
    place: Place,
    kind: Any,
    dtype: torch.dtype | None = None,
    what: str = "any",
    *,
    fresh_head: bool = False,
    pass_through: bool = False,
    **settings: Any,
) -> Any:
    """A model of the class `kind` with the weights of a folder, the adapter merged and the method attached.

    A pooler that an encoder's file lacks is left out. With `fresh_head`, weights outside the encoder may be missing or
    of another shape, and are random then; with `pass_through`, square layers among them pass their input on.
    """
    with reading(place, "the weights"), quietly():
        model, found = kind.from_pretrained(
            place.folder,
            dtype="auto" if dtype is None else dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **settings,
        )
    shapes = {
        key: f", {list(there)} there and {list(here)} in the model" for key, there, here in found["mismatched_keys"]
    }
    lacking = {**dict.fromkeys(found["missing_keys"] - _in_adapter(place), ""), **shapes}
    if what == "encoder" and lacking and all(key.startswith("pooler.") for key in lacking):
        model.pooler, lacking = None, {}
    if pass_through:
        _hand_on(model, lacking)
    if fresh_head:
        lacking = {key: shape for key, shape in lacking.items() if _is_of_encoder(model, key)}
    if lacking:  # they would be random numbers, and so would be all that is computed with them
        advice = "; it is not a trained classifier: train one first, as with fairhead mitigate erm"
        raise InputError(
            f"{place.name}: the file of weights lacks {len(lacking)} that the model needs: "
            f"{_few([key + lacking[key] for key in sorted(lacking)])}{advice if what == 'text' else ''}"
        )
    with reading(place, "the weights"):
        model = with_method(model, place.folder, partial(tokenizer_of, place))
    if place.adapter is not None:
        _merge_adapter(place, within(model))
    spoiled = not_finite(model)
    if spoiled:
        raise InputError(
            f"{place.name}: weights are NaN or infinite, as training or saving went wrong: {_few(spoiled)}"
        )
    return model


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def not_finite(model: nn.Module) -> list[str]:
    """The names of the weights that hold a NaN or an infinite number."""
    found = []
    for name, weight in model.state_dict().items():
        large = isinstance(weight, Tensor) and weight.is_floating_point() and weight.numel() and weight.itemsize > 1
        if large and not torch.stack(torch.aminmax(weight)).isfinite().all():
            found.append(name)
    return found


def _hand_on(model: nn.Module, fresh: Iterable[str]) -> None:
    """Let new square layers pass their input on: RoBERTa and DistilBERT have one before the last layer.

    A last layer that is trained alone would otherwise see random mixtures of the features. A tanh or GELU that follows
    is nearly straight near 0, and a ReLU (DistilBERT's) above it. Neither needs more than 16 bits.
    """
    for key in fresh:
        name, _, kind = key.rpartition(".")
        layer = model.get_submodule(name) if kind == "weight" else None
        if isinstance(layer, nn.Linear) and layer.in_features == layer.out_features and layer.bias is not None:
            rectified = name.endswith("pre_classifier")
            nn.init.eye_(layer.weight).data.mul_(0.05 if rectified else 0.02)
            nn.init.constant_(layer.bias, 0.5 if rectified else 0.0)


def _is_of_encoder(model: nn.Module, key: str) -> bool:
    """Whether a weight belongs to the largest part of a model, and not to a pooler within it."""
    sizes = {name: sum(p.numel() for p in child.parameters()) for name, child in model.named_children()}
    return key.split(".")[0] == max(sizes, key=lambda name: sizes[name]) and ".pooler." not in key


def _in_adapter(place: Place) -> set[str]:
    """Weights of the model itself (a task head, mostly) that come with an adapter."""
    if place.adapter is None:
        return set()
    file = place.adapter / _ADAPTER_WEIGHTS
    if not file.is_file():
        raise InputError(f"{place.name} has no {_ADAPTER_WEIGHTS}: weights are read as safetensors only")
    with reading(place, "the adapter"), safe_open(file, "pt") as opened:
        keys: list[str] = opened.keys()
        return {key.removeprefix(_IN_ADAPTER) for key in keys}


def _merge_adapter(place: Place, model: Any) -> None:
    """Merge LoRA's matrices into the weights, in place."""
    try:
        from peft import PeftModel, get_peft_model_state_dict
    except ImportError:
        raise FairheadError(f"{place.name} is a LoRA adapter, which needs peft: pip install peft") from None
    assert place.adapter is not None
    settings = read_json(place.adapter / ADAPTER)
    # Other kinds load tokenizers and files of their own; Megatron's layers are imported by the name that is given.
    if settings.get("peft_type") != "LORA" or settings.get("megatron_config"):
        raise InputError(
            f"{place.name} is a PEFT adapter of the kind {settings.get('peft_type')!r}; plain LoRA is read"
        )
    with reading(place, "the adapter"), quietly(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of missing weights, which are refused here
        adapted: Any = PeftModel.from_pretrained(model, place.adapter, local_files_only=True)
    expected = {key.removeprefix(_IN_ADAPTER) for key in get_peft_model_state_dict(adapted)}
    missing = expected - _in_adapter(place)
    if missing:
        raise InputError(
            f"{place.name}: the adapter lacks {len(missing)} weights of those that it names, such as {min(missing)}"
        )
    adapted.merge_and_unload()


def weights_digest(model: nn.Module) -> str:
    """A hash of all weights and buffers that are saved with them.

    Example:
        >>> torch.manual_seed(0) and weights_digest(nn.Linear(2, 2)) != weights_digest(nn.Linear(2, 2))
        True
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, weight in sorted(model.state_dict().items()):
        if not isinstance(weight, Tensor):
            continue
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(raw_bytes(weight).data)
    return digest.hexdigest()


def raw_bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """The memory of a tensor, row after row."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def device_named(name: str) -> torch.device:
    """A device that can be used: "cpu", "cuda", "cuda:1", ...; "auto" takes a GPU where there is one."""
    if name == "auto":
        own = f":{os.environ['LOCAL_RANK']}" if "LOCAL_RANK" in os.environ else ""  # of several processes, one per GPU
        return torch.device(f"cuda{own}" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"the device is {name!r}; expected cpu, cuda, cuda:1, ... or auto") from None
    if device.type == "cpu":
        return device
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None or here.type != device.type:
        what = "no GPU" if device.type == "cuda" else f"no {device.type} device"
        raise InputError(f"the device is {name}, and PyTorch sees {what} here: use --device cpu")
    if device.index is not None and device.index >= torch.accelerator.device_count():
        raise InputError(f"the device is {name}, and there are {torch.accelerator.device_count()}, counted from 0")
    return device


@contextmanager
def in_folder(model: Any, beside: Any) -> Iterator[str]:
    """The model as a name or a folder; a model object is written to a temporary folder."""
    if isinstance(model, str | Path):
        yield str(model)
        return
    with tempfile.TemporaryDirectory(prefix="fairhead-") as folder:
        reads_pictures = getattr(model, "main_input_name", "") == "pixel_values"
        loaded = open_model(model, tokenizer=beside, processor=beside)
        part = loaded.processor if reads_pictures else loaded.tokenizer
        save(model, folder, part.save_pretrained)
        yield folder
