"""Choosing among trained candidates without any group: the smallest spread of the answers between clusters, and cost.

The spread is the standard deviation, between clusters, of how often a class is answered given the true class, with the
noise of finite cells subtracted: what equalised odds would measure if the clusters were groups. A point of spread
counts as much as a point of accuracy, so that none is spent for nothing. A candidate may cost at most a stated price in
accuracy; one standard error is allowed for, because a few hundred rows do not show it better.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairhead.mitigate.losses import cell_numbers
from fairhead.train import Selection
from fairhead.train.fitting import worst_accuracy

Array = NDArray[np.float64]
Codes = NDArray[np.int64]

_LARGE = 20  # validation rows of a (class, cluster) cell whose accuracy an epoch may be chosen by
_LEAST = 5  # rows of a (class, cluster) cell: with fewer its rate is not looked at
_REPLICATES = 200


@dataclass(frozen=True)
class Tried:
    """One candidate on the rows that it is chosen by."""

    name: str  # such as "balance"
    accuracy: float
    spread: float  # standard deviation of the rates between clusters, noise subtracted; 0 where noise explains it all
    cost: float  # accuracy of plain training less its own
    cost_se: float  # its standard error, paired on rows (or on the units that they are of)
    affordable: bool  # whether the cost is within the price, one standard error allowed for

    @property
    def total(self) -> float:
        """What is to be small: the spread and the cost, a point for a point."""
        return self.spread + self.cost


def between_clusters(answers: Codes, labels: Codes, clusters: Codes) -> float:
    """The noise-corrected variance, between clusters, of P(answer | label, cluster); a mean over labels and answers.

    Cells count by their rows; what binomial noise alone would give is subtracted, so that the result can be negative.
    """
    found = []
    count, classes = int(clusters.max()) + 1, int(max(answers.max(), labels.max())) + 1
    for label in np.unique(labels):
        rows = labels == label
        table = np.zeros((count, classes))
        np.add.at(table, (clusters[rows], answers[rows]), 1.0)
        n = table.sum(1)
        table, n = table[n >= _LEAST], n[n >= _LEAST]
        if len(n) < 2:
            continue
        rates, share = table / n[:, None], n / n.sum()
        variance = share @ (rates - share @ rates) ** 2
        noise = (share * (1 - share) / (n - 1)) @ (rates * (1 - rates))
        # Of two classes both rates say the same.
        found.append((variance - noise)[1:].mean() if classes == 2 else (variance - noise).mean())
    return float(np.mean(found)) if found else 0.0


def tried(
    answers: Mapping[str, Codes],  # of each candidate, [n] each; costs are counted from the first
    labels: Codes,  # [n]
    clusters: Codes,  # [n]
    units: Codes | None,  # who or what a row is of, [n]; each row on its own where None
    price: float,  # the largest cost in accuracy, as a share (0.02 is two points)
    seed: int = 0,
) -> list[Tried]:
    """Each candidate's spread and cost, on the same rows."""
    right = {name: (found == labels).astype(np.float64) for name, found in answers.items()}
    first = next(iter(right.values()))
    codes = np.arange(len(labels)) if units is None else np.unique(units, return_inverse=True)[1]
    size = np.bincount(codes)
    rng = np.random.default_rng(seed)
    drawn = rng.multinomial(len(size), np.full(len(size), 1 / len(size)), size=_REPLICATES)
    found = []
    for name, hits in right.items():
        lost = np.bincount(codes, weights=first - hits)
        cost, replicates = lost.sum() / len(labels), (drawn @ lost) / (drawn @ size)
        se = float(replicates.std(ddof=1))
        spread = max(between_clusters(answers[name], labels, clusters), 0.0) ** 0.5
        found.append(Tried(name, float(hits.mean()), spread, float(cost), se, bool(cost - se <= price)))
    return found


def chosen(candidates: list[Tried]) -> Tried:
    """The affordable candidate with the smallest total of spread and cost; the first of equals."""
    return min((one for one in candidates if one.affordable), key=lambda one: one.total)


def least_spread(plain: Tensor, labels: Tensor, clusters: Tensor, units: Tensor | None, price: float) -> Selection:
    """Select by the smallest spread and cost, among epochs that cost at most `price` points of accuracy.

    The cost is counted from the answers of `plain` training, [m].
    Epochs that cost more come after all others, the costliest last.
    """
    rows = labels.numpy(), clusters.numpy(), None if units is None else units.numpy()

    def score(predicted: Tensor) -> float:
        _, found = tried({"plain": plain.numpy(), "epoch": predicted.numpy()}, *rows, price / 100)
        return 1 - found.total if found.affordable else -found.cost

    return score


def worst_large_cell(labels: Tensor, clusters: Tensor, least: int = _LARGE) -> Selection:
    """Select by the lowest accuracy of a (class, cluster) cell of `least` rows or more (of any, if none has)."""
    labels, cells = labels.cpu(), cell_numbers(labels, clusters)
    large = torch.bincount(cells)[cells] >= least
    rows = large if large.any() else torch.ones_like(large)
    return lambda predicted: worst_accuracy(predicted[rows], labels[rows], cells[rows])


def joined_units(units: Sequence[Tensor | None], sizes: Sequence[int]) -> Codes | None:
    """Numbers of the units of all parts, no number in two of them; None where no part has any."""
    if all(part is None for part in units):
        return None
    joined, above = [], 0
    for part, size in zip(units, sizes, strict=True):
        numbers = np.arange(size) if part is None else part.numpy()
        joined.append(numbers + above)
        above = int(joined[-1].max()) + 1
    return np.concatenate(joined)
