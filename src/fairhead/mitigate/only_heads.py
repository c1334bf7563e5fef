"""Training in some attention heads only: their rows of q, k and v, and their columns of the output projection."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fairhead.errors import InputError, UnsupportedModel
from fairhead.heads.sites import Heads, Site, check_heads, find_sites, heads_named, read_head_map
from fairhead.train.plan import LanguagePlan


def read_heads(text: str) -> Heads:
    """Heads from their names (L11H1,L10H5), or those that `fairhead locate` chose (headmap.json)."""
    return read_head_map(text)["selected"] if text.endswith(".json") else heads_named(text)


def random_heads(heads: Sequence[tuple[int, int]], per_layer: Sequence[int], seed: int) -> Heads:
    """As many other heads of the same layers, at random; of a layer that has too few others, some are the same."""
    rng, found = np.random.default_rng(seed), []
    for layer in sorted({layer for layer, _ in heads}):
        own = [head for of, head in heads if of == layer]
        others = [head for head in range(per_layer[layer]) if head not in own]
        order = [*rng.permutation(others).tolist(), *rng.permutation(own).tolist()]
        found += [(layer, int(head)) for head in sorted(order[: len(own)])]
    return tuple(found)


@contextmanager
def only_heads(model: nn.Module, plan: LanguagePlan) -> Iterator[Heads]:
    """While the block is open, training changes the heads of the plan alone; yields them, none where it names none.

    A key and value head that several query heads share is trained with each of them.
    """
    if plan.only_heads is None:
        yield ()
        return
    if plan.lora is not None or plan.weight_decay:
        raise InputError("heads are trained in the model's own weights, without decay: leave lora and weight_decay out")
    sites = find_sites(model)
    heads = read_heads(plan.only_heads)
    check_heads(heads, [site.n_heads for site in sites])
    if not heads:
        raise InputError(f"{plan.only_heads} names no head, so there is nothing to train")
    if plan.random_heads:
        heads = random_heads(heads, [site.n_heads for site in sites], plan.seed)
    asked = {name: weight.requires_grad for name, weight in model.named_parameters()}
    masks = [found for site in sites for found in _masks(site, [head for layer, head in heads if layer == site.layer])]
    model.requires_grad_(False)
    hooks = [weight.requires_grad_().register_hook(partial(torch.mul, mask)) for weight, mask in masks]
    try:
        yield heads
    finally:
        for hook in hooks:
            hook.remove()
        for name, weight in model.named_parameters():
            weight.requires_grad_(asked[name])


def _masks(site: Site, heads: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """The parameters of a layer that its heads are made of, each with a mask that is 1 where it is trained."""
    if not heads:
        return []
    size, module = site.head_dim, site.module
    found = [_mask(site.projection, "weight", _places(heads, size), inputs=True)]
    fused = getattr(module, "c_attn", None)
    if isinstance(fused, Conv1D):  # GPT-2: q, k and v side by side
        width = site.n_heads * size
        places = [place + part * width for part in range(3) for place in _places(heads, size)]
        return [*found, _mask(fused, "weight", places), _mask(fused, "bias", places)]
    for name in ("q_proj", "k_proj", "v_proj"):
        projection = getattr(module, name, None)
        if type(projection) is not nn.Linear:
            raise UnsupportedModel(
                f"{site.family} (layer {site.layer}) has no linear {name}: which weights are a head's is not known"
            )
        there = projection.out_features // size
        own = sorted({head * there // site.n_heads for head in heads})
        kinds = ("weight",) if projection.bias is None else ("weight", "bias")
        found += [_mask(projection, kind, _places(own, size)) for kind in kinds]
    return found


def _places(heads: Sequence[int], size: int) -> list[int]:
    return [head * size + i for head in heads for i in range(size)]


def _mask(projection: Any, name: str, places: Sequence[int], inputs: bool = False) -> tuple[Tensor, Tensor]:
    """Of a projection's outputs, or of its inputs; a `Conv1D` keeps [in, out], a linear layer [out, in]."""
    weight = getattr(projection, name)
    mask = torch.zeros_like(weight)
    of_columns = weight.dim() == 2 and inputs != isinstance(projection, Conv1D)
    mask[(slice(None), places) if of_columns else places] = 1
    return weight, mask
