"""Choosing among trained candidates without any group: by the spread of accuracy between clusters, and by cost.

The spread is the standard deviation, between clusters, of how often the rows of a class are answered rightly, with the
noise of finite cells subtracted: what equalised odds would measure if the clusters were groups. A point of spread
counts as much as a point of accuracy. A candidate replaces plain training only if what it gains (spread and cost
together, against plain training) exceeds one standard error of that gain, and if it costs at most a stated price in
accuracy; one standard error is allowed for there, because a few hundred rows do not show it better.

Clusters of a class may be groups, or may cut one group into rows that are easy and rows that are hard. Two groups lie
farther apart than the sides of a cut, and not in the direction of another class: `share_of_groups` asks for both.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from fairhead.mitigate.training_job import cell_numbers
from fairhead.train import Selection
from fairhead.train.fitting import worst_accuracy

Array = NDArray[np.float64]
Codes = NDArray[np.int64]

# Standard deviations between two groups. A cut through one normal distribution gives 2.65 at most (twice the mean of a
# half, by its standard deviation), and up to 3.2 where its rows are scaled to unit length.
APART = 3.3
_LARGE = 20  # rows of a (class, cluster) cell whose accuracy an epoch may be chosen by, or whose mean is looked at
_LEAST = 5  # rows of a (class, cluster) cell: with fewer its rate is not looked at
_REPLICATES = 200


@dataclass(frozen=True)
class CandidateResult:
    """One candidate on the rows that it is chosen by."""

    name: str  # such as "balance"
    accuracy: float
    # Standard deviation of the rates between clusters, noise subtracted; 0 where noise explains it all, None where no
    # class has two clusters of enough rows
    spread: float | None
    cost: float  # accuracy of plain training less its own
    cost_se: float  # its standard error, paired on rows (or on the units that they are of)
    # Spread of plain training, less its own spread and its cost. Without a spread, match alone has one: its accuracy
    gain: float | None
    gain_se: float | None  # its standard error, as that of the cost
    affordable: bool  # whether the cost is within the price, one standard error allowed for

    @property
    def total(self) -> float:
        """What is to be small: the spread and the cost, a point for a point."""
        return (self.spread or 0.0) + self.cost

    @property
    def better(self) -> bool:
        """Whether it gains more than one standard error."""
        return self.gain is not None and self.gain_se is not None and self.gain > self.gain_se


def between_clusters(answers: Codes, labels: Codes, clusters: Codes) -> float:
    """The noise-corrected variance, between clusters, of how often a class is answered rightly; a mean over classes.

    Cells count by their rows; what binomial noise alone would give is subtracted, so that the result can be negative.
    It is NaN where no class has two clusters of enough rows.
    """
    tables = np.zeros((2, int(labels.max()) + 1, int(clusters.max()) + 1))  # the right answers, and all rows
    np.add.at(tables[0], (labels, clusters), answers == labels)
    np.add.at(tables[1], (labels, clusters), 1)
    return float(_variance(*tables))


def _variance(right: Array, rows: Array) -> Array:
    """The same from the right answers and the rows of each cell, [..., classes, clusters]; [...]."""
    rows = np.where(rows >= _LEAST, rows, 0.0)
    n = np.maximum(rows, _LEAST)
    share, rate = rows / np.maximum(rows.sum(-1, keepdims=True), 1), np.minimum(right / n, 1.0)
    variance = (share * (rate - (share * rate).sum(-1, keepdims=True)) ** 2).sum(-1)
    noise = (share * (1 - share) / (n - 1) * rate * (1 - rate)).sum(-1)
    defined = (rows > 0).sum(-1) >= 2
    with np.errstate(invalid="ignore"):
        found: Array = np.where(defined, variance - noise, 0.0).sum(-1) / defined.sum(-1)
    return found


def judge(
    answers: Mapping[str, Codes],  # of each candidate, [n] each; costs and gains are counted from the first
    labels: Codes,  # [n]
    clusters: Codes,  # [n]
    units: Codes | None,  # who or what a row is of, [n]; each row on its own where None
    price: float,  # the largest cost in accuracy, as a share (0.02 is two points)
    seed: int = 0,
) -> list[CandidateResult]:
    """Each candidate's spread, cost and gain, on the same rows; standard errors by a paired bootstrap of the units."""
    unit = np.arange(len(labels)) if units is None else np.unique(units, return_inverse=True)[1]
    count = int(unit.max()) + 1
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=_REPLICATES)
    times = np.vstack([np.ones((1, count)), drawn])  # how often a unit is drawn: at first the rows as they are
    shape = len(times), int(labels.max()) + 1, int(clusters.max()) + 1
    cell = labels * shape[2] + clusters

    def tables(values: Array) -> Array:
        each = csr_array((values, (cell, unit)), shape=(shape[1] * shape[2], count))
        return np.asarray((each @ times.T).T).reshape(shape)

    rows = tables(np.ones(len(labels)))
    results: list[CandidateResult] = []
    plain_spread = plain_accuracy = np.empty(0)
    for name, given in answers.items():
        right = tables((given == labels).astype(np.float64))
        accuracy = right.sum((1, 2)) / rows.sum((1, 2))
        spread = np.maximum(_variance(right, rows), 0.0) ** 0.5
        if not results:
            plain_spread, plain_accuracy = spread, accuracy
        cost = plain_accuracy - accuracy
        cost_se = float(cost[1:].std(ddof=1))
        defined = bool(np.isfinite(spread[0]))
        gain = plain_spread - spread - cost if defined else -cost
        known = defined or name.partition(" ")[0] == "match"
        results.append(
            CandidateResult(
                name,
                accuracy=float(accuracy[0]),
                spread=float(spread[0]) if defined else None,
                cost=float(cost[0]),
                cost_se=cost_se,
                gain=float(gain[0]) if known else None,
                gain_se=float(np.nanstd(gain[1:], ddof=1)) if known else None,
                affordable=bool(cost[0] - cost_se <= price),
            )
        )
    return results


