"""Last-encoder training (DAM, section 3.4): the frozen part of a model runs once, its features stay on disk.

`last_encoder(model)` is the part that is trained: the last encoder layer and the task head, as a model of the same
class whose input is the features. `frozen_features(model, examples)` are those features, from a cache that is keyed by
the weights, the inputs and the precision themselves, so it can be shared by epochs, seeds, methods and experiments
and is never out of date. Both together compute what the whole model computes.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fairhead.errors import UnsupportedModel
from fairhead.models.attached import refuse_method
from fairhead.models.batches import quiet
from fairhead.models.load import weights_digest
from fairhead.train.cache import cache_folder, cached_array, key_of
from fairhead.train.examples import Examples
from fairhead.train.first_token import first_token_only
from fairhead.train.step import autocast

Progress = Callable[[int, int], None]


class _Encoder(NamedTuple):
    """Where a model keeps its embeddings and its layers."""

    trunk: nn.Module  # holds the embeddings
    holder: nn.Module  # holds the list of layers
    name: str  # of that list in its holder


def _encoder(model: nn.Module) -> _Encoder:
    """Find the longest list of layers, and the module around it that holds the embeddings."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    if lists:
        path, _ = max(lists, key=lambda entry: len(entry[1]))
        holder_path, _, name = path.rpartition(".")
        trunk_path = holder_path
        while True:
            trunk = model.get_submodule(trunk_path)
            if isinstance(getattr(trunk, "embeddings", None), nn.Module):
                return _Encoder(trunk, model.get_submodule(holder_path), name)
            if not trunk_path:
                break
            trunk_path = trunk_path.rpartition(".")[0]
    raise UnsupportedModel(
        f"{type(model).__name__} has no encoder of embeddings and layers; last-encoder training works with "
        "ViT, DINOv2, CLIP vision, BERT, RoBERTa, DistilBERT and ModernBERT"
    )


def last_encoder(model: nn.Module) -> nn.Module:
    """The trainable rest of a frozen model: its last encoder layer, what comes after it, and the task head.

    A copy: the model given stays as it is. Features go in under the name that `frozen_features` gives them. Where the
    task head reads the first token alone, the copy computes that token alone: the logits are the same, the hidden
    states of other tokens are not (see `fairhead.train.first_token`).
    """
    refuse_method(model, "last-encoder training")
    # Layers that would be thrown away are not copied first.
    encoder = _encoder(model)
    layers = getattr(encoder.holder, encoder.name)
    setattr(encoder.holder, encoder.name, nn.ModuleList([layers[-1]]))
    try:
        rest = copy.deepcopy(model)
    finally:
        setattr(encoder.holder, encoder.name, layers)
    trunk = _encoder(rest).trunk
    config: Any = getattr(rest, "config", None)
    if config is not None:
        config.num_hidden_layers = 1
    for name in ("embeddings", "pre_layrnorm"):  # CLIP normalises between its embeddings and its layers
        before: Any = getattr(trunk, name, None)
        if before is not None:
            before.requires_grad_(False)
            before.forward = _pass_on
    _cut(rest)
    return rest


def _cut(rest: Any) -> None:
    """Leave the other tokens out where the task head reads the first alone; see `first_token_only`."""
    name = "pixel_values" if getattr(rest, "main_input_name", "") == "pixel_values" else "inputs_embeds"
    width = getattr(getattr(rest, "config", None), "hidden_size", None)
    if width is None:
        return
    weight = next(parameter for parameter in rest.parameters() if parameter.is_floating_point())
    # Chance of its own: to look at a model must not change what comes after.
    tokens = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0)).to(weight)

    def run() -> Tensor:
        logits: Tensor = rest(**{name: tokens}).logits
        return logits

    first_token_only(rest, run)


