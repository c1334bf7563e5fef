"""Pairs of sentences with their neutral texts, put together into one batch that a model reads once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fairhead.language import packing
from fairhead.language.packing import Row, plain_row
from fairhead.language.row_layout import Layout, Planned, ReadyBatch, send
from fairhead.mitigate.triplets import Example as KlaadExample

STEREOTYPE, ANTI_STEREOTYPE, UNRELATED, NEUTRAL = range(4)


class Reference(NamedTuple):
    """What the model said of an example before it was trained."""

    logprobs: tuple[float, float]  # of the stereotype and of the anti-stereotype
    states: Tensor  # what the output layer reads where the distribution is kept, [K, D]
    mean_gap: float  # what is taken off Δ; NaN: the mean of the batch


class Example(NamedTuple):
    """The sentences of an item, with neutral texts where there are any, as one tree."""

    of: tuple[str, str]  # the item's source of data, and its category there
    sentences: tuple[Sequence[int], ...]  # in the order of STEREOTYPE, ANTI_STEREOTYPE, UNRELATED and neutral ones
    tree: Row
    ends_in_own: bool = False  # whether the last sentence is one that the model wrote before training
    reference: Reference | None = None
    klaad: KlaadExample | None = None  # the same item as KLAAD reads it


class Batch(NamedTuple):
    """B examples on the model's device: S scored tokens, predicted at P positions."""

    ready: ReadyBatch
    pair_tokens: Tensor  # scored tokens of stereotypes and anti-stereotypes, a sentence after the other, [Q]
    pair_of: Tensor  # which of the 2B sentences each is of, stereotypes first, [Q]
    trained: Tensor  # scored tokens of pairs and neutral texts, [C]
    kept: Tensor  # positions whose distribution is kept, an example after the other, [K]
    kept_of: Tensor  # how many of them each example has, [B]; not on the device
    counted: Tensor  # for each token of unrelated sentences and given texts, which of `kept` predicts it, [T]
    counted_own: Tensor  # the same of texts that the model wrote, [T']

    def token_logprobs(self, logits: Tensor, totals: Tensor) -> Tensor:
        """Log-probabilities [S] of the scored tokens, from logits [P, V] and their log-sum-exp [P]."""
        return logits[self.ready.source, self.ready.token] - totals[self.ready.source]

    def pair_logprobs(self, logits: Tensor, totals: Tensor) -> Tensor:
        """Log-probabilities of whole sentences, [2, B]: stereotypes, then anti-stereotypes."""
        tokens = self.token_logprobs(logits, totals)[self.pair_tokens]
        return tokens.new_zeros(2 * len(self.kept_of)).index_add(0, self.pair_of, tokens).view(2, -1)


def batch_of(examples: Sequence[Example], layout_of: Callable[[Sequence[Example]], Layout]) -> Batch:
    """Put examples together."""
    layout, n, each = layout_of(examples), len(examples), len(examples[0].sentences)
    rows: list[Row] = []
    for b, example in enumerate(examples):
        if layout.tree:
            paths = (packing.Path(each * b + path.sequence, path.positions) for path in example.tree.paths)
            rows.append(replace(example.tree, paths=tuple(paths)))
        else:
            rows += [plain_row(tokens, sequence=each * b + k) for k, tokens in enumerate(example.sentences)]
    planned = Planned(layout, tuple(rows), range(n * each))
    at = dict(planned.paths())
    ready = planned.ready()
    device = ready.source.device
    pairs = [at[each * b + k] for k in (STEREOTYPE, ANTI_STEREOTYPE) for b in range(n)]
    neutral = [at[each * b + k] for b in range(n) for k in range(NEUTRAL, each)]
    source, kept, counted, counted_own = planned.sources(), list[Any](), list[Any](), [np.empty(0, dtype=np.int64)]
    last = each - examples[0].ends_in_own
    for b, example in enumerate(examples):
        places = np.concatenate([source[at[each * b + k]] for k in range(UNRELATED, each)])
        # What texts begin with alike is kept once, also where they are read in rows of their own.
        ordered = sorted(example.tree.paths)[UNRELATED:]
        before = [example.tree.parent[path.positions] for path in ordered]
        _, first, inverse = np.unique(np.concatenate(before), return_index=True, return_inverse=True)
        inverse += sum(map(len, kept))
        others = sum(map(len, before[: last - UNRELATED]))
        counted.append(inverse[:others])
        counted_own.append(inverse[others:])
        kept.append(places[first])

    def moved(values: Any) -> Tensor:
        return send(torch.from_numpy(np.ascontiguousarray(values)), device)

    return Batch(
        ready,
        moved(np.concatenate(pairs)),
        moved(np.repeat(np.arange(2 * n), [len(one) for one in pairs])),
        moved(np.concatenate([*pairs, *neutral])),
        moved(np.concatenate(kept)),
        torch.tensor([len(one) for one in kept]),
        moved(np.concatenate(counted)),
        moved(np.concatenate(counted_own)),
    )


@contextmanager
def beside(output: nn.Module, before: nn.Module, states: Tensor) -> Iterator[None]:
    """Let an output layer also give, after its own logits, those of `states` by the layer as it was before.

    Whatever the model does to its logits afterwards (soft caps, scales) it does to both.
    """

    def append(module: nn.Module, inputs: tuple[Tensor, ...], logits: Tensor) -> Tensor:
        with torch.no_grad():
            # `forward`, not a call: where it is the layer itself, its hooks are not meant for this.
            then = before.forward(states.to(inputs[0].dtype))
        return torch.cat([logits, then[None]], dim=1)

    hook = output.register_forward_hook(append)
    try:
        yield
    finally:
        hook.remove()


def divergence_of(before: Tensor, now: Tensor, total_before: Tensor, total_now: Tensor) -> Tensor:
    """KL(before ‖ now) of distributions given by logits [K, V] and their log-sum-exp [K]: [K]."""
    share = (before - total_before[:, None]).exp()
    return (share * (before - now)).sum(-1) - total_before + total_now
