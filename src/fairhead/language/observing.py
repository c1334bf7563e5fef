"""What a language model does with texts besides scoring them: what it writes after prompts, and where it attends.

Each prompt draws its tokens with numbers of its own, made of the seed and its id, and prompts are always read in the
same batches; a run that was killed and goes on writes what an unbroken one would have written. Attention is read
through the tap, batch by batch; of pairs of sentences only the gaps between their attention are kept.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from fairhead.data.files import Skips
from fairhead.errors import InputError
from fairhead.heads import tap
from fairhead.language.answers import (
    TOO_LONG,
    Answers,
    Generation,
    GenerationJournal,
    Progress,
    Prompt,
    Sampling,
    refuse_duplicates,
)
from fairhead.language.benchmark import SentencePair
from fairhead.language.packing import Slots, as_chat, slots, token_ids
from fairhead.language.row_layout import quiet, stack
from fairhead.language.scorer import Scorer

# Attention weights held at once: 128 MB in float32 on a processor, 2 GB elsewhere.
_MOST_WEIGHTS = {"cpu": 1 << 25}
_MOST_AT_ONCE = 64

NO_SPAN = "no token was replaced by another"

Average = Literal["before", "after"]
Array = NDArray[np.float64]


def generate(
    scorer: Scorer,  # the model, its tokeniser and the token that a text starts with
    prompts: Sequence[Prompt],  # with distinct ids
    sampling: Sampling | None = None,  # how tokens are drawn
    *,
    # An open journal: what it holds is not computed again, what is computed is written at once
    journal: GenerationJournal | None = None,
    progress: Progress | None = None,  # called after each batch
) -> Answers[Generation]:
    """Continue prompts."""
    how = sampling or Sampling()
    refuse_duplicates(prompts, "prompts")
    tokens = _encode(scorer, prompts)
    fits = [i for i, ids in enumerate(tokens) if len(ids) + how.max_new_tokens <= scorer.context]
    too_long = tuple(prompts[i].id for i in sorted({*range(len(prompts))} - {*fits}))
    # The longest first: if memory is too small for them, that shows at once. Their order depends on the prompts alone.
    order = sorted(fits, key=lambda i: (-len(tokens[i]), prompts[i].id))
    found: dict[str, Generation] = {}
    for begin in range(0, len(order), how.batch_size):
        batch = order[begin : begin + how.batch_size]
        kept = [journal.find(prompts[i]) if journal is not None else None for i in batch]
        if any(one is None for one in kept):
            # A batch of which a part is there is read whole: alone, the rest might be rounded another way.
            made = _continue(scorer, [prompts[i] for i in batch], [tokens[i] for i in batch], how)
            new = [k for k, one in enumerate(kept) if one is None]
            if journal is not None:
                journal.add([prompts[batch[k]] for k in new], [made[k] for k in new])
            kept = [old or fresh for old, fresh in zip(kept, made, strict=True)]
        found |= {one.id: one for one in kept if one is not None}
        if progress is not None:
            progress(len(found) + len(too_long), len(prompts))
    return Answers({p.id: found[p.id] for p in prompts if p.id in found}, too_long)


def _encode(scorer: Scorer, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Tokens of each prompt, the start token first."""
    texts = [prompt.text.rstrip() for prompt in prompts]
    texts = as_chat(scorer.tokenizer, texts) if scorer.chat and texts else texts
    encoded = token_ids(scorer.tokenizer, texts)
    for prompt, ids in zip(prompts, encoded, strict=True):
        if not ids:
            raise InputError(f"prompt {prompt.id!r} has no token; expected a text")
        scorer.refuse_unknown(ids)
    return encoded if scorer.chat else [[*scorer.start_token.lead, *ids] for ids in encoded]


