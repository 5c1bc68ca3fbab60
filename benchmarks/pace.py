"""`Pace`: how fast the processors of this machine compute, sampled beside a benchmark.

    with Pace() as pace:
        ...
        pace.slow_share(began_s)  # of the time since that moment

Cores of a virtual machine may be hardware threads of cores that others use, too. Work that computes then takes up to 1.6 times as
long for some seconds or a minute, work that waits for memory does not, and nothing inside the machine says so.

Does: multiply small matrices 20 times a second in a process of its own, and count its CPU time, which other programs of this
machine do not lengthen. Takes some 0.2 % of a core. Does not: look at the program that is measured.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

_EVERY_S = 0.05
_SLOW = 1.12  # times what a sample usually takes
_LEAST = 20  # samples that tell what is usual
_WINDOW = 5  # samples, whose median counts: one may be held up


class Pace:
    def __enter__(self) -> Self:
        descriptor, name = tempfile.mkstemp(prefix="pace-")
        self.path = Path(name)
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen([sys.executable, "-m", "benchmarks.pace"], stdout=descriptor, env=environment)
        os.close(descriptor)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self.path.unlink()

    def samples(self) -> list[tuple[float, float]]:
        """(moment of the monotonic clock, seconds), by moment."""
        lines = self.path.read_text().splitlines()
        # The last line may be half written.
        return [(float(at_s), float(took_s)) for at_s, took_s in map(str.split, lines[:-1])]

    def slow_share(self, since_s: float) -> float:
        """Of the time since that moment: how much of it the machine was slower than it usually is."""
        return slow_share(self.samples(), since_s)


def slow_share(samples: list[tuple[float, float]], since_s: float) -> float:
    """`samples`: (moment, seconds), by moment. Usual is what the faster half of all takes, in the middle: a machine may be slow
    for most of the time."""
    if len(samples) < _LEAST:
        return 0.0
    took = [took_s for _, took_s in samples]
    usual_s = statistics.quantiles(took, n=4)[0]
    first = next((place for place, (at_s, _) in enumerate(samples) if at_s >= since_s), len(samples))
    windows = [took[place : place + _WINDOW] for place in range(first, len(took), _WINDOW)]
    return sum(statistics.median(window) > _SLOW * usual_s for window in windows) / max(1, len(windows))


def _sample_forever() -> None:
    import numpy as np

    left = np.linspace(0.0, 1.0, 4096, dtype=np.float32).reshape(64, 64)
    out = np.empty_like(left)

    def took_s() -> float:
        began_s = time.thread_time()
        for _ in range(12):
            np.dot(left, left, out=out)
        return time.thread_time() - began_s

    while os.getppid() != 1:
        at_s = time.monotonic()
        took_s()  # caches are cold
        print(at_s, min(took_s(), took_s()), flush=True)
        time.sleep(_EVERY_S)


if __name__ == "__main__":
    _sample_forever()
