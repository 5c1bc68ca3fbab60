"""`Pace`: how fast the processors of this machine compute, sampled beside a measurement.

    with Pace() as pace:
        ...
        pace.slow_share(began_s)  # of the time since that moment

Cores of a virtual machine may be hardware threads of cores that others use, too. Work that computes then takes up to 1.6 times as
long for some seconds or a minute, work that waits for memory does not, and nothing inside the machine says so.

Does: multiply small matrices 20 times a second in a process of its own, and count its CPU time, which other programs of this
machine do not lengthen. Takes some 0.3 % of a core. Does not: look at the program that is measured.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

_EVERY_S = 0.05
_SLOW = 1.12  # times what a sample usually takes
_LEAST = 20  # samples that tell what is usual
_WINDOW = 5  # samples, whose median counts: one may be held up


class PaceSample(NamedTuple):
    at_s: float  # of the monotonic clock
    took_s: float


class Span(NamedTuple):
    begin_s: float
    end_s: float
    is_slow: bool


class Pace:
    def __enter__(self) -> Self:
        descriptor, name = tempfile.mkstemp(prefix="tonle-pace-")
        self.path = Path(name)
        # One thread each, whatever numpy multiplies with.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tonle.simulate.pace", str(os.getpid())]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                env=environment,
                start_new_session=True,  # Ctrl-C is for the program that measures, which ends this one
            )
        except OSError:
            self.path.unlink()
            raise
        finally:
            os.close(descriptor)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self.path.unlink()

    def samples(self) -> list[PaceSample]:
        """By moment."""
        lines = self.path.read_text().splitlines()
        # The last line may be half written.
        return [PaceSample(*map(float, line.split())) for line in lines[:-1]]

    def spans(self) -> list[Span]:
        """The time until now, in pieces of a quarter of a second."""
        return list(spans(self.samples()))

    def slow_share(self, since_s: float) -> float:
        """Of the time since that moment: how much of it the machine was slower than it usually is."""
        return slow_share(self.spans(), since_s)


def spans(samples: Sequence[PaceSample]) -> Iterator[Span]:
    """Usual is what the faster half takes, in the middle: a machine may be slow for most of the time."""
    if len(samples) < _LEAST:
        return
    usual_s = statistics.quantiles((sample.took_s for sample in samples), n=4)[0]
    for place in range(0, len(samples), _WINDOW):
        window = samples[place : place + _WINDOW]
        end_s = samples[place + _WINDOW].at_s if place + _WINDOW < len(samples) else window[-1].at_s
        yield Span(window[0].at_s, end_s, statistics.median(sample.took_s for sample in window) > _SLOW * usual_s)


def slow_share(all_spans: Sequence[Span], since_s: float) -> float:
    since = [span for span in all_spans if span.begin_s >= since_s]
    whole_s = sum(span.end_s - span.begin_s for span in since)
    return sum(span.end_s - span.begin_s for span in since if span.is_slow) / whole_s if whole_s else 0.0


def _sample(parent: int) -> None:
    """Until the parent is gone."""
    import numpy as np

    left = np.linspace(0.0, 1.0, 4096, dtype=np.float32).reshape(64, 64)
    out = np.empty_like(left)

    def took_s() -> float:
        began_s = time.thread_time()
        for _ in range(12):
            np.dot(left, left, out=out)
        return time.thread_time() - began_s

    while os.getppid() == parent:
        at_s = time.monotonic()
        took_s()  # caches are cold
        sys.stdout.write(f"{at_s} {min(took_s(), took_s())}\n")
        sys.stdout.flush()
        time.sleep(_EVERY_S)


if __name__ == "__main__":
    _sample(int(sys.argv[1]))
