"""The three ways to a module's heads, and attention weights of chosen rows, without building the others.

Each way puts itself in place and returns the function that takes it away. The interface route swaps the *attention
module's own* config for a copy that names our function. The model's config stays as it is, so masks are still made for
the kernel the model was loaded with, layers that are not tapped run untouched, and there is nothing global to undo.
"""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from fairhead.errors import UnsupportedModel
from fairhead.heads.requests import CheckedTokens, Requests, check_range
from fairhead.heads.sites import Site, forward_code

# Arguments of a registry call that change the weights in ways not known here: learned sinks, paged caches, packing.
_UNKNOWN = ("s_aux", "cache", "cu_seq_lens_q")
# Attention functions whose masks say all there is to say: flash attention has its windows and padding elsewhere.
_KNOWN = (None, "eager", "sdpa", "flex_attention")
_NAME = "fairhead"
_PLACE = "_fairhead_tap"  # the attribute of a tapped module that holds its Requests and kernel


def attention_weights(
    module: nn.Module,  # that made the call
    query: Tensor,  # [B, H, Q, d]
    key: Tensor,  # [B, H_kv, K, d], where H is a multiple of H_kv (grouped queries)
    # Bool (True: may look) or additive float, broadcastable to [B, H, Q, K], or flex attention's own kind; None is
    # "causal" to sdpa and "everything" to the others
    mask: Tensor | BlockMask | None,
    rows: CheckedTokens,  # query positions
    implementation: str | None,  # of attention, that the call was made for
    **arguments: Any,  # the rest of the registry call: scaling, softcap, position_bias, is_causal, ...
) -> Tensor:
    """Softmax weights before dropout: [B, H, Q, K], or [B, H, K] where `rows` is an int."""
    if implementation not in _KNOWN:
        raise UnsupportedModel(
            f"attention weights cannot be read under attn_implementation={implementation!r}; "
            "call model.set_attn_implementation('sdpa') first (or 'eager')"
        )
    unknown = [name for name in _UNKNOWN if arguments.get(name) is not None]
    if unknown:
        raise UnsupportedModel(f"{type(module).__name__} passes {unknown[0]!r}: its attention weights cannot be read")
    n_query, n_key = query.shape[2], key.shape[2]
    is_causal = arguments.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    causal = implementation == "sdpa" and mask is None and is_causal and n_query > 1
    check_range(rows, query.shape[0], n_query)
    if isinstance(mask, BlockMask):
        mask = create_mask(mask.mask_mod, query.shape[0], query.shape[1], n_query, n_key, device=str(query.device))

    if key.shape[1] != query.shape[1]:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scaling = arguments.get("scaling")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = _rows_of(query, rows, n_query) @ key.transpose(2, 3) * scaling
    softcap = arguments.get("softcap")
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    position_bias = arguments.get("position_bias")
    if position_bias is not None:
        logits = logits + _rows_of(position_bias, rows, n_query)[..., :n_key]
    if causal:  # tril also hides the empty places of a static cache, as sdpa does
        mask = torch.ones(n_query, n_key, dtype=torch.bool, device=query.device).tril()[None, None]
    if mask is not None:
        mask = _rows_of(mask, rows, n_query)[..., :n_key]
        hidden = torch.finfo(logits.dtype).min
        logits = logits.masked_fill(~mask, hidden) if mask.dtype == torch.bool else logits + mask
    weights = logits.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return weights[:, :, 0] if isinstance(rows, int) else weights


def computed_weights(weights: Tensor, rows: CheckedTokens) -> Tensor:
    """Rows of weights [B, H, Q, K] that attention computed itself, in a tensor of their own."""
    check_range(rows, weights.shape[0], weights.shape[2])
    return weights if rows is None else weights[:, :, rows].clone()


def _rows_of(x: Tensor, rows: CheckedTokens, n_query: int) -> Tensor:
    """Query rows of x [B or 1, H or 1, Q or 1, ...], the query axis kept."""
    if rows is None or x.shape[2] != n_query:
        return x
    # A view for one row: a list would become an index tensor, and a device would be waited for at every step.
    return x[:, :, rows].unsqueeze(2) if isinstance(rows, int) else x[:, :, rows]


