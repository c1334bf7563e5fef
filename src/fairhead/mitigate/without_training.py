"""Methods that train no language model: SentenceDebias edits its last layer, self-debiasing works while it decodes."""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import LogitsProcessor

from fairhead.data.sentences import StereoSetItem
from fairhead.errors import InputError, UnsupportedModel
from fairhead.language.lexicons import Swaps, read_swaps
from fairhead.language.packing import start_token, token_ids
from fairhead.language.row_layout import context_length, final_states, quiet, refuse_other_than_causal, stack
from fairhead.settings import Count, NotNegative, Option, PositiveShare, check_config

_SENTENCE = "The following text discriminates against people because of their {}:\n"
_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "sliding_window", "window_size")


@dataclass(frozen=True)
class SentenceDebias:
    """SentenceDebias (Liang et al. 2020) for causal models: remove the direction of swapped words.

    The directions are the principal components of the differences between the mean-pooled last hidden states of
    sentences and their counterfactuals (`language.lexicons`). The projection that removes them comes right before the
    output layer and is folded into it: the result is an ordinary model.

    Attributes:
        swaps: word lists: a folder of WinoBias or gn_glove, or a file of pairs.
        components: number of directions to remove.
        batch_size: sentences per batch.
    """

    swaps: Annotated[str, Option(metavar="PATH")]
    components: Count = 1
    batch_size: Count = 32

    def check(self) -> None:
        """Refuse word lists that cannot be read, before a model is loaded."""
        read_swaps(self.swaps)

    def edit(
        self, model: Any, tokenizer: Any, items: Iterable[StereoSetItem], progress: Callable[[int, int], None]
    ) -> dict[str, Any]:
        """Find the directions in the sentences of the items, and take them out of the model, in place."""
        pairs = counterfactual_pairs(items, read_swaps(self.swaps))
        axes = directions(model, tokenizer, pairs, self.components, self.batch_size, progress)
        project_out(model, axes)
        return {"pairs": len(pairs), "components": len(axes)}


def counterfactual_pairs(items: Iterable[StereoSetItem], swaps: Swaps) -> list[tuple[str, str]]:
    """The coherent sentences of items that have a word to swap, each with its counterfactual; none twice."""
    texts = dict.fromkeys(text for item in items for text in (item.texts.stereotype, item.texts.anti_stereotype))
    return [(text, other) for text in texts if (other := swaps.swapped(text)) != text]


def directions(
    model: Any,
    tokenizer: Any,
    pairs: Sequence[tuple[str, str]],
    components: int = 1,
    batch_size: int = 32,
    progress: Callable[[int, int], None] | None = None,
) -> Tensor:
    """Unit vectors that the swap moves sentences along, [components, D], in float32 on the CPU.

    Pairs of a sentence and its counterfactual that are longer than the model's context are passed over.
    """
    refuse_other_than_causal(model)
    if len(pairs) <= components:
        raise InputError(f"{len(pairs)} sentences have a word to swap; more than {components} are needed")
    encoded = token_ids(tokenizer, [text for pair in pairs for text in pair], start_token(tokenizer).lead)
    both, limit = zip(encoded[::2], encoded[1::2], strict=True), context_length(model)
    fits = sorted((pair for pair in both if max(map(len, pair)) <= limit), key=lambda pair: len(pair[0]))
    differences = []
    with quiet(model):
        for begin in range(0, len(fits), batch_size):
            batch = zip(*fits[begin : begin + batch_size], strict=True)
            first, second = (_pooled(model, side) for side in batch)
            differences.append((first - second).double().cpu())
            if progress is not None:
                progress(min(begin + batch_size, len(fits)), len(fits))
    table = torch.cat(differences)
    # About 0 and not about their mean: a pair's difference has no sign of its own, and the mean is what is looked for.
    return torch.linalg.svd(torch.cat([table, -table]), full_matrices=False).Vh[:components].float()


