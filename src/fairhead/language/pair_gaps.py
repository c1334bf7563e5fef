"""Where the attention of two sentences differs, token by token: what was read of a model on pairs. Needs no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fairhead.language.benchmark import SentencePair

Array = NDArray[np.float64]
NO_SPAN = "no token was replaced by another"


class TokenGaps(NamedTuple):
    """A pair token by token, M places that both sentences have."""

    first: tuple[str, ...]  # texts of the first sentence's tokens
    second: tuple[str, ...]  # texts of the second's
    changed: NDArray[np.bool_]  # where the two differ: the span that carries the bias, [M]
    by_layer: Array  # gaps, averaged over heads, [layers, M]
    equal_length: bool  # whether the sentences have the same number of tokens


@dataclass(frozen=True)
class PairGaps:
    """What was read of a model on n pairs."""

    pairs: tuple[SentencePair, ...]  # the pairs
    tokens: tuple[TokenGaps, ...]  # each token by token
    # Whether the largest gap is on the span, in each head, [n, layers, heads]; ties count in part. NaN where a layer
    # has fewer heads.
    hit: Array
    on: Array  # mean gap on the span, [n, layers, heads]
    off: Array  # mean gap elsewhere, [n, layers, heads]
    # Ids of pairs that could not be compared, by reason
    left_out: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        pairs: Sequence[SentencePair],
        tokens: Sequence[TokenGaps],
        gaps: Sequence[Sequence[Array]],
        left_out: Mapping[str, tuple[str, ...]] | None = None,
    ) -> "PairGaps":
        """From the gaps of each pair: one array [heads, M] a layer."""
        layers, heads = len(gaps[0]), max(len(layer) for layer in gaps[0])
        hit, on, off = (np.full((len(pairs), layers, heads), np.nan) for _ in range(3))
        for i, (of_pair, by_token) in enumerate(zip(gaps, tokens, strict=True)):
            for number, layer in enumerate(of_pair):
                n, changed = len(layer), by_token.changed
                hit[i, number, :n] = largest_on(layer, changed)
                on[i, number, :n], off[i, number, :n] = layer[:, changed].mean(1), layer[:, ~changed].mean(1)
        return cls(tuple(pairs), tuple(tokens), hit, on, off, dict(left_out or {}))

    @property
    def chance(self) -> Array:
        """The share of each pair's tokens that are of its span, [n]: what chance would hit."""
        return np.array([tokens.changed.mean() for tokens in self.tokens])

    def of_layers(self) -> "tuple[Array, Array, Array]":
        """`hit`, `on` and `off` of gaps averaged over heads, [n, layers] each."""
        hit = np.stack([largest_on(tokens.by_layer, tokens.changed) for tokens in self.tokens])
        on, off = (np.stack([t.by_layer[:, t.changed == side].mean(1) for t in self.tokens]) for side in (True, False))
        return hit, on, off


def largest_on(gaps: Array, changed: NDArray[np.bool_]) -> Array:
    """Share of the places with the largest gap [..., M] that are of the span: 1 or 0, something else where gaps tie.

    Example:
        >>> largest_on(np.array([[1.0, 3.0, 2.0], [2.0, 2.0, 0.0]]), np.array([False, True, False])).tolist()
        [1.0, 0.5]
    """
    top = gaps == gaps.max(axis=-1, keepdims=True)
    shares: Array = (top & changed).sum(-1) / top.sum(-1)
    return shares
