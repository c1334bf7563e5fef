"""How heads are chosen and tested: the options, and the two halves of the rows."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fairhead.errors import InputError
from fairhead.locate.effects import Evaluation

Rank = Literal["gap", "concept", "bias", "effect"]
RANKS: tuple[str, ...] = get_args(Rank)
OTHER_HALF = (
    "The heads were chosen on other rows than the choosing half of this run: some of those reported on here may have "
    "been used for the choice. With the data, limit and seed of that run, the halves are the same."
)


@dataclass(frozen=True)
class LocatePlan:
    """How heads are chosen and tested.

    Attributes:
        count: heads to choose at most.
        per_layer: of one layer at most; None for a quarter of its heads, so that enough are left as controls.
        rank: "gap" (part in the gap of the class evidence), "concept" (how well a head tells the groups apart along
            the concept), "bias" (that, times its coupling with the class evidence) or "effect" (what the gap of the
            class evidence loses when the head alone is edited in a true forward pass).
        alpha: false discovery rate of the choice.
        kinds: edits whose effect is estimated. The first is that of single heads and curves.
        draws: control sets, unless all are fewer.
        positive: the class whose evidence is looked at; None for the one with the largest gap of selection rates in
            the choosing half (of two classes, the last).
        m: texts a head, in TextSpan.
        permutations: relabellings behind the p-value of a head's texts.
        extremes: images shown at either end of a head's concept axis.
        n_boot: bootstrap replicates.
        level: confidence level.
        seed: of halves, controls and resampling.

    Example:
        >>> LocatePlan(count=2, kinds=("mean",)).draws
        200
    """

    count: int = 4
    per_layer: int | None = None
    rank: Rank = "gap"
    alpha: float = 0.05
    kinds: tuple[str, ...] = ("mean", "zero", "resample", "project")
    draws: int = 200
    positive: str | None = None
    m: int = 20
    permutations: int = 2000
    extremes: int = 4
    n_boot: int = 2000
    level: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank not in RANKS:
            raise InputError(f"rank is {self.rank!r}; expected one of {', '.join(RANKS)}")
        if self.count < 1 or self.draws < 1:
            raise InputError(f"count is {self.count} and draws is {self.draws}; at least 1 of each is needed")


def halves(cells: NDArray[np.integer], clusters: NDArray[np.integer] | None, seed: int = 0) -> NDArray[np.bool_]:
    """Split rows in two, [n] bool: every cell evenly, or, where there are clusters, whole clusters at random.

    Example:
        >>> first = halves(np.repeat([0, 1], [6, 4]), None)
        >>> first[:6].sum(), first[6:].sum()
        (np.int64(3), np.int64(2))
    """
    rng = np.random.default_rng(seed)
    chosen = np.zeros(len(cells), dtype=bool)
    if clusters is not None:
        names = np.unique(clusters)
        return np.isin(clusters, rng.permutation(names)[: len(names) // 2])
    for cell in np.unique(cells):
        rows = rng.permutation(np.flatnonzero(cells == cell))
        chosen[rows[: len(rows) // 2]] = True
    return chosen


def halves_of(evaluation: Evaluation, seed: int = 0) -> NDArray[np.bool_]:
    """The choosing half of the rows that `locate` takes by default, [n] bool.

    Example:
        >>> labels, groups = np.arange(8) % 2, np.arange(8) // 4
        >>> int(halves_of(Evaluation(labels, ("no", "yes"), groups, ("f", "m"), "sex")).sum())
        4
    """
    choosing = halves(2 * evaluation.labels + evaluation.groups, evaluation.clusters, seed)
    check_halves(evaluation, choosing)
    return choosing


def half_sha256(ids: Sequence[Any] | NDArray[Any] | None, choosing: NDArray[np.bool_]) -> str | None:
    """A hash of who is in the choosing half, to tell later whether heads were chosen on it; None without ids.

    Example:
        >>> halves = np.array([True, True, False]), np.array([True, False, True])
        >>> first, second = (half_sha256(("a", "b", "c"), half) for half in halves)
        >>> first == second
        False
    """
    if ids is None:
        return None
    return hashlib.sha256("\n".join(sorted(map(str, np.asarray(ids)[choosing]))).encode()).hexdigest()


def check_halves(evaluation: Evaluation, choosing: NDArray[np.bool_]) -> None:
    """Refuse halves of which one has a single group.

    Raises:
        InputError: a group is absent from a half.
    """
    for half, name in ((choosing, "choosing"), (~choosing, "reporting")):
        for group, pole in ((1, evaluation.poles[0]), (0, evaluation.poles[1])):
            if not (evaluation.groups[half] == group).any():
                raise InputError(
                    f"{pole} has none of the {int(half.sum())} {evaluation.noun} of the {name} half; both groups are "
                    f"needed in both: use more {evaluation.noun}"
                )