def _pass_on(*args: Any, inputs_embeds: Tensor | None = None, **ignored: Any) -> Tensor:
    """Stand in for an embedding layer: the features that were given are its result."""
    if inputs_embeds is not None:
        return inputs_embeds
    return next(x for x in args if isinstance(x, Tensor) and x.is_floating_point())


def put_back(model: nn.Module, rest: nn.Module) -> nn.Module:
    """Give the whole model, in place, what `rest` (from `last_encoder`) has learnt; a method attached stays out."""
    encoder = _encoder(model)
    layers = getattr(encoder.holder, encoder.name)
    (path,) = (name for name, module in model.named_modules() if module is layers)
    state, learnt = model.state_dict(), rest.state_dict()
    for name, tensor in learnt.items():
        whole = name.replace(f"{path}.0.", f"{path}.{len(layers) - 1}.", 1) if name.startswith(f"{path}.0.") else name
        if whole in state:
            state[whole] = tensor
    model.load_state_dict(state)
    return model


def frozen_features(
    model: nn.Module,  # the whole model; it runs in evaluation mode, without gradients, on the device it is on
    examples: Examples,  # inputs and labels
    folder: Path | str | None = None,  # the cache; by default `$FAIRHEAD_CACHE` or `~/.cache/fairhead`
    *,
    batch_size: int = 256,  # rows at a time
    precision: str = "no",  # "no" (32 bit) or "bf16" (autocast); features are kept in 32 bit
    progress: Progress | None = None,  # called with (done, total) while features are computed
) -> Examples:
    """What reaches the last encoder layer, for every example: computed once, then mapped from disk.

    Returns:
        Examples for `last_encoder(model)`: features of shape [n, T, D] as "pixel_values" or "inputs_embeds", with the
        attention mask where there is one. See `last_encoder` for an example.
    """
    encoder = _encoder(model)
    layers = getattr(encoder.holder, encoder.name)
    device = next(model.parameters()).device

    def of(rows: Tensor) -> Tensor:
        return _reaching(model, layers[-1], examples.take(rows), device, precision)

    frozen = {name: tensor for name, tensor in model.state_dict().items() if _is_frozen(name, tensor, model, layers)}
    # What hooks make of the inputs first, such as normalised pictures, by the first row; to a few digits, as devices
    # differ in the last ones.
    embedded = _reaching(model, encoder.trunk.get_submodule("embeddings"), examples.take(torch.arange(1)), device, "no")
    key = key_of(
        "features",
        precision,
        _settings(model),
        np.round(embedded.double().cpu().numpy(), 3),
        *_contents(frozen),
        *_contents(examples.inputs),
    )
    about = {"model": type(model).__name__, "layers": len(layers), "rows": len(examples), "precision": precision}
    features = _kept(key, of, of(torch.arange(1)), len(examples), batch_size, about, folder, progress)
    inputs = {"pixel_values" if "pixel_values" in examples.inputs else "inputs_embeds": features}
    if "attention_mask" in examples.inputs:
        inputs["attention_mask"] = examples.inputs["attention_mask"]
    return Examples(inputs, examples.labels)


def encode(
    model: nn.Module, examples: Examples, folder: Path | str | None = None, progress: Progress | None = None
) -> Tensor:
    """One vector per row by a model without a task head, [n, D] on the CPU: computed once, then mapped from disk.

    The model runs in evaluation mode on the device it is on; `folder` and `progress` are those of `frozen_features`.
    """
    device = next(model.parameters()).device

    def features(part: Examples) -> Tensor:
        inputs = part.to(device).inputs
        return pooled(model(**inputs), inputs.get("attention_mask"))

    return kept_features("encoded", model, examples, features, folder, progress)


