"""Random heads to hold a finding against: as many in each layer as were chosen there, and none of those."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.locate.scores import Head


@dataclass(frozen=True)
class Controls:
    """Sets of heads, each matched to the chosen ones. `exhaustive`: all that there are.

    Example:
        >>> Controls(((Head(0, 1),), (Head(0, 2),)), exhaustive=True).sets[1]
        (Head(layer=0, head=2),)
    """

    sets: tuple[tuple[Head, ...], ...]
    exhaustive: bool


def layer_matched(
    selected: Sequence[Head], n_heads: int, *, draws: int = 200, all_up_to: int | None = None, seed: int = 0
) -> Controls:
    """Head sets with as many heads of each layer as `selected` has, leaving those out.

    Args:
        selected: the chosen heads.
        n_heads: heads in a layer.
        draws: how many different sets to draw when there are too many.
        all_up_to: take all sets when there are no more than this; None for twice the draws.
        seed: of the draw.

    Raises:
        InputError: no heads were chosen, or so many of a layer that too few others are left there.

    Example:
        >>> from fairhead.locate import layer_matched
        >>> controls = layer_matched([(2, 0), (2, 1)], n_heads=4)
        >>> controls.exhaustive, controls.sets
        (True, ((Head(layer=2, head=2), Head(layer=2, head=3)),))
    """
    if not selected:
        raise InputError("no heads were selected, so there is nothing to match controls to")
    taken = Counter(layer for layer, _ in selected)
    free = {layer: [h for h in range(n_heads) if (layer, h) not in {tuple(s) for s in selected}] for layer in taken}
    for layer, count in taken.items():
        if len(free[layer]) < count:
            raise InputError(
                f"{count} of the {n_heads} heads of layer {layer} are selected; that leaves {len(free[layer])}, too "
                "few to draw controls from: select fewer heads of one layer"
            )
    layers = sorted(taken)
    if math.prod(math.comb(len(free[layer]), taken[layer]) for layer in layers) <= _few_enough(draws, all_up_to):
        choices = product(*(combinations(free[layer], taken[layer]) for layer in layers))
        return Controls(tuple(_flatten(layers, choice) for choice in choices), exhaustive=True)
    rng = np.random.default_rng(seed)
    drawn: dict[tuple[Head, ...], None] = {}  # a set that keeps the order of the draw
    while len(drawn) < draws:
        choice = [sorted(rng.choice(free[layer], taken[layer], replace=False).tolist()) for layer in layers]
        drawn.setdefault(_flatten(layers, choice))
    return Controls(tuple(drawn), exhaustive=False)


def norm_matched(
    selected: Sequence[tuple[int, int]],
    norms: NDArray[np.floating],
    *,
    neighbours: int = 12,
    draws: int = 200,
    all_up_to: int | None = None,
    seed: int = 0,
) -> Controls:
    """Head sets in which each chosen head is replaced by one that writes about as much, of whatever layer.

    Args:
        selected: the chosen heads.
        norms: how much each head writes: the mean length of its centred term, [layers, heads].
        neighbours: how many heads nearest in (the logarithm of) that length each may be replaced by.
        draws: how many different sets to draw when there are too many.
        all_up_to: take all sets when there are no more than this; None for twice the draws.
        seed: of the draw.

    Example:
        >>> norms = np.array([[1.0, 1.1, 5.0], [1.2, 0.1, 0.9]])
        >>> [tuple(heads[0]) for heads in norm_matched([(0, 0)], norms, neighbours=2).sets]
        [(0, 1), (1, 2)]
    """
    if not selected:
        raise InputError("no heads were selected, so there is nothing to match controls to")
    taken = {tuple(head) for head in selected}
    free = [Head(*h) for h in np.ndindex(norms.shape) if h not in taken]
    if len(free) < len(selected):
        raise InputError(f"{len(selected)} heads are selected, which leaves {len(free)}: too few to draw controls from")
    size = np.log(np.maximum(norms, 1e-12))
    sizes = np.array([size[head] for head in free])
    near = [
        [
            free[i]
            for i in np.argsort(np.abs(sizes - size[tuple(head)]), kind="stable")[: max(neighbours, len(selected))]
        ]
        for head in selected
    ]
    if math.prod(map(len, near)) <= _few_enough(draws, all_up_to):
        every = dict.fromkeys(tuple(sorted(choice)) for choice in product(*near) if len(set(choice)) == len(choice))
        return Controls(tuple(every), exhaustive=True)
    rng = np.random.default_rng(seed)
    drawn: dict[tuple[Head, ...], None] = {}
    for _ in range(50 * draws):
        choice = [candidates[int(rng.integers(len(candidates)))] for candidates in near]
        if len(set(choice)) == len(choice):
            drawn.setdefault(tuple(sorted(choice)))
        if len(drawn) == draws:
            break
    return Controls(tuple(drawn), exhaustive=False)


def _few_enough(draws: int, all_up_to: int | None) -> int:
    """How many sets are all taken: at least as many as would be drawn, or drawing different ones might never end."""
    return 2 * draws if all_up_to is None else max(draws, all_up_to)


def _flatten(layers: Sequence[int], choice: Sequence[Sequence[int]]) -> tuple[Head, ...]:
    return tuple(Head(layer, head) for layer, heads in zip(layers, choice, strict=True) for head in heads)
