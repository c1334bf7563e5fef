"""Counterfactual data augmentation (Zhao et al. 2018, Webster et al. 2020): sentences and their counterfactuals.

The stereotypes and anti-stereotypes of the training items are the text; each sentence with a word of the swap lists is
read as it is and with those words swapped, so that neither form has the other's company more often. Sentences without
such a word would be plain fine-tuning and are left out unless asked for.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fairhead.data.sentence_triplets import StereoSetItem
from fairhead.errors import InputError
from fairhead.language.answers import TOO_LONG
from fairhead.language.lexicons import read_swaps
from fairhead.language.packing import start_token
from fairhead.language.row_layout import Sentences, stack
from fairhead.mitigate.language_trainer import Prepared
from fairhead.settings import Option
from fairhead.train.step import Parts

NOTHING_TO_SWAP = "no word of the swap lists"


@dataclass(frozen=True)
class CDA:
    """The settings.

    Attributes:
        swaps: word lists: a folder of WinoBias or gn_glove, or a file of pairs.
        one_sided: train on swapped sentences only, not on the originals.
        all_sentences: also train on sentences without a word to swap.

    Example:
        >>> CDA("winobias").one_sided
        False
    """

    swaps: Annotated[str, Option(metavar="PATH")]
    one_sided: bool = False
    all_sentences: bool = False
    plan: ClassVar[Mapping[str, Any]] = {"batch_size": 16}

    def check(self) -> None:
        """Refuse word lists that cannot be read, before a model is loaded."""
        read_swaps(self.swaps)

    def prepare(self, items: Iterable[StereoSetItem], tokenizer: Any, context: int) -> "Prepared[tuple[int, ...]]":
        """One example a sentence, the start token first."""
        swaps, lead = read_swaps(self.swaps), start_token(tokenizer).lead
        examples: list[tuple[int, ...]] = []
        left_out: dict[str, list[str]] = {}
        for item in items:
            texts: list[str] = []
            for text in (item.texts.stereotype, item.texts.anti_stereotype):
                other = swaps.swapped(text)
                if other != text:
                    texts += [other] if self.one_sided else [text, other]
                elif self.all_sentences:
                    texts.append(text)
            found = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
            if not all(found):
                raise InputError(f"item {item.id!r}: a sentence of it has no token; a text is expected")
            kept = [(*lead, *ids) for ids in found if len(ids) + len(lead) <= context]
            if not kept:
                left_out.setdefault(TOO_LONG if found else NOTHING_TO_SWAP, []).append(item.id)
            examples += kept
        return Prepared(examples, [len(one) for one in examples], {k: tuple(v) for k, v in left_out.items()})

    @contextmanager
    def session(self, model: nn.Module) -> "Iterator[Callable[[Sequence[Sequence[int]]], Parts]]":
        """Cross-entropy of sentences."""
        device = next(model.parameters()).device

        def loss(examples: Sequence[Sequence[int]]) -> Parts:
            batch = stack(examples, device)
            per_token = token_losses(_logits(model, batch), batch)
            return {"loss": per_token.sum() / batch.mask[:, 1:].sum()}

        yield loss

    def measuring(self) -> "CDA":
        """Itself: its loss has one part."""
        return self


def token_losses(logits: Tensor, batch: Sentences) -> Tensor:
    """Negative log-probability of each token after the first, 0 for padding: [N, T, V] → [N, T − 1].

    Example:
        >>> import torch
        >>> batch = stack([[0, 1, 1], [0, 1]])
        >>> token_losses(torch.zeros(2, 3, 4), batch).sum(1).tolist()  # log 4 a token
        [2.7725887298583984, 1.3862943649291992]
    """
    flat = cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch.ids[:, 1:].flatten(), reduction="none")
    return flat.view(batch.ids.shape[0], -1) * batch.mask[:, 1:]


def _logits(model: nn.Module, batch: Sentences) -> Tensor:
    found: Tensor = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits
    return found
