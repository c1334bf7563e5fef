"""Training by several processes, one per GPU, that `accelerate launch` or torchrun has started."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list

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
