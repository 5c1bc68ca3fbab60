"""Sounds for tests, as files, and a pool that runs a kind in this process."""

from __future__ import annotations

import io
import struct
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
import pytest

from tonle.workers.kind import Job, Kind, Result
from tonle.workers.kinds.resample import Samples

MISSING = "not installed: pip install 'tonle[speech]'"


def soundfile() -> Any:
    return pytest.importorskip("soundfile", reason=f"soundfile is {MISSING}")


def tone(seconds: float, rate: int, hz: float = 440.0) -> Samples:
    return (0.3 * np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def encoded(samples: Any, rate: int, container: str, subtype: str | None = None) -> bytes:
    out = io.BytesIO()
    soundfile().write(out, samples, rate, format=container, subtype=subtype)
    return out.getvalue()


def wav(data: bytes, *, rate: int = 16_000, channels: int = 1, claimed: int | None = None, code: int = 1,
        bits: int = 16) -> bytes:  # fmt: skip
    """With whatever its header says. `code` 1: integers, 3: floats."""
    size = len(data) if claimed is None else claimed
    form = struct.pack("<HHIIHH", code, channels, rate, rate * channels * bits // 8 % 2**32, channels * bits // 8, bits)
    return (
        struct.pack("<4sI4s4sI", b"RIFF", min(size + 36, 2**32 - 1), b"WAVE", b"fmt ", 16)
        + form
        + struct.pack("<4sI", b"data", size)
        + data
    )


class DirectPool:
    """The part of `WorkerPool` that endpoints use, without processes."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.failures: list[Exception] = []  # each ends one stream after its first piece
        self.num_closed = 0

    async def run(self, job: Job, *, timeout_s: float | None = None) -> Result:
        (result,) = self.kind.run([job])
        if isinstance(result, Exception):
            raise result
        return result

    async def run_all(self, jobs: Sequence[Job], *, timeout_s: float | None = None) -> list[Result]:
        return [await self.run(job) for job in jobs]

    async def stream(self, job: Job, *, timeout_s: float | None = None) -> AsyncGenerator[Result, None]:
        failure = self.failures.pop(0) if self.failures else None
        try:
            for result in self.kind.stream(job):
                yield result
                if failure is not None:
                    raise failure
        finally:
            self.num_closed += 1
