"""What a GPU says about itself, through NVML (nvidia-ml-py) or, without that package, the nvidia-smi command."""

import contextlib
import shutil
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

_MIB = 2**20
_PATIENCE = 5.0  # seconds that nvidia-smi is given to answer, and to end


@dataclass(frozen=True)
class Sample:
    """One sample of a GPU; None where it does not say."""

    watts: float | None = None  # power draw
    joules: float | None = None  # energy counter since the driver was loaded
    busy: float | None = None  # share of recent time in which a kernel ran, 0 to 1
    used_mib: float | None = None  # memory in use by all processes
    process_mib: float | None = None  # memory in use by this process


def find_gpu(device: str = "cuda") -> "Gpu | None":
    """The GPU behind a torch device, or None where neither NVML nor nvidia-smi knows it."""
    import torch

    # By its unique name: torch counts only the GPUs it may see, NVML all of them.
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    for kind in (NvmlGpu, SmiGpu):
        with contextlib.suppress(Exception):  # whatever a missing driver, package or permission raises
            return kind(uuid)
    return None


class NvmlGpu:
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
        """Let go of NVML."""
        self._nvml.nvmlShutdown()

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        try:
            return question(self._handle)
        except self._nvml.NVMLError:  # not every GPU answers everything
            return None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


class SmiGpu:
    """A GPU through one nvidia-smi that goes on printing; it has no energy counter and no memory by process."""

    _FIELDS = "power.draw,utilization.gpu,memory.used,power.limit,name"

    def __init__(self, uuid: str, command: str | None = None) -> None:
        command = command or shutil.which("nvidia-smi")
        if command is None:
            raise FileNotFoundError("nvidia-smi")
        query = [command, "-i", uuid, f"--query-gpu={self._FIELDS}", "--format=csv,noheader,nounits", "-lms", "100"]
        self._process = subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        self._lines = self._process.stdout
        self._latest: list[str] | None = None
        self._answered = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        if not self._answered.wait(_PATIENCE) or self._latest is None:
            self.close()
            raise OSError("nvidia-smi said nothing about this GPU")
        self.name = self._latest[4]

    def sample(self, pid: int) -> Sample:
        """Return what nvidia-smi printed last."""
        assert self._latest is not None
        watts, busy, used = (_number(field) for field in self._latest[:3])
        return Sample(watts=watts, busy=_scaled(busy, 0.01), used_mib=used)

    def power_limit(self) -> float | None:
        """Watts that it may draw."""
        assert self._latest is not None
        return _number(self._latest[3])

    def close(self) -> None:
        """End nvidia-smi."""
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._thread.join(_PATIENCE)
        self._lines.close()

    def _follow(self) -> None:
        for line in self._lines:
            fields = [field.strip() for field in line.split(",")]
            if len(fields) == len(self._FIELDS.split(",")):
                self._latest = fields
                self._answered.set()
        self._answered.set()  # nothing more will come


Gpu = NvmlGpu | SmiGpu


def _number(text: str) -> float | None:
    """nvidia-smi writes "[N/A]" for what it does not know."""
    try:
        return float(text)
    except ValueError:
        return None
