"""The effect of taking heads out on one metric, held against random heads: as many of each layer, and none of those."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.locate.head_maps import Head
from fairhead.stats import Difference


@dataclass(frozen=True)
class Ablation:
    """The effect of taking heads out on one metric, against layer-matched controls.

    Attributes:
        selected: the heads taken out.
        change: the metric before (a) and after (b), paired over rows, with interval and p-value.
        controls: the change of the metric when each control set is taken out instead.
        exhaustive: whether the controls are all that there are.
        accuracy: the change of accuracy, where known.
        control_accuracy: the change of accuracy under each control set, where known.

    Example:
        >>> change = Difference("DP", "sex", 0.30, 0.10, -0.20, -0.25, -0.15, n=500, p=0.001, p_adjusted=0.001)
        >>> found = Ablation((Head(2, 1),), change, controls=(0.01, -0.02, 0.0, 0.03), exhaustive=True)
        >>> found.percentile, found.p_controls          # no control set lowers DP as much
        (0.0, 0.2)
    """

    selected: tuple[Head, ...]
    change: Difference
    controls: tuple[float, ...]
    exhaustive: bool
    accuracy: Difference | None = None
    control_accuracy: tuple[float, ...] = ()

    @property
    def effect(self) -> float:
        """After minus before."""
        return float("nan") if self.change.value is None else self.change.value

    @property
    def percentile(self) -> float:
        """Share of the control sets that lower the metric at least as much: near 0 is a strong finding."""
        return float(np.mean(self._as_low))

    @property
    def p_controls(self) -> float:
        """How often a random set would lower the metric as much: (1 + k) / (1 + sets), one-sided."""
        return float((1 + self._as_low.sum()) / (1 + len(self.controls)))

    @property
    def _as_low(self) -> NDArray[np.bool_]:
        # Equal counts can differ in the last bit as fractions.
        return np.asarray(self.controls) <= self.effect + 1e-12

    def to_dict(self) -> dict[str, Any]:
        """The JSON form, which is also the data of a report's "ablation" section."""
        change, accuracy = self.change, self.accuracy
        return {
            "metric": change.metric,
            "selected": [list(head) for head in self.selected],
            "before": change.a,
            "after": change.b,
            "effect": change.value,
            "low": change.low,
            "high": change.high,
            "p": change.p,
            "controls": list(self.controls),
            "exhaustive": self.exhaustive,
            "percentile": self.percentile,
            "p_controls": self.p_controls,
            "accuracy_effect": None
            if accuracy is None
            else {"value": accuracy.value, "low": accuracy.low, "high": accuracy.high},
            "control_accuracy": list(self.control_accuracy),
        }


@dataclass(frozen=True)
class Controls:
    """Sets of heads, each matched to the chosen ones. `exhaustive`: all that there are.

    Example:
        >>> Controls(((Head(0, 1),), (Head(0, 2),)), exhaustive=True).sets[1]
        (Head(layer=0, head=2),)
    """

    sets: tuple[tuple[Head, ...], ...]
    exhaustive: bool


def layer_matched(selected: Sequence[tuple[int, int]], n_heads: int, *, draws: int = 200, seed: int = 0) -> Controls:
    """Head sets with as many heads of each layer as `selected` has, leaving those out.

    So many different `draws` are made where there are more than twice as many sets; otherwise all are taken.

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
    if math.prod(math.comb(len(free[layer]), taken[layer]) for layer in layers) <= 2 * draws:
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
    seed: int = 0,
) -> Controls:
    """Head sets in which each chosen head is replaced by one that writes about as much, of whatever layer.

    How much a head writes is the mean length of its centred term, `norms` [layers, heads]; it may be replaced by one of
    so many `neighbours` nearest in the logarithm of that.

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
    if math.prod(map(len, near)) <= 2 * draws:
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


def _flatten(layers: Sequence[int], choice: Sequence[Sequence[int]]) -> tuple[Head, ...]:
    return tuple(Head(layer, head) for layer, heads in zip(layers, choice, strict=True) for head in heads)
