"""BiasUnlearn: stereotypes are made less likely, what the model knew otherwise is kept."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from fairhead.data.sentences import StereoSetItem
from fairhead.errors import InputError
from fairhead.language.row_layout import Sentences
from fairhead.mitigate.language_trainer import Prepared
from fairhead.mitigate.sentence_losses import NegativeLogLikelihoods, logits_of, token_losses
from fairhead.mitigate.triplets import TokenTriplet, encode_triplets, stack_triplets
from fairhead.settings import NotNegative, Positive, Share, check_config
from fairhead.train.step import Parts
from fairhead.train.tuning import Look

Example = tuple[TokenTriplet, bool]


@dataclass(frozen=True)
class BiasUnlearn:
    """BiasUnlearn (EMNLP 2025) on the triplets that KLAAD trains on: forget stereotypes, keep what the model knew.

    The loss of a triplet has three parts:

    1. negative preference optimisation on the stereotype, −(2/β) log σ(β (NLL − NLL of the pretrained model)): as the
       stereotype grows less likely than it was, the pull on it fades, so that it is not pushed without end;
    2. cross-entropy on the anti-stereotype;
    3. the divergence of the next-token distributions on the unrelated sentence from those of the pretrained model.

    As its authors run it, the category farthest from even is trained on, a quarter of the anti-stereotypes is forgotten
    too, stereotypes and anti-stereotypes change places while the score of watched terms is below even, and that score
    ends the training (`LanguagePlan.checks`). The defaults are the authors'.

    Attributes:
        forget_weight: of the negative preference optimisation.
        retain_weight: of the cross-entropy on the anti-stereotype.
        keep_weight: of the divergence from the pretrained model on unrelated sentences.
        beta: how soon the pull on the stereotype fades.
        anti_in_forget: share of the triplets, evenly spread, whose anti-stereotype is to be forgotten too.
        category: train on the category whose stereotype score is farthest from even, or on all of them.
        swap: let stereotypes and anti-stereotypes change places while the last check saw a score below even.
    """

    forget_weight: NotNegative = 0.5
    retain_weight: NotNegative = 0.3
    keep_weight: NotNegative = 0.2
    beta: Positive = 0.1
    anti_in_forget: Share = 0.25
    category: Literal["farthest", "all"] = "farthest"
    swap: bool = True
    plan: ClassVar[Mapping[str, Any]] = {"learning_rate": 2e-5, "checks": 8, "watched": 0.15}

    def __post_init__(self) -> None:
        check_config(self)
        weights = (self.forget_weight, self.retain_weight, self.keep_weight)
        if not any(weights):
            raise InputError(f"the weights of the losses are {weights}; one above 0 is expected")

    def choose(self, items: Sequence[StereoSetItem], score: Callable[[Sequence[StereoSetItem]], float]) -> str | None:
        """The category to train on, by the stereotype scores of the training items; None for all of them."""
        found = sorted({item.bias_type for item in items})
        if self.category == "all" or len(found) < 2:
            return None
        scores = {name: score([item for item in items if item.bias_type == name]) for name in found}
        return max(found, key=lambda name: abs(scores[name] - 0.5))

    def prepare(self, items: Iterable[StereoSetItem], tokenizer: Any, context: int) -> "Prepared[Example]":
        """One example per item."""
        triplets, left_out = encode_triplets(items, tokenizer, context)
        share = self.anti_in_forget
        mixed = [int((i + 1) * share) > int(i * share) for i in range(len(triplets))]
        examples = [(triplet, mix) for triplet, mix in zip(triplets, mixed, strict=True)]
        return Prepared(examples, [max(map(len, triplet[1:])) for triplet in triplets], left_out)

    @contextmanager
    def session(self, model: nn.Module) -> "Iterator[Callable[[Sequence[Example]], Parts]]":
        """The loss of examples, against the model as it is now."""
        # LoRA's model is the pretrained one with its matrices switched off; else a copy is kept.
        lora = hasattr(model, "disable_adapter")
        reference: Any = model if lora else deepcopy(model).requires_grad_(False).eval()
        off: Callable[[], AbstractContextManager[Any]] = reference.disable_adapter if lora else nullcontext
        yield _Loss(self, model, reference, off)

    def parts(self, logits: Tensor, before: Tensor, batch: Sentences, mixed: Tensor) -> Parts:
        """The loss from the logits of B triplets [3B, T, V] and those of the pretrained model; `mixed` is [B]."""
        n = len(mixed)
        now = token_losses(logits[: 2 * n], Sentences(batch.ids[: 2 * n], batch.mask[: 2 * n]))
        then = token_losses(before[: 2 * n], Sentences(batch.ids[: 2 * n], batch.mask[: 2 * n]))
        rise = (now - then).sum(-1)  # [2B]
        pull = -2 / self.beta * logsigmoid(self.beta * rise)
        forgotten = torch.cat([torch.ones_like(mixed, dtype=torch.bool), mixed])
        forget = pull[forgotten].mean()
        retain = now[n:].sum() / batch.mask[n : 2 * n, 1:].sum()
        keep = _divergence(before[2 * n :], logits[2 * n :], batch.mask[2 * n :])
        total = self.forget_weight * forget + self.retain_weight * retain + self.keep_weight * keep
        return {"loss": total, "forget": forget, "retain": retain, "keep": keep}

    def measuring(self) -> "NegativeLogLikelihoods":
        """How likely the three sentences are: the loss itself needs the pretrained model."""
        return NegativeLogLikelihoods()


class _Loss:
    """The loss of a batch; which sentences are to be forgotten depends on the last check."""

    def __init__(
        self, method: BiasUnlearn, model: nn.Module, reference: Any, off: Callable[[], AbstractContextManager[Any]]
    ) -> None:
        self._method, self._model, self._reference, self._off = method, model, reference, off
        self.swapped = False

    def see(self, look: Look) -> None:
        """What a check has seen."""
        self.swapped = self._method.swap and look.ss < 0.5

    def __call__(self, examples: Sequence[Example]) -> Parts:
        device = next(self._model.parameters()).device
        triplets = [triplet for triplet, _ in examples]
        if self.swapped:
            triplets = [t._replace(stereotype=t.anti_stereotype, anti_stereotype=t.stereotype) for t in triplets]
        batch = stack_triplets(triplets, device)
        logits = logits_of(self._model, batch)
        with torch.no_grad(), self._off():
            before = logits_of(self._reference, batch)
        return self._method.parts(logits, before, batch, torch.tensor([mix for _, mix in examples], device=device))


def _divergence(before: Tensor, now: Tensor, mask: Tensor) -> Tensor:
    """KL(pretrained ‖ now) of next-token distributions [B, T, V], averaged over the tokens that predict one."""
    old, new = (logits[:, :-1].float().log_softmax(-1) for logits in (before, now))
    per_token = (old.exp() * (old - new)).sum(-1) * mask[:, 1:]
    return per_token.sum() / mask[:, 1:].sum()
