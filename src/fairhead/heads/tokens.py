"""Choosing token positions, the same way for reading and for editing."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fairhead.errors import InputError

# None: every token. int: one position. slice or list of ints: several. bool tensor [batch, tokens]: per example.
Tokens = None | int | slice | Sequence[int] | Tensor


def check_tokens(tokens: Tokens) -> Tokens:
    """Return `tokens` in a form that `take` and `put` accept, or raise `InputError`."""
    if tokens is None or isinstance(tokens, int | slice):
        return tokens
    if isinstance(tokens, Tensor):
        if tokens.dtype == torch.bool and tokens.dim() == 2:
            return tokens
        if tokens.dtype != torch.bool and tokens.dim() == 1 and not tokens.is_floating_point():
            return tokens
        raise InputError(
            f"tokens is a {tokens.dtype} tensor of shape {list(tokens.shape)}; expected a bool mask [batch, tokens] "
            "or a one-dimensional tensor of positions"
        )
    return torch.tensor(list(tokens), dtype=torch.long)


def take(x: Tensor, tokens: Tokens) -> Tensor:
    """Rows of x [B, T, ...] at the chosen tokens: [B, ...] for an int, [N, ...] for a mask, else [B, t, ...]."""
    if tokens is None:
        return x
    if isinstance(tokens, Tensor):
        tokens = tokens.to(x.device)
        return x[tokens] if tokens.dtype == torch.bool else x[:, tokens]
    return x[:, tokens]


def put(x: Tensor, tokens: Tokens, new: Tensor) -> Tensor:
    """A copy of x [B, T, ...] with the chosen tokens replaced by `new`, shaped as `take` gives them."""
    if tokens is None:
        return new
    out = x.clone()
    if isinstance(tokens, Tensor):
        tokens = tokens.to(x.device)
        if tokens.dtype == torch.bool:
            out[tokens] = new
            return out
    out[:, tokens] = new
    return out
