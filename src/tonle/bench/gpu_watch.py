"""`GpuWatch`: the GPUs of this machine during a level.

Does: ask NVML a few times per second in a thread of its own, and sum up. Does not: know which GPU the server uses: it reports all
of the machine. Where the server is on another machine, or there is no NVIDIA driver, there is nothing to report.
"""

from __future__ import annotations

import ipaddress
import statistics
import threading
from collections.abc import Iterable

from tonle.bench.measure import GpuReport
from tonle.telemetry.gpu import GpuReading, LocalGpus

EVERY_S = 0.25


class GpuWatch:
    """Owns the thread, from construction to `stop`."""

    def __init__(self, gpus: LocalGpus, every_s: float = EVERY_S) -> None:
        self._gpus = gpus
        self._every_s = every_s
        self._readings: list[list[GpuReading]] = []  # one list per look
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tonle-bench-gpu", daemon=True)
        self._thread.start()

    def stop(self) -> list[GpuReport]:
        """What was seen since the start."""
        self._stopped.set()
        self._thread.join(timeout=2.0)  # a driver that hangs is left behind
        return [
            summarize(name, [look[number] for look in list(self._readings) if number < len(look)])
            for number, name in enumerate(self._gpus.names)
        ]

    def _watch(self) -> None:
        while True:
            self._readings.append(self._gpus.read())
            if self._stopped.wait(self._every_s):
                return


def summarize(name: str, readings: list[GpuReading]) -> GpuReport:
    return GpuReport(
        name=name,
        utilization=_mean(reading.utilization for reading in readings),
        memory_used=max((reading.memory_used for reading in readings if reading.memory_used is not None), default=None),
        memory_total=next((reading.memory_total for reading in readings if reading.memory_total is not None), None),
        power_w=_mean(reading.power_w for reading in readings),
    )


def is_this_machine(host: str) -> bool:
    """Whether a server at this address runs where the client does, as far as the address tells."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _mean(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.fmean(there) if there else None
