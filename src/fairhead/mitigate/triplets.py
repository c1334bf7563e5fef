"""Sentences in threes (stereotype, anti-stereotype, unrelated), from StereoSet to the batches a model is trained on.

For KLAAD's loss the three sentences are laid into one tree, so that what they begin with is computed once: about two
thirds of the tokens are left. Models that cannot read trees get a row per sentence.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fairhead.data import parse_spec, read_items
from fairhead.data.sentences import BBQItem, CrowsPair, StereoSetItem, Triplet, TripletSplit, split_by_target
from fairhead.data.splits import shuffle_by_hash
from fairhead.errors import InputError, check_known
from fairhead.language.answers import TOO_LONG, text_digest
from fairhead.language.packing import (
    Alignment,
    Ints,
    Row,
    TokenSequence,
    align,
    align_by_position,
    pack,
    plain_row,
    start_token,
    token_ids,
)
from fairhead.language.row_layout import Layout, Sentences, reads_trees, send, stack, window_of
from fairhead.language.running import digest
from fairhead.settings import PYTHON_ONLY, Count, Option, Seed, Share, check_settings
from fairhead.train.step import say_once

NOT_TO_TRAIN_ON = "CrowS-Pairs was made to score models with, and its authors ask that none be trained on it"


def is_crows_pairs(name: str, path: str) -> bool:
    """Whether data of this name, or of this file, are CrowS-Pairs: also as own pairs, in any language."""
    return "crows" in f"{name} {Path(path).name}".casefold()


E = TypeVar("E")
SHARE = " share"  # after the name of a part of a loss: of how many of the examples it is


class Prepared(NamedTuple, Generic[E]):
    """Items as a method trains on them."""

    examples: Sequence[E]  # one or more an item
    lengths: Sequence[int]  # the tokens of each example
    left_out: Mapping[str, tuple[str, ...]]  # ids of items that cannot be trained on, by reason
    noted: Mapping[str, tuple[str, ...]] = {}  # of items that are trained on, but not by every part of the loss


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
        source: the data as name:path: stereoset:PATH, bbq:PATH, or your own triplets:PATH or pairs:PATH. Of BBQ, pairs
            are made that tell the same story of two people, once the other way round; templates are its terms. Repeat
            it to train on several sources; a term that is held out of one is not trained on in another.
        held_out: share of the items whose target terms are held out of training; with several sources, one share for
            all, or one for each in their order (0.3,0.5).
        seed: seed of the split.
        bias_type: use only items of this category, such as gender; by default all.
        kind: use only StereoSet's sentences that differ in a word or two (intrasentence), or only those that follow a
            context (intersentence), which share no word; the split by terms stays the same.
        limit: use only this many items of each part, to try things out; the split stays the same.
        options: options of the reader; with several readers, each uses those that it has, and "pairs.term" sets the
            option of one of them.
    """

    source: Annotated[Sequence[str], Option("--data", "SPEC")]
    held_out: Annotated[Sequence[Share] | Share, Option(metavar="SHARE")] = (0.1,)
    seed: Annotated[Seed, Option("--split-seed")] = 0
    bias_type: str | None = None
    kind: Literal["intrasentence", "intersentence"] | None = None
    limit: Count | None = None
    options: Annotated[Mapping[str, Any], PYTHON_ONLY] = field(default_factory=dict)
    panel: ClassVar[str] = "Data"

    def __post_init__(self) -> None:
        check_settings(TripletData, vars(self), "the data")
        if 1 in self.shares:
            raise InputError("held_out is 1: nothing would be left to train on")
        if len(self.shares) != len(self.sources):
            raise InputError(f"held_out is {self.held_out}; expected one share, or one for each of {self.sources}")
        if len({*self.sources}) < len(self.sources):
            raise InputError(f"a source of data is named twice: {', '.join(self.sources)}")

    @property
    def sources(self) -> tuple[str, ...]:
        """Each as name:path."""
        return (self.source,) if isinstance(self.source, str) else tuple(self.source)

    @property
    def shares(self) -> tuple[float, ...]:
        """What is held out of each."""
        found = tuple(self.held_out) if isinstance(self.held_out, Sequence) else (self.held_out,)
        return found * len(self.sources) if len(found) == 1 else found

    def read(self) -> TripletSplit:
        """Read and split; no target term is in both parts.

        Example:
            >>> TripletData("bold:BOLD").read()
            Traceback (most recent call last):
                ...
            fairhead.errors.InputError: bold has beginnings of texts; sentences in threes or pairs of sentences or \
questions with answers are needed here: bbq, crows_pairs, stereoset, pairs, triplets
        """
        readers = [parse_spec(source, "triplets", "pairs", "questions").reader for source in self.sources]
        known = {f"{of}{key}" for reader in readers for key in reader.options for of in ("", f"{reader.name}.")}
        named = " or of ".join(reader.name for reader in readers)
        shown = sorted(name for name in known if "." not in name)
        for name in {*self.options} - known:
            check_known(name, shown, f"{name!r} is no option of {named}; there are")
        parts = [self._read(source, share) for source, share in zip(self.sources, self.shares, strict=True)]
        held_out = tuple(item for part in parts for item in part.held_out)
        terms = {*targets(held_out)}
        train = tuple(i for part in parts for i in part.train if i.target.casefold() not in terms)
        return TripletSplit(train, held_out)

    def _read(self, source: str, held_out: float) -> TripletSplit:
        """One of the sources."""
        reader, path = parse_spec(source)
        own = {name: self.options[name] for name in reader.options if name in self.options}
        own |= {name: self.options[key] for name in reader.options if (key := f"{reader.name}.{name}") in self.options}
        found: Any = reader.read(path, **own)
        if is_crows_pairs(found.name, str(found.provenance.get("path", ""))):
            so = "say so wherever scores of this model are shown, and score it on the pairs that are held out"
            say_once(f"{NOT_TO_TRAIN_ON}: {so}")
        in_pairs = reader.kind != "triplets"
        if reader.kind == "questions":
            found = swapped_people(found)
        items: list[StereoSetItem] = triplets_of(found) if in_pairs else list(found)
        if self.bias_type is not None:
            known = sorted({item.bias_type for item in items})
            items = [item for item in items if item.bias_type == self.bias_type]
            if not items:
                raise InputError(f"there are no items of bias type {self.bias_type!r}; there are {', '.join(known)}")
        split = split_by_target(items, held_out, self.seed)
        if in_pairs:  # no sentence that is held out is to be the third one of a training triplet
            kept = {item.id for item in split.train}
            split = split._replace(train=tuple(triplets_of([pair for pair in found if pair.id in kept])))
        return TripletSplit(*(self._drawn(part, source) for part in split))

    def _drawn(self, items: tuple[StereoSetItem, ...], source: str) -> tuple[StereoSetItem, ...]:
        items = tuple(item for item in items if self.kind in (None, item.kind))
        if self.limit is not None and self.limit < len(items):
            chosen = np.random.default_rng(self.seed).permutation(len(items))[: self.limit]
            items = tuple(items[i] for i in sorted(chosen))
        if len(self.sources) == 1:
            return items
        return tuple(replace(i, id=f"{source}/{i.id}", source=source) for i in items)  # ids may be the same in two

    def described(self) -> dict[str, Any]:
        """What it is, as a record of the training keeps it."""
        found = {name: value for name, value in asdict(self).items() if name not in ("options", "kind") or value}
        # What is in memory is known again by what it is, not by where it lies.
        held = {s: read_items(s) for s in self.sources if s.startswith("memory:")}
        sources = [f"memory:{held[s].name}-{digest(held[s])}" if s in held else s for s in self.sources]
        which = 0 if len(sources) == 1 else slice(None)
        return found | {"source": sources[which], "held_out": self.shares[which]}


