"""Training by several processes, one per GPU, that `accelerate launch` or torchrun has started.

What compares the rows of a batch needs those of all processes: `gathered` and `summed`.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor
from torch import distributed as dist

from fairhead.store import locked


def joined() -> PartialState:
    """The processes of this run: those that a launcher started, or this one alone."""
    return PartialState(cpu=not torch.accelerator.is_available())  # with cpu=True it looks for those on the CPU


T = TypeVar("T")


def agreed(found: T) -> T:
    """What the first process has found, in all of them: what hardware rounds in its own way may decide otherwise."""
    said = [found]
    if joined().num_processes > 1:
        broadcast_object_list(said)
    return said[0]


@contextmanager
def written_by_first(out: Path) -> Iterator[bool]:
    """Whether this process is the one that writes to the folder of a run, which no other run may do meanwhile.

    All processes leave together, so that whoever follows finds what the first one wrote.
    """
    processes = joined()
    writes = processes.is_main_process
    with locked(out) if writes else nullcontext():
        yield writes
    processes.wait_for_everyone()


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