def project_out(model: Any, axes: Tensor) -> None:
    """Fold the projection into the output layer, in place: W becomes W (1 − VᵀV). Axes are [k, D], orthonormal.

    An output layer that is the input embedding (tied) becomes a matrix of its own.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedModel(
            f"{type(model).__name__} ends in a {type(head).__name__}; expected a linear layer to project before"
        )
    weight = head.weight.detach()
    v = axes.to(weight.device, torch.float64)
    projected = weight.double() - (weight.double() @ v.T) @ v
    head.weight = nn.Parameter(projected.to(weight.dtype), requires_grad=head.weight.requires_grad)
    model.config.tie_word_embeddings = model.config.get_text_config().tie_word_embeddings = False


def _pooled(model: Any, sentences: Sequence[Sequence[int]]) -> Tensor:
    """Mean over tokens of the states that the output layer reads: [N, D]."""
    batch = stack(sentences, next(model.parameters()).device)
    states = final_states(model, {"input_ids": batch.ids, "attention_mask": batch.mask})
    return (states.float() * batch.mask[..., None]).sum(1) / batch.mask.sum(1, keepdim=True)


@dataclass(frozen=True)
class SelfDebias:
    """Self-debiasing at decoding (Schick et al. 2021): the model itself detects words of a biased text.

    The model reads every text twice: as it is, and after a sentence such as "The following text discriminates against
    people because of their gender". If the second reading makes a word more likely by Δ, its probability is multiplied
    by max(ε, exp(−λΔ)). Nothing is trained and no weight changes. Each reading costs a forward pass; with several
    sentences, the one that raises a word most counts.

    Attributes:
        bias_types: bias types to insert into the sentence, one or several; each costs a forward pass.
        decay: λ, how fast a word's probability falls.
        floor: ε, the smallest factor for its probability.
        sentence: the sentence before the text, with {} for the bias type.
    """

    bias_types: Annotated[tuple[str, ...], Option("--bias-type")] = ("gender", "race", "religion")
    decay: NotNegative = 50.0
    floor: PositiveShare = 0.01
    sentence: str = _SENTENCE
    needs_tokenizer: ClassVar[bool] = True  # to attach it

    def __post_init__(self) -> None:
        check_config(self)
        if "{}" not in self.sentence:
            raise InputError(f"the sentence {self.sentence!r} has no {{}} for the bias type")

    def attach(self, model: Any, tokenizer: Any) -> "SelfDebiased":
        """The model with this at its output; texts are expected to begin with the start token."""
        refuse_other_than_causal(model)
        prefixes = token_ids(tokenizer, [self.sentence.format(name) for name in self.bias_types])
        (start,) = start_token(tokenizer, "default").lead
        return SelfDebiased(model, prefixes, start, self.decay, self.floor)


class SelfDebiased(nn.Module):
    """A causal language model whose next-token distribution has been changed: its logits are log-probabilities."""

    def __init__(self, base: Any, prefixes: Sequence[Sequence[int]], start: int, decay: float, floor: float) -> None:
        super().__init__()
        if not all(prefixes):
            raise InputError("a sentence of self-debiasing has no token in this tokeniser")
        self.base = base
        for i, prefix in enumerate(prefixes):
            # As buffers, so that they are part of the digest that tells one model's scores from another's.
            self.register_buffer(f"prefix_{i}", torch.tensor([start, *prefix], device=base.device))
        self.register_buffer("constants", torch.tensor([decay, floor], dtype=torch.float64, device=base.device))
        self._start, self._n = start, len(prefixes)
        self.head = _Head(base, self._n, decay, math.log(floor))
        self.config = deepcopy(base.config)
        # The sentence takes its part of the context, and of any layer's window.
        text = self.config.get_text_config()
        for name in _LENGTHS:
            length = getattr(text, name, None)
            if isinstance(length, int) and length > 0:
                setattr(text, name, length - max(map(len, prefixes)))
        with quiet(self):
            self._check()

    @property
    def generation_config(self) -> Any:
        """That of the model: it names the tokens that end a text."""
        return self.base.generation_config

    def get_input_embeddings(self) -> Any:
        """The model's own."""
        return self.base.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        """What turns the last states of all readings into log-probabilities."""
        return self.head

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None, **_: Any
    ) -> Any:
        """Log-probabilities of the next token, `.logits` [B, T, V]. Masks are [B, T], or [B, 1, T, T] and added."""
        given: dict[str, Any] = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
        states = [_states(self.base, given)]
        first = torch.zeros_like(input_ids, dtype=torch.bool)
        first[:, 0] = True
        root = (first if position_ids is None else position_ids == 0) & (input_ids == self._start)
        for prefix in self._prefixes():
            states.append(_states(self.base, self._after(prefix, given, root))[:, len(prefix) - 1 :])
        return SimpleNamespace(logits=self.head(torch.cat(states, dim=-1)))

    def at_decoding(self, attention_mask: Tensor) -> "LogitsProcessor":
        """The same for `generate`: changes the scores of the next token; the mask is that of the prompts, [B, T]."""
        return _AtDecoding(self, attention_mask)

    def _prefixes(self) -> list[Tensor]:
        return [self.get_buffer(f"prefix_{i}") for i in range(self._n)]

    def _after(self, prefix: Tensor, given: Mapping[str, Any], root: Tensor) -> dict[str, Any]:
        """The same texts after a sentence: start, sentence, text. The sentence's last token stands at their roots."""
        ids, mask, positions = given["input_ids"], given["attention_mask"], given["position_ids"]
        n, length = len(ids), len(prefix) - 1
        lead = prefix[:-1].expand(n, -1)
        changed: dict[str, Any] = {"input_ids": torch.cat([lead, ids.masked_fill(root, int(prefix[-1]))], dim=1)}
        if mask is not None and mask.dim() == 4:
            width = mask.shape[-1]
            whole = mask.new_zeros(n, 1, length + width, length + width)
            whole[:, :, :length] = torch.finfo(mask.dtype).min
            whole[:, :, :length, :length] = whole[:, :, :length, :length].triu(1)
            whole[:, :, length:, length:] = mask
            changed["attention_mask"] = whole
        elif mask is not None:
            changed["attention_mask"] = torch.cat([mask.new_ones(n, length), mask], dim=1)
        if positions is not None:
            before = torch.arange(length, device=ids.device).expand(n, -1)
            changed["position_ids"] = torch.cat([before, positions + length], dim=1)
        return changed

    def _check(self) -> None:
        ids = torch.arange(3, device=self.base.device)[None] % self.get_input_embeddings().weight.shape[0]
        own = self.base(input_ids=ids).logits.float()
        ours = self.head.logits(_states(self.base, {"input_ids": ids})).float()
        if not torch.allclose(own, ours, atol=1e-2 * float(own.std()) + 1e-5):
            raise UnsupportedModel(
                f"{type(self.base).__name__} does more to its logits than its output layer says; "
                "self-debiasing does not know this family"
            )