def triplets_of(pairs: Sequence[CrowsPair]) -> list[StereoSetItem]:
    """Pairs as triplets, the third sentence of another pair; a pair without a term is one of its own.

    Example:
        >>> pairs = [CrowsPair(str(i), f"She {i}.", f"He {i}.", "stereo", "gender", ()) for i in range(3)]
        >>> triplet = triplets_of(pairs)[0]
        >>> triplet.sentences.stereotype, triplet.sentences.unrelated in ("He 1.", "He 2."), triplet.target
        ('She 0.', True, 'She 0.')
    """
    order = shuffle_by_hash([pair.less for pair in pairs], seed=0)
    if len(order) < 2:
        raise InputError("at least two pairs with different sentences are needed: each is compared with another one")
    after = dict(zip(order, [*order[1:], order[0]], strict=True))

    def triplet(pair: CrowsPair) -> StereoSetItem:
        three = Triplet(pair.more, pair.less, after[pair.less])
        return StereoSetItem(pair.id, "intrasentence", pair.target, pair.bias_type, "", three, of_pair=True)

    return [triplet(pair) for pair in pairs]


def swapped_people(items: Iterable[BBQItem]) -> list[CrowsPair]:
    """Pairs of contexts of BBQ that tell the same story of two people, in one of them the other way round.

    Both name both people, so that how common a name is cancels out where both are named equally often. The more
    stereotypical one is that in which the answer to the negative question agrees with the stereotype. Stories that are
    told one way alone give no pair. BBQ draws some words of its stories at random; these may differ within a pair.

    Example:
        >>> from fairhead.data.sentences import Answer
        >>> people = Answer("The old man", "", "old"), Answer("The boy", "", "nonOld"), Answer("Unknown", "", "unknown")
        >>> told = {0: "An old man and a boy met. The old man forgot.", 1: "A boy and an old man met. The boy forgot."}
        >>> about = {"category": "Age", "question_index": "1", "polarity": "neg", "condition": "disambig"}
        >>> about |= {"question": "Who forgot?", "answers": people, "target": 0, "stereotyped_groups": ("old",)}
        >>> items = [BBQItem(f"Age/{i}", context=told[i], label=i, subcategory="", **about) for i in told]
        >>> (pair,) = swapped_people(items)
        >>> pair.less, pair.target
        ('A boy and an old man met. The boy forgot.', 'Age/1')
    """
    found: dict[tuple[str, frozenset[str]], dict[bool, BBQItem]] = {}
    for item in items:
        if item.condition == "disambig" and item.polarity == "neg" and item.target is not None:
            people = frozenset(answer.text for answer in item.answers if not answer.is_unknown)
            found.setdefault((item.template, people), {}).setdefault(item.label == item.target, item)
    both = ((told[True], told[False]) for told in found.values() if len(told) == 2)
    pairs = [
        CrowsPair(more.id, more.context, less.context, "stereo", more.category, (), more.template)
        for more, less in both
        if more.context != less.context
    ]
    if not pairs:
        raise InputError("no two contexts tell the same of the same two people, once the other way round: no pairs")
    return pairs


