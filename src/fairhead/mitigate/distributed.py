"""A batch that is spread over processes, seen as one; gradients flow through. Without processes: the tensor itself."""

import torch
from torch import Tensor
from torch import distributed as dist


def is_spread() -> bool:
    """Whether several processes share each batch."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gathered(x: Tensor) -> Tensor:
    """The rows of all processes, [processes · B, ...]."""
    if not is_spread():
        return x
    if x.is_floating_point():
        from torch.distributed.nn.functional import all_gather

        return torch.cat(all_gather(x))
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts)


def summed(x: Tensor) -> Tensor:
    """The sum over all processes."""
    if not is_spread():
        return x
    from torch.distributed.nn.functional import all_reduce

    return all_reduce(x)
