"""Sentences in threes (stereotype, anti-stereotype, unrelated), from StereoSet to the batches a model is trained on."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch

from fairhead.data import parse_spec, read_items
from fairhead.data.sentence_pairs import CrowsPair
from fairhead.data.sentence_triplets import StereoSetItem, Triplet, TripletSplit, split_by_target
from fairhead.data.splits import shuffle_by_hash
from fairhead.errors import InputError
from fairhead.language.answers import TOO_LONG
from fairhead.language.packing import start_token
from fairhead.language.row_layout import Sentences, stack
from fairhead.language.running import digest
from fairhead.settings import PYTHON_ONLY, Count, Option, Seed, Share, check_settings


class TokenTriplet(NamedTuple):
    """The tokens of an item's three texts, each with the start token first."""

    id: str
    stereotype: tuple[int, ...]
    anti_stereotype: tuple[int, ...]
    unrelated: tuple[int, ...]


class EncodedTriplets(NamedTuple):
    """Items ready for training, and those left out by reason."""

    triplets: tuple[TokenTriplet, ...]
    left_out: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class TripletData:
    """Which triplets to train on.

    Attributes:
        source: the data as name:path: stereoset:PATH; of your own triplets:PATH or pairs:PATH.
        held_out: share of the items whose target terms are kept out of training.
        seed: of the split; another seed, another split.
        bias_type: only items of this category, such as gender; by default all.
        kind: only StereoSet's sentences that differ in a word or two (intrasentence), or only those that follow a
            context (intersentence), which share no word; the split by terms stays the same.
        limit: only so many items of each part, to try things out; the split stays the same.
        options: of the reader.
    """

    source: Annotated[str, Option("--data", "SPEC")]
    held_out: Annotated[Share, Option(metavar="SHARE")] = 0.1
    seed: Annotated[Seed, Option("--split-seed")] = 0
    bias_type: str | None = None
    kind: Literal["intrasentence", "intersentence"] | None = None
    limit: Count | None = None
    options: Annotated[Mapping[str, Any], PYTHON_ONLY] = field(default_factory=dict)
    panel: ClassVar[str] = "Data"

    def __post_init__(self) -> None:
        check_settings(TripletData, vars(self), "the data")
        if self.held_out == 1:
            raise InputError("held_out is 1: nothing would be left to train on")

    def read(self) -> TripletSplit:
        """Read and split; no target term is in both parts.

        Example:
            >>> TripletData("crows:crows_pairs.csv").read()
            Traceback (most recent call last):
                ...
            fairhead.errors.InputError: crows_pairs is there to score models with, and none should be trained on it; \
stereoset:PATH, triplets:PATH or pairs:PATH is expected
        """
        reader = parse_spec(self.source, "triplets", "pairs").reader
        if reader.name == "crows_pairs":
            raise InputError(
                "crows_pairs is there to score models with, and none should be trained on it; stereoset:PATH, "
                "triplets:PATH or pairs:PATH is expected"
            )
        found = list(read_items(self.source, **self.options))
        items: list[StereoSetItem] = triplets_of(found) if reader.kind == "pairs" else found
        if self.bias_type is not None:
            known = sorted({item.bias_type for item in items})
            items = [item for item in items if item.bias_type == self.bias_type]
            if not items:
                raise InputError(f"there are no items of bias type {self.bias_type!r}; there are {', '.join(known)}")
        split = split_by_target(items, self.held_out, self.seed)
        if reader.kind == "pairs":  # no sentence that is held out is to be the third one of a training triplet
            kept = {item.id for item in split.train}
            split = split._replace(train=tuple(triplets_of([pair for pair in found if pair.id in kept])))
        return TripletSplit(*(self._drawn(part) for part in split))

    def _drawn(self, items: tuple[StereoSetItem, ...]) -> tuple[StereoSetItem, ...]:
        if self.kind is not None:
            items = tuple(item for item in items if item.kind == self.kind)
        if self.limit is None or self.limit >= len(items):
            return items
        chosen = np.random.default_rng(self.seed).permutation(len(items))[: self.limit]
        return tuple(items[i] for i in sorted(chosen))

    def described(self) -> dict[str, Any]:
        """What it is, as a record of the training keeps it."""
        found = {name: value for name, value in asdict(self).items() if name not in ("options", "kind") or value}
        if self.source.startswith("memory:"):  # known again by what they are, not by where they lie
            found["source"] = f"memory:{digest(read_items(self.source))}"
        return found