def targets(items: Sequence[StereoSetItem]) -> tuple[str, ...]:
    """The distinct target terms of items, in lower case, sorted."""
    return tuple(sorted({item.target.casefold() for item in items}))


def texts_of(items: Sequence[StereoSetItem]) -> tuple[str, ...]:
    """Digests of their stereotypes, sorted: whoever reads the same sentences in another way knows them by these."""
    return tuple(sorted({text_digest(item.texts.stereotype) for item in items}))


def encode_triplets(items: Iterable[StereoSetItem], tokenizer: Any, context: int | None = None) -> EncodedTriplets:
    """Tokens of each item's three full texts, the start token (BOS, or end of text) before each.

    Items with a text longer than the context are left out and named, never cut.
    """
    listed, lead = list(items), start_token(tokenizer).lead
    found = token_ids(tokenizer, [text for item in listed for text in item.texts])
    kept, too_long = [], []
    for i, item in enumerate(listed):
        three = found[3 * i : 3 * i + 3]
        for label, ids in zip(("stereotype", "anti-stereotype", "unrelated"), three, strict=True):
            if not ids:
                raise InputError(f"item {item.id!r}: its {label} sentence is empty; expected three sentences")
        if context is not None and max(map(len, three)) + len(lead) > context:
            too_long.append(item.id)
        else:
            kept.append(TokenTriplet(item.id, *((*lead, *ids) for ids in three)))
    return EncodedTriplets(tuple(kept), {TOO_LONG: tuple(too_long)} if too_long else {})


def stack_triplets(triplets: Sequence[TokenTriplet], device: torch.device | str = "cpu") -> Sentences:
    """One batch of 3B rows: all stereotypes, then all anti-stereotypes, then all unrelated sentences."""
    columns = zip(*(triplet[1:] for triplet in triplets), strict=True)
    return stack([tokens for column in columns for tokens in column], device)


class Example(NamedTuple):
    """A triplet as one tree."""

    sentences: tuple[Sequence[int], ...]  # tokens of stereotype, anti-stereotype and, where needed, the unrelated one
    tree: Row  # all of them
    places: tuple[Ints, ...]  # where the tokens of each lie in it
    alignment: Alignment  # which tokens of stereotype (first) and anti-stereotype (second) are compared


def example_of(triplet: TokenTriplet, length_align: Literal["span", "pad_common"], unrelated: bool) -> Example:
    """Lay out a triplet, with the unrelated sentence or without."""
    sentences = triplet[1:] if unrelated else triplet[1:3]
    tree = tree_of(sentences)
    positions = {path.sequence: path.positions for path in tree.paths}
    places = tuple(np.concatenate([[0], positions[i]]) for i in range(len(sentences)))
    match = align if length_align == "span" else align_by_position
    return Example(sentences, tree, places, match(triplet.stereotype, triplet.anti_stereotype))


