"""KLAAD (Kim, Lee and Lee, EMNLP 2025), on the tap: a model attends alike to a stereotype and to its opposite.

The loss of a triplet (stereotype, anti-stereotype, unrelated sentence) has three parts:

1. cross-entropy on the two coherent sentences, so that the model keeps its language;
2. the divergence of the two sentences' attention maps, in the last layer or in others, over the rows that can differ:
   those of tokens after the first difference;
3. a triplet loss on the final hidden states: the coherent sentences nearer to each other than to the unrelated one.

The authors have released no code. Where the paper is silent this is our reading, and each choice is an option. Its
"softmax normalisation before KL", by the letter, is a second softmax over weights that are shares already: a divergence
near 0 and next to no gradient. `renorm="softmax"` does it; the default does not. Nor is it "without modifying weights":
this is fine-tuning.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, normalize, relu

from fairhead.data.sentences import StereoSetItem
from fairhead.errors import InputError, check_known
from fairhead.heads import Reading, tap
from fairhead.language.row_layout import at_vocabulary
from fairhead.mitigate.triplets import (
    SHARE,
    Batch,
    Example,
    Prepared,
    batch_of,
    can_differ,
    encode_triplets,
    example_of,
    layouts_of,
    tree_of,
)
from fairhead.settings import NotNegative, Option, check_config
from fairhead.train.step import Parts

NO_ROWS = "attention cannot differ: no common token after the difference"
# Below this, a weight counts as this: 0 has no logarithm.
_LEAST = 1e-9
# λ1, λ2, λ3 and the margin: the paper's Table 7 for the first three (Gemma's are inferred); GPT-2 as GPT-Neo, Qwen as
# Llama, being built alike.
PRESETS = {
    "llama": (0.7, 0.15, 0.15, 0.3),
    "gpt-neo": (0.5, 0.25, 0.25, 0.5),
    "gemma-2": (0.9, 0.05, 0.05, 0.5),
    "gpt-2": (0.5, 0.25, 0.25, 0.5),
    "qwen": (0.7, 0.15, 0.15, 0.3),
}
_FAMILIES = {"gpt_neo": "gpt-neo", "gemma2": "gemma-2", "gpt2": "gpt-2", "qwen2": "qwen", "qwen3": "qwen"}


@dataclass(frozen=True)
class KLAAD:
    """Settings of KLAAD. The defaults are the paper's weights for Llama and our recommended choices.

    Attributes:
        ce_weight: weight of the cross-entropy (λ1).
        kl_weight: weight of the divergence of attention maps (λ2).
        triplet_weight: weight of the triplet loss (λ3). Parts with weight 0 are not computed.
        margin: margin of the triplet loss.
        layers: layers whose attention is compared, counted from 0 or from -1 backwards.
        heads: compare the "mean" over heads, or compare "each" head and then take the mean.
        renorm: normalisation of weights before the divergence: "none"; "softmax" (as the paper states); "log-renorm",
            which raises weights to at least 1e-9 and rescales them to sum 1.
        length_align: "span" compares unchanged tokens, matched in order, and the total weight on all others;
            "pad_common" compares token i with token i up to the end of the shorter sentence.
        direction: "anti_stereo", KL(anti ‖ stereo), as in the paper; "stereo_anti", the reverse; "symmetric", the
            Jensen-Shannon divergence.
        detach_anti: stop the gradient through the anti-stereotype's attention, which is then the teacher.
        pooling: hidden state of a sentence: the "mean" over its tokens, or that of its "last" token.

    Example:
        >>> KLAAD(kl_weight=0).margin
        0.3
        >>> KLAAD.preset("gpt-neo").ce_weight
        0.5
    """

    ce_weight: NotNegative = 0.7
    kl_weight: NotNegative = 0.15
    triplet_weight: NotNegative = 0.15
    margin: NotNegative = 0.3
    layers: Annotated[Sequence[int], Option(metavar="LIST")] = (-1,)
    heads: Literal["mean", "each"] = "mean"
    renorm: Literal["none", "softmax", "log-renorm"] = "none"
    length_align: Literal["span", "pad_common"] = "span"
    direction: Literal["anti_stereo", "stereo_anti", "symmetric"] = "anti_stereo"
    detach_anti: bool = False
    pooling: Literal["mean", "last"] = "mean"

    def __post_init__(self) -> None:
        check_config(self)
        weights = (self.ce_weight, self.kl_weight, self.triplet_weight)
        if not any(weights):
            raise InputError(f"the weights of the losses are {weights}; expected one above 0")
        if self.kl_weight and not self.layers:
            raise InputError("kl_weight is above 0, but no layer is named whose attention is compared")

    @classmethod
    def preset(cls, name: str) -> "KLAAD":
        """Weights and margin of a family: one of `PRESETS`, or the `model_type` of a Hugging Face config."""
        check_known(_FAMILIES.get(name, name), PRESETS, f"there is no preset {name!r}; there are")
        return cls(**cls.of_family(name))

    @staticmethod
    def of_family(name: str) -> dict[str, Any]:
        """The settings of a preset; none where the family has none: it then has the defaults, which are Llama's."""
        values = PRESETS.get(_FAMILIES.get(name, name), ())
        return dict(zip(("ce_weight", "kl_weight", "triplet_weight", "margin"), values, strict=False))

    def prepare(self, items: Iterable[StereoSetItem], tokenizer: Any, context: int) -> Prepared[Example]:
        """Tokens of the items, their common beginnings shared, and the alignment of their coherent sentences."""
        triplets, left_out = encode_triplets(items, tokenizer, context)
        examples = [example_of(triplet, self.length_align, self.triplet_weight > 0) for triplet in triplets]
        none = tuple(t.id for t, one in zip(triplets, examples, strict=True) if not can_differ(one).any())
        # Of all three, whatever is trained on: a run without a part then differs in that part, not in its batches.
        lengths = [len(tree_of(triplet[1:]).tokens) for triplet in triplets]
        return Prepared(examples, lengths, left_out, {NO_ROWS: none} if none else {})

    @contextmanager
    def session(self, model: nn.Module) -> Iterator[Callable[[Sequence[Example]], Parts]]:
        """The loss of examples, while the model is tapped at the layers that it needs."""
        layout_of = layouts_of(model)
        with ExitStack() as stack:
            weights = stack.enter_context(tap(model, self.layers)).read("weights") if self.kl_weight else None
            yield lambda examples: losses(model, batch_of(examples, layout_of(examples)), self, weights)

    def measuring(self) -> "BothAlignments":
        """The same settings with every part computed, to see what training without one does to it."""
        whole = replace(self, ce_weight=1.0, kl_weight=1.0, triplet_weight=1.0, layers=self.layers or (-1,))
        return BothAlignments(whole)


