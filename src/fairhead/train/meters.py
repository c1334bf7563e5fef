"""What a run costs: time, memory and energy, each figure with what it is and where it comes from.

A figure that this machine cannot know is None, never an estimate in disguise. Energy comes in three forms, because the
literature uses all three: the energy counter (the one to trust), power integrated over time, and DAM's formula
(the share of time in which the GPU was busy × a fixed power), which is a duty cycle and not a measurement of energy.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from fairhead.train.gpu_power import Gpu, Sample, find_gpu

_JOULES_PER_WH = 3600.0
_MIB = 2**20
POWER_EVERY = 0.05  # seconds: 20 Hz, twice what trapezoids over power need
_UTILISATION_EVERY = 60.0  # seconds: as the paper's measurement


@dataclass(frozen=True)
class Reading:
    """What a `Meter` measured. None: not known on this machine."""

    seconds: float  # wall time
    cpu_seconds: float  # processor time of this process, all threads
    # Largest resident memory of this process while metered; elsewhere than on Linux, since it started
    peak_rss_mib: float | None
    gpu: str | None = None  # the GPU's name
    gpu_allocated_mib: float | None = None  # peak of what PyTorch's tensors took
    gpu_reserved_mib: float | None = None  # peak of what PyTorch's allocator held
    gpu_process_mib: float | None = None  # peak of what the driver says this process holds, CUDA's own context included
    gpu_board_mib: float | None = None  # peak of what all processes held on the GPU
    energy_counter_wh: float | None = None  # from the GPU's energy counter (NVML)
    energy_power_wh: float | None = None  # power draw, sampled at least 10 times a second, trapezoids
    energy_utilisation_wh: float | None = None  # DAM's formula: busy share, sampled every 60 s, × `utilisation_watts`
    utilisation_watts: float | None = None  # the fixed power of that formula
    power_samples: int = 0  # how many samples are behind `energy_power_wh`
    # Largest number of runs that shared the device; energy is then an equal share, not a measurement
    shared_by: int = 1

    @property
    def energy_wh(self) -> float | None:
        """The best energy figure there is: the counter's, else integrated power; never the utilisation formula."""
        return self.energy_power_wh if self.energy_counter_wh is None else self.energy_counter_wh

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with `energy_wh` beside the figures it was chosen from."""
        return {**asdict(self), "energy_wh": self.energy_wh}


class Meter:
    """Measure what happens inside a `with` block.

    Args:
        device: "cuda", "cuda:1", ... to measure a GPU as well; anything else measures the process alone.
        gpu: where GPU figures come from; found by itself (NVML, else nvidia-smi) where none is given.
        utilisation_watts: the fixed power of DAM's formula; by default the GPU's own power limit. (The paper: 350.)
        sharers: how many runs use the device at this moment; each is charged an equal share of its energy.
    """

    def __init__(
        self,
        device: str = "cpu",
        gpu: Gpu | None = None,
        utilisation_watts: float | None = None,
        sharers: Callable[[], int] | None = None,
    ) -> None:
        self._device = device
        self._gpu = gpu
        self._watts = utilisation_watts
        self._sharers = sharers or (lambda: 1)
        self._reading: Reading | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def reading(self) -> Reading:
        """What was measured; there when the block has ended."""
        if self._reading is None:
            raise RuntimeError("the meter is still running: read it after its `with` block")
        return self._reading

    def __enter__(self) -> "Meter":
        if self._device.startswith("cuda"):
            import torch

            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            if self._gpu is None:
                self._gpu = find_gpu(self._device)
        _forget_peak_rss()
        self._shared_by = self._sharers()
        self._started = time.perf_counter()
        self._cpu_started = time.process_time()
        if self._gpu is not None:
            limit = self._gpu.power_limit() if self._watts is None else self._watts
            self._energy = Energy(limit)
            self._take(self._gpu)
            self._thread = threading.Thread(target=self._sample, args=(self._gpu,), daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        allocated = reserved = None
        if self._device.startswith("cuda"):
            import torch

            torch.cuda.synchronize(self._device)
            allocated = torch.cuda.max_memory_allocated(self._device) / _MIB
            reserved = torch.cuda.max_memory_reserved(self._device) / _MIB
        gpu: dict[str, Any] = {}
        if self._gpu is not None and self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._take(self._gpu)
            gpu = self._energy.figures()
            gpu["gpu"] = self._gpu.name
            self._gpu.close()
        shared_by = max(self._shared_by, self._sharers(), gpu.pop("shared_by", 1))
        self._reading = Reading(
            seconds=time.perf_counter() - self._started,
            cpu_seconds=time.process_time() - self._cpu_started,
            peak_rss_mib=_peak_rss_mib(),
            gpu_allocated_mib=allocated,
            gpu_reserved_mib=reserved,
            shared_by=shared_by,
            **gpu,
        )

    def _sample(self, gpu: Gpu) -> None:
        while not self._stop.wait(POWER_EVERY):
            self._take(gpu)

    def _take(self, gpu: Gpu) -> None:
        self._energy.add(time.perf_counter(), gpu.sample(os.getpid()), max(1, self._sharers()))


class Energy:
    """Sums that a stream of samples adds up to.

    Args:
        utilisation_watts: of DAM's formula; None leaves that figure out.
    """

    def __init__(self, utilisation_watts: float | None = None) -> None:
        self._watts = utilisation_watts
        self._last: tuple[float, Sample] | None = None
        self._counter: float | None = None
        self._power: float | None = None
        self._busy_seconds: float | None = None
        self._looked: float | None = None
        self._latest_busy: tuple[float, float, int] | None = None
        self._process: float | None = None
        self._in_use: float | None = None
        self._samples = 0
        self._sharers = 1

    def add(self, now: float, sample: Sample, sharers: int) -> None:
        """Take in one sample, `now` in seconds; what was used since the last one is shared between `sharers`."""
        self._sharers = max(self._sharers, sharers)
        self._process = _largest(self._process, sample.process_mib)
        self._in_use = _largest(self._in_use, sample.used_mib)
        if sample.watts is not None:
            self._samples += 1
        if self._last is not None:
            then, before = self._last
            if before.joules is not None and sample.joules is not None:
                self._counter = (self._counter or 0.0) + (sample.joules - before.joules) / sharers
            if before.watts is not None and sample.watts is not None:
                self._power = (self._power or 0.0) + (now - then) * (before.watts + sample.watts) / 2 / sharers
        if sample.busy is not None:
            if self._looked is None:
                self._looked = now
            elif now - self._looked >= _UTILISATION_EVERY:
                self._add_busy(now, sample.busy, sharers)
            self._latest_busy = (now, sample.busy, sharers)
        self._last = (now, sample)

    def _add_busy(self, now: float, busy: float, sharers: int) -> None:
        # As the paper does: what is seen at the end of a minute stands for the whole minute.
        assert self._looked is not None
        self._busy_seconds = (self._busy_seconds or 0.0) + busy * (now - self._looked) / sharers
        self._looked = now

    def figures(self) -> dict[str, Any]:
        """The fields of `Reading` that come from the GPU; the last, incomplete minute counts by its last sample."""
        if self._latest_busy is not None:
            self._add_busy(*self._latest_busy)
        formula = self._busy_seconds is not None and self._watts is not None
        return {
            "gpu_process_mib": self._process,
            "gpu_board_mib": self._in_use,
            "energy_counter_wh": _in_wh(self._counter),
            "energy_power_wh": _in_wh(self._power),
            "energy_utilisation_wh": _in_wh((self._busy_seconds or 0.0) * (self._watts or 0.0)) if formula else None,
            "utilisation_watts": self._watts,
            "power_samples": self._samples,
            "shared_by": self._sharers,
        }


def _in_wh(joules: float | None) -> float | None:
    return None if joules is None else joules / _JOULES_PER_WH


def _largest(a: float | None, b: float | None) -> float | None:
    known = [x for x in (a, b) if x is not None]
    return max(known) if known else None


_PROCESS = Path("/proc/self")


def _forget_peak_rss() -> None:
    """Start the process's peak anew, where the system can (Linux)."""
    with suppress(OSError):
        (_PROCESS / "clear_refs").write_text("5")


def _peak_rss_mib() -> float | None:
    with suppress(OSError, StopIteration):
        lines = (_PROCESS / "status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("VmHWM:")).split()[1]) / 1024
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / _MIB if sys.platform == "darwin" else peak / 1024
