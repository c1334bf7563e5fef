"""Last-encoder training (DAM, section 3.4): the last encoder layer and the task head, as a model of their own.

`last_encoder(model)` is the part that is trained, a model of the same class whose input is what reaches the last layer
(`fairhead.train.features.frozen_features`). Both together compute what the whole model computes.

A classifier that reads the first token needs the keys and values of all tokens, but only the first one's query, row of
attention, output projection, feed-forward part and norms: a small part of the work. Nothing of the model is rewritten:
hooks show its linear layers and norms one token, and sums with longer tensors broadcast, so that the first token is
right and the others are never looked at. Whether that is so is tried out, not assumed.
"""

import copy
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fairhead.errors import UnsupportedModel
from fairhead.heads import FirstRow, find_sites
from fairhead.models.attached import refuse_method


class Encoder(NamedTuple):
    """Where a model keeps its embeddings and its layers."""

    trunk: nn.Module  # holds the embeddings
    layers: nn.ModuleList
    path: str  # of the layers in the model


def encoder_of(model: nn.Module) -> Encoder:
    """Find the longest list of layers, and the module around it that holds the embeddings."""
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    path = max(lists, key=lambda name: len(lists[name]), default="")
    around = path
    while around:
        around = around.rpartition(".")[0]
        trunk = model.get_submodule(around)
        if isinstance(getattr(trunk, "embeddings", None), nn.Module):
            return Encoder(trunk, lists[path], path)
    raise UnsupportedModel(
        f"{type(model).__name__} has no encoder of embeddings and layers; last-encoder training works with "
        "ViT, DINOv2, CLIP vision, BERT, RoBERTa, DistilBERT and ModernBERT"
    )


def last_encoder(model: nn.Module) -> nn.Module:
    """The trainable rest of a frozen model: its last encoder layer, what comes after it, and the task head.

    A copy: the model given stays as it is. Features go in under the name that `frozen_features` gives them. Where the
    task head reads the first token alone, the copy computes that token alone: the logits are the same, the hidden
    states of other tokens are not.
    """
    refuse_method(model, "last-encoder training")
    encoder = encoder_of(model)
    holder_path, _, name = encoder.path.rpartition(".")
    holder = model.get_submodule(holder_path)
    setattr(holder, name, nn.ModuleList([encoder.layers[-1]]))  # layers that would be thrown away are not copied
    try:
        rest = copy.deepcopy(model)
    finally:
        setattr(holder, name, encoder.layers)
    config: Any = getattr(rest, "config", None)
    if config is not None:
        config.num_hidden_layers = 1
    trunk = encoder_of(rest).trunk
    for part in ("embeddings", "pre_layrnorm"):  # CLIP normalises between its embeddings and its layers
        before: Any = getattr(trunk, part, None)
        if before is not None:
            before.requires_grad_(False)
            before.forward = _pass_on
    if getattr(config, "hidden_size", None) is not None:
        _first_token_only(rest, config.hidden_size)
    return rest


def _pass_on(*args: Any, inputs_embeds: Tensor | None = None, **ignored: Any) -> Tensor:
    """Replace an embedding layer: return the features that were given."""
    if inputs_embeds is not None:
        return inputs_embeds
    return next(x for x in args if isinstance(x, Tensor) and x.is_floating_point())


def put_back(model: nn.Module, rest: nn.Module) -> nn.Module:
    """Give the whole model, in place, what `rest` (from `last_encoder`) has learnt; a method attached stays out."""
    encoder = encoder_of(model)
    first, last = f"{encoder.path}.0.", f"{encoder.path}.{len(encoder.layers) - 1}."
    learnt = {
        last + name.removeprefix(first) if name.startswith(first) else name: tensor
        for name, tensor in rest.state_dict().items()
    }
    state = model.state_dict()
    model.load_state_dict({name: learnt.get(name, tensor) for name, tensor in state.items()})
    return model


def _first_token_only(rest: Any, width: int) -> None:
    """Let a model with one attention layer compute its first token alone, if its logits stay what they are."""
    sites = find_sites(rest)
    if len(sites) != 1:
        return
    site = sites[0]
    name = "pixel_values" if getattr(rest, "main_input_name", "") == "pixel_values" else "inputs_embeds"
    weight = next(parameter for parameter in rest.parameters() if parameter.is_floating_point())
    # Chance of its own: to look at a model must not change what comes after.
    tokens = torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0)).to(weight)
    was_training = rest.training
    rest.eval()
    try:
        with torch.no_grad():
            called, whole = _calls_and_logits(rest, {name: tokens})
            if site.projection not in called:
                return
            at = called.index(site.projection)
            for module in dict.fromkeys(called[at:]):
                module.register_forward_pre_hook(_show_first)
            names = {module: path.rpartition(".")[2] for path, module in rest.named_modules()}
            for module in called[:at]:
                if names[module].startswith("q") and isinstance(module, nn.Linear):
                    module.register_forward_pre_hook(_show_first_query)
                    module.register_forward_hook(_repeat_first)
            attention: Any = site.module
            attention.forward = functools.partial(_with_one_row, attention)
            try:
                cut: Tensor | None = rest(**{name: tokens}).logits
            except (RuntimeError, ValueError, IndexError):  # shapes that do not fit: this model needs its tokens
                cut = None
    finally:
        rest.train(was_training)
    # Compared with how far rows differ: logits that do not depend on the input yet (a head of zeros) tell nothing.
    apart = (whole - whole.flip(0)).abs().max()
    if cut is None or cut.shape != whole.shape or not (cut - whole).abs().max() < 1e-3 * apart:
        all_tokens(rest)


def _calls_and_logits(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[list[nn.Module], Tensor]:
    """The linear layers and norms of a model in the order in which they are called, and its logits."""
    called: list[nn.Module] = []
    # The norms of transformers' families are classes of their own, named so.
    parts = [part for part in model.modules() if isinstance(part, nn.Linear) or "norm" in type(part).__name__.lower()]
    handles = [part.register_forward_pre_hook(lambda module, args: called.append(module)) for part in parts]
    try:
        return called, model(**inputs).logits
    finally:
        for handle in handles:
            handle.remove()


def all_tokens(model: nn.Module) -> None:
    """Let a model compute all tokens again, if a method reads them; a whole model stays as it is."""
    for module in model.modules():
        hook_lists: tuple[dict[int, Any], ...] = (module._forward_pre_hooks, module._forward_hooks)
        for hooks in hook_lists:
            for number in [number for number, hook in hooks.items() if hook in _HOOKS]:
                del hooks[number]
        if getattr(vars(module).get("forward"), "func", None) is _with_one_row:
            del module.forward  # the one of its class is there again


def _show_first(module: nn.Module, args: tuple[Any, ...]) -> Any:
    x = args[0]
    return (x[:, :1], *args[1:]) if x.dim() == 3 else None


def _show_first_query(module: Any, args: tuple[Any, ...]) -> Any:
    module._all_tokens = args[0].shape[1]
    return _show_first(module, args)


def _repeat_first(module: Any, args: tuple[Any, ...], query: Tensor) -> Tensor:
    """[B, 1, D] to [B, T, D], a view: attention gets its usual shapes, and its other rows are dropped afterwards."""
    return query.expand(-1, module._all_tokens, -1)


_HOOKS = (_show_first, _show_first_query, _repeat_first)


def _with_one_row(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with FirstRow():
        return type(module).forward(module, *args, **kwargs)
