"""How busy an NVIDIA GPU is, and how full, as its driver tells (NVML).

Does: ask at most once per second, however often it is read; give None where there is no such GPU or the driver does not
tell. Does not: touch CUDA, so that a process without torch can ask about the GPU of another one's engine.
`LocalGpus` reads all GPUs of the machine as often as it is asked: for a benchmark.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

log = logging.getLogger("tonle.telemetry")

_MAX_AGE_S = 1.0  # the driver's own figure covers between a sixth of a second and a second


class GpuUse(NamedTuple):
    """One reading. None: the driver does not tell, as of a part of a GPU (MIG)."""

    utilization: float | None  # share of the last moments in which at least one kernel ran, 0..1
    memory_used: int | None  # bytes, of all processes
    memory_total: int | None  # bytes


class GpuReading(NamedTuple):
    """One reading for a benchmark. None: the driver does not tell."""

    utilization: float | None = None  # 0..1
    memory_used: int | None = None  # bytes
    memory_total: int | None = None  # bytes
    power_w: float | None = None


class GpuMonitor:
    """Readings of GPUs by their UUID. Safe to use from several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reading = threading.Lock()  # held while the driver is asked
        self._last: dict[str, tuple[float, GpuUse | None]] = {}  # UUID -> when it was asked, what it said
        self._nvml: Any = None  # the module, once it works

    def read(self, uuid: str) -> GpuUse | None:
        """`uuid` is the engine's word for its GPU (`ModelCard.gpu`); empty: it has none."""
        if self._is_recent(uuid):
            return self.known(uuid)
        with self._reading:
            if not self._is_recent(uuid):
                self._refresh(uuid)
        return self.known(uuid)

    def read_within(self, uuid: str, wait_s: float) -> GpuUse | None:
        """As `read`, for an event loop: a driver that takes longer is not waited for, and the last reading is given."""
        if not self._is_recent(uuid) and not self._reading.locked():
            thread = threading.Thread(target=self.read, args=(uuid,), name="tonle-gpu", daemon=True)
            thread.start()
            thread.join(wait_s)
        return self.known(uuid)

    def known(self, uuid: str) -> GpuUse | None:
        """As it was read last; None also if it never was."""
        last = self._last.get(uuid)
        return None if last is None else last[1]

    def _is_recent(self, uuid: str) -> bool:
        """Or there is nothing to ask about."""
        last = self._last.get(uuid)
        return not uuid or (last is not None and self._clock() - last[0] < _MAX_AGE_S)

    def _refresh(self, uuid: str) -> None:
        asked_s = self._clock()
        try:
            self._last[uuid] = (asked_s, self._ask(uuid))
        except Exception as error:  # no driver, no NVIDIA GPU, a GPU that is lost: NVML has a class for each
            if uuid not in self._last or self.known(uuid) is not None:
                log.info("the use of GPU %s cannot be read: %s", uuid, error)
            self._last[uuid] = (asked_s, None)

    def _ask(self, uuid: str) -> GpuUse | None:
        if self._nvml is None:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        nvml = self._nvml
        handle = self._handle(uuid)
        rates = _if_supported(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = _if_supported(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        if rates is None and memory is None:
            return None
        return GpuUse(
            None if rates is None else rates.gpu / 100,
            None if memory is None else memory.used,
            None if memory is None else memory.total,
        )

    def _handle(self, uuid: str) -> Any:
        """CUDA names a GPU, and a part of one, by the same kind of UUID; NVML has a prefix for each."""
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except self._nvml.NVMLError:
            return self._nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")


class LocalGpus:
    """All GPUs that the driver of this machine knows; `names` is empty where there is none."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._handles: list[Any] = []
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml: Any = pynvml
            for number in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(number)
                name = pynvml.nvmlDeviceGetName(handle)
                self.names.append(name.decode() if isinstance(name, bytes) else name)
                self._handles.append(handle)
        except Exception as error:  # no package, no driver, no GPU: NVML has a class for each
            log.info("no GPU is watched: %s", error)
            del self.names[len(self._handles) :]

    def read(self) -> list[GpuReading]:
        """One for each name. Never raises."""
        return [self._read_one(handle) for handle in self._handles]

    def _read_one(self, handle: Any) -> GpuReading:
        nvml = self._nvml
        try:
            rates = _if_supported(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
            memory = _if_supported(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
            milliwatts = _if_supported(nvml, nvml.nvmlDeviceGetPowerUsage, handle)
        except nvml.NVMLError as error:  # a GPU that is lost
            log.info("a GPU cannot be read: %s", error)
            return GpuReading()
        return GpuReading(
            None if rates is None else rates.gpu / 100,
            None if memory is None else memory.used,
            None if memory is None else memory.total,
            None if milliwatts is None else milliwatts / 1000,
        )


def _if_supported(nvml: Any, ask: Callable[[Any], Any], handle: Any) -> Any:
    try:
        return ask(handle)
    except nvml.NVMLError_NotSupported:
        return None
