"""Finding the attention layers of a model, whatever its family, and heads as users name them.

A family is data, not code: which module computes attention, where its output projection hangs, and which of three
routes (`routes.py`) leads to its heads. Families that send their attention through transformers' registry need no
entry at all; the table below is for the others.
"""

import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fairhead.errors import InputError, UnsupportedModel
from fairhead.report.form import is_head

Heads = tuple[tuple[int, int], ...]  # (layer, head), from 0

READABLE = ("q", "k", "v", "weights", "output", "contribution")
_HEAD_OUTPUTS = ("output", "contribution", "edit")


@dataclass(frozen=True)
class Route:
    """How the heads of a family are reached."""

    # "interface" (transformers' attention registry), "method" (an `_attn(q, k, v, mask)` method of the module) or
    # "hooks" (module hooks only)
    kind: str
    # What can be read ("q", "k", "v", "weights", "output", "contribution") and done ("transform", "edit")
    can: frozenset[str]
    value: str | None = None  # name of the value projection, for routes that read "v" with a hook
    why: str = ""  # the reason why it cannot do the rest


INTERFACE = Route("interface", frozenset({*READABLE, "transform", "edit"}))
_METHOD = Route("method", INTERFACE.can)
_CHANGES = frozenset({"transform", "edit"})
_SHARED = Route("interface", _CHANGES, why="layers share its weights, so readings of one would be mixed with another's")
_PACKED = Route("interface", _CHANGES, why="it gets a batch as one sequence and attends to each example by itself")
_BLOCKS = Route("hooks", frozenset(), why="it attends to blocks of tokens by itself, not through the registry")
_BY_NAME = Route("interface", frozenset(), why="it does other things for other attention implementations")

# Attention classes that do not go through the registry, or not as others do. The disentangled scores of DeBERTa are a
# sum of three products, so its q and k alone do not make its weights: they are not offered.
_OTHER_ROUTES = {
    "GPTNeoSelfAttention": _METHOD,
    "GPTJAttention": _METHOD,
    "CodeGenAttention": _METHOD,
    "DisentangledSelfAttention": Route("hooks", frozenset({"v", "weights", *_HEAD_OUTPUTS}), value="value_proj"),
    "AlbertAttention": _SHARED,
    "HrmTextAttention": _SHARED,
    "LongT5LocalAttention": _BLOCKS,
    "LongT5TransientGlobalAttention": _BLOCKS,
    "DiffLlamaAttention": Route("interface", frozenset(), why="it subtracts heads from each other before W_O"),
    "MPNetSelfAttention": Route("hooks", frozenset({"v", *_HEAD_OUTPUTS}), value="v"),
    "BloomAttention": Route("hooks", frozenset(_HEAD_OUTPUTS)),
    "FalconAttention": Route("hooks", frozenset(_HEAD_OUTPUTS)),
}

