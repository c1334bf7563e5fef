"""What a run costs: time, memory and energy, each figure with what it is and where it comes from.

A figure that this machine cannot know is None, never an estimate in disguise. Energy comes in three forms, because the
literature uses all three: the energy counter (the one to trust), power integrated over time, and DAM's formula
(the share of time in which the GPU was busy × a fixed power), which is a duty cycle and not a measurement of energy.
What a GPU says about itself comes through NVML (nvidia-ml-py).
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Sample:
    """One sample of a GPU; None where it does not say."""

    watts: float | None = None  # power draw
    joules: float | None = None  # energy counter since the driver was loaded
    busy: float | None = None  # share of recent time in which a kernel ran, 0 to 1
    used_mib: float | None = None  # memory in use by all processes
    process_mib: float | None = None  # memory in use by this process


def find_gpu(device: str = "cuda") -> "Gpu | None":
    """The GPU behind a torch device, or None where NVML does not know it."""
    import torch

    # By its unique name: torch counts only the GPUs it may see, NVML all of them.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    with suppress(Exception):  # any error of a missing driver, package or permission
        return Gpu(uuid)
    return None


class Gpu:
    """A GPU through NVML, by its unique name "GPU-..."; `nvml` is the module `pynvml`, or one like it."""

    def __init__(self, uuid: str, nvml: Any = None) -> None:
        self._nvml = nvml or import_module("pynvml")
        self._nvml.nvmlInit()
        self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        name = self._nvml.nvmlDeviceGetName(self._handle)
        self.name = name.decode() if isinstance(name, bytes) else str(name)

    def sample(self, pid: int) -> Sample:
        """Look at it now."""
        nvml = self._nvml
        used = self._ask(nvml.nvmlDeviceGetMemoryInfo)
        busy = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        processes = self._ask(nvml.nvmlDeviceGetComputeRunningProcesses) or []
        # Inside a container the driver may list host numbers, among which this process is not found: not known then.
        own = next((p.usedGpuMemory for p in processes if p.pid == pid), None)
        return Sample(
            watts=_scaled(self._ask(nvml.nvmlDeviceGetPowerUsage), 1e-3),
            joules=_scaled(self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption), 1e-3),
            busy=None if busy is None else busy.gpu / 100,
            used_mib=None if used is None else used.used / _MIB,
            process_mib=_scaled(own, 1 / _MIB),
        )

    def power_limit(self) -> float | None:
        """Watts that it may draw."""
        return _scaled(self._ask(self._nvml.nvmlDeviceGetEnforcedPowerLimit), 1e-3)

    def close(self) -> None:
        """Close NVML."""
        self._nvml.nvmlShutdown()

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        try:
            return question(self._handle)
        except self._nvml.NVMLError:  # not every GPU answers everything
            return None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


class Meter:
    """Measure what happens inside a `with` block.

    Args:
        device: "cuda", "cuda:1", ... to measure a GPU as well; anything else measures the process alone.
        gpu: where GPU figures come from; by default the GPU of `device`, where NVML knows it.
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
        self._device, self._gpu, self._watts = device, gpu, utilisation_watts
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

    def __exit__(self, *_: object) -> None:
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
            gpu = {**self._energy.figures(), "gpu": self._gpu.name}
            self._gpu.close()
        gpu["shared_by"] = max(self._shared_by, self._sharers(), gpu.get("shared_by", 1))
        self._reading = Reading(
            seconds=time.perf_counter() - self._started,
            cpu_seconds=time.process_time() - self._cpu_started,
            peak_rss_mib=_peak_rss_mib(),
            gpu_allocated_mib=allocated,
            gpu_reserved_mib=reserved,
            **gpu,
        )

    def _sample(self, gpu: Gpu) -> None:
        while not self._stop.wait(POWER_EVERY):
            self._take(gpu)

    def _take(self, gpu: Gpu) -> None:
        self._energy.add(time.perf_counter(), gpu.sample(os.getpid()), max(1, self._sharers()))


class Energy:
    """Sums that a stream of samples adds up to; DAM's formula is left out where it has no `utilisation_watts`."""

    def __init__(self, utilisation_watts: float | None = None) -> None:
        self._watts = utilisation_watts
        self._last: tuple[float, Sample] | None = None
        self._looked: float | None = None  # until when busy seconds have been added up
        self._latest_busy: tuple[float, float, int] | None = None
        self._totals: dict[str, float] = {}  # sums and peaks; a figure that no sample had is missing
        self._samples, self._sharers = 0, 1

    def add(self, now: float, sample: Sample, sharers: int) -> None:
        """Take in one sample, `now` in seconds; what was used since the last one is shared between `sharers`."""
        self._sharers = max(self._sharers, sharers)
        for name, mib in (("process", sample.process_mib), ("used", sample.used_mib)):
            if mib is not None:
                self._totals[name] = max(mib, self._totals.get(name, mib))
        if sample.watts is not None:
            self._samples += 1
        if self._last is not None:
            then, before = self._last
            if before.joules is not None and sample.joules is not None:
                self._count("counter", (sample.joules - before.joules) / sharers)
            if before.watts is not None and sample.watts is not None:
                self._count("power", (now - then) * (before.watts + sample.watts) / 2 / sharers)
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
        self._count("busy seconds", busy * (now - self._looked) / sharers)
        self._looked = now

    def _count(self, name: str, amount: float) -> None:
        self._totals[name] = self._totals.get(name, 0.0) + amount

    def figures(self) -> dict[str, Any]:
        """The fields of `Reading` that come from the GPU; the last, incomplete minute counts by its last sample."""
        if self._latest_busy is not None:
            self._add_busy(*self._latest_busy)

        def wh(name: str, watts: float | None = 1.0) -> float | None:
            if watts is None or name not in self._totals:
                return None
            return self._totals[name] * watts / _JOULES_PER_WH

        return {
            "gpu_process_mib": self._totals.get("process"),
            "gpu_board_mib": self._totals.get("used"),
            "energy_counter_wh": wh("counter"),
            "energy_power_wh": wh("power"),
            "energy_utilisation_wh": wh("busy seconds", self._watts),
            "utilisation_watts": self._watts,
            "power_samples": self._samples,
            "shared_by": self._sharers,
        }


_PROCESS = Path("/proc/self")


def _forget_peak_rss() -> None:
    """Reset the process's peak, where the system can (Linux)."""
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
