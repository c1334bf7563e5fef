"""Attention entropy: has training flattened attention, or concentrated it on one token? Needs no torch at import.

The entropy of a row of attention weights, divided by that of a row which looks at every token it can see alike: 1 is
uniform, 0 is a single token. The first token of a text sees only itself and does not count. `table` reads a model; the
rest makes means over heads and layers of such a table.
"""

import re
from collections.abc import Sequence
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from fairhead.errors import InputError
from fairhead.language.answers import Progress
from fairhead.language.benchmark import Benchmark, Figure, Label, Measure, Measured, Work
from fairhead.language.benchmarks.perplexity import Document, read_documents
from fairhead.language.item_table import ItemTable
from fairhead.language.packing import token_ids
from fairhead.stats.bootstrap import Array
from fairhead.stats.clusters import ratio

if TYPE_CHECKING:
    from torch import Tensor

    from fairhead.language.scorer import Scorer

# Tokens of each document that are read: entropies of longer rows differ little, and maps grow with the square.
WINDOW = 128
# A layer has collapsed where less than this share is left: of what parts it from uniform, or of its entropy.
COLLAPSE = 0.5


def table(
    scorer: "Scorer", documents: Sequence[Document], window: int = WINDOW, progress: Progress | None = None
) -> ItemTable:
    """The mean entropy of each head on each document: fields "L0H0", "L0H1", …, and "rows", over which means are taken.

    One forward pass per batch; of the maps only their entropies are kept. So many tokens (`window`) are read of each
    document, the start token included; documents of fewer than two tokens are left out.
    """
    import torch

    from fairhead.language.attention_reading import read_attention

    width = min(window, scorer.context)
    if width < 3:
        raise InputError(f"a window of {width} tokens: expected at least 3")
    encoded = token_ids(scorer.tokenizer, [document.text for document in documents], scorer.start_token.lead)
    tokens = [ids[:width] for ids in encoded]
    long = {i: [ids] for i, ids in enumerate(tokens) if len(ids) > 2}
    if not long:
        raise InputError("there is no text of at least two tokens to read attention on")
    found: dict[int, Tensor] = {}
    names: list[str] = []
    for batch in read_attention(scorer, long, progress):
        # [B, all heads]
        entropies = torch.cat([_mean_entropy(weights, batch.mask) for weights in batch.weights], dim=1)
        found |= dict(zip(batch.members, entropies.double().cpu(), strict=True))
        names = batch.heads
    short = tuple(document.id for i, document in enumerate(documents) if i not in long)
    kept = [i for i in range(len(documents)) if i in found]
    values = torch.stack([found[i] for i in kept]).numpy()
    if not np.isfinite(values).all():
        raise InputError("attention weights are not finite: are the weights damaged, or is the precision too low?")
    return ItemTable.of(
        "attention_entropy",
        [documents[i].id for i in kept],
        [documents[i].id for i in kept],
        [documents[i].groups for i in kept],
        {**dict(zip(names, values.T, strict=True)), "rows": [len(tokens[i]) - 1 for i in kept]},
        left_out={"fewer than two tokens": short} if short else None,
    )


def _mean_entropy(weights: "Tensor", mask: "Tensor") -> "Tensor":
    """Entropy of rows [B, H, Q, K] over the largest possible, mean over the real queries from the second on: [B, H].

    Some rows at a time: float32 copies of whole maps would double the memory.
    """
    import torch

    width = weights.shape[2]
    largest = torch.log(torch.arange(2, width + 1, device=weights.device, dtype=torch.float32))
    real = mask[:, 1:].to(weights.device, torch.float32)
    total = torch.zeros(weights.shape[:2], device=weights.device)
    step = ceil(width / 8)
    for begin in range(1, width, step):
        rows = weights[:, :, begin : begin + step].float()
        rows = rows / rows.sum(dim=-1, keepdim=True)  # half precision does not sum to 1
        entropy = torch.special.entr(rows).sum(dim=-1) / largest[begin - 1 : begin - 1 + rows.shape[2]]
        total += (entropy * real[:, None, begin - 1 : begin - 1 + rows.shape[2]]).sum(dim=-1)
    return total / real.sum(dim=-1)[:, None]


def layers(table: ItemTable) -> list[list[str]]:
    """The fields of each layer's heads, first layer first."""
    found: dict[int, list[str]] = {}
    for name in table.fields:
        if match := re.fullmatch(r"L(\d+)H\d+", name):
            found.setdefault(int(match[1]), []).append(name)
    return [found[layer] for layer in sorted(found)]


def measures(table: ItemTable) -> Sequence[Measure]:
    """The mean over all heads ("attention_entropy"), then of each layer ("attention_entropy_layer_0", …).

    Documents count by their rows.
    """
    by_layer = layers(table)
    everything = [name for names in by_layer for name in names]
    chosen = {"": everything, **{f"_layer_{i}": names for i, names in enumerate(by_layer)}}
    return [
        Measure(f"attention_entropy{suffix}", partial(_weighted, names=names), ratio, of=lambda group: group is None)
        for suffix, names in chosen.items()
    ]


def _weighted(table: ItemTable, names: Sequence[str]) -> Array:
    """The mean over heads of each document times its rows, and its rows: [n, 2]."""
    rows = table.column("rows")
    means = np.mean([table.column(name) for name in names], axis=0) if len(table) else rows
    return np.column_stack([means * rows, rows])


def by_head(table: ItemTable) -> list[list[float]]:
    """The mean entropy of each head over all documents, [layers][heads]."""
    rows = table.column("rows")
    return [[float(table.column(name) @ rows / rows.sum()) for name in names] for names in layers(table)]


def collapse(before: float, after: float) -> str | None:
    """What has become of a layer whose attention has lost its shape, in words; None where it has not.

    Example:
        >>> collapse(0.4, 0.8), collapse(0.4, 0.1), collapse(0.4, 0.45)
        ('nearly uniform', 'nailed to single tokens', None)
    """
    if 1 - after < COLLAPSE * (1 - before):
        return "nearly uniform"
    return "nailed to single tokens" if after < COLLAPSE * before else None


def _measure(work: Work) -> Measured:
    return Measured(table(work.scorer, work.items, progress=work.progress))


BENCHMARK = Benchmark(
    name="attention_entropy",
    command="attention",
    title="Attention entropy",
    question="How spread out is each head's attention on plain text (1: uniform, 0: a single token)?",
    read=read_documents,
    measure=_measure,
    data="bold",
    reads_text=True,
    most_items=200,
    min_items=1,
    section="Attention",
    measures=measures,
    labels={"attention_entropy": Label("mean", "1 is uniform attention, 0 a single token", share=False)},
    headlines=(Figure("attention_entropy"),),
    by_head=by_head,
    collapse=collapse,
)
