"""Training by several processes, one a GPU, that `accelerate launch` or torchrun has started."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from accelerate import PartialState

from fairhead.store import locked


def joined() -> PartialState:
    """The processes of this run: those that a launcher started, or this one alone."""
    return PartialState(cpu=not torch.accelerator.is_available())  # with cpu=True it looks for those on the CPU


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
