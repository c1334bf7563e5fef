"""Each head taken out alone in true forward passes: what is lost of the evidence, and of its gap between groups.

What a head itself writes (its direct part) leaves out what later layers make of it; this ranking does not. The price is
one pass for each head, over both halves of the rows.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fairhead.locate.class_directions import evidence_of
from fairhead.locate.effects import Edited, Evaluation
from fairhead.locate.head_features import Array
from fairhead.locate.head_maps import Head, HeadMap, score_heads

Read = TypeVar("Read")


class Lost(NamedTuple):
    """Evidence of n rows: of the model as it is, [n], and what of it is lost without each head alone, [n, L, H]."""

    before: Array
    without: Array


def each_alone(
    edited: Callable[[Sequence[Sequence[Head]]], Sequence[Read]],
    shape: tuple[int, int],
    evidence: Callable[[Read], NDArray[np.floating]],
) -> Lost:
    """Edit every head of a model on its own.

    Args:
        edited: what is read with each of several sets of heads edited.
        shape: layers and heads.
        evidence: the evidence of each row, [n], from what is read.

    Example:
        >>> lost = each_alone(lambda sets: [np.full(2, 5.0 - len(heads)) for heads in sets], (1, 3), lambda read: read)
        >>> lost.before.tolist(), lost.without.tolist()
        ([5.0, 5.0], [[[1.0, 1.0, 1.0]], [[1.0, 1.0, 1.0]]])
    """
    every = [(Head(*head),) for head in np.ndindex(shape)]
    before, *after = (np.asarray(evidence(read), dtype=np.float64) for read in edited([(), *every]))
    return Lost(before, np.stack([before - each for each in after], axis=1).reshape(len(before), *shape))


def effect_map(
    edited: Edited,
    shape: tuple[int, int],
    rows: Evaluation,
    positive: int,
    *,
    level: float = 0.95,
    kind: str = "mean",
) -> HeadMap:
    """What the gap in the evidence for a class loses without each head.

    Args:
        edited: logits [n, C] with each of several sets of heads edited in a true forward pass.
        shape: layers and heads.
        rows: both groups must have some of every label.
        positive: the class.
        level: of the intervals.
        kind: of edit, for the words.

    Example:
        >>> groups, labels = np.arange(80) % 2, (np.arange(80) // 2) % 2
        >>> rows = Evaluation(labels, ("no", "yes"), groups, ("light", "dark"), "shade")
        >>> noise = np.random.default_rng(0).normal(size=80)
        >>> def edited(sets):  # without head 1 of layer 0 the group has no say
        ...     return [np.stack([noise, 4.0 * groups * ((0, 1) not in heads)], axis=1) for heads in sets]
        >>> effect_map(edited, (1, 2), rows, positive=1).gap.round(6).tolist()
        [[0.0, 4.0]]
    """
    lost = each_alone(edited, shape, lambda logits: evidence_of(logits, positive))
    first, second = rows.poles
    return score_heads(
        lost.without,
        lost.before,
        rows.groups,
        rows.labels,
        clusters=rows.clusters,
        names=rows.poles,
        level=level,
        measure=f"evidence gap lost without the head ({kind}, forward pass), {first} minus {second}",
    )