def kept_features(
    what: str,
    model: nn.Module,
    examples: Examples,
    features: Callable[[Examples], Tensor],
    folder: Path | str | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """What `features` gives for the rows, [n, D] on the CPU; kept under `what`, the model's weights and the inputs."""

    def of(rows: Tensor) -> Tensor:
        with quiet(model):
            return features(examples.take(rows)).float().cpu()

    # The first row as well, to a few digits: what hooks make of the inputs, such as normalised pictures, is in it.
    first = of(torch.arange(1))
    key = key_of(
        what,
        weights_digest(model),
        _settings(model),
        np.round(first.double().numpy(), 2),
        *_contents(examples.inputs),
    )
    about = {"model": type(model).__name__, "what": what, "rows": len(examples)}
    return _kept(key, of, first, len(examples), 128, about, folder, progress)


def _kept(
    key: str,
    of: Callable[[Tensor], Tensor],  # gives the features of some rows
    first: Tensor,  # those of the first, [1, ...]
    n: int,
    batch_size: int,
    about: dict[str, Any],
    folder: Path | str | None,
    progress: Progress | None,
) -> Tensor:
    """The features of n rows in 32 bits, [n, ...]: computed once, then mapped from disk."""

    def fill(array: Any) -> None:
        for rows in torch.arange(n).split(batch_size):
            array[rows[0] : rows[-1] + 1] = of(rows).float().cpu().numpy()
            if progress is not None:
                progress(int(rows[-1]) + 1, n)

    return torch.from_numpy(cached_array(cache_folder(folder), key, (n, *first.shape[1:]), "float32", fill, about))


def pooled(output: Any, mask: Tensor | None) -> Tensor:
    """One vector per row, [B, D]: CLIP's embedding, the mean over a text's tokens, or a picture's first token.

    `output` is that of a model without a task head; `mask` [B, T] is 1 where a token of a text is real.
    """
    if mask is not None:
        weight = mask[..., None].to(output.last_hidden_state.dtype)
        total: Tensor = (output.last_hidden_state * weight).sum(1)
        return total / weight.sum(1).clamp(min=1)
    for name in ("image_embeds", "pooler_output"):
        found: Tensor | None = getattr(output, name, None)
        if found is not None:
            return found
    first: Tensor = output.last_hidden_state[:, 0]
    return first


class _Reached(Exception):
    """The module was reached: what follows need not be computed."""


def _reaching(model: nn.Module, part: nn.Module, batch: Examples, device: torch.device, precision: str) -> Tensor:
    """The first tensor that a part of the model is given for one batch: [B, T, D] for an encoder layer."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = (*args, kwargs.get("hidden_states"), *kwargs.values())
        kept.append(next(x for x in given if isinstance(x, Tensor)))
        raise _Reached

    hook = part.register_forward_pre_hook(keep, with_kwargs=True)
    inputs = {name: tensor.to(device) for name, tensor in batch.inputs.items()}
    try:
        with quiet(model), autocast(device, precision):
            model(**inputs)
    except _Reached:
        pass
    finally:
        hook.remove()
    return kept[0]


def _is_frozen(name: str, tensor: Tensor, model: nn.Module, layers: nn.ModuleList) -> bool:
    """Whether a tensor takes part in the features: neither the last layer nor anything after it does."""
    (path,) = (other for other, module in model.named_modules() if module is layers)
    if name.startswith(f"{path}."):
        return not name.startswith(f"{path}.{len(layers) - 1}.")
    return "embed" in name or "pre_layrnorm" in name


def _settings(model: nn.Module) -> dict[str, Any]:
    """What the weights do not show, such as the number of heads; the task head and names have no part in features."""
    config: Any = getattr(model, "config", None)
    apart = ("_", "id2label", "label2id", "problem_type", "architectures", "transformers")
    settings = {} if config is None else config.to_dict()
    return {name: value for name, value in settings.items() if not name.startswith(apart)}


def _contents(tensors: Mapping[str, Tensor]) -> Iterator[Any]:
    """Names, shapes and bytes, for a key."""
    for name, tensor in sorted(tensors.items()):
        yield f"{name} {tuple(tensor.shape)}"
        yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