@dataclass(eq=False)
class _Tapped:
    """What a module carries while it is tapped.

    Routes find it through the module, in partial functions rather than closures: these are copied with the module,
    so a deep copy of a tapped model has requests of its own instead of sharing those of the model it came from.
    """

    undo: list[Callable[[], None]]  # take the route away
    requests: Requests = field(default_factory=Requests)  # what has been asked of it
    at_projection: bool = False  # whether there is a hook on the output projection
    config: Any = None  # on the interface route, the config that the module had
    implementation: str | None = None  # the attention implementation that config names
    kernel: Callable[..., Any] | None = None  # the attention function of that name


def _tapped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The registered attention function: the model's own kernel, with the requests before and after it."""
    tapped: _Tapped = getattr(module, _PLACE)
    requests = tapped.requests
    if _implementation(tapped.config) != tapped.implementation:  # `set_attn_implementation` has been called
        _choose_kernel(module, tapped)
    if requests.transforms:
        query, key = requests.transform(query, key)
    assert tapped.kernel is not None
    output, weights = tapped.kernel(module, query, key, value, attention_mask, **kwargs)
    if requests.edits:
        output = requests.edit(output)
    if requests.readings:
        get = partial(_weights_of, module, tapped, query, key, attention_mask, weights, kwargs)
        requests.read_all(output, query, key, value, get)
    return output, weights


AttentionInterface.register(_NAME, _tapped_attention)


def _weights_of(
    module: nn.Module,
    tapped: _Tapped,
    query: Tensor,
    key: Tensor,
    mask: Any,
    computed: Tensor | None,
    arguments: dict[str, Any],
    rows: CheckedTokens,
) -> Tensor:
    """Rows of the weights before dropout: the kernel's own, if it returns them, or computed again."""
    if computed is not None and tapped.implementation in (None, "eager") and not arguments.get("dropout"):
        return computed_weights(computed, rows)
    return attention_weights(module, query, key, mask, rows, implementation=tapped.implementation, **arguments)


def install(site: Site, ability: str) -> Requests:
    """Put the route of `site` in place, or join the one that another tap has put there."""
    tapped: _Tapped | None = getattr(site.module, _PLACE, None)
    if tapped is None:
        tapped = _ROUTES[site.route.kind](site)
        setattr(site.module, _PLACE, tapped)
    if ability == "contribution" and not tapped.at_projection:
        # Some families gate or normalise the heads on their way to W_O; what the projection gets is what adds up.
        hook = partial(_at_projection, site.module)
        tapped.undo.append(site.projection.register_forward_pre_hook(hook).remove)
        tapped.at_projection = True
    return tapped.requests


def uninstall(site: Site) -> None:
    """Take the requests of `site` away, and the route with them when they were the last."""
    tapped: _Tapped | None = getattr(site.module, _PLACE, None)
    if tapped is None:
        return
    tapped.requests.remove(site)
    if not tapped.requests:
        for undo in tapped.undo:
            undo()
        delattr(site.module, _PLACE)


def _requests_of(module: nn.Module) -> Requests:
    tapped: _Tapped = getattr(module, _PLACE)
    return tapped.requests


def _by_interface(site: Site) -> _Tapped:
    module: Any = site.module
    original = module.config
    tapped = _Tapped([partial(setattr, module, "config", original)], config=original)
    _choose_kernel(module, tapped)
    config = copy.copy(original)
    config._attn_implementation_internal = _NAME  # the property's setter would change nested configs too
    module.config = config
    return tapped


def _implementation(config: Any) -> str | None:
    """The attention implementation that a config names."""
    if torch.compiler.is_compiling():
        return config._attn_implementation
    # Beneath the config's own look-up, which takes twenty times as long: this is asked in every layer of every pass.
    return object.__getattribute__(config, "_attn_implementation_internal")


def _choose_kernel(module: nn.Module, tapped: _Tapped) -> None:
    """Look up the attention function that the module's config names."""
    implementation = _implementation(tapped.config)
    if implementation in (None, "eager"):
        if getattr(module, "reorder_and_upcast_attn", False):
            raise UnsupportedModel(
                f"{type(module).__name__} with reorder_and_upcast_attn=True has an eager path of its own; "
                "load the model with attn_implementation='sdpa' or set that option to False"
            )
        code = forward_code(module)
        assert code is not None
        # The one that its forward names: a file with two towers may have two.
        (name,) = {name for name in code.co_names if name.endswith("eager_attention_forward")}
        tapped.kernel = inspect.unwrap(type(module).forward).__globals__[name]
    else:
        tapped.kernel = AttentionInterface()[implementation]
    tapped.implementation = implementation


