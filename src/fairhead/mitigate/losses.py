"""What the losses of several methods are made of: row losses, GroupDRO's loss, cells, and even draws of them."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import WeightedRandomSampler

from fairhead.train.loop import gathered


def row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each row, [B], in 32 bits; logits [B, C], labels [B].

    Example:
        >>> row_losses(torch.zeros(1, 4), torch.tensor([2])).exp().item()
        4.0
    """
    return cross_entropy(logits.float(), labels, reduction="none")


class GroupLoss:
    """GroupDRO's loss (Sagawa et al., 2020): Σ q_g L_g, where q_g grows exponentially with the loss of its group.

    The groups are those that a method has found, or (in `references`) was given.
    """

    def __init__(self, groups: Tensor, step_size: float = 0.01, adjustment: float = 0.0) -> None:
        """Start with equal q for the groups of the training rows, numbered from 0, [n].

        `step_size` is how fast q follows the losses (η); `adjustment` is C of the generalisation adjustment C / √n_g,
        added to a group's loss when q is updated.
        """
        sizes = torch.bincount(groups)
        self.groups, self.step_size, self.adjustment = groups, step_size, adjustment / sizes.clamp(min=1).sqrt()
        self.q = (sizes > 0).float() / (sizes > 0).sum()

    def __call__(self, output: Any, labels: Tensor, rows: Tensor) -> Tensor:
        """The loss of a batch; q moves with it."""
        if self.q.device != rows.device:
            moved = (tensor.to(rows.device) for tensor in (self.groups, self.adjustment, self.q))
            self.groups, self.adjustment, self.q = moved
        losses, group = gathered(row_losses(output.logits, labels)), gathered(self.groups[rows])
        counts = torch.zeros_like(self.q).index_add(0, group, torch.ones_like(losses))
        means = torch.zeros_like(self.q).index_add(0, group, losses) / counts.clamp(min=1)
        with torch.no_grad():
            here = counts > 0  # groups that the batch lacks keep their weight
            # In place: a step that is recorded and replayed knows this tensor and no other.
            self.q.mul_(torch.where(here, (self.step_size * (means + self.adjustment)).exp(), 1.0))
            self.q.div_(self.q.sum())
        return (self.q * means).sum()


class Adjusted:
    """A loss of f + offset, where each training row has offsets of its own: what they say, f need not learn."""

    def __init__(self, offsets: Tensor, loss: Callable[[Any, Tensor, Tensor], Tensor] | None = None) -> None:
        """`offsets` [n, C]; the mean cross-entropy where no loss is given."""
        self.offsets, self.loss = offsets, loss

    def __call__(self, output: Any, labels: Tensor, rows: Tensor) -> Tensor:
        """The loss of a batch."""
        if self.offsets.device != rows.device:
            self.offsets = self.offsets.to(rows.device)
        shifted = copy.copy(output)
        unseen = output.logits.shape[-1] - self.offsets.shape[-1]  # the last classes may have no training row
        shifted.logits = output.logits.float() + pad(self.offsets[rows], (0, unseen))
        return row_losses(shifted.logits, labels).mean() if self.loss is None else self.loss(shifted, labels, rows)


def balanced(cells: Tensor, generator: torch.Generator, power: float = 1.0) -> WeightedRandomSampler:
    """As many draws as rows, from every cell [n] alike, or in proportion to size^(1 − power)."""
    sizes = torch.bincount(cells.cpu()).double()
    chances = sizes[cells.cpu()].pow(-power)
    return WeightedRandomSampler(chances.tolist(), len(cells), generator=generator)


def cell_numbers(labels: Tensor, parts: Tensor) -> Tensor:
    """One number for each (class, part) pair that occurs, from 0 and without holes, [n] on the CPU."""
    labels, parts = labels.cpu().long(), parts.cpu().long()
    return (labels * (parts.max() + 1) + parts).unique(return_inverse=True)[1]