def choose(results: Sequence[CandidateResult], at_any_price: bool = False) -> CandidateResult:
    """The candidate with the smallest total among those that are affordable and better than the first; else that."""
    able = (one for one in results[1:] if one.better and (one.affordable or at_any_price))
    return min(able, key=lambda one: one.total, default=results[0])


def share_of_groups(points: Tensor, centres: Tensor, labels: Tensor) -> float | None:
    """The share of the rows that lie, within their class, in one of two groups; None where all cells are too small.

    Of each class and each two clusters, the rows whose nearest centres are these two are looked at. Their means on
    both sides must be `APART` standard deviations from each other (Mahalanobis, less what noise alone gives), not
    counting the directions in which classes differ within clusters: rows that differ in these are easy or hard ones.

    Args:
        points: what was clustered, [n, D].
        centres: of the clusters, [k, D].
        labels: [n].
    """
    points, labels = points.double(), labels.unique(return_inverse=True)[1]
    nearest = torch.cdist(points, centres.double()).topk(2, dim=1, largest=False).indices  # [n, 2]
    pair = nearest.sort(1).values
    sides: list[tuple[Tensor, Tensor]] = []  # rows
    for a, b, label in torch.cat([pair, labels[:, None]], 1).unique(dim=0).tolist():
        rows = (pair == torch.tensor([a, b])).all(1) & (labels == label)
        one, other = ((rows & (nearest[:, 0] == side)).nonzero()[:, 0] for side in (a, b))
        if min(len(one), len(other)) >= _LARGE:
            sides.append((one, other))
    if not sides:
        return None
    within = torch.cat([points[rows] - points[rows].mean(0) for both in sides for rows in both])
    covariance = within.T @ within / len(within)
    covariance += 1e-3 * covariance.trace() / len(covariance) * torch.eye(len(covariance))
    points = torch.linalg.solve_triangular(torch.linalg.cholesky(covariance), points.T, upper=False).T
    known = _class_directions(points, labels, nearest[:, 0])
    points = points - points @ known @ known.T
    seen = apart = 0
    for one, other in sides:
        between = (points[one].mean(0) - points[other].mean(0)).square().sum()
        noise = (len(known) - known.shape[1]) * (1 / len(one) + 1 / len(other))
        seen += len(one) + len(other)
        apart += (len(one) + len(other)) * int(between - noise >= APART**2)
    return apart / seen


def _class_directions(points: Tensor, labels: Tensor, clusters: Tensor) -> Tensor:
    """The directions in which classes differ most within clusters, [D, C - 1], or a quarter of all D.

    The effects of classes are found by least squares, with a term for each class and one for each cluster.
    """
    terms = torch.cat([torch.nn.functional.one_hot(part) for part in (labels, clusters)], 1).to(points)  # [n, C + k]
    effects = torch.linalg.pinv(terms.T @ terms) @ (terms.T @ points)
    shown = effects[labels] - effects[labels].mean(0)
    most = min(int(labels.max()), max(1, points.shape[1] // 4))
    return torch.linalg.eigh(shown.T @ shown).eigenvectors[:, -most:] if most else points.new_zeros(points.shape[1], 0)


def least_spread(plain: Tensor, labels: Tensor, clusters: Tensor, units: Tensor | None, price: float) -> Selection:
    """Select by the smallest spread and cost, among epochs that cost at most `price` points of accuracy.

    The cost is counted from the answers of `plain` training, [m].
    Epochs that cost more come after all others, the costliest last.
    """
    rows = labels.numpy(), clusters.numpy(), None if units is None else units.numpy()

    def score(predicted: Tensor) -> float:
        _, epoch = judge({"plain": plain.numpy(), "epoch": predicted.numpy()}, *rows, price / 100)
        return 1 - epoch.total if epoch.affordable else -epoch.cost

    return score


def worst_large_cell(labels: Tensor, clusters: Tensor, least: int = _LARGE) -> Selection:
    """Select by the lowest accuracy of a (class, cluster) cell of `least` rows or more (of any, if none has)."""
    labels, cells = labels.cpu(), cell_numbers(labels, clusters)
    large = torch.bincount(cells)[cells] >= least
    rows = large if large.any() else torch.ones_like(large)
    return lambda predicted: worst_accuracy(predicted[rows], labels[rows], cells[rows])
