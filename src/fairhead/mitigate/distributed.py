"""A batch that is spread over processes, seen as one; gradients flow through. Without processes: the tensor itself."""

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


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
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        # A copy: the gradient of a sum is one tensor for both of its terms.
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]