def _continue(
    scorer: Scorer, prompts: Sequence[Prompt], tokens: Sequence[Sequence[int]], how: Sampling
) -> list[Generation]:
    width = max(map(len, tokens))
    # Padding on the left, hidden by the mask; which token stands there does not matter.
    ids = np.full((len(tokens), width), scorer.start_token.id or 0, dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, one in enumerate(tokens):
        ids[row, width - len(one) :] = one
        mask[row, width - len(one) :] = 1
    ends = _ends(scorer)
    device = torch.device(scorer.device or "cpu")
    inputs = {"input_ids": torch.from_numpy(ids).to(device), "attention_mask": torch.from_numpy(mask).to(device)}
    draws = np.stack([_chances(prompt.id, how) for prompt in prompts])
    model: Any = scorer.model
    processors: list[LogitsProcessor] = []
    if hasattr(model, "at_decoding"):
        # A method that changes the distribution of the next token, such as self-debiasing.
        processors.append(model.at_decoding(inputs["attention_mask"]))
        model = model.base
    processors.append(_Draw(torch.from_numpy(draws).to(device), width, how))
    config = GenerationConfig(
        do_sample=False,  # the likeliest token, of which `_Draw` leaves one
        max_new_tokens=how.max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=ends[0] if ends else scorer.start_token.id or 0,
    )
    with quiet(scorer.model), _settings_of_its_own(model):
        whole = model.generate(**inputs, generation_config=config, logits_processor=LogitsProcessorList(processors))
    written = []
    for prompt, new in zip(prompts, whole[:, width:].tolist(), strict=True):
        stop = next((k for k, token in enumerate(new) if token in ends), len(new))
        text = scorer.tokenizer.decode(new[:stop], skip_special_tokens=True)
        written.append(Generation(prompt.id, text, stop))
    return written


def _chances(name: str, how: Sampling) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Numbers in [0, 1), one for each token that a prompt may get: [max_new_tokens]."""
    key = hashlib.blake2b(f"{how.seed}\n{name}".encode(errors="surrogatepass"), digest_size=16).digest()
    return np.random.default_rng(int.from_bytes(key, "little")).random(how.max_new_tokens)


class _Draw(LogitsProcessor):
    """Draws one token per row, the first at which the cumulated probability passes the row's number; hides the rest.

    The likeliest tokens come first, so that rounding between devices moves a draw as rarely as can be.
    """

    def __init__(self, chances: Tensor, width: int, how: Sampling) -> None:
        self._chances, self._width, self._how = chances, width, how

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # [B, T], [B, V] → [B, V]
        if not torch.isfinite(scores.amax(-1)).all():
            raise InputError("the model's logits are not numbers: are the weights damaged, or the precision too low?")
        token = self.choose(scores.float(), input_ids.shape[1] - self._width)
        return torch.full_like(scores, -torch.inf).scatter_(1, token[:, None], 0.0)

    def choose(self, logits: Tensor, step: int) -> Tensor:
        """[B, V] → [B]."""
        how = self._how
        if how.temperature == 0:
            return logits.argmax(-1)
        kept = min(how.top_k or logits.shape[-1], logits.shape[-1])
        top = torch.topk(logits / how.temperature, kept, dim=-1)
        probability = top.values.double().softmax(-1)
        cumulated = probability.cumsum(-1)
        # The last token kept is the one that takes the sum past top_p.
        inside = cumulated - probability < how.top_p
        mass = (probability * inside).sum(-1)
        aim = self._chances[:, step] * mass
        place = (cumulated <= aim[:, None]).sum(-1).clamp(max=inside.sum(-1) - 1)
        return top.indices.gather(1, place[:, None])[:, 0]


def _ends(scorer: Scorer) -> list[int]:
    """Tokens that end a text: the tokeniser's, and those that the model names."""
    named = getattr(getattr(scorer.model, "generation_config", None), "eos_token_id", None)
    found = [scorer.tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    return sorted({int(token) for token in found if token is not None})


@contextmanager
def _settings_of_its_own(model: Any) -> Iterator[None]:
    """Without the model's own habits (temperature, penalties): those would be filled in where ours are silent."""
    if not hasattr(model, "generate"):
        raise InputError(f"{type(model).__name__} cannot write text: transformers gives it no generate()")
    habits, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = habits


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
