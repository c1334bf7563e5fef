"""What the losses of several methods are made of: row losses, GroupDRO's loss, and batches spread over processes."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn.functional import cross_entropy, pad
from torch.utils.data import WeightedRandomSampler


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
        self.groups = groups
        sizes = torch.bincount(groups)
        self.adjustment = adjustment / sizes.clamp(min=1).sqrt()
        self.step_size = step_size
        self.q = (sizes > 0).float() / (sizes > 0).sum()

    def __call__(self, output: Any, labels: Tensor, rows: Tensor) -> Tensor:
        """The loss of a batch; q moves with it."""
        if self.q.device != rows.device:
            self.groups, self.adjustment, self.q = (
                tensor.to(rows.device) for tensor in (self.groups, self.adjustment, self.q)
            )
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


def is_spread() -> bool:
    """Whether several processes share each batch."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gathered(x: Tensor) -> Tensor:
    """The rows of all processes, [processes · B, ...]."""
    gather: Any = _Gather.apply
    return gather(x) if is_spread() else x


def summed(x: Tensor) -> Tensor:
    """The sum over all processes."""
    add: Any = _Sum.apply
    return add(x) if is_spread() else x


class _Sum(torch.autograd.Function):
    """What depends on the sum, on any process, depends on every process's part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class _Gather(torch.autograd.Function):
    """The last batch of an epoch may be smaller on some processes: what is sent is as long as the longest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        counts = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, torch.tensor([len(x)], device=x.device))
        ctx.sizes = [int(count) for count in counts]
        sent = x.new_zeros(max(ctx.sizes), *x.shape[1:])
        sent[: len(x)] = x
        parts = [torch.empty_like(sent) for _ in ctx.sizes]
        dist.all_gather(parts, sent)
        return torch.cat([part[:size] for part, size in zip(parts, ctx.sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        # A copy: the gradient of a sum is one tensor for both of its terms.
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.split(ctx.sizes)[dist.get_rank()]
