"""Choosing token positions, the same way for reading and for editing."""

import operator
from collections.abc import Iterable
from typing import SupportsIndex

import torch
from torch import Tensor

from fairhead.errors import InputError

# None: every token. int: one position. slice or list of ints: several. bool tensor [batch, tokens]: per example.
Tokens = None | SupportsIndex | slice | Iterable[int] | Tensor
# The same once it is checked: positions are plain numbers, so that they can be compared with a pass's length on the
# host (an index beyond the end of a CUDA tensor ends the process's use of the device).
CheckedTokens = None | int | slice | list[int] | Tensor


def check_tokens(tokens: Tokens) -> CheckedTokens:
    """Return `tokens` in a form that `take` and `put` accept, or raise `InputError`."""
    if tokens is None or isinstance(tokens, slice):
        return tokens
    if isinstance(tokens, Tensor) and tokens.dim() > 0:
        if tokens.dtype == torch.bool and tokens.dim() == 2:
            return tokens
        if tokens.dtype != torch.bool and tokens.dim() == 1 and not tokens.is_floating_point():
            return [int(token) for token in tokens.tolist()]
        raise InputError(
            f"tokens is a {tokens.dtype} tensor of shape {list(tokens.shape)}; expected a bool mask [batch, tokens] "
            "or a one-dimensional tensor of positions"
        )
    try:
        if isinstance(tokens, Iterable) and not isinstance(tokens, Tensor):
            return [int(operator.index(token)) for token in tokens]
        return int(operator.index(tokens))  # True is an index too, and another one than 1
    except TypeError:
        raise InputError(
            f"tokens is {tokens!r}; expected a position, a slice, a list of positions or a bool tensor [batch, tokens]"
        ) from None


def check_range(tokens: CheckedTokens, batch: int, length: int) -> None:
    """Raise `InputError` if `tokens` asks for what a pass of [batch, length] does not have."""
    if isinstance(tokens, int) and -length <= tokens < length:
        return
    if tokens is None or isinstance(tokens, slice):
        return
    if isinstance(tokens, Tensor):
        if tuple(tokens.shape) != (batch, length):
            raise InputError(
                f"the mask of tokens has shape {list(tokens.shape)}; this pass has [batch, tokens] = "
                f"[{batch}, {length}]: make the request anew for each batch"
            )
        return
    for token in [tokens] if isinstance(tokens, int) else tokens:
        if not -length <= token < length:
            raise InputError(
                f"token {token} does not exist: this pass has {length} tokens, counted from 0 or from -1 backwards "
                "(a decoding step with a cache has only its new ones)"
            )


def take(x: Tensor, tokens: CheckedTokens, axis: int = 1) -> Tensor:
    """Rows of x [B, T, ...] at the chosen tokens: [B, ...] for an int, [N, ...] for a mask, else [B, t, ...].

    Args:
        x: examples on the first axis.
        tokens: which.
        axis: the one of the tokens. A mask puts its rows first, whatever the axis.
    """
    if tokens is None:
        return x
    shape = x.shape
    check_range(tokens, shape[0], shape[axis])
    if isinstance(tokens, int):
        return x.select(axis, tokens)
    if isinstance(tokens, Tensor):
        return x.transpose(1, axis)[tokens.to(x.device)]
    return x[:, tokens] if axis == 1 else x.transpose(1, axis)[:, tokens].transpose(1, axis)


def take_copy(x: Tensor, tokens: CheckedTokens, axis: int = 1) -> Tensor:
    """As `take`, in a tensor of its own unless every token is asked for: a view would keep the other rows alive."""
    chosen = take(x, tokens, axis)
    return chosen.clone() if isinstance(tokens, int | slice) else chosen


def put(x: Tensor, tokens: CheckedTokens, new: Tensor) -> Tensor:
    """A copy of x [B, T, ...] with the chosen tokens replaced by `new`, shaped as `take` gives them."""
    if tokens is None:
        return new
    out = x.clone()
    if isinstance(tokens, Tensor):
        out[tokens.to(x.device)] = new
    else:
        out[:, tokens] = new
    return out