def _at_projection(module: nn.Module, _: nn.Module, args: tuple[Any, ...]) -> None:
    _requests_of(module).read_contribution(args[0])


def _by_method(site: Site) -> _Tapped:
    module: Any = site.module
    module._attn = partial(_attend, module, module._attn)
    return _Tapped([partial(delattr, module, "_attn")])


def _attend(
    module: nn.Module,
    original: Callable[..., tuple[Tensor, Tensor]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    requests = _requests_of(module)
    query, key = requests.transform(query, key)
    output, weights = original(query, key, value, *args, **kwargs)  # [B, H, T, d], [B, H, Q, K]
    if requests.edits:
        output = requests.edit(output.transpose(1, 2)).transpose(1, 2)
    if requests.readings:
        get = partial(_undropped_weights, module, weights)
        requests.read_all(output.transpose(1, 2), query, key, value, get)
    return output, weights


def _by_hooks(site: Site) -> _Tapped:
    module = site.module
    handles = [site.projection.register_forward_pre_hook(partial(_edit_at_projection, module, site))]
    if site.route.value is not None:
        values = module.get_submodule(site.route.value)
        handles.append(values.register_forward_hook(partial(_after_value, module, site)))
    if "weights" in site.route.can:
        handles.append(module.register_forward_pre_hook(_ask_for_weights, with_kwargs=True))
        handles.append(module.register_forward_hook(_after_attention))
    # Compiled code does not notice hooks that come or go, and nothing else changes on this route.
    torch.compiler.reset()
    return _Tapped([*(handle.remove for handle in handles), torch.compiler.reset], at_projection=True)


def _edit_at_projection(module: nn.Module, site: Site, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    requests = _requests_of(module)
    output = args[0].unflatten(-1, (site.n_heads, site.head_dim))  # [B, T, H, d]
    if requests.edits:
        output = requests.edit(output)
    joined = output.flatten(-2)
    if requests.readings:
        requests.read_output(output)
        requests.read_contribution(joined)
    return (joined, *args[1:]) if requests.edits else args


def _after_value(module: nn.Module, site: Site, _: nn.Module, __: tuple[Any, ...], values: Tensor) -> None:
    requests = _requests_of(module)
    if "v" in requests.readings:
        requests.read("v", values.unflatten(-1, (-1, site.head_dim)).transpose(1, 2))


def _ask_for_weights(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "weights" not in _requests_of(module).readings:
        return None
    return (*args[:2], True, *args[3:]), kwargs  # forward(hidden_states, attention_mask, output_attentions, ...)


def _after_attention(module: nn.Module, _: tuple[Any, ...], outputs: tuple[Tensor, Tensor | None]) -> None:
    if outputs[1] is not None:
        _requests_of(module).read_weights(partial(_undropped_weights, module, outputs[1]))


def _undropped_weights(module: nn.Module, weights: Tensor, rows: CheckedTokens) -> Tensor:
    """Rows of weights [B, H, Q, K] that the module computed itself, after its dropout."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Dropout) and child.p > 0 and child.training and "resid" not in name:
            raise UnsupportedModel(
                f"{type(module).__name__} computes its weights with dropout while training, so they cannot be read "
                f"then; call model.eval() or set the p of its {name} to 0"
            )
    return computed_weights(weights, rows)


_ROUTES = {"interface": _by_interface, "method": _by_method, "hooks": _by_hooks}


class AppendedAttention(nn.Module):
    """Attention through transformers' registry, so that the tap reaches its heads as it does any model's."""

    is_causal = False

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.config: Any = PreTrainedConfig()
        self.config._attn_implementation = "sdpa"
        self.head_dim = width // heads
        # Not q_proj and the like: transformers rewrites those names while it saves a model of some families.
        self.queries, self.keys, self.values, self.linear_out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within each row of x [B, T, D]."""
        q, k, v = (
            linear(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.queries, self.keys, self.values)
        )
        attend: Any = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        may_look = None if mask is None else (mask != 0)[:, None, None].expand(-1, 1, x.shape[1], -1)
        output, _ = attend(self, q, k, v, may_look, scaling=self.head_dim**-0.5, dropout=0.0)
        return self.linear_out(output.flatten(-2))


class FirstRow(TorchFunctionMode):
    """Torch's attention for the first query alone while it is open; the other rows repeat its output, unused."""

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
