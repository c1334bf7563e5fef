"""The three ways to a module's heads. Each puts itself in place and returns the function that takes it away.

The interface route swaps the *attention module's own* config for a copy that names our function. The model's config
stays as it is, so masks are still made for the kernel the model was loaded with, layers that are not tapped run
untouched, and there is nothing global to undo.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface

from fairhead.errors import UnsupportedModel
from fairhead.heads.requests import Requests
from fairhead.heads.sites import Site
from fairhead.heads.tokens import take
from fairhead.heads.weights import attention_weights

_NAME = "fairhead"
_PLACE = "_fairhead_tap"  # the attribute of a tapped module that holds its Requests and kernel


@dataclass(eq=False)
class _Tapped:
    """What a module carries while it is tapped.

    Attributes:
        requests: what has been asked of it.
        undo: takes the route away.
        kernel: on the interface route, the attention function that the model was loaded with.
        is_eager: whether that is the eager one, for which a missing mask means "look at everything".
        is_checked: whether the heads are known to reach the projection as they are; see `_check_projection`.
        check: the hook that finds out.
    """

    requests: Requests
    undo: Callable[[], None]
    kernel: Callable[..., Any] | None = None
    is_eager: bool = False
    is_checked: bool = False
    check: RemovableHandle | None = None


def _tapped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The registered attention function: the model's own kernel, with the requests before and after it."""
    tapped: _Tapped = getattr(module, _PLACE)
    requests = tapped.requests
    query, key = requests.transform(query, key)
    assert tapped.kernel is not None
    output, weights = tapped.kernel(module, query, key, value, attention_mask, **kwargs)
    if requests.edits:
        output = requests.edit(output)
    if requests.wanted:
        requests.read("q", lambda tokens: _heads_first(query, tokens))
        requests.read("k", lambda tokens: _heads_first(key, tokens))
        requests.read("v", lambda tokens: _heads_first(value, tokens))
        requests.read(
            "weights",
            lambda rows: attention_weights(
                module, query, key, attention_mask, rows, causal_without_mask=not tapped.is_eager, **kwargs
            ),
        )
        requests.read_heads(output)
        if "contribution" in requests.wanted and not tapped.is_checked:
            _check_projection(requests.readings[0][0], tapped, output)
    return output, weights


AttentionInterface.register(_NAME, _tapped_attention)


def _heads_first(x: Tensor, tokens: Any) -> Tensor:
    """q, k or v [B, H, T, d] at chosen tokens: [B, H, d] for an int, else [B, H, t, d]."""
    if tokens is None:
        return x
    chosen = take(x.transpose(1, 2), tokens)
    return chosen if chosen.dim() == 3 else chosen.transpose(1, 2)


def install(site: Site) -> Requests:
    """Put the route of `site` in place, or join the one that another tap has put there."""
    tapped: _Tapped | None = getattr(site.module, _PLACE, None)
    if tapped is None:
        tapped = _ROUTES[site.route.kind](site, Requests())
        setattr(site.module, _PLACE, tapped)
    return tapped.requests


def uninstall(site: Site) -> None:
    """Take the requests of `site` away, and the route with them when they were the last."""
    tapped: _Tapped | None = getattr(site.module, _PLACE, None)
    if tapped is None:
        return
    tapped.requests.remove(site)
    if not tapped.requests:
        tapped.undo()
        if tapped.check is not None:
            tapped.check.remove()
        delattr(site.module, _PLACE)


def _by_interface(site: Site, requests: Requests) -> _Tapped:
    module: Any = site.module
    original = module.config
    implementation = original._attn_implementation
    is_eager = implementation in (None, "eager")
    if is_eager and getattr(module, "reorder_and_upcast_attn", False):
        raise UnsupportedModel(
            f"{site.family} with reorder_and_upcast_attn=True has an eager path of its own; "
            "load the model with attn_implementation='sdpa' or set that option to False"
        )
    if is_eager:
        kernel = inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]
    else:
        kernel = AttentionInterface()[implementation]
    config = copy.copy(original)
    config._attn_implementation_internal = _NAME  # the property's setter would change nested configs too
    module.config = config
    return _Tapped(requests, lambda: setattr(module, "config", original), kernel, is_eager)