# Names of the output projection: a child of the attention module, or (BERT and its kin) of the module beside it.
_PROJECTIONS = (
    *("o_proj", "out_proj", "c_proj", "dense", "out_lin", "Wo", "o", "proj", "wo", "projection_layer"),
    *("projection", "output", "linear_out"),
)
_SIBLING_PROJECTION = "output.dense"
_HEAD_DIMS = ("v_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "attention_head_dim")


@dataclass(frozen=True, eq=False)
class Site:
    """One attention layer of a tapped model."""

    layer: int  # its number, counted over the attention modules of the tapped model in the order they are built
    name: str  # the module's path inside the tapped model
    family: str  # the class of the attention module
    n_heads: int  # query heads
    head_dim: int  # width of one head's output
    module: nn.Module  # the attention module
    projection: nn.Module  # the output projection, whose input is the concatenation of the heads
    route: Route  # how its heads are reached
    block: Any = None  # the module around it that gradient checkpointing runs twice, if there is one
    model_type: str | None = None  # what transformers calls the family ("deberta-v2"), where a config says it

    def require(self, ability: str, verb: str) -> None:
        """Raise `UnsupportedModel` unless this layer can do it."""
        if ability not in self.route.can:
            raise UnsupportedModel(
                f"{self.family}{f' of {self.model_type}' if self.model_type else ''} "
                f"(layer {self.layer}, {self.name}) cannot {verb}"
                + (f": {self.route.why}" if self.route.why else "")
                + f"; what it can do: {', '.join(sorted(self.route.can)) or 'nothing'}"
            )

    def passes_hooks(self) -> bool:
        """Whether hooks get the head outputs on their way to W_O, and might change them in place."""
        return bool(self.module._forward_hooks or self.projection._forward_pre_hooks)

    def require_gradients(self) -> None:
        """Raise `UnsupportedModel` in the forward pass of a re-entrant checkpoint, which records no gradients."""
        if torch.is_grad_enabled() or not self.module.training or not getattr(self.block, "gradient_checkpointing", 0):
            return
        settings = getattr(getattr(self.block, "_gradient_checkpointing_func", None), "keywords", {})
        if settings.get("use_reentrant", True):
            raise UnsupportedModel(
                f"{self.family} (layer {self.layer}) runs under gradient checkpointing with use_reentrant=True, where "
                "no gradient flows through what is read; "
                "call model.gradient_checkpointing_enable({'use_reentrant': False}), or model.eval() to read only"
            )


def find_sites(model: nn.Module) -> list[Site]:
    """The attention layers of `model` (a transformers model, a wrapped one, or a part of one), in order."""
    sites: list[Site] = []
    modules = dict(model.named_modules())
    for name, module in modules.items():
        route = _route_of(module)
        if route is None:
            continue
        projection = _projection_of(module, modules.get(name.rpartition(".")[0]) if name else None)
        if projection is None:
            raise UnsupportedModel(
                f"{type(module).__name__} ({name or 'the model itself'}) has no output projection under a known name: "
                f"looked for {', '.join(_PROJECTIONS)} and, beside it, {_SIBLING_PROJECTION}"
            )
        head_dim = _head_dim_of(module)
        n_heads, rest = divmod(_input_width(projection), head_dim)
        if rest:
            raise UnsupportedModel(
                f"the output projection of {type(module).__name__} ({name}) takes {_input_width(projection)} numbers, "
                f"which is not a whole number of heads of {head_dim}"
            )
        around = _around(modules, name)
        block = next((outer for outer in around[1:] if hasattr(outer, "gradient_checkpointing")), None)
        types = (getattr(getattr(outer, "config", None), "model_type", None) for outer in around)
        known_as = next((str(found) for found in types if found), None)
        family = type(module).__name__
        sites.append(Site(len(sites), name, family, n_heads, head_dim, module, projection, route, block, known_as))
    if not sites:
        attention = sorted({type(m).__name__ for m in modules.values() if "attention" in type(m).__name__.lower()})
        raise UnsupportedModel(
            f"{type(model).__name__} has no attention layer that fairhead can reach (attention classes found: "
            f"{', '.join(attention) or 'none'}); it needs a transformers model whose attention goes through the "
            f"attention registry, or one of {', '.join(sorted(_OTHER_ROUTES))}"
        )
    return sites


def output_weight(site: Site, device: torch.device | None = None) -> Tensor:
    """W_O of a layer, one block a head: shape [model width, heads, head_dim].

    It is what the projection does now: LoRA, parametrisations and quantisation are included. Inputs of a projection
    whose weights are elsewhere (offloaded by accelerate) are sent to `device`.
    """
    projection: Any = site.projection
    if type(projection) is nn.Linear and not projection.weight.is_meta:  # a subclass may do more than multiply
        weight: Tensor = projection.weight
    elif type(projection) is Conv1D and not projection.weight.is_meta:
        weight = projection.weight.T
    else:
        weight = _probed_weight(projection, device)
    return weight.reshape(weight.shape[0], -1, site.head_dim)


def _probed_weight(projection: nn.Module, device: torch.device | None) -> Tensor:
    """The matrix of any affine module, read off by sending the identity through it: shape [out, in]."""
    parameters = list(projection.parameters())
    # Quantised weights are integers, or bytes that pack several: they take floats all the same.
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.get_default_dtype())
    if device is None:
        device = torch.device("cpu") if parameters[0].is_meta else parameters[0].device
    identity = torch.eye(_input_width(projection), dtype=dtype, device=device)
    modes = [(module, module.training) for module in projection.modules()]
    projection.eval()  # LoRA drops inputs out while training; the weight is the map without that noise
    try:
        # forward, not call: hooks on the projection are not meant for this
        weight: Tensor = (projection.forward(identity) - projection.forward(torch.zeros_like(identity[:1]))).T
        return weight
    finally:
        for module, was_training in modes:
            module.training = was_training


def forward_code(module: nn.Module) -> CodeType | None:
    """The code of a module's own forward, beneath decorators."""
    return getattr(inspect.unwrap(type(module).forward), "__code__", None)


