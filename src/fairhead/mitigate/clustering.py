"""k-means and the silhouette, on whatever device the points are."""

from typing import NamedTuple

import torch
from torch import Tensor


class Clustering(NamedTuple):
    """Centres [k, D], the cluster of each point [n], and the sum of squared distances."""

    centres: Tensor
    cluster: Tensor
    inertia: float


def kmeans(points: Tensor, k: int, seed: int = 0, restarts: int = 4, rounds: int = 100) -> Clustering:
    """Lloyd's algorithm from k-means++ starts; the best of several.

    Args:
        points: [n, D].
        k: clusters; no more than there are distinct points are used.
        seed: of the starts.
        restarts: how many starts.
        rounds: at most, each.

    Example:
        >>> import torch
        >>> kmeans(torch.tensor([[0.0], [0.1], [9.0], [9.1]]), 2).cluster.diff().abs().tolist()
        [0, 1, 0]
    """
    points = points.float()
    generator = torch.Generator().manual_seed(seed)
    best: Clustering | None = None
    for _ in range(restarts):
        centres = _spread_out(points, k, generator)
        cluster = nearest(points, centres)
        for _ in range(rounds):
            sums = torch.zeros_like(centres).index_add(0, cluster, points)
            sizes = torch.bincount(cluster, minlength=len(centres))
            centres = torch.where((sizes > 0)[:, None], sums / sizes.clamp(min=1)[:, None], centres)
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
    return (centres.square().sum(1) - 2 * points @ centres.T).argmin(1)


def silhouette(points: Tensor, cluster: Tensor, at_most: int = 2000, seed: int = 0) -> float:
    """Mean over points of (b − a) / max(a, b): a is the mean distance to the own cluster, b to the next one.

    Args:
        points: [n, D].
        cluster: [n].
        at_most: points beyond this many are sampled.
        seed: of that sample.

    Returns:
        Between −1 and 1; −1 where there is but one cluster.
    """
    if len(points) > at_most:
        chosen = torch.randperm(len(points), generator=torch.Generator().manual_seed(seed))[:at_most]
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
