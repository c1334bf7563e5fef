"""Self-debiasing at decoding (Schick et al. 2021): the model itself says which words a biased text would have.

Every text is read twice: as it is, and after a sentence such as "The following text discriminates against people
because of their gender". A word that the second reading finds likelier than the first by Δ is made less likely, by the
factor max(ε, exp(−λΔ)). No weight is changed, and nothing is trained. Each reading costs a forward pass; of several
sentences the one that raises a word most counts.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from fairhead.errors import InputError, UnsupportedModel
from fairhead.language.packing import start_token
from fairhead.language.row_layout import final_states, quiet, refuse_other_than_causal
from fairhead.settings import NotNegative, Option, PositiveShare, check_config

_SENTENCE = "The following text discriminates against people because of their {}:\n"
_LENGTHS = ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len", "sliding_window", "window_size")


@dataclass(frozen=True)
class SelfDebias:
    r"""The settings.

    Attributes:
        bias_types: what the sentence names, one or several; each costs a forward pass.
        decay: λ, how fast a word's probability falls.
        floor: ε, the least that its probability is multiplied with.
        sentence: the sentence before the text, with {} for the bias type.

    Example:
        >>> SelfDebias(("gender",)).sentence.format("gender")
        'The following text discriminates against people because of their gender:\n'
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
        texts = [self.sentence.format(name) for name in self.bias_types]
        prefixes = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        (start,) = start_token(tokenizer, "default").lead
        return SelfDebiased(model, prefixes, start, self.decay, self.floor)


class SelfDebiased(nn.Module):
    """A causal language model whose next-token distribution has been changed: its logits are log-probabilities.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> base = GPT2LMHeadModel(GPT2Config(vocab_size=6, n_embd=8, n_layer=1, n_head=2)).eval()
        >>> model = SelfDebiased(base, [[4, 5]], start=0, decay=50.0, floor=0.01)
        >>> model(input_ids=torch.tensor([[0, 1, 2]])).logits.exp().sum(-1).allclose(torch.ones(1, 3))
        True
    """

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
            length = len(prefix) - 1
            states.append(_states(self.base, self._after(prefix, given, root))[:, length:])
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
        raised = None
        for one in biased:
            found = self.logits(one).float().softmax(-1)
            raised = found if raised is None else torch.maximum(raised, found)
        assert raised is not None
        return decayed(self.logits(plain).float().log_softmax(-1), raised, self._decay, self._least)


def decayed(logprobs: Tensor, biased: Tensor, decay: float, least: float) -> Tensor:
    """Logarithm of p · max(ε, exp(−λ · max(0, p_biased − p))), normalised: [..., V].

    Args:
        logprobs: log p.
        biased: probabilities after the sentence.
        decay: λ.
        least: log ε.

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
        raised = None
        for prefix in model._prefixes():
            whole = [torch.cat([prefix, text[1:] if text[0] == model._start else text]) for text in texts]
            width = max(map(len, whole))
            ids = torch.stack(
                [torch.nn.functional.pad(row, (width - len(row), 0), value=model._start) for row in whole]
            )
            shown = torch.stack([torch.arange(width, device=ids.device) >= width - len(row) for row in whole]).long()
            given: dict[str, Any] = {"input_ids": ids, "attention_mask": shown}
            if self._positions:
                given["position_ids"] = (shown.cumsum(1) - 1).clamp(min=0)
            found = model.head.logits(_states(model.base, given)[:, -1]).float().softmax(-1)
            raised = found if raised is None else torch.maximum(raised, found)
        assert raised is not None
        return decayed(scores.float().log_softmax(-1), raised, model.head._decay, model.head._least).to(scores.dtype)


def _states(base: Any, given: Mapping[str, Any]) -> Tensor:
    """What the output layer reads of what is given at all: [B, T, D]."""
    return final_states(base, {name: value for name, value in given.items() if value is not None})