@dataclass(frozen=True)
class BothAlignments:
    """KLAAD's parts, with the divergence by either reading of the paper's alignment.

    "kl" is that of the settings; the other has its name, such as "kl_pad_common". Both are means over the items whose
    attention can differ.
    """

    config: KLAAD

    @property
    def other(self) -> KLAAD:
        """The settings with the other alignment."""
        return replace(self.config, length_align="span" if self.config.length_align == "pad_common" else "pad_common")

    def prepare(self, items: Iterable[StereoSetItem], tokenizer: Any, context: int) -> "Prepared[_InBothWays]":
        """Each item in both ways."""
        listed = list(items)
        first, second = (config.prepare(listed, tokenizer, context) for config in (self.config, self.other))
        both = list(zip(first.examples, second.examples, strict=True))
        return Prepared(both, first.lengths, first.left_out, first.noted)

    @contextmanager
    def session(self, model: nn.Module) -> "Iterator[Callable[[Sequence[_InBothWays]], Parts]]":
        """The parts of both, from one forward pass, and the share of items that each divergence is of."""
        layout_of = layouts_of(model)
        with tap(model, self.config.layers) as opened:
            weights = opened.read("weights")

            def parts(examples: Sequence[_InBothWays]) -> Parts:
                own, other = ([one[side] for one in examples] for side in (0, 1))
                batches = [batch_of(one, layout_of(one)) for one in (own, other)]
                name = f"kl_{self.other.length_align}"
                found = losses(model, batches[0], self.config, weights, {name: batches[1]})
                shares = [(batch.queries.sum(-1) > 0).float().mean() for batch in batches]
                for part, share in zip(("kl", name), shares, strict=True):
                    found |= {part: found[part] * share, f"{part}{SHARE}": share}
                return found

            yield parts


_InBothWays = tuple[Example, Example]


def losses(
    model: nn.Module, batch: Batch, config: KLAAD, weights: Reading | None, also: Mapping[str, Batch] | None = None
) -> dict[str, Tensor]:
    """The parts of the loss ("ce", "kl", "triplet") that have a weight, and their weighted sum ("loss").

    The model reads the batch once. `weights` are the attention of `config.layers`, read through an open tap; None where
    `kl_weight` is 0. `also` has further divergences, of the same sentences compared in other ways; no part of the sum.
    """
    # Where nothing is predicted, nothing goes through the vocabulary.
    predicting = batch.predicting if config.ce_weight else batch.predicting[:0]
    with at_vocabulary(model, predicting) as seen:
        logits = model(**batch.inputs, use_cache=False).logits[0].float()
    parts: dict[str, Tensor] = {}
    if config.ce_weight:
        surprise = logits.logsumexp(-1)[batch.source] - logits[batch.source, batch.tokens]
        parts["ce"] = (surprise[: batch.n_stereotype].mean() + surprise[batch.n_stereotype :].mean()) / 2
    if config.kl_weight:
        assert weights is not None
        for name, compared in {"kl": batch, **(also or {})}.items():
            parts[name] = torch.stack([attention_divergence(layer, compared, config) for layer in weights]).mean()
        weights.clear()
    if config.triplet_weight:
        sentences = (seen[0].float()[rows] for rows in batch.rows)
        s, a, u = (pool(hidden, of, config.pooling) for hidden, of in zip(sentences, batch.member, strict=True))
        parts["triplet"] = triplet_loss(s, a, u, config.margin)
    factors = {"ce": config.ce_weight, "kl": config.kl_weight, "triplet": config.triplet_weight}
    return {"loss": torch.stack([factors[name] * parts[name] for name in factors if name in parts]).sum(), **parts}


