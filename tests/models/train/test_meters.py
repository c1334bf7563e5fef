"""Meters against a GPU whose counters are known."""

import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from fairhead.train import meters
from fairhead.train.meters import Energy, Gpu, Meter, Sample

MIB = 2**20
clock = SimpleNamespace(now=0.0)


@pytest.fixture(autouse=True)
def a_clock_of_our_own(monkeypatch):
    """A busy machine may be late by as much as these runs take."""
    told = SimpleNamespace(perf_counter=lambda: clock.now, process_time=time.process_time)
    monkeypatch.setattr(meters, "time", told)


class FakeNvml:
    """A GPU that draws 360 W from the moment it is made, and has a counter that says so."""

    class NVMLError(Exception):
        pass

    watts = 360.0

    def __init__(self, silent=()):
        self.silent = silent
        self.started = clock.now
        self.open = 0
        self.looks = 0

    def nvmlInit(self):
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetName(self, handle):
        return b"Fake 1"

    def nvmlDeviceGetPowerUsage(self, handle):
        self.looks += 1
        return self._answer("power", 1000 * self.watts)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self._answer("energy", 5_000_000 + 1000 * self.watts * (clock.now - self.started))

    def nvmlDeviceGetUtilizationRates(self, handle):
        return self._answer("busy", SimpleNamespace(gpu=50))

    def nvmlDeviceGetMemoryInfo(self, handle):
        return self._answer("memory", SimpleNamespace(used=(900 if self.looks == 2 else 700) * MIB))

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        mine = SimpleNamespace(pid=os.getpid(), usedGpuMemory=(600 if self.looks == 2 else 500) * MIB)
        return self._answer("processes", [SimpleNamespace(pid=1, usedGpuMemory=100 * MIB), mine])

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return self._answer("limit", 700_000)

    def _answer(self, what, value):
        if what in self.silent:
            raise self.NVMLError(what)
        return value


def measured(nvml, seconds=0.3, **options):
    with Meter(gpu=Gpu("GPU-1", nvml), **options) as meter:
        for _ in range(3):
            time.sleep(seconds / 3)
            clock.now += 1.5
    assert meter.reading.seconds == pytest.approx(4.5)
    return meter.reading


def test_counter_and_power_agree_with_the_known_draw():
    nvml = FakeNvml()
    reading = measured(nvml)
    assert reading.energy_counter_wh == pytest.approx(nvml.watts * 4.5 / 3600)
    assert reading.energy_power_wh == pytest.approx(nvml.watts * 4.5 / 3600)
    assert reading.energy_wh == reading.energy_counter_wh
    assert reading.gpu == "Fake 1"
    assert nvml.open == 0


def test_the_paper_s_formula_is_busy_share_times_fixed_power():
    reading = measured(FakeNvml())
    assert reading.utilisation_watts == 700
    assert reading.energy_utilisation_wh == pytest.approx(0.5 * 700 * 4.5 / 3600)
    assert measured(FakeNvml(), utilisation_watts=350).energy_utilisation_wh == pytest.approx(0.5 * 350 * 4.5 / 3600)


def test_power_is_sampled_all_along_at_ten_times_a_second_or_more():
    assert meters.POWER_EVERY <= 0.1
    # Two samples are those at both ends; a busy machine may lose some of the others.
    assert measured(FakeNvml(), seconds=10 * meters.POWER_EVERY).power_samples > 4


def test_peaks_are_the_largest_values_seen_and_only_of_this_process():
    reading = measured(FakeNvml())
    assert reading.gpu_process_mib == 600
    assert reading.gpu_board_mib == 900
    assert reading.gpu_allocated_mib is None  # that is PyTorch's to say, and there is no GPU here


def test_what_a_gpu_does_not_say_is_none():
    reading = measured(FakeNvml(silent={"energy", "processes", "limit"}))
    assert reading.energy_counter_wh is None
    assert reading.gpu_process_mib is None
    assert reading.energy_utilisation_wh is None
    assert reading.energy_wh == reading.energy_power_wh > 0


def test_runs_that_share_a_gpu_are_charged_equal_shares():
    alone, shared = measured(FakeNvml()), measured(FakeNvml(), sharers=lambda: 3)
    assert shared.energy_wh == pytest.approx(alone.energy_wh / 3)
    assert shared.shared_by == 3


def test_trapezoids_of_a_ramp_are_exact():
    energy = Energy()
    for second in range(11):
        energy.add(float(second), Sample(watts=100.0 * second), 1)
    assert energy.figures()["energy_power_wh"] == pytest.approx(100 * 10**2 / 2 / 3600)


def test_utilisation_is_looked_at_once_a_minute_as_in_the_paper():
    energy = Energy(utilisation_watts=360.0)
    # Idle but for the very moments at which the paper's script looks, and in the last half minute.
    for second in range(0, 151, 10):
        energy.add(float(second), Sample(busy=1.0 if second in (60, 120) else 0.0), 1)
    assert energy.figures()["energy_utilisation_wh"] == pytest.approx(360 * 120 / 3600)


def test_without_a_gpu_only_the_process_is_known():
    with Meter("cpu") as meter:
        clock.now += sum(range(100_000)) / 1e9
        with pytest.raises(RuntimeError, match="still running"):
            meter.reading  # noqa: B018
    found = meter.reading.to_dict()
    assert found["seconds"] > 0
    assert found["cpu_seconds"] > 0
    assert found["peak_rss_mib"] > 1
    assert [name for name, value in found.items() if name.startswith(("gpu", "energy")) and value is not None] == []


def test_the_thread_ends_with_the_block_even_after_an_error():
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), Meter(gpu=Gpu("GPU-1", FakeNvml())) as meter:
        print(1 / 0)
    assert threading.active_count() == before
    assert meter.reading.energy_wh is not None


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="Linux only")
def test_the_peak_of_memory_is_that_of_the_block():
    with Meter() as large:
        np.ones(200 * MIB // 8).sum()
    with Meter() as small:
        np.ones(8).sum()
    assert large.reading.peak_rss_mib - small.reading.peak_rss_mib > 150
