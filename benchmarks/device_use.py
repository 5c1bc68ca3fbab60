"""How busy the device was while something ran.

Does: on a GPU the share of time in which a kernel ran, by NVML (`pip install nvidia-ml-py`); on a CPU this process's CPU time as
a share of all cores. Does not: tell how well a kernel uses the device.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from importlib import import_module
from typing import Any, Self

SAMPLE_S = 0.05


class DeviceUse:
    """`with DeviceUse("cuda") as use: …`, then `use.share`: 0 to 1, or None where it cannot be measured."""

    def __init__(self, device: str) -> None:
        self.share: float | None = None
        self._gpu = _gpu(device) if device.startswith("cuda") else None
        self._on_cpu = not device.startswith("cuda")
        self._samples: list[float] = []
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._began = time.perf_counter(), time.process_time()
        if self._gpu is not None:
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        wall_s, cpu_s = time.perf_counter() - self._began[0], time.process_time() - self._began[1]
        if self._on_cpu:
            self.share = cpu_s / wall_s / len(os.sched_getaffinity(0))
        if self._thread is not None:
            self._done.set()
            self._thread.join()
            self.share = statistics.mean(self._samples) if self._samples else None

    def _watch(self) -> None:
        library, handle = self._gpu
        while not self._done.wait(SAMPLE_S):
            self._samples.append(library.nvmlDeviceGetUtilizationRates(handle).gpu / 100)


def _gpu(device: str) -> tuple[Any, Any] | None:
    """NVML and its handle of the device; None without NVML."""
    try:
        library = import_module("pynvml")
        library.nvmlInit()
        return library, library.nvmlDeviceGetHandleByIndex(int(device.partition(":")[2] or 0))
    except Exception:  # not installed, or no driver: then there is no number
        return None
