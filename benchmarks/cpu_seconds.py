"""CPU seconds of a process and its descendants, now or over time.

Does: sum user and system time over the family, also of children that have ended and were waited for.
Does not: know what the process does. `CpuWatch` samples a few times a second, in a thread of its own.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Sequence
from time import monotonic, time
from types import TracebackType

from benchmarks.needs import development_tool

psutil = development_tool("psutil")

INTERVAL_S = 0.2


def cpu_seconds(pid: int) -> float:
    """So far; 0 for a process that is gone."""
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.Error:
        return 0.0
    total = 0.0
    for process in family:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def interpolate(samples: Sequence[tuple[float, float]], moment_s: float) -> float:
    """CPU seconds at a moment, linear between the (moment, CPU seconds) around it; flat before the first and after the last."""
    if not samples:
        return 0.0
    index = bisect_left(samples, (moment_s, 0.0))
    if index in (0, len(samples)):
        return samples[min(index, len(samples) - 1)][1]
    (before_s, low), (after_s, high) = samples[index - 1 : index + 1]
    return low + (high - low) * (moment_s - before_s) / (after_s - before_s)


class CpuWatch:
    """A context manager: remembers how CPU time grew while it was open."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._samples: list[tuple[float, float]] = []  # (monotonic, CPU seconds)
        self._wall_offset_s = time() - monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cpu-watch", daemon=True)

    def __enter__(self) -> CpuWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stopped.set()
        self._thread.join()

    def between(self, begin: tuple[str, float], end: tuple[str, float]) -> float:
        """CPU seconds from one moment to another, each with its clock: "monotonic" or "wall"."""
        return interpolate(self._samples, self._moment(*end)) - interpolate(self._samples, self._moment(*begin))

    def _moment(self, clock: str, moment_s: float) -> float:
        return moment_s - self._wall_offset_s if clock == "wall" else moment_s

    def _run(self) -> None:
        while not self._stopped.wait(INTERVAL_S):
            seconds = cpu_seconds(self._pid)
            if seconds:  # 0: it ended just now
                self._samples.append((monotonic(), seconds))
