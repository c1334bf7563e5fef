"""Clusters of features: k-means, how stable a number of clusters is, and the number that is most stable."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fairhead.errors import InputError

COUNTS = (2, 3, 4, 8, 16, 32)
# Rows beyond this many add nothing to what a stability is known by.
_ROWS = 6000
# Points that a silhouette is of: it takes the distance of each two.
_SHOWN = 2000
_HALVINGS = 3  # how often rows are halved, to see how stable clusters are
_NEARLY_THE_SAME = 0.9  # a stability that no other scaling of the features need improve on
# Principal components that features are clustered in.
_COMPONENTS = 64


class Clustering(NamedTuple):
    """Centres [k, D], the cluster of each point [n], and the sum of squared distances."""

    centres: Tensor
    cluster: Tensor
    inertia: float

    def of(self, points: Tensor) -> Tensor:
        """The cluster of each of other points, [m]."""
        return nearest(points, self.centres)


def kmeans(points: Tensor, k: int, seed: int = 0, restarts: int = 4, rounds: int = 100) -> Clustering:
    """Lloyd's algorithm on points [n, D] from k-means++ starts, the best of several.

    There are no more clusters than distinct points.
    """
    points = points.float()
    generator = torch.Generator().manual_seed(seed)
    best: Clustering | None = None
    for _ in range(restarts):
        centres = _spread_out(points, k, generator)
        cluster = nearest(points, centres)
        for _ in range(rounds):
            sizes = torch.bincount(cluster, minlength=len(centres))[:, None]
            centres = torch.where(sizes > 0, _sums(points, cluster, len(centres)) / sizes.clamp(min=1), centres)
            before, cluster = cluster, nearest(points, centres)
            if torch.equal(before, cluster):
                break
        inertia = (points - centres[cluster]).square().sum().item()
        if best is None or inertia < best.inertia:
            best = Clustering(centres, cluster, inertia)
    assert best is not None
    return best


def nearest(points: Tensor, centres: Tensor) -> Tensor:
    """The nearest centre of each point, [n]."""
    # |x − c|² without |x|², which is the same for all centres
    return torch.addmm(centres.square().sum(1), points, -2 * centres.T).argmin(1)


def _sums(points: Tensor, cluster: Tensor, k: int) -> Tensor:
    """The sum of the points of each cluster, [k, D]."""
    if points.is_cuda:  # by a matrix product: there, additions in no fixed order would give another sum each time
        return torch.nn.functional.one_hot(cluster, k).to(points).T @ points
    return points.new_zeros(k, points.shape[1]).index_add_(0, cluster, points)


def silhouette(points: Tensor, cluster: Tensor) -> float:
    """Mean over points [n, D] of (b − a) / max(a, b): a is the mean distance to the own cluster, b to the next one.

    It lies between −1 and 1, and is −1 where there is but one cluster. Of very many points some are drawn.
    """
    if len(points) > _SHOWN:
        chosen = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:_SHOWN]
        points, cluster = points[chosen.to(points.device)], cluster[chosen.to(cluster.device)]
    _, cluster = cluster.unique(return_inverse=True)
    sizes = torch.bincount(cluster)
    if len(sizes) < 2:
        return -1.0
    member = torch.nn.functional.one_hot(cluster).to(points.dtype)  # [n, k]
    sums = torch.cdist(points, points) @ member
    rows = torch.arange(len(points), device=points.device)
    own = sums[rows, cluster] / (sizes[cluster] - 1).clamp(min=1)
    means = sums / sizes
    means[rows, cluster] = torch.inf
    other = means.min(1).values
    score = (other - own) / torch.maximum(own, other).clamp(min=1e-12)
    return score.masked_fill(sizes[cluster] == 1, 0.0).mean().item()


def _spread_out(points: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """k-means++: each next centre is a point drawn in proportion to its squared distance from those before."""
    first = torch.randint(len(points), (1,), generator=generator).item()
    centres = [points[int(first)]]
    distance = (points - centres[0]).square().sum(1)
    while len(centres) < k and distance.max() > 0:
        chosen = torch.multinomial(distance.cpu().double(), 1, generator=generator).item()
        centres.append(points[int(chosen)])
        distance = torch.minimum(distance, (points - centres[-1]).square().sum(1))
    return torch.stack(centres)


class Stability(NamedTuple):
    """How well clusters of one half of the rows agree with those of the other: an adjusted Rand index per repeat."""

    clusters: int
    agreement: tuple[float, ...]

    @property
    def mean(self) -> float:
        """1 for the same clusters, 0 for chance."""
        return sum(self.agreement) / len(self.agreement)


def stabilities(
    points: Tensor,  # [n, D]
    counts: Sequence[int] = COUNTS,  # numbers of clusters; those that half of the rows cannot have are left out
    seed: int = 0,  # of the halves and the starts
    # Who or what a row is of, [n]: one unit is never in both halves, or clusters would be of units
    units: Tensor | None = None,
) -> list[Stability]:
    """The stability of each number of clusters: k-means on each half of the rows, both used on all of them."""
    halves = min(len(points), _ROWS) // 2
    possible = [count for count in counts if count < halves]
    if not possible:
        raise InputError(
            f"{len(points)} rows are too few for clusters: at least {2 * (min(counts) + 1)} are needed for "
            f"{min(counts)}"
        )
    generator = torch.Generator().manual_seed(seed)
    units = unit_numbers(units, len(points))
    drawn = []
    for _ in range(_HALVINGS):
        place = torch.randperm(int(units.max()) + 1, generator=generator)
        order = place[units].argsort(stable=True)[: 2 * halves]  # unit by unit
        first = place[units[order]] <= place[units[order[halves - 1]]]  # a unit on the border stays whole
        drawn.append((order[first], order[~first]))
    found = []
    for count in possible:
        agreement = []
        for repeat, both in enumerate(drawn):
            shown = points[torch.cat(both).to(points.device)]
            one, other = (
                kmeans(points[half.to(points.device)], count, seed + 2 * repeat + part, restarts=1, rounds=50)
                for part, half in enumerate(both)
            )
            agreement.append(adjusted_rand(one.of(shown), other.of(shown)))
        found.append(Stability(count, tuple(agreement)))
    return found


def unit_numbers(units: Tensor | None, n: int) -> Tensor:
    """Units numbered from 0 without holes, [n]; each row is one of its own where none are given."""
    return torch.arange(n) if units is None else units.unique(return_inverse=True)[1]


def most_stable(found: Sequence[Stability]) -> int:
    """The number of clusters with the highest stability."""
    return max(found, key=lambda stability: stability.mean).clusters


def adjusted_rand(one: Tensor, other: Tensor) -> float:
    """The adjusted Rand index of two clusterings of the same rows, [n] each (Hubert and Arabie, 1985)."""
    table = torch.zeros(int(one.max()) + 1, int(other.max()) + 1, dtype=torch.float64)
    table.index_put_((one.cpu(), other.cpu()), torch.ones(len(one), dtype=torch.float64), accumulate=True)

    def pairs(counts: Tensor) -> float:
        return float((counts * (counts - 1) / 2).sum())

    both, rows, columns = pairs(table), pairs(table.sum(1)), pairs(table.sum(0))
    chance = rows * columns / max(pairs(table.sum()), 1.0)
    most = (rows + columns) / 2
    return 1.0 if most == chance else (both - chance) / (most - chance)


class Clusters(NamedTuple):
    """The clusters of the training rows, and what their number was chosen by."""

    clustering: Clustering  # of the training rows
    stability: tuple[Stability, ...]  # of each number that was looked at; empty where the number was given
    mean: Tensor  # of the training features, of unit length, [D]
    axes: Tensor  # from what is left to the principal components of the scaled features, [D, components]

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.clustering.centres)

    def of(self, features: Tensor) -> Tensor:
        """The cluster of each row of other features, [m]."""
        return self.clustering.of((unit(features) - self.mean) @ self.axes)


def find_clusters(features: Tensor, count: int | None = None, seed: int = 0, units: Tensor | None = None) -> Clusters:
    """k-means on features [n, D], of unit length; the most stable number of clusters.

    Columns are standardised. Where their clusters have a stability under 0.9, those of columns as they are get their
    chance, and the more stable ones are kept: a group that shows in one column alone is shrunk to the size of noise
    by standardising.
    What correlates with the label is not taken out first: it is what is to be found. The first principal components
    give nearly the clusters that all features do, ten times sooner. Rows of one of the `units` [n] (a person, a
    document) stay together when the stability of a number is looked at.
    """
    if count is not None and count > len(features):
        raise InputError(f"{count} clusters of {len(features)} rows cannot be had: ask for fewer")
    counts = COUNTS if count is None else (count,) if count < min(len(features), _ROWS) // 2 else ()
    shown = unit(features)
    mean, scale = shown.mean(0), shown.std(0)
    best: tuple[float, tuple[Stability, ...], Tensor, Tensor] | None = None
    for each in (scale, torch.ones_like(scale)):
        each = torch.where(scale > 1e-6, each, torch.inf)  # a constant column takes no part
        points = (shown - mean) / each
        axes = torch.linalg.eigh(points.T @ points).eigenvectors.flip(1)[:, :_COMPONENTS]
        points = points @ axes
        stability = tuple(stabilities(points, counts, seed, units)) if counts else ()
        most = max((one.mean for one in stability), default=1.0)
        if best is None or most > best[0]:
            best = most, stability, points, axes / each[:, None]
        if most >= _NEARLY_THE_SAME:
            break
    assert best is not None
    _, stability, points, axes = best
    clustering = kmeans(points, count or most_stable(stability), seed)
    return Clusters(clustering, stability if count is None else (), mean, axes)


def unit(features: Tensor) -> Tensor:
    """Rows of length one, [n, D], in 32 bits on the CPU."""
    return torch.nn.functional.normalize(features.float().cpu(), dim=1)


def independent_weights(labels: Tensor, clusters: Tensor, weights: Tensor | None = None, cap: float = 20.0) -> Tensor:
    """P(y) P(c) / P(y, c) of each row, [n], mean 1: under these weights label and cluster are independent.

    `weights` are the rows' own, which shares are counted by and the result is multiplied with. `cap` is the largest
    weight, in means: a cell of a row or two would decide everything otherwise.
    """
    own = torch.ones(len(labels), dtype=torch.float64) if weights is None else weights.double()
    numbers = (labels, clusters, labels * (int(clusters.max()) + 1) + clusters)
    shares = [torch.bincount(part, weights=own)[part] / own.sum() for part in numbers]
    found = own * shares[0] * shares[1] / shares[2].clamp(min=1e-12)
    found = (found / found.mean()).clamp(max=cap)
    return found / found.mean() if (found == cap).any() else found
