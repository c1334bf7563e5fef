"""Where a language model attends. Attention is read through the tap, batch by batch.

Of pairs of sentences only the gaps between their attention are kept.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairhead.data.files import Skips
from fairhead.errors import InputError
from fairhead.heads import tap
from fairhead.language.answers import (
    TOO_LONG,
    Progress,
)
from fairhead.language.benchmark import SentencePair
from fairhead.language.packing import Slots, slots, token_ids
from fairhead.language.row_layout import quiet, stack
from fairhead.language.scorer import Scorer

# Attention weights held at once: 128 MB in float32 on a processor, 2 GB elsewhere.
_MOST_WEIGHTS = {"cpu": 1 << 25}
_MOST_AT_ONCE = 64

NO_SPAN = "no token was replaced by another"

Average = Literal["before", "after"]
Array = NDArray[np.float64]


class AttentionBatch(NamedTuple):
    """Attention that was read in one forward pass."""

    members: list[int]  # numbers of what was read
    # [N, H, T, T] a layer: the first sequences of all members, then their second ones, ...; they hold until the next
    # batch is read
    weights: Sequence[Tensor]
    mask: Tensor  # 1 for tokens, 0 for padding, [N, T]
    heads: list[str]  # "L0H0", "L0H1", ...


def read_attention(
    scorer: Scorer, tokens: Mapping[int, Sequence[Sequence[int]]], progress: Progress | None = None
) -> Iterator[AttentionBatch]:
    """Read the attention in every layer, those alike in length together, so that little is padded.

    `tokens` has the sequences of each number, as many for each.
    """
    longest = {i: max(map(len, sequences)) for i, sequences in tokens.items()}
    order, done = sorted(tokens, key=longest.__getitem__), 0
    model = scorer.attending
    with quiet(model), tap(model) as heads:
        reading = heads.read("weights")
        names = [f"L{site.layer}H{head}" for site in heads.sites for head in range(site.n_heads)]
        most = _MOST_WEIGHTS.get(torch.device(scorer.device or "cpu").type, 1 << 29)
        while order:
            # The longest of the next ones decides how many fit.
            last = order[min(len(order), _MOST_AT_ONCE) - 1]
            fits = max(1, most // (len(tokens[last]) * len(names) * longest[last] ** 2))
            batch, order = order[: min(fits, _MOST_AT_ONCE)], order[min(fits, _MOST_AT_ONCE) :]
            ids, mask = stack([sequence for turn in zip(*(tokens[i] for i in batch), strict=True) for sequence in turn])
            model(input_ids=ids.to(scorer.device), attention_mask=mask.to(scorer.device), use_cache=False)
            yield AttentionBatch(batch, list(reading), mask, names)
            reading.clear()
            done += len(batch)
            if progress is not None:
                progress(done, len(tokens))


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


def read_gaps(
    scorer: Scorer,  # the model
    # With distinct ids. Those longer than the model's context, and those without a place where a token was replaced by
    # another, are left out and named.
    pairs: Sequence[SentencePair],
    *,
    # Averages are made "before" the difference (how much attention a token gets in all) or "after" it (how far single
    # weights are apart). The paper does not say which.
    average: Average = "before",
    # Count the start token among the tokens, as the paper seems to. Much attention rests there, whatever the sentence
    # says, so that its gap is often the largest.
    start_token: bool = True,
    progress: Progress | None = None,  # called with the pairs done and their total
) -> PairGaps:
    """How far apart attention to each token is in the two sentences of a pair, in every layer and head.

    The gap of a token is |A_first − A_second| in its column of the attention map, with averages over the queries that
    both sentences have (and, for a layer, over heads). Every layer is read, in one pass per batch; only gaps are kept.
    """
    lead = scorer.start_token.lead
    ids = token_ids(scorer.tokenizer, [text for pair in pairs for text in (pair.first, pair.second)], lead)
    both, places = {}, {}
    left_out = Skips()
    for i, pair in enumerate(pairs):
        first, second = ids[2 * i : 2 * i + 2]
        counted = slice(0 if start_token else len(lead), None)
        shared = Slots(*(of[counted] for of in slots(first, second)))  # type: ignore[arg-type]
        if max(len(first), len(second)) > scorer.context:
            left_out.drop(TOO_LONG, pair.id)
        elif not any(shared.changed) or all(shared.changed):
            left_out.drop(NO_SPAN, pair.id)
        else:
            both[i], places[i] = (first, second), shared
    if not both:
        reasons = ", ".join(f"{len(names)} {reason}" for reason, names in left_out.found().items()) or "none was given"
        raise InputError(f"there is no pair of sentences to compare: {reasons}")
    tokens: dict[int, TokenGaps] = {}
    of_heads: dict[int, list[Array]] = {}
    for batch in read_attention(scorer, both, progress):
        by_layer = [_column_gaps(weights, [places[i] for i in batch.members], average) for weights in batch.weights]
        for row, i in enumerate(batch.members):
            changed = np.array(places[i].changed)
            of_heads[i] = [heads[row, :, : len(changed)] for heads, _ in by_layer]
            if not all(np.isfinite(heads).all() for heads in of_heads[i]):
                raise InputError(f"pair {pairs[i].id!r}: attention is not finite. Are the weights damaged? Try float32")
            texts = [
                tuple(scorer.tokenizer.decode([sentence[place]]) for place in at)
                for sentence, at in zip(both[i], places[i], strict=False)
            ]
            means = np.stack([mean[row, : len(changed)] for _, mean in by_layer])
            tokens[i] = TokenGaps(texts[0], texts[1], changed, means, len(both[i][0]) == len(both[i][1]))
    kept = sorted(both)
    return PairGaps.of(
        [pairs[i] for i in kept], [tokens[i] for i in kept], [of_heads[i] for i in kept], left_out.found()
    )


def _column_gaps(weights: Tensor, shared: Sequence[Slots], average: Average) -> tuple[Array, Array]:
    """From attention of first, then second sentences [2B, H, T, T] to gaps of their M shared places.

    They are of each head, [B, H, M], and of the mean over heads, [B, M].
    """
    first, real = stack([s.first for s in shared])
    second, _ = stack([s.second for s in shared])
    maps = []
    for half, places in zip(weights.float().chunk(2), (first, second), strict=True):
        at = places.to(weights.device)
        queries = half.gather(2, at[:, None, :, None].expand(-1, half.shape[1], -1, half.shape[3]))
        maps.append(queries.gather(3, at[:, None, None, :].expand(-1, half.shape[1], at.shape[1], -1)))
    is_query = real.to(weights.device, torch.float32)[:, None, :, None]
    apart = (maps[0] - maps[1]) * is_query
    if average == "after":
        apart = apart.abs()
    of_heads = apart.sum(2) / is_query.sum(2)
    return of_heads.abs().double().cpu().numpy(), of_heads.mean(1).abs().double().cpu().numpy()
