"""Two networks that are trained together, seen by the loop as one model: separate ones, or two heads of one encoder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from fairhead.mitigate.last_layer import find_head
from fairhead.mitigate.training_job import Job
from fairhead.train.examples import check_inputs


class PairOutput(NamedTuple):
    """Logits of the first network, [B, C], and (while training) what the second gives.

    A tuple: parallel training takes outputs apart and puts them together, and loses what was added to others.
    """

    logits: Tensor
    second: Tensor | None


class Pair(nn.Module):
    """The first network is the one that predicts; the second runs while training only.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> class Net(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return SimpleNamespace(logits=super().forward(x))
        >>> pair = Pair(Net(3, 2), Net(3, 2))
        >>> pair(x=torch.zeros(4, 3)).second.shape, pair.eval()(x=torch.zeros(4, 3)).second
        (torch.Size([4, 2]), None)
    """

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.second = second

    def forward(self, **inputs: Any) -> PairOutput:
        """Run both on the same inputs."""
        second = self.second(**inputs).logits if self.training else None
        return PairOutput(self.first(**inputs).logits, second)


def fresh_pair(job: Job, build_second: Callable[[], nn.Module] | None = None) -> Pair:
    """Two new networks that share nothing; the second is built like the first unless `build_second` says how."""
    pair = Pair(job.build_model(), (build_second or job.build_model)())
    check_inputs(pair.first, job.train)  # the pair takes anything: what the networks take must be asked of them
    shared = {id(p) for p in pair.first.parameters()} & {id(p) for p in pair.second.parameters()}
    assert not shared, "build_model must give a fresh model each time"
    return pair


class TwoHeads(nn.Module):
    """A classifier, and beside its head a second part that reads what the head reads, while training only."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.seen: list[Tensor] = []

    def forward(self, **inputs: Any) -> PairOutput:
        """Run the encoder once, and both heads."""
        logits = self.first(**inputs).logits
        second = self.second(self.seen.pop().float()) if self.training else None
        self.seen.clear()
        return PairOutput(logits, second)


@contextmanager
def second_head(job: Job, build: Callable[[nn.Linear], nn.Module]) -> Iterator[TwoHeads]:
    """A new network with a second head, which `build` makes from the first; it is gone from `first` at the end."""
    model = job.build_model()
    check_inputs(model, job.train)
    head = find_head(model, job.train)
    both = TwoHeads(model, build(head))
    handle = head.register_forward_pre_hook(lambda module, args: both.seen.append(args[0]))
    try:
        yield both
    finally:
        handle.remove()
