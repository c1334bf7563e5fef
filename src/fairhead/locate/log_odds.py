"""The log-odds of pairs of texts under a causal language model, taken apart: one term a head, an MLP, the embedding.

The log-probability of a token is its logit less the logarithm of a sum over the vocabulary, which is no sum of terms.
But that logarithm is the expected logit plus the entropy of the distribution, exactly. With the final norm folded in as
elsewhere (each position's own deviation), what a term adds to (logit − expected logit) is its product with
direction = unembedding(token) − expected unembedding, which is also the gradient of the log-probability. So

    log p(token) = Σ over terms ⟨term, direction⟩ + biases − entropy

holds to rounding. The entropy is what no term owns: it is reported as `rest`. A term's part is the slope of the
log-probability as the term grows or shrinks, everything else held: its direct effect, to first order.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fairhead.errors import InputError, UnsupportedModel
from fairhead.language.answers import Progress
from fairhead.language.packing import TokenSequence, encode
from fairhead.language.row_layout import Planned, quiet
from fairhead.language.scorer import Scorer
from fairhead.locate.decompose import Decomposer
from fairhead.locate.head_features import keep_rows
from fairhead.locate.pair_rows import TextPairs

Array = NDArray[np.float64]
_BLOCK = 256  # pairs read, and written to disk, at a time
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_LOW_PRECISION = 0.2


@dataclass(frozen=True)
class PairTerms:
    """Log-odds of n pairs, stereotype against anti-stereotype, taken apart."""

    log_odds: Array  # the model's own, [n]
    heads: Array  # each head's part, [n, L, H]
    others: Array  # parts of the embedding (first) and of each layer's MLP (then), [n, M]
    constant: Array  # what biases add, [n]
    rest: Array  # what no term owns: the difference of the summed entropies, [n]
    # [n, L, H, d]: a head whose own output were m everywhere would have the part ⟨m, reader⟩
    readers: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.log_odds)

    def take(self, rows: NDArray[Any]) -> "PairTerms":
        """The chosen pairs: positions, or a mask."""
        return PairTerms(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})

    def times(self, sign: float) -> "PairTerms":
        """The same, seen from the other side where the sign is −1."""
        return self if sign == 1 else PairTerms(**{f.name: sign * getattr(self, f.name) for f in fields(self)})

    def without(self, heads: Sequence[tuple[int, int]], means: Array | None = None) -> Array:
        """Log-odds with some heads silent, or (given means [L, H, d]) stuck at their mean: direct effect alone, [n]."""
        left = self.log_odds.copy()
        for layer, head in heads:
            left -= self.heads[:, layer, head]
            if means is not None:
                left += self.readers[:, layer, head] @ means[layer, head]
        return left


class _Text(NamedTuple):
    """A text of a pair: its tokens, of which those that can differ between the texts are scored, and its weight."""

    sequence: TokenSequence
    weight: float


def take_apart(
    scorer: Scorer,  # the model, best in float32
    pairs: TextPairs,  # texts to compare
    *,
    # Where to keep the terms; a stopped run goes on there
    folder: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,  # called with (pairs done, pairs)
) -> PairTerms:
    """Read pairs and take their log-odds apart."""
    texts, reader = _texts(scorer, pairs), _Reader(scorer)
    digest = hashlib.sha256("\n".join(f"{t.id} {t.digest}" for t in pairs.texts).encode()).hexdigest()

    def blocks(start: int) -> Iterator[Mapping[str, NDArray[Any]]]:
        for at in range(start, len(pairs), _BLOCK):
            terms = reader.read(texts[2 * at : 2 * (at + _BLOCK)])
            yield {field.name: getattr(terms, field.name) for field in fields(terms)}

    identity = {"texts": digest, **scorer.settings()}
    return PairTerms(**keep_rows(blocks, reader.row, len(pairs), folder=folder, identity=identity, progress=progress))


def encoded_texts(scorer: Scorer, pairs: TextPairs) -> list[TokenSequence]:
    """The tokens of every text of the pairs, all of them scored."""
    found = encode(list(pairs.texts), scorer.tokenizer, scorer.start_token)
    for text, one in zip(pairs.texts, found, strict=True):
        if len(one.sequence.tokens) > scorer.context:
            raise InputError(
                f"the text {text.id!r} has {len(one.sequence.tokens)} tokens, the model reads {scorer.context}: leave "
                "it out"
            )
    return [one.sequence for one in found]


def _texts(scorer: Scorer, pairs: TextPairs) -> list[_Text]:
    """Two a pair. Of sums, tokens before the first difference are left out: they are in both, and add nothing."""
    sequences = encoded_texts(scorer, pairs)
    texts = []
    for i in range(len(pairs)):
        two = sequences[i * pairs.per_pair : i * pairs.per_pair + 2]
        last = min(len(text.tokens) for text in two) - 1
        both = enumerate(zip(two[0].tokens, two[1].tokens, strict=False))
        first = next((i for i, (x, y) in both if x != y), last)
        for sign, (tokens, scored_from) in zip((1.0, -1.0), two, strict=True):
            if pairs.per_token:
                texts.append(_Text(TokenSequence(tokens, scored_from), sign / (len(tokens) - scored_from)))
            else:
                texts.append(_Text(TokenSequence(tokens, max(scored_from, min(first, last))), sign))
    return texts


class _Reader:
    """Reads blocks of texts; knows how the model's last hidden state becomes logits."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        model: Any = scorer.model
        self._decomposer = Decomposer(model, token="last", unit=False)
        self._unembedding = _unembedding_of(model)
        # From a direction of the output to the heads' own outputs, a layer's heads side by side: [L, D, H · d].
        self._maps = self._decomposer.maps.permute(0, 2, 1, 3).flatten(2).contiguous()
        self._checked = False
        layers, heads = self._decomposer.n_layers, self._decomposer.n_heads
        shapes = {"log_odds": (), "heads": (layers, heads), "others": (layers + 1,), "constant": (), "rest": ()}
        of_pair = [(name, np.float64, shape) for name, shape in shapes.items()]
        # What is kept of a pair, by the fields of `PairTerms`
        self.row = np.dtype([*of_pair, ("readers", np.float32, (layers, heads, self._decomposer.head_dim))], align=True)

    def read(self, texts: Sequence[_Text]) -> PairTerms:
        sums = {
            name: torch.from_numpy(np.zeros((len(texts) // 2, *self.row[name].shape), self.row[name].base))
            for name in self.row.names or ()
        }
        for batch in self._scorer.planned([text.sequence for text in texts]):
            with quiet(self._scorer.model):
                pairs, found = self._batch(batch, texts)
            for name, values in found.items():
                sums[name].index_add_(0, pairs, values.to(sums[name]))
        return PairTerms(**{name: values.numpy() for name, values in sums.items()})

    def _batch(self, batch: Planned, texts: Sequence[_Text]) -> tuple[Tensor, dict[str, Tensor]]:
        """The pairs that have tokens in a batch, [k], and what these tokens add to each sum, [k, ...]."""
        inputs: Any = batch.layout.inputs(batch.rows)
        device = inputs["input_ids"].device
        places = [row.predicting for row in batch.rows]
        mask = torch.zeros(inputs["input_ids"].shape, dtype=torch.bool)
        for i, place in enumerate(places):
            mask[i, torch.from_numpy(place.at)] = True
        inputs["use_cache"] = False
        terms = self._decomposer(inputs, mask.to(device))
        if not self._checked:
            self._check(batch, terms.output, [place.at for place in places])
        # S scored tokens: where each is predicted (a row of the terms), and which token it is.
        offsets = np.cumsum([0, *(len(place.at) for place in places)])
        source = np.concatenate([place.source + o for place, o in zip(places, offsets, strict=False)])
        token = np.concatenate([row.tokens[place.scored] for row, place in zip(batch.rows, places, strict=True)])
        entries = list(batch.paths())
        pairs = np.unique([text // 2 for text, _ in entries]).astype(np.int64)
        mix = np.zeros((len(pairs), len(token)))
        for text, places_of in entries:
            mix[np.searchsorted(pairs, text // 2), places_of] += texts[text].weight
        weights = torch.from_numpy(mix).to(device, torch.float32)  # of each token in each pair's log-odds, [k, S]
        at, chosen = torch.from_numpy(source).to(device), torch.from_numpy(token).to(device)
        logprob, direction, bias = self._unembedding(terms.output, at, chosen)
        heads, readers = [], []
        for layer in range(self._decomposer.n_layers):
            z = terms.heads[:, layer]  # [P, H, d]
            seen = (direction @ self._maps[layer]).view(len(direction), *z.shape[1:])  # [S, H, d]
            heads.append(weights @ (seen * z[at]).sum(-1))
            assert terms.scale is not None  # there is no pool here
            own = (seen * terms.scale[at, layer, None, None]).flatten(1)
            readers.append((weights @ own).view(len(pairs), *z.shape[1:]))
        linear = (terms.output[at] * direction).sum(-1)
        found = {
            "log_odds": weights @ logprob,
            "heads": torch.stack(heads, 1),
            "others": weights @ (terms.others[at] @ direction[:, :, None])[..., 0],
            "constant": weights @ ((terms.constant[at] * direction).sum(-1) + bias),
            "rest": weights @ (logprob - linear - bias),
            "readers": torch.stack(readers, 1),
        }
        return torch.from_numpy(pairs), {name: values.cpu() for name, values in found.items()}

    def _check(self, batch: Planned, output: Tensor, at: Sequence[NDArray[np.int64]]) -> None:
        """Once: are these the model's own logits? A family that does more to them than is known must not pass."""
        own = batch.layout.logits(batch.rows, at).float()
        miss = float((self._unembedding.logits(output) - own).abs().max() / own.abs().max())
        if not miss <= _TOLERANCE.get(next(self._scorer.model.parameters()).dtype, _LOW_PRECISION):
            raise UnsupportedModel(
                f"the logits of {type(self._scorer.model).__name__} are not its unembedding of the normed stream (off "
                f"by {miss:.1%}): it does something to them that is not known, so its log-odds cannot be taken apart"
            )
        self._checked = True


@dataclass(frozen=True, eq=False)
class _Unembedding:
    """Logits = cap · tanh(scale · (h W' + b) / cap), with no cap and a scale of 1 in most families."""

    weight: Tensor  # [V, D]
    bias: Tensor | None
    scale: float
    cap: float | None

    def logits(self, h: Tensor) -> Tensor:
        raw = h @ self.weight.T
        raw = (raw if self.bias is None else raw + self.bias) * self.scale
        return raw if self.cap is None else torch.tanh(raw / self.cap) * self.cap

    def __call__(self, h: Tensor, at: Tensor, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of S scored tokens, `token[s]` being predicted at `at[s]` of hidden states h [P, D].

        Their log-probabilities [S], the gradients of these in the last hidden state [S, D], and what a bias adds [S].
        """
        logits = self.logits(h)
        logs = logits.log_softmax(-1)
        p = logs.exp()
        # How a logit answers to its own linear part.
        slope = None if self.cap is None else 1 - (logits / self.cap) ** 2
        spread = p if slope is None else p * slope
        own = torch.ones_like(token, dtype=h.dtype) if slope is None else slope[at, token]
        direction = self.scale * (own[:, None] * self.weight[token] - (spread @ self.weight)[at])
        bias = torch.zeros_like(own)
        if self.bias is not None:
            bias = self.scale * (own * self.bias[token] - (spread @ self.bias)[at])
        return logs[at, token], direction, bias


def _unembedding_of(model: Any) -> _Unembedding:
    last = model.get_output_embeddings()
    if not isinstance(last, nn.Linear):
        raise UnsupportedModel(
            f"the output layer of {type(model).__name__} is a {type(last).__name__}; expected a linear layer"
        )
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    bias = None if last.bias is None else last.bias.detach().float()
    return _Unembedding(last.weight.detach().float(), bias, scale, getattr(config, "final_logit_softcapping", None))


def whole(terms: PairTerms) -> Iterator[tuple[str, Array]]:
    """All parts by name, each [n]; their sum is the log-odds."""
    yield "heads", terms.heads.sum((1, 2))
    yield "embedding and MLPs", terms.others.sum(1)
    yield "biases", terms.constant
    yield "entropy", terms.rest
