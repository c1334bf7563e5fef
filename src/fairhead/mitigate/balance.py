"""Balance: weights and offsets that make clusters (of `fairhead.train.kmeans`) independent of the label."""

import torch
from torch import Tensor

from fairhead.mitigate.losses import cell_numbers


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
