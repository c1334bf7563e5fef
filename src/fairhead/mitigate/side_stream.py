"""Work that a recorded step does beside its main line: a GPU has room for small kernels next to large ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class SideStream:
    """Lets what depends on an early point of the forward pass begin there, while the pass goes on.

    In a step that is being recorded (see `fairhead.train.step`) the work gets a branch of its own, and so does its
    backward pass. Elsewhere nothing changes: it is Python that takes the time there.

    Example:
        >>> side_stream = SideStream()
        >>> side_stream.mark(torch.nn.Identity(), (), torch.zeros(1))
        >>> with side_stream.work():
        ...     value = torch.ones(2).sum().item()
        >>> value
        2.0
    """

    def __init__(self) -> None:
        self._since: Any = None

    def mark(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """What the work needs is there: a forward hook."""
        tensor = output[0] if isinstance(output, tuple) else output
        on_gpu = isinstance(tensor, Tensor) and tensor.is_cuda and not torch.compiler.is_compiling()
        if on_gpu and torch.cuda.is_current_stream_capturing():
            self._since = torch.cuda.current_stream().record_event()

    @contextmanager
    def work(self) -> Iterator[None]:
        """Do the work; what comes after this block waits for it."""
        since, self._since = self._since, None
        if since is None or not torch.cuda.is_current_stream_capturing():
            yield
            return
        main, beside = torch.cuda.current_stream(), torch.cuda.Stream()
        beside.wait_event(since)
        with torch.cuda.stream(beside):
            yield
        main.wait_stream(beside)

    def clear(self) -> None:
        """Forget the mark of a pass that had no work to do: what it points to can be neither copied nor used."""
        self._since = None
