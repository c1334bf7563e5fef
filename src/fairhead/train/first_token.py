"""Computing the first token alone where nothing reads the others: most of the work of a last encoder layer.

A classifier that reads the first token needs the keys and values of all tokens, but only the first one's query, row of
attention, output projection, feed-forward part and norms. Nothing of the model is rewritten: hooks show its linear
layers and norms one token, and sums with longer tensors broadcast, so that the first token is right and the others are
never looked at. Whether that is so is tried out, not assumed.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from fairhead.heads import find_sites

# The norms of transformers' families are classes of their own, named so.
_NORM = "norm"


def first_token_only(model: nn.Module, run: Callable[[], Tensor]) -> bool:
    """Let a model with one attention layer compute its first token alone, if its logits stay what they are.

    `run` gives the logits of an input of several rows that differ, and of several tokens. Returned is whether the model
    was changed; `all_tokens` changes it back.
    """
    sites = find_sites(model)
    if len(sites) != 1:
        return False
    site = sites[0]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            with _order_of_calls(model) as called:
                whole = run()
            if site.projection not in called:
                return False
            for module in dict.fromkeys(called[called.index(site.projection) :]):
                module.register_forward_pre_hook(_show_first)
            names = {module: name.rpartition(".")[2] for name, module in model.named_modules()}
            for module in called[: called.index(site.projection)]:
                if names[module].startswith("q") and isinstance(module, nn.Linear):
                    module.register_forward_pre_hook(_show_first_query)
                    module.register_forward_hook(_repeat_first)
            attention: Any = site.module
            attention.forward = functools.partial(_with_one_row, attention)
            cut = _logits_or_none(run)
    finally:
        model.train(was_training)
    # Compared with how far rows differ: logits that do not depend on the input yet (a head of zeros) tell nothing.
    apart = (whole - whole.flip(0)).abs().max()
    if cut is not None and cut.shape == whole.shape and (cut - whole).abs().max() < 1e-3 * apart:
        return True
    all_tokens(model)
    return False


def all_tokens(model: nn.Module) -> None:
    """Undo `first_token_only`: for whoever reads the other tokens after all. A model that is whole stays as it is."""
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
    """[B, 1, D] to [B, T, D], a view: attention is called as ever, and its other rows are dropped after it."""
    return query.expand(-1, module._all_tokens, -1)


def _with_one_row(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    with _OneRow():
        return type(module).forward(module, *args, **kwargs)


class _OneRow(TorchFunctionMode):
    """Torch's attention for the first query alone; the others get its output, and nobody looks at them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not scaled_dot_product_attention or kwargs.get("is_causal") or len(args) != 3:
            return function(*args, **kwargs)
        query, key, value = args
        mask = kwargs.get("attn_mask")
        if mask is not None and mask.shape[-2] > 1:
            kwargs = {**kwargs, "attn_mask": mask[..., :1, :]}
        rows = function(query[:, :, :1], key, value, **kwargs)
        return rows.expand(-1, -1, query.shape[2], -1)


_HOOKS = (_show_first, _show_first_query, _repeat_first)


def _logits_or_none(run: Callable[[], Tensor]) -> Tensor | None:
    try:
        return run()
    except (RuntimeError, ValueError, IndexError):  # shapes that do not fit: this model needs its tokens
        return None


@contextmanager
def _order_of_calls(model: nn.Module) -> Iterator[list[nn.Module]]:
    """The linear layers and norms of a model as they are called."""
    called: list[nn.Module] = []
    parts = [m for m in model.modules() if isinstance(m, nn.Linear) or _NORM in type(m).__name__.lower()]
    handles = [part.register_forward_pre_hook(lambda module, args: called.append(module)) for part in parts]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()
