"""The use of a GPU as NVML tells it, with a stand-in for the driver's library."""

from __future__ import annotations

import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tonle.telemetry.gpu import GpuMonitor, GpuUse

OURS = "11111111-2222-3333-4444-555555555555"
GIB = 2**30


class Driver(ModuleType):
    """`pynvml`, with one whole GPU and a part of another."""

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818  (as it is called there)
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.num_inits = 0
        self.num_asked = 0
        self.percent = 93
        self.lost: str | None = None
        self.hold: threading.Event | None = None  # until it is set, the driver does not answer

    def nvmlInit(self) -> None:
        self._work()
        self.num_inits += 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in (f"GPU-{OURS}", "MIG-part"):
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._work()
        self.num_asked += 1
        if handle.startswith("MIG"):
            raise self.NVMLError_NotSupported("Not Supported")
        return SimpleNamespace(gpu=self.percent, memory=40)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=10 * GIB, free=70 * GIB, total=80 * GIB)

    def _work(self) -> None:
        if self.lost is not None:
            raise self.NVMLError(self.lost)
        if self.hold is not None:
            assert self.hold.wait(60)


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", made)
    return made


def test_the_share_of_time_and_the_memory(driver: Driver) -> None:
    assert GpuMonitor().read(OURS) == GpuUse(0.93, 10 * GIB, 80 * GIB)


def test_the_driver_is_asked_at_most_once_a_second(driver: Driver) -> None:
    clock = Clock()
    monitor = GpuMonitor(clock)
    for _ in range(1000):
        clock.now_s += 0.0009
        assert monitor.read(OURS) == monitor.read_within(OURS, 5)
    assert driver.num_asked == 1
    clock.now_s += 0.2
    driver.percent = 7
    assert monitor.read(OURS) == GpuUse(0.07, 10 * GIB, 80 * GIB)
    assert (driver.num_asked, driver.num_inits) == (2, 1)


def test_an_engine_without_a_gpu_asks_no_driver(driver: Driver) -> None:
    assert GpuMonitor().read("") is None and GpuMonitor().read_within("", 5) is None
    assert driver.num_inits == 0


def test_a_part_of_a_gpu_tells_its_memory(driver: Driver) -> None:
    assert GpuMonitor().read("part") == GpuUse(None, 10 * GIB, 80 * GIB)


def test_no_driver_no_package_or_an_unknown_gpu_is_none(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    monitor = GpuMonitor(clock)
    with caplog.at_level("INFO", logger="tonle"):
        for _ in range(3):
            assert monitor.read("another") is None
            clock.now_s += 2
        driver.lost = "Driver Not Loaded"
        assert GpuMonitor().read(OURS) is None
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert GpuMonitor().read(OURS) is None
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3 and said[0] == "the use of GPU another cannot be read: Not Found"


def test_a_gpu_that_is_lost_and_comes_back(driver: Driver) -> None:
    clock = Clock()
    monitor = GpuMonitor(clock)
    seen = []
    for driver.lost in (None, "GPU is lost", None):
        seen.append(monitor.read(OURS))
        clock.now_s += 2
    assert seen == [GpuUse(0.93, 10 * GIB, 80 * GIB), None, GpuUse(0.93, 10 * GIB, 80 * GIB)]


def test_an_event_loop_does_not_wait_for_a_slow_driver(driver: Driver) -> None:
    clock = Clock()
    monitor = GpuMonitor(clock)
    driver.hold = threading.Event()
    assert monitor.read_within(OURS, 0.01) is None
    asking = threading.active_count()
    assert monitor.read_within(OURS, 60) is None, "one question at a time"
    assert threading.active_count() == asking
    driver.hold.set()
    assert monitor.read(OURS) == GpuUse(0.93, 10 * GIB, 80 * GIB)
    assert driver.num_asked == 1
