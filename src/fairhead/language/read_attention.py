"""Reading a language model's attention through the tap: batch by batch, and on pairs of sentences."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fairhead.data.files import Skips
from fairhead.errors import InputError
from fairhead.heads import tap
from fairhead.language.answers import TOO_LONG, Progress
from fairhead.language.benchmark import SentencePair
from fairhead.language.packing import Slots, slots, token_ids
from fairhead.language.pair_gaps import NO_SPAN, Array, PairGaps, TokenGaps
from fairhead.language.row_layout import quiet, stack
from fairhead.language.scorer import Scorer

# Attention weights held at once: 128 MB in float32 on a processor, 2 GB elsewhere.
_MOST_WEIGHTS = {"cpu": 1 << 25}
_MOST_AT_ONCE = 64

Average = Literal["before", "after"]


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


class _Encoded(NamedTuple):
    """The tokens of both sentences, the start token first, and the places they share."""

    first: list[int]
    second: list[int]
    slots: Slots


class _Gaps(NamedTuple):
    """A layer's gaps: of each head, [..., H, M], and of their mean, [..., M]."""

    heads: Array
    mean: Array


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
    found, left_out = _comparable(scorer, pairs, start_token)
    gaps: dict[int, list[_Gaps]] = {}
    for batch in read_attention(scorer, {i: (e.first, e.second) for i, e in found.items()}, progress):
        encoded = [found[i] for i in batch.members]
        by_layer = [_column_gaps(weights, encoded, average) for weights in batch.weights]
        for row, i in enumerate(batch.members):
            n = len(found[i].slots.first)
            gaps[i] = [_Gaps(heads[row, :, :n], mean[row, :n]) for heads, mean in by_layer]
    kept = sorted(found)
    tokens = tuple(_token_gaps(scorer.tokenizer, found[i], gaps[i], pairs[i].id) for i in kept)
    return PairGaps.of([pairs[i] for i in kept], tokens, [[layer.heads for layer in gaps[i]] for i in kept], left_out)


def _comparable(
    scorer: Scorer, pairs: Sequence[SentencePair], start_token: bool
) -> tuple[dict[int, _Encoded], Mapping[str, tuple[str, ...]]]:
    texts = [text for pair in pairs for text in (pair.first, pair.second)]
    ids = token_ids(scorer.tokenizer, texts, scorer.start_token.lead)
    skip = 0 if start_token else len(scorer.start_token.lead)
    found: dict[int, _Encoded] = {}
    left_out = Skips()
    for i, pair in enumerate(pairs):
        first, second = ids[2 * i], ids[2 * i + 1]
        places = slots(first, second)
        shared = Slots(places.first[skip:], places.second[skip:], places.changed[skip:])
        if max(len(first), len(second)) > scorer.context:
            left_out.drop(TOO_LONG, pair.id)
        elif not any(shared.changed) or all(shared.changed):
            left_out.drop(NO_SPAN, pair.id)
        else:
            found[i] = _Encoded(first, second, shared)
    if not found:
        reasons = ", ".join(f"{len(names)} {reason}" for reason, names in left_out.found().items()) or "none was given"
        raise InputError(f"there is no pair of sentences to compare: {reasons}")
    return found, left_out.found()


def _column_gaps(weights: Tensor, encoded: Sequence[_Encoded], average: Average) -> _Gaps:
    """From attention of first, then second sentences [2B, H, T, T] to gaps of their M shared places."""
    shared = [e.slots for e in encoded]
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
    gaps = (of_heads.abs(), of_heads.mean(1).abs())
    return _Gaps(*(part.double().cpu().numpy() for part in gaps))


def _token_gaps(tokenizer: Any, encoded: _Encoded, gaps: Sequence[_Gaps], name: str) -> TokenGaps:
    if not all(np.isfinite(layer.heads).all() for layer in gaps):
        raise InputError(f"pair {name!r}: attention is not finite. Are the weights damaged? Try float32")
    first, second = (
        tuple(tokenizer.decode([ids[i]]) for i in places)
        for ids, places in ((encoded.first, encoded.slots.first), (encoded.second, encoded.slots.second))
    )
    return TokenGaps(
        first,
        second,
        np.array(encoded.slots.changed),
        np.stack([layer.mean for layer in gaps]),
        len(encoded.first) == len(encoded.second),
    )