def _route_of(module: nn.Module) -> Route | None:
    other = _OTHER_ROUTES.get(type(module).__name__)
    if other is not None:
        missing = other.value is not None and not hasattr(module, other.value)  # DeBERTa v1 has q, k, v in one
        return Route(other.kind, other.can - {"v"}) if missing else other
    # A module that looks its attention up in the registry names the registry in its own forward.
    code = forward_code(module)
    if code is None or "ALL_ATTENTION_FUNCTIONS" not in code.co_names or not hasattr(module, "config"):
        return None
    if "cu_seqlens" in (*code.co_varnames, *code.co_cellvars):
        return _PACKED
    # Sparse attention (DeepSeek-V3.2, GLM) masks for "sdpa" and "eager" only: under our name the mask would be lost.
    names = [name for constant in code.co_consts for name in (constant if isinstance(constant, tuple) else (constant,))]
    return _BY_NAME if "sdpa" in names else INTERFACE


def _projection_of(module: nn.Module, parent: nn.Module | None) -> nn.Module | None:
    for name in _PROJECTIONS:
        found = getattr(module, name, None)
        if isinstance(found, nn.Module):
            return found
    try:
        return parent.get_submodule(_SIBLING_PROJECTION) if parent is not None else None
    except AttributeError:
        return None


def _around(modules: dict[str, nn.Module], name: str) -> list[nn.Module]:
    """A module and those that hold it, from the inside out."""
    found = [modules[name]]
    while name:
        name = name.rpartition(".")[0]
        found.append(modules[name])
    return found


def _head_dim_of(module: nn.Module) -> int:
    for name in _HEAD_DIMS:
        value = getattr(module, name, None)
        if isinstance(value, int):
            return value
    config: Any = module.config
    return int(config.hidden_size // config.num_attention_heads)


def _input_width(projection: Any) -> int:
    width = getattr(projection, "in_features", None)
    return int(width if width is not None else projection.weight.shape[0])  # Conv1D keeps [in, out]


def heads_named(text: str) -> Heads:
    """Heads from their names, each once.

    Example:
        >>> heads_named("L1H2, L0H3, L1H2")
        ((1, 2), (0, 3))
    """
    found = [re.fullmatch(r"\s*[Ll](\d+)[Hh](\d+)\s*", part) for part in text.split(",")]
    if not all(found):
        raise InputError(f"{text!r} does not name heads; write them as L11H4,L10H5 (layer and head from 0)")
    return tuple(dict.fromkeys((int(match[1]), int(match[2])) for match in found if match))


def read_head_map(path: str | Path) -> dict[str, Any]:
    """A headmap.json of `fairhead locate`; its "selected" heads are pairs."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} is not a head map of fairhead locate: {error.strerror or error}") from None
    except ValueError as error:
        raise InputError(f"{path} is not a head map of fairhead locate, nor other JSON: {error}") from None
    selected = content.get("selected") if isinstance(content, dict) else None
    if not isinstance(selected, list) or not all(map(is_head, selected)):
        raise InputError(f"{path} is not a head map of fairhead locate: it has no list “selected” of [layer, head]")
    return {**content, "selected": tuple((layer, head) for layer, head in selected)}


def gains_of(head_map: Mapping[str, Any], path: str | Path) -> dict[tuple[int, int], float]:
    """The gains in a head map by head: those of its own edit, or those that were found for its target; {} for none."""
    doses = head_map.get("doses") or {}
    try:
        if head_map.get("gains") is not None:
            every = {(la, h): gain for la, row in enumerate(head_map["gains"]) for h, gain in enumerate(row)}
            found = {head: gain for head, gain in every.items() if gain != 1}
        else:
            tried = [dose for dose in (doses.get("chosen"), *doses.get("front", ())) if dose is not None]
            told = next((dose for dose in tried if dose["kind"] == "gain"), {"heads": (), "gains": ()})
            found = {(la, h): gain for (la, h), gain in zip(told["heads"], told["gains"], strict=True)}
        known = all(is_head(list(head)) and math.isfinite(gain) for head, gain in found.items())
    except (TypeError, ValueError, KeyError, AttributeError):
        known = False
    if not known:
        raise InputError(f"{path} has gains that are not one number for each of its heads: run fairhead locate again")
    return found


def check_heads(heads: Sequence[tuple[int, int]], per_layer: Sequence[int]) -> None:
    """Refuse heads that a model does not have; `per_layer` says how many each of its layers has."""
    for layer, head in heads:
        if layer >= len(per_layer) or head >= per_layer[layer]:
            sizes = " or ".join(map(str, sorted(set(per_layer))))
            raise InputError(
                f"there is no head L{layer}H{head}: the model has {len(per_layer)} layers of {sizes} heads, counted "
                "from 0"
            )