class _Head(nn.Module):
    """Last states of all readings, [..., (1 + n) D] → log-probabilities [..., V]."""

    def __init__(self, base: Any, n: int, decay: float, least: float) -> None:
        super().__init__()
        # Not a child module: its weights are the model's own and would be counted twice.
        self.__dict__["_output"] = base.get_output_embeddings()
        self._cap = getattr(base.config.get_text_config(), "final_logit_softcapping", None)
        self._n, self._decay, self._least = n, decay, least

    def logits(self, states: Tensor) -> Tensor:
        """As the model itself makes them."""
        found: Tensor = self.__dict__["_output"](states)
        return found if self._cap is None else self._cap * torch.tanh(found / self._cap)

    def forward(self, states: Tensor) -> Tensor:
        plain, *biased = states.chunk(1 + self._n, dim=-1)
        return self.changed(self.logits(plain), biased)

    def changed(self, logits: Tensor, biased: Iterable[Tensor]) -> Tensor:
        """Log-probabilities, from the model's own logits and the last states of the other readings."""
        raised = reduce(torch.maximum, (self.logits(one).float().softmax(-1) for one in biased))
        return decayed(logits.float().log_softmax(-1), raised, self._decay, self._least)


def decayed(logprobs: Tensor, biased: Tensor, decay: float, least: float) -> Tensor:
    """Logarithm of p · max(ε, exp(−λ · max(0, p_biased − p))), normalised, [..., V]; decay is λ, least is log ε.

    Example:
        >>> found = decayed(torch.tensor([0.5, 0.5]).log(), torch.tensor([0.6, 0.4]), 50.0, math.log(0.01))
        >>> [round(p, 4) for p in found.exp().tolist()]  # 0.5 · max(0.01, exp(−5)) and 0.5, normalised
        [0.0099, 0.9901]
    """
    fall = (-decay * (biased - logprobs.exp()).clamp(min=0)).clamp(min=least)
    return (logprobs + fall).log_softmax(-1)


class _AtDecoding(LogitsProcessor):
    def __init__(self, model: SelfDebiased, attention_mask: Tensor) -> None:
        self._model, self._mask = model, attention_mask
        # Positions matter where padding stands on the left and a family counts them absolutely.
        self._positions = "position_ids" in inspect.signature(model.base.forward).parameters

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # [B, T], [B, V] → [B, V]
        model = self._model
        new = input_ids.shape[1] - self._mask.shape[1]
        mask = torch.cat([self._mask, self._mask.new_ones(len(input_ids), new)], dim=1)
        texts = [row[kept.bool()] for row, kept in zip(input_ids, mask, strict=True)]
        biased = []
        for prefix in model._prefixes():
            whole = [torch.cat([prefix, text[1:] if text[0] == model._start else text]) for text in texts]
            ids = pad_sequence(whole, batch_first=True, padding_value=model._start, padding_side="left")
            shown = pad_sequence([torch.ones_like(row) for row in whole], batch_first=True, padding_side="left")
            given: dict[str, Any] = {"input_ids": ids, "attention_mask": shown}
            if self._positions:
                given["position_ids"] = (shown.cumsum(1) - 1).clamp(min=0)
            biased.append(_states(model.base, given)[:, -1])
        return model.head.changed(scores, biased).to(scores.dtype)


def _states(base: Any, given: Mapping[str, Any]) -> Tensor:
    """What the output layer reads of what is given at all: [B, T, D]."""
    return final_states(base, {name: value for name, value in given.items() if value is not None})
