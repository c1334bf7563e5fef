"""Attention weights of chosen rows, equal to what eager attention computes, without building the others."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_mask

from fairhead.errors import UnsupportedModel
from fairhead.heads.tokens import CheckedTokens, check_range

# Arguments of a registry call that change the weights in ways not known here: learned sinks, paged caches, packing.
_UNKNOWN = ("s_aux", "cache", "cu_seq_lens_q")
# Attention functions whose masks say all there is to say: flash attention has its windows and padding elsewhere.
_KNOWN = (None, "eager", "sdpa", "flex_attention")


def attention_weights(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | BlockMask | None,
    rows: CheckedTokens,
    implementation: str | None,
    **arguments: Any,
) -> Tensor:
    """Softmax weights before dropout: [B, H, Q, K], or [B, H, K] where `rows` is an int.

    Args:
        module: the attention module that made the call.
        query: [B, H, Q, d].
        key: [B, H_kv, K, d], where H is a multiple of H_kv (grouped queries).
        mask: bool (True: may look) or additive float, broadcastable to [B, H, Q, K], or flex attention's own kind;
            None is "causal" to sdpa and "everything" to the others.
        rows: query positions.
        implementation: the attention implementation that the call was made for.
        **arguments: the rest of the registry call: scaling, softcap, position_bias, is_causal, ...
    """
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