def attention_divergence(weights: Tensor, batch: Batch, config: KLAAD) -> Tensor:
    """Divergence over keys of attention maps in weights [N, H, T, T], averaged over queries, then heads, then pairs.

    Only queries that can differ count, and only pairs that have any.
    """
    maps = weights.float()
    maps = maps.mean(1, keepdim=True) if config.heads == "mean" else maps
    s, a = (_compared_map(maps[rows], p, batch.compared) for rows, p in zip(batch.rows, batch.places, strict=False))
    if config.detach_anti:
        a = a.detach()
    number = torch.arange(batch.compared.shape[1], device=s.device)
    # A query sees the compared keys up to its own, and the total of the others where there are any before it.
    seen = (number[None, :] <= number[:, None]) & batch.compared.bool()[:, None, :]
    valid = torch.cat([seen, batch.others[..., None]], dim=-1)[:, None]
    log_s, log_a = (_log_shares(x, valid, config.renorm) for x in (s, a))
    if config.direction == "symmetric":
        middle = torch.logaddexp(log_s, log_a) - math.log(2)
        per_query = (_divergence(log_a, middle, valid) + _divergence(log_s, middle, valid)) / 2
    else:
        of, from_ = (log_a, log_s) if config.direction == "anti_stereo" else (log_s, log_a)
        per_query = _divergence(of, from_, valid)
    queries = batch.queries[:, None].float()
    rows = queries.sum(-1)
    per_pair = (per_query * queries).sum(-1) / rows.clamp(min=1)  # [B, H]
    return per_pair.mean(1).sum() / (rows > 0).sum().clamp(min=1)


def _compared_map(weights: Tensor, places: Tensor, compared: Tensor) -> Tensor:
    """Weights [B, H, T, T] → [B, H, M, M + 1]: compared queries by compared keys, last the total of all other keys."""
    (_, heads, _, tokens), n = weights.shape, places.shape[1]
    rows = weights.gather(2, places[:, None, :, None].expand(-1, heads, -1, tokens))
    shared = rows.gather(3, places[:, None, None, :].expand(-1, heads, n, -1))
    other = 1 - torch.zeros_like(rows[:, 0, 0]).scatter_reduce(1, places, compared.to(rows.dtype), "amax")
    return torch.cat([shared, (rows * other[:, None, None]).sum(-1, keepdim=True)], dim=-1)


def _log_shares(weights: Tensor, valid: Tensor, renorm: str) -> Tensor:
    """Logarithms of what is compared; those that are not valid are any finite number."""
    if renorm == "none":
        return weights.clamp(min=_LEAST).log()
    values = weights if renorm == "softmax" else weights.clamp(min=_LEAST).log()
    return log_softmax(values.masked_fill(~valid, -torch.inf), dim=-1).masked_fill(~valid, 0.0)


def _divergence(log_p: Tensor, log_q: Tensor, valid: Tensor) -> Tensor:
    return (log_p.exp() * (log_p - log_q)).masked_fill(~valid, 0.0).sum(-1)


def pool(hidden: Tensor, mask: Tensor, pooling: Literal["mean", "last"] = "mean") -> Tensor:
    """One unit vector per sentence: [N, T, D] → [N, D]."""
    if pooling == "last":
        number = torch.arange(hidden.shape[1], device=hidden.device)
        last = (mask * (number + 1)).argmax(1)
        return normalize(hidden[torch.arange(len(hidden), device=hidden.device), last], dim=-1)
    return normalize((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True), dim=-1)


def triplet_loss(stereotype: Tensor, anti: Tensor, unrelated: Tensor, margin: float) -> Tensor:
    """max(0, ‖s − a‖² − ‖s − u‖² + margin) of unit vectors [B, D], averaged."""
    near, far = (stereotype - anti).square().sum(-1), (stereotype - unrelated).square().sum(-1)
    return relu(near - far + margin).mean()