def can_differ(example: Example) -> Ints:
    """For each compared token, 1 where the attention of the two sentences there can be compared, [M].

    Up to the first difference the attention is the same. Where one sentence alone has other tokens before, its share of
    them has no counterpart, and a divergence from next to nothing would outweigh all the rest.

    Example:
        >>> can_differ(example_of(TokenTriplet("1", (0, 7, 8, 5), (0, 7, 9, 5), (0, 5)), "span", unrelated=False))
        array([0, 0, 1])
    """
    first, second = (np.asarray(places, dtype=np.int64) for places in example.alignment)
    number = np.arange(len(first))
    pairs = enumerate(zip(*example.sentences[:2], strict=False))
    same = next((i for i, (one, other) in pairs if one != other), min(map(len, example.sentences[:2])))
    return ((first >= same) & ((first > number) == (second > number))).astype(np.int64)


def tree_of(sentences: Sequence[Sequence[int]]) -> Row:
    """All of them in one row, what they begin with once."""
    (tree,) = pack([TokenSequence(tokens, 1) for tokens in sentences], sum(map(len, sentences)))
    return tree


def layouts_of(model: nn.Module) -> Callable[[Sequence[Any]], Layout]:
    """How to hand examples that have a `tree` to a model: so, if it reads trees and has no window narrower than one."""
    window = window_of(model) or 1 << 30
    with torch.no_grad():
        trees = reads_trees(model)

    def choose(examples: Sequence[Any]) -> Layout:
        return Layout(model, trees and max(len(example.tree.tokens) for example in examples) <= window)

    return choose


class Batch(NamedTuple):
    """B triplets in N rows of T tokens."""

    inputs: dict[str, Tensor]  # what the model is called with
    predicting: Tensor  # flattened positions whose next token counts, [P]
    source: Tensor  # for each counted token, where in `predicting` it is predicted; those of stereotypes first
    tokens: Tensor  # the counted tokens
    n_stereotype: int  # how many are the stereotypes'
    rows: Tensor  # the row of each sentence, [2 or 3, B]
    member: Tensor  # 1 where a row's token is of the sentence, [2 or 3, B, T]
    places: Tensor  # compared tokens of stereotype and anti-stereotype, [2, B, M]
    compared: Tensor  # 0 where there are fewer than M, [B, M]
    queries: Tensor  # 1 for compared tokens whose attention can differ, `can_differ`, [B, M]
    others: Tensor  # whether, in either sentence, a token that is not compared stands before, [B, M]


def batch_of(examples: Sequence[Example], layout: Layout) -> Batch:
    """Put examples together; all is laid out before it goes to the device, which is then never waited for."""
    n, sides = len(examples), range(len(examples[0].sentences))
    if layout.tree:
        trees, rows = [example.tree for example in examples], np.tile(np.arange(n), (len(sides), 1))
        places = [[example.places[side] for example in examples] for side in sides]
    else:
        sentences = [example.sentences[side] for side in sides for example in examples]
        trees = [plain_row(tokens) for tokens in sentences]
        rows = np.arange(len(trees)).reshape(len(sides), n)
        places = [[np.arange(len(example.sentences[side])) for example in examples] for side in sides]
    inputs = layout.inputs(trees)
    width = inputs["input_ids"].shape[1]
    member = np.zeros((len(sides), n, width), dtype=np.float32)
    for side in sides:
        for b in range(n):
            member[side, b, places[side][b]] = 1
    coherent = [(side, b) for side in (0, 1) for b in range(n)]
    before = np.concatenate([places[side][b][:-1] + rows[side, b] * width for side, b in coherent])
    tokens = np.concatenate([examples[b].sentences[side][1:] for side, b in coherent])
    predicting, source = np.unique(before, return_inverse=True)
    aligned = [[example.alignment[side] for example in examples] for side in (0, 1)]
    in_row = [[p[list(a)].tolist() for p, a in zip(places[side], aligned[side], strict=True)] for side in (0, 1)]
    in_sentence, compared = torch.stack([stack(one).ids for one in aligned]), stack(aligned[0]).mask
    # A token whose number in the sentence is not its number among the compared ones has others before it.
    above = in_sentence > torch.arange(compared.shape[1])
    queries = stack([can_differ(example) for example in examples]).ids
    device = inputs["input_ids"].device

    def moved(values: Tensor | NDArray[Any]) -> Tensor:
        return send(torch.as_tensor(values), device)

    return Batch(
        inputs,
        moved(predicting),
        moved(source),
        moved(tokens),
        sum(len(example.sentences[0]) - 1 for example in examples),
        moved(rows),
        moved(member),
        moved(torch.stack([stack(one).ids for one in in_row])),
        moved(compared),
        moved(queries),
        moved(above.any(0)),
    )
