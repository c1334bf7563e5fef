"""What every benchmark shares: naming the machine, and timing peers fairly on a noisy one."""

import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path


def machine(device: str = "cpu") -> str:
    """One line that says where the figures come from."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    parts = [cpu, f"{os.cpu_count()} cores", f"Python {platform.python_version()}", f"numpy {version('numpy')}"]
    try:
        parts.append(f"torch {version('torch')}")
        if device == "cuda":
            import torch

            parts.insert(0, torch.cuda.get_device_name())
    except ModuleNotFoundError:
        pass
    return "Machine: " + ", ".join(parts)


def interleaved_medians(
    peers: dict[str, Callable[[], object]],
    repeats: int,
    around: Callable[[str], AbstractContextManager[object]] = lambda name: nullcontext(),
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each peer. They take turns, so that a slow moment of the machine falls on all of them.

    Args:
        peers: what to time, by name.
        repeats: how often each has its turn, after one that is not counted.
        around: for each name, what must hold while it runs; entering and leaving it is not timed.
        clock: seconds; `time.process_time` counts this process's own work, whatever else the machine has to do.
    """
    seconds: dict[str, list[float]] = {name: [] for name in peers}
    for turn in range(repeats + 1):
        order = list(peers) if turn % 2 == 0 else list(reversed(peers))
        for name in order:
            with around(name):
                start = clock()
                peers[name]()
                seconds[name].append(clock() - start)
    return {name: statistics.median(times[1:]) for name, times in seconds.items()}
