"""A model, or a scorer, from a folder of weights."""

import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import transformers
from safetensors import SafetensorError
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fairhead.devices import device_named
from fairhead.errors import InputError, UnsupportedModel
from fairhead.language.scorer import Scorer
from fairhead.language.tokens import Start

DType = Literal["auto", "float32", "bfloat16", "float16"]


def load_scorer(
    path: str | os.PathLike[str],
    *,
    device: str = "auto",
    dtype: DType = "auto",
    batch_tokens: int | None = None,
    start: Start = "always",
) -> Scorer:
    """Load a causal language model and its tokeniser from a folder, for scoring.

    Args:
        path: a folder with config.json, safetensors weights and the tokeniser; nothing is downloaded.
        device: "cpu", "cuda", "cuda:1", ...; "auto" takes a GPU where there is one.
        dtype: "float32", "bfloat16" or "float16"; "auto" is float32 on a processor and bfloat16 on a GPU.
        batch_tokens: as in `Scorer`.
        start: as in `Scorer`.

    Example:
        >>> load_scorer("no/such/folder")
        Traceback (most recent call last):
            ...
        fairhead.errors.InputError: no/such/folder: a folder with a model (config.json) is expected; it is not there
    """
    loaded = load_model(path, device=device, dtype=dtype)
    model = _at_decoding(loaded.model, loaded.tokenizer, Path(path), start)
    return Scorer(model, loaded.tokenizer, batch_tokens=batch_tokens, start=start)


def _at_decoding(model: Any, tokenizer: Any, folder: Path, start: Start) -> Any:
    """The model with what its folder says is done to its output, if anything (`fairhead mitigate self_debias`)."""
    from fairhead.mitigate.self_debias import read_settings

    settings = read_settings(folder)
    if settings is None:
        return model
    if start != "always":
        raise InputError(f"{folder}: self-debiasing puts its sentence after the start token; --start always is needed")
    return settings.attach(model, tokenizer)


class LoadedModel(NamedTuple):
    """A causal language model in evaluation mode, and its tokeniser."""

    model: Any
    tokenizer: Any


def load_model(path: str | os.PathLike[str], *, device: str = "auto", dtype: DType = "auto") -> LoadedModel:
    """Load a causal language model and its tokeniser from a folder; see `load_scorer`."""
    folder = Path(path)
    if not (folder / "config.json").is_file():
        found = "it has no config.json" if folder.is_dir() else "it is not there"
        raise InputError(f"{path}: a folder with a model (config.json) is expected; {found}")
    place = device_named(device)
    kind = _dtype(dtype, place)
    config = _loaded("config.json", folder, transformers.AutoConfig)
    _refuse_other_architectures(folder, config)
    tokenizer = _loaded("the tokeniser", folder, transformers.AutoTokenizer)
    options = {"config": config, "dtype": kind, "use_safetensors": True, "output_loading_info": True}
    model, found = _loaded("the weights", folder, transformers.AutoModelForCausalLM, **options)
    missing = sorted(found["missing_keys"])
    if missing:
        # They would be random numbers, and the scores with them.
        raise InputError(
            f"{folder}: the file of weights lacks {len(missing)} that the model needs, such as {missing[0]}"
        )
    return LoadedModel(model.eval().to(place), tokenizer)


def _loaded(what: str, folder: Path, auto: Any, **options: Any) -> Any:
    try:
        return auto.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(f"{folder}: {what} cannot be loaded: {reason}") from None


def _refuse_other_architectures(folder: Path, config: Any) -> None:
    # An encoder would be loaded too, with an output layer of random numbers.
    named = list(config.architectures or [])
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    encoder_only = {"BertLMHeadModel", "RobertaForCausalLM"} if not getattr(config, "is_decoder", False) else set()
    if named and not any(name in causal and name not in encoder_only for name in named):
        raise UnsupportedModel(
            f"{folder}: holds a {named[0]}; a causal language model (such as LlamaForCausalLM) is expected"
        )


def _dtype(name: str, device: torch.device) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    known["auto"] = torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in known:
        raise InputError(f"dtype {name!r} is not known; one of {', '.join(known)} is expected")
    return known[name]