def triplets_of(pairs: Sequence[CrowsPair]) -> list[StereoSetItem]:
    """Pairs as triplets, each a term of its own: the third sentence is the less stereotypical one of another pair.

    Example:
        >>> pairs = [CrowsPair(str(i), f"She {i}.", f"He {i}.", "stereo", "gender", ()) for i in range(3)]
        >>> triplet = triplets_of(pairs)[0]
        >>> triplet.sentences.stereotype, triplet.sentences.unrelated in ("He 1.", "He 2."), triplet.target
        ('She 0.', True, 'She 0.')
    """
    order = shuffle_by_hash([pair.less for pair in pairs], seed=0)
    if len(order) < 2:
        raise InputError("at least two pairs with different sentences are needed: each is held against another one")
    after = dict(zip(order, [*order[1:], order[0]], strict=True))
    kind = "intrasentence"
    return [StereoSetItem(p.id, kind, p.more, p.bias_type, "", Triplet(p.more, p.less, after[p.less])) for p in pairs]


def targets(items: Iterable[StereoSetItem]) -> tuple[str, ...]:
    """The distinct target terms of items, as they are compared: in lower case, sorted."""
    return tuple(sorted({item.target.casefold() for item in items}))


def encode_triplets(items: Iterable[StereoSetItem], tokenizer: Any, context: int | None = None) -> EncodedTriplets:
    """Tokens of each item's three full texts, the start token (BOS, or end of text) before each.

    Args:
        items: as the reader returns them.
        tokenizer: a Hugging Face tokeniser.
        context: tokens that the model can read; items with a longer text are left out and named, never cut.

    Raises:
        InputError: a text without a token; the tokeniser has no token to start a text with.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> from fairhead.data.sentence_triplets import Triplet
        >>> words = Tokenizer(models.WordLevel({w: i for i, w in enumerate("<s> nurses are kind rude blue".split())}))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>")
        >>> texts = Triplet("nurses are kind", "nurses are rude", "nurses are blue")
        >>> item = StereoSetItem("1", "intrasentence", "nurse", "profession", "nurses are BLANK", texts)
        >>> encode_triplets([item], tokenizer).triplets[0].anti_stereotype
        (0, 1, 2, 4)
    """
    listed = list(items)
    lead = start_token(tokenizer).lead
    texts = [text for item in listed for text in item.texts]
    found: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    kept, too_long = [], []
    for i, item in enumerate(listed):
        three = found[3 * i : 3 * i + 3]
        for label, ids in zip(("stereotype", "anti-stereotype", "unrelated"), three, strict=True):
            if not ids:
                raise InputError(f"item {item.id!r}: its {label} sentence is empty; three sentences are expected")
        if context is not None and max(map(len, three)) + len(lead) > context:
            too_long.append(item.id)
        else:
            kept.append(TokenTriplet(item.id, *((*lead, *ids) for ids in three)))
    return EncodedTriplets(tuple(kept), {TOO_LONG: tuple(too_long)} if too_long else {})


def stack_triplets(triplets: Sequence[TokenTriplet], device: torch.device | str = "cpu") -> Sentences:
    """One batch of 3B rows: all stereotypes, then all anti-stereotypes, then all unrelated sentences.

    Example:
        >>> stack_triplets([TokenTriplet("1", (0, 1), (0, 2), (0, 3)), TokenTriplet("2", (0, 4), (0, 5), (0, 6))]).ids
        tensor([[0, 1],
                [0, 4],
                [0, 2],
                [0, 5],
                [0, 3],
                [0, 6]])
    """
    columns = zip(*(triplet[1:] for triplet in triplets), strict=True)
    return stack([tokens for column in columns for tokens in column], device)
