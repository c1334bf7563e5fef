"""Balance: groups that nobody named, found as clusters of frozen features, made independent of the label."""

from typing import NamedTuple

import torch
from torch import Tensor

from fairhead.errors import InputError
from fairhead.mitigate.losses import cell_numbers
from fairhead.train.kmeans import COUNTS, Clustering, Stability, kmeans, most_stable, stabilities

_COMPONENTS = 64


class Clusters(NamedTuple):
    """The clusters of the training rows, and what their number was chosen by.

    Attributes:
        clustering: of the training rows.
        stability: of each number that was looked at; empty where the number was given.
        mean: of the training features, of unit length, [D].
        axes: from what is left to the principal components of the standardised features, [D, components].
    """

    clustering: Clustering
    stability: tuple[Stability, ...]
    mean: Tensor
    axes: Tensor

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.clustering.centres)

    def of(self, features: Tensor) -> Tensor:
        """The cluster of each row of other features, [m]."""
        return self.clustering.of((unit(features) - self.mean) @ self.axes)


def find_clusters(features: Tensor, count: int | None = None, seed: int = 0, units: Tensor | None = None) -> Clusters:
    """k-means on features [n, D], of unit length and standardised; the most stable number of clusters.

    What goes along with the label is not taken out first: it is what is to be found. The first principal components
    give nearly the clusters that all features do, ten times sooner. Rows of one of the `units` [n] (a person, a
    document) stay together when the stability of a number is looked at.

    Raises:
        InputError: more clusters are asked for than there are rows.
    """
    if count is not None and count > len(features):
        raise InputError(f"{count} clusters of {len(features)} rows cannot be had: ask for fewer")
    shown = unit(features)
    mean, scale = shown.mean(0), shown.std(0)
    scale = torch.where(scale > 1e-6, scale, torch.inf)  # a constant column takes no part
    points = (shown - mean) / scale
    axes = torch.linalg.eigh(points.T @ points).eigenvectors.flip(1)[:, :_COMPONENTS]
    points = points @ axes
    stability = () if count is not None else tuple(stabilities(points, COUNTS, seed, units=units))
    return Clusters(kmeans(points, count or most_stable(stability), seed), stability, mean, axes / scale[:, None])


def unit(features: Tensor) -> Tensor:
    """Rows of length one, [n, D], in 32 bits on the CPU."""
    return torch.nn.functional.normalize(features.float().cpu(), dim=1)


def independent_weights(labels: Tensor, clusters: Tensor, weights: Tensor | None = None, cap: float = 20.0) -> Tensor:
    """P(y) P(c) / P(y, c) of each row, [n], mean 1: under these weights label and cluster are independent.

    Args:
        labels: [n].
        clusters: [n].
        weights: the rows' own, [n], which the shares are counted by and the result is multiplied with.
        cap: the largest weight, in means; a cell of a row or two would decide everything otherwise.

    Example:
        >>> import torch
        >>> independent_weights(torch.tensor([0, 0, 1, 0, 1, 1]), torch.tensor([0, 0, 0, 1, 1, 1])).tolist()
        [0.75, 0.75, 1.5, 1.5, 0.75, 0.75]
    """
    own = torch.ones(len(labels), dtype=torch.float64) if weights is None else weights.double()
    numbers = (labels, clusters, cell_numbers(labels, clusters))
    shares = [torch.bincount(part, weights=own)[part] / own.sum() for part in numbers]
    found = own * shares[0] * shares[1] / shares[2].clamp(min=1e-12)
    found = (found / found.mean()).clamp(max=cap)
    return found / found.mean() if (found == cap).any() else found


def label_offsets(labels: Tensor, groups: Tensor, *, even: bool = False) -> Tensor:
    """Log p(y | g) − log p(y) for the group of each row and every class, [n, C].

    Added to the logits in training (Hong and Yang, 2021): f alone, at test, then has nothing to say about what the
    group says of the label. The shares of the classes stay with f, unless `even`: log p(y | g) as it is. A class that a
    group lacks counts as half a row.

    Example:
        >>> import torch
        >>> label_offsets(torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1])).abs().max().item()
        0.0
    """
    table = torch.zeros(int(groups.max()) + 1, int(labels.max()) + 1, dtype=torch.float64)
    table.index_put_((groups, labels), torch.ones(len(labels), dtype=torch.float64), accumulate=True)
    prior = (torch.bincount(labels).double() / len(labels)).clamp(min=1e-9).log()
    table = table.clamp(min=0.5)
    given = (table / table.sum(1, keepdim=True)).log()
    return (given if even else given - prior)[groups].float()
