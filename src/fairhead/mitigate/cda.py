"""CDA: fine-tuning on sentences and their counterfactuals, in which the words of the swap lists change places."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import nn

from fairhead.data.files import Skips
from fairhead.data.sentences import StereoSetItem
from fairhead.errors import InputError
from fairhead.language.answers import TOO_LONG
from fairhead.language.lexicons import read_swaps
from fairhead.language.packing import start_token, token_ids
from fairhead.language.row_layout import stack
from fairhead.mitigate.language_trainer import Prepared
from fairhead.mitigate.sentence_losses import logits_of, token_losses
from fairhead.settings import Option
from fairhead.train.step import Parts

NOTHING_TO_SWAP = "no word of the swap lists"


@dataclass(frozen=True)
class CDA:
    """Counterfactual data augmentation (Zhao et al. 2018, Webster et al. 2020).

    The stereotypes and anti-stereotypes of the training items are the text; each sentence with a word of the swap lists
    is read as it is and with those words swapped, so that neither form has the other's company more often. Sentences
    without such a word would be plain fine-tuning and are left out unless asked for.

    Attributes:
        swaps: word lists: a folder of WinoBias or gn_glove, or a file of pairs.
        one_sided: train on swapped sentences only, not on the originals.
        all_sentences: also train on sentences without a word to swap.
    """

    swaps: Annotated[str, Option(metavar="PATH")]
    one_sided: bool = False
    all_sentences: bool = False
    plan: ClassVar[Mapping[str, Any]] = {"batch_size": 16}

    def check(self) -> None:
        """Refuse word lists that cannot be read, before a model is loaded."""
        read_swaps(self.swaps)

    def prepare(self, items: Iterable[StereoSetItem], tokenizer: Any, context: int) -> "Prepared[tuple[int, ...]]":
        """One example per sentence, the start token first."""
        swaps, lead = read_swaps(self.swaps), start_token(tokenizer).lead
        examples: list[tuple[int, ...]] = []
        left_out = Skips()
        for item in items:
            texts: list[str] = []
            for text in (item.texts.stereotype, item.texts.anti_stereotype):
                other = swaps.swapped(text)
                if other != text:
                    texts += [other] if self.one_sided else [text, other]
                elif self.all_sentences:
                    texts.append(text)
            found = token_ids(tokenizer, texts)
            if not all(found):
                raise InputError(f"item {item.id!r}: a sentence of it has no token; a text is expected")
            kept = [(*lead, *ids) for ids in found if len(ids) + len(lead) <= context]
            if not kept:
                left_out.drop(TOO_LONG if found else NOTHING_TO_SWAP, item.id)
            examples += kept
        return Prepared(examples, [len(one) for one in examples], left_out.found())

    @contextmanager
    def session(self, model: nn.Module) -> "Iterator[Callable[[Sequence[Sequence[int]]], Parts]]":
        """Cross-entropy of sentences."""
        device = next(model.parameters()).device

        def loss(examples: Sequence[Sequence[int]]) -> Parts:
            batch = stack(examples, device)
            return {"loss": token_losses(logits_of(model, batch), batch).sum() / batch.mask[:, 1:].sum()}

        yield loss
