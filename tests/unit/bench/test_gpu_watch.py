"""GPUs beside latencies, with a stand-in for the driver's library."""

from __future__ import annotations

import sys
import threading
import time
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.unit.bench.scripted import Behaviour, serving
from tonle.bench import BenchOptions, run_bench
from tonle.bench.gpu_watch import GpuWatch, is_this_machine, summarize
from tonle.bench.level_lines import level_lines
from tonle.bench.measure import GpuReport
from tonle.telemetry.gpu import GpuReading, LocalGpus

GIB = 2**30


class Driver(ModuleType):
    """`pynvml` with two GPUs, the second a part of one (MIG), which tells its memory alone."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818  (as it is called there)
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.percents = [90, 100]  # in turns
        self.num_asked = 0
        self.lost = False

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetName(self, handle: int) -> str | bytes:
        return "NVIDIA H200" if handle == 0 else b"NVIDIA H200 MIG 1g"

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if self.lost:
            raise self.NVMLError("GPU is lost")
        if handle:
            raise self.NVMLError_NotSupported("Not Supported")
        self.num_asked += 1
        return SimpleNamespace(gpu=self.percents[self.num_asked % 2], memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=(100 + min(self.num_asked, 20)) * GIB, free=GIB, total=141 * GIB)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        if handle:
            raise self.NVMLError_NotSupported("Not Supported")
        return 650_400


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def test_every_gpu_is_read(driver: Driver) -> None:
    gpus = LocalGpus()
    assert gpus.names == ["NVIDIA H200", "NVIDIA H200 MIG 1g"]
    assert gpus.read() == [GpuReading(1.0, 101 * GIB, 141 * GIB, 650.4), GpuReading(None, 101 * GIB, 141 * GIB, None)]
    driver.lost = True
    assert gpus.read() == [GpuReading(), GpuReading()]


def test_no_package_and_no_driver_are_no_gpus(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise driver.NVMLError("Driver Not Loaded")

    monkeypatch.setattr(driver, "nvmlInit", fail)
    assert LocalGpus().names == [] and LocalGpus().read() == []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert LocalGpus().names == []


def test_a_watch_takes_the_mean_and_the_most(driver: Driver) -> None:
    watch = GpuWatch(LocalGpus(), every_s=0.001)
    deadline = time.monotonic() + 120
    while driver.num_asked < 40 and time.monotonic() < deadline:
        time.sleep(0.001)
    whole, part = watch.stop()
    assert whole.utilization == pytest.approx(0.95, abs=0.01)
    assert (whole.name, whole.memory_used, whole.memory_total) == ("NVIDIA H200", 120 * GIB, 141 * GIB)
    assert whole.power_w == pytest.approx(650.4)
    assert (part.utilization, part.power_w, part.memory_used) == (None, None, 120 * GIB)
    assert not any(thread.name == "tonle-bench-gpu" for thread in threading.enumerate())


def test_a_gpu_that_says_nothing() -> None:
    nothing = GpuReport(name="X", utilization=None, memory_used=None, memory_total=None, power_w=None)
    assert summarize("X", []) == summarize("X", [GpuReading()]) == nothing


def test_a_level_has_the_gpus_and_prints_them(driver: Driver) -> None:
    with serving(Behaviour(pause_s=0.005)) as server:
        level = run_bench(BenchOptions(url=server.url, requests=2, warmup=0)).levels[0]
    assert [gpu.name for gpu in level.gpus] == ["NVIDIA H200", "NVIDIA H200 MIG 1g"]
    lines = level_lines(level)
    assert any(line.startswith("GPU NVIDIA H200: ") and line.endswith(" of 141.0 GiB, 650 W") for line in lines)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("localhost", True),
        ("10.0.0.1", False),
        ("gpu-box", False),
    ],
)
def test_only_a_server_on_this_machine_has_these_gpus(host: str, expected: bool) -> None:
    assert is_this_machine(host) is expected