def _check_projection(site: Site, tapped: _Tapped, output: Tensor) -> None:
    """Once a layer: a family that gates or normalises its heads before W_O has no contributions as we define them."""
    if torch.compiler.is_compiling():
        return

    def compare(_: nn.Module, args: tuple[Any, ...]) -> None:
        handle.remove()
        if not torch.equal(output.reshape(args[0].shape), args[0]):
            raise UnsupportedModel(
                f"{site.family} ({site.name}) changes the head outputs before its output projection, so the heads do "
                "not add up to the attention output; read 'output' instead of 'contribution'"
            )
        tapped.is_checked = True

    handle = tapped.check = site.projection.register_forward_pre_hook(compare)


def _by_method(site: Site, requests: Requests) -> _Tapped:
    module: Any = site.module
    original = module._attn

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        query, key = requests.transform(query, key)
        output, weights = original(query, key, value, *args, **kwargs)  # [B, H, T, d], [B, H, Q, K]
        if requests.edits:
            output = requests.edit(output.transpose(1, 2)).transpose(1, 2)
        if requests.wanted:
            requests.read("q", lambda tokens: _heads_first(query, tokens))
            requests.read("k", lambda tokens: _heads_first(key, tokens))
            requests.read("v", lambda tokens: _heads_first(value, tokens))
            requests.read("weights", lambda rows: _computed_rows(site, weights, rows))
            requests.read_heads(output.transpose(1, 2))
        return output, weights

    module._attn = attend
    return _Tapped(requests, lambda: delattr(module, "_attn"))


def _by_hooks(site: Site, requests: Requests) -> _Tapped:
    def before_projection(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        joined = args[0]  # [B, T, H * d]
        output = joined.unflatten(-1, (site.n_heads, site.head_dim))
        if requests.edits:
            output = requests.edit(output)
        requests.read_heads(output)
        return (output.flatten(-2), *args[1:]) if requests.edits else args

    def after_value(_: nn.Module, __: tuple[Any, ...], values: Tensor) -> None:
        split = values.unflatten(-1, (-1, site.head_dim)).transpose(1, 2)
        requests.read("v", lambda tokens: _heads_first(split, tokens))

    def ask_for_weights(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "weights" not in requests.wanted:
            return None
        return (*args[:2], True, *args[3:]), kwargs  # forward(hidden_states, attention_mask, output_attentions, ...)

    def after_attention(_: nn.Module, __: tuple[Any, ...], outputs: tuple[Tensor, Tensor | None]) -> None:
        weights = outputs[1]
        if weights is not None:
            requests.read("weights", lambda rows: _computed_rows(site, weights, rows))

    handles = [site.projection.register_forward_pre_hook(before_projection)]
    if site.route.value is not None:
        handles.append(site.module.get_submodule(site.route.value).register_forward_hook(after_value))
    if "weights" in site.route.can:
        handles.append(site.module.register_forward_pre_hook(ask_for_weights, with_kwargs=True))
        handles.append(site.module.register_forward_hook(after_attention))

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return _Tapped(requests, undo)


def _computed_rows(site: Site, weights: Tensor, rows: Any) -> Tensor:
    """Rows of weights [B, H, Q, K] that the module computed itself, after its dropout."""
    dropouts = [m for m in site.module.modules() if isinstance(m, nn.Dropout) and m.p > 0 and m.training]
    if dropouts:
        raise UnsupportedModel(
            f"{site.family} computes its weights with dropout while training, so they cannot be read then; "
            "call model.eval() or set its attention dropout to 0"
        )
    if rows is None:
        return weights
    return weights[:, :, rows].clone()


_ROUTES = {"interface": _by_interface, "method": _by_method, "hooks": _by_hooks}
