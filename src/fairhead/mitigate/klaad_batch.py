"""Triplets as KLAAD's loss reads them: sentences that begin alike share their beginning, as in the scoring engine.

A triplet's three sentences are laid into one tree, so that what they have in common is computed once: about two thirds
of the tokens are left. Models that cannot read trees get a row a sentence.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fairhead.language.packing import Alignment, Ints, Row, TokenSequence, align, align_by_position, pack, plain_row
from fairhead.language.row_layout import (
    Layout,
    context_length,
    reads_trees,
    send,
    stack,
    vocabulary_of,
    window_of,
)
from fairhead.mitigate.triplets import TokenTriplet


class Example(NamedTuple):
    """A triplet as one tree.

    Attributes:
        sentences: the tokens of the stereotype, the anti-stereotype and, where it is needed, the unrelated sentence.
        tree: all of them.
        places: where the tokens of each lie in it.
        alignment: which tokens of stereotype (first) and anti-stereotype (second) are compared.
    """

    sentences: tuple[Sequence[int], ...]
    tree: Row
    places: tuple[Ints, ...]
    alignment: Alignment


def example_of(triplet: TokenTriplet, length_align: Literal["span", "pad_common"], unrelated: bool) -> Example:
    """Lay out a triplet, with the unrelated sentence or without.

    Example:
        >>> example = example_of(TokenTriplet("1", (0, 7, 8), (0, 7, 9), (0, 5)), "span", unrelated=True)
        >>> example.tree.tokens.tolist(), [places.tolist() for places in example.places]
        ([0, 5, 7, 8, 9], [[0, 2, 3], [0, 2, 4], [0, 1]])
    """
    sentences = triplet[1:] if unrelated else triplet[1:3]
    tree = tree_of(sentences)
    positions = {path.sequence: path.positions for path in tree.paths}
    places = tuple(np.concatenate([[0], positions[i]]) for i in range(len(sentences)))
    match = align if length_align == "span" else align_by_position
    return Example(sentences, tree, places, match(triplet.stereotype, triplet.anti_stereotype))


def can_differ(example: Example) -> Ints:
    """For each compared token, 1 where the attention of the two sentences there can be held against each other, [M].

    Up to the first difference both sentences are one and the same text, and so is their attention. Where one sentence
    alone has other tokens before, its share of them has no counterpart, and a divergence from next to nothing would
    outweigh all the rest.

    Example:
        >>> can_differ(example_of(TokenTriplet("1", (0, 7, 8, 5), (0, 7, 9, 5), (0, 5)), "span", unrelated=False))
        array([0, 0, 1])
    """
    first, second = (np.asarray(places, dtype=np.int64) for places in example.alignment)
    number = np.arange(len(first))
    stereotype, anti = example.sentences[:2]
    both = min(len(stereotype), len(anti))
    same = next((i for i in range(both) if stereotype[i] != anti[i]), both)  # tokens before the first difference
    return ((first >= same) & ((first > number) == (second > number))).astype(np.int64)


def tree_of(sentences: Sequence[Sequence[int]]) -> Row:
    """All of them in one row, what they begin with once.

    Example:
        >>> tree_of([(0, 7, 8), (0, 7, 9)]).tokens.tolist()
        [0, 7, 8, 9]
    """
    (tree,) = pack([TokenSequence(tokens, 1) for tokens in sentences], sum(map(len, sentences)))
    return tree


def layouts_of(model: nn.Module) -> Callable[[Sequence[Any]], Layout]:
    """How to hand examples that have a `tree` to a model: so, if it reads trees and has no window narrower than one."""
    window = window_of(model) or 1 << 30
    with torch.no_grad():
        trees = reads_trees(model, vocabulary_of(model), context_length(model))

    def choose(examples: Sequence[Any]) -> Layout:
        return Layout(model, trees and max(len(example.tree.tokens) for example in examples) <= window)

    return choose


class Batch(NamedTuple):
    """B triplets in N rows of T tokens.

    Attributes:
        inputs: what the model is called with.
        predicting: flattened positions whose next token counts, [P].
        source: for each counted token, where in `predicting` it is predicted; those of stereotypes first.
        tokens: the counted tokens.
        n_stereotype: how many are the stereotypes'.
        rows: the row of each sentence, [2 or 3, B].
        member: 1 where a row's token is of the sentence, [2 or 3, B, T].
        places: compared tokens of stereotype and anti-stereotype, [2, B, M].
        compared: 0 where there are fewer than M, [B, M].
        queries: 1 for compared tokens whose attention can differ, `can_differ`, [B, M].
        others: whether, in either sentence, a token that is not compared stands before, [B, M].
    """

    inputs: dict[str, Tensor]
    predicting: Tensor
    source: Tensor
    tokens: Tensor
    n_stereotype: int
    rows: Tensor
    member: Tensor
    places: Tensor
    compared: Tensor
    queries: Tensor
    others: Tensor


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
