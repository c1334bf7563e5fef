"""What is said of a table of attention entropies (`entropy.py` makes it): means over heads, layers and all of them.

Needs no torch: two runs are compared from their tables alone.
"""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairhead.language.resampling import Array, ratio
from fairhead.language.tables import ItemTable, Measure, overall

# A layer has collapsed where less than this share is left: of what parts it from uniform, or of its entropy.
COLLAPSE = 0.5


def layers(table: ItemTable) -> list[list[str]]:
    """The fields of each layer's heads, first layer first.

    Example:
        >>> layers(ItemTable.of("attention_entropy", ["a"], ["a"], [[]], {"L0H0": [1], "L0H1": [1], "rows": [3]}))
        [['L0H0', 'L0H1']]
    """
    found: dict[int, list[str]] = {}
    for name in table.fields:
        match = re.fullmatch(r"L(\d+)H\d+", name)
        if match:
            found.setdefault(int(match[1]), []).append(name)
    return [found[layer] for layer in sorted(found)]


def measures(table: ItemTable) -> Sequence[Measure]:
    """The mean over all heads ("attention_entropy"), then of each layer ("attention_entropy_layer_0", …).

    Documents count by their rows.

    Example:
        >>> table = ItemTable.of("attention_entropy", ["a"], ["a"], [[]], {"L0H0": [0.5], "L1H0": [1.0], "rows": [3]})
        >>> [measure.metric for measure in measures(table)]
        ['attention_entropy', 'attention_entropy_layer_0', 'attention_entropy_layer_1']
    """
    by_layer = layers(table)
    everything = [name for names in by_layer for name in names]
    of_layers = [_mean(f"attention_entropy_layer_{i}", names) for i, names in enumerate(by_layer)]
    return [_mean("attention_entropy", everything), *of_layers]


def by_head(table: ItemTable) -> list[list[float]]:
    """The mean entropy of each head over all documents, [layers][heads].

    Example:
        >>> columns = {"L0H0": [0.5, 1.0], "rows": [3, 1]}
        >>> by_head(ItemTable.of("attention_entropy", ["a", "b"], ["a", "b"], [[], []], columns))
        [[0.625]]
    """
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


def _mean(metric: str, names: Sequence[str]) -> Measure:
    def columns(table: ItemTable) -> Array:
        rows: NDArray[Any] = table.column("rows")
        mean: NDArray[Any] = np.mean([table.column(name) for name in names], axis=0) if len(table) else rows
        return np.column_stack([mean * rows, rows])

    return Measure(metric, columns, ratio, None, overall)
