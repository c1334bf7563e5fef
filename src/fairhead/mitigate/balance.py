"""Balance: offsets that make clusters independent of the label; weights are with the clusters (`train.kmeans`)."""

import torch
from torch import Tensor


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
