"""Random heads to hold a finding against: as many in each layer as were chosen there, and none of those."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np

from fairhead.errors import InputError
from fairhead.locate.scores import Head


@dataclass(frozen=True)
class Controls:
    """Sets of heads, each matched by layer to the chosen ones. `exhaustive`: all that there are."""

    sets: tuple[tuple[Head, ...], ...]
    exhaustive: bool


def layer_matched(
    selected: Sequence[Head], n_heads: int, *, draws: int = 200, all_up_to: int = 400, seed: int = 0
) -> Controls:
    """Head sets with as many heads of each layer as `selected` has, leaving those out.

    Args:
        selected: the chosen heads.
        n_heads: heads in a layer.
        draws: how many different sets to draw when there are too many.
        all_up_to: take all sets when there are no more than this.
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
    if math.prod(math.comb(len(free[layer]), taken[layer]) for layer in layers) <= all_up_to:
        choices = product(*(combinations(free[layer], taken[layer]) for layer in layers))
        return Controls(tuple(_flatten(layers, choice) for choice in choices), exhaustive=True)
    rng = np.random.default_rng(seed)
    drawn: dict[tuple[Head, ...], None] = {}  # a set that keeps the order of the draw
    while len(drawn) < draws:
        choice = [sorted(rng.choice(free[layer], taken[layer], replace=False).tolist()) for layer in layers]
        drawn.setdefault(_flatten(layers, choice))
    return Controls(tuple(drawn), exhaustive=False)


def _flatten(layers: Sequence[int], choice: Sequence[Sequence[int]]) -> tuple[Head, ...]:
    return tuple(Head(layer, head) for layer, heads in zip(layers, choice, strict=True) for head in heads)
