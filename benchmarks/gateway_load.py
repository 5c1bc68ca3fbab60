"""Callers who each wait for their answer before they ask again, and what they saw.

Does: drive one address with our own HTTP client, which takes less CPU than anything it measures. Does not: know what
answers.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from tonle.edge.client import Address, HttpClient, UpstreamError

KEY = "sk-benchmark"


@dataclass
class Level:
    """So many callers, whole or streamed answers."""

    per_s: float
    first_p50_ms: float
    first_p99_ms: float
    num_failed: int
    cpu_us: float = 0.0  # of all the server's processes, per request
    main_us: float = 0.0  # of the one that serves

    def __str__(self) -> str:
        failed = f" ({self.num_failed} failed)" if self.num_failed else ""
        return f"{self.per_s:8.0f} · {self.first_p50_ms:.1f} / {self.first_p99_ms:.1f}{failed}"


class Arrival:
    """When the first byte of an answer came, and whether it was one."""

    def __init__(self) -> None:
        self.status = 0
        self.first_s = 0.0
        self.tail = b""

    def attach(self, press: Callable[[bool], None]) -> None:
        pass

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status

    def data(self, piece: bytes) -> None:
        self.first_s = self.first_s or time.perf_counter()
        self.tail = piece[-64:]


def body_of(*, stream: bool, **fields: object) -> bytes:
    messages = [{"role": "user", "content": "What is the capital of Cambodia?"}]
    return json.dumps({"model": "stub", "messages": messages, "stream": stream, **fields}).encode()


async def drive(url: str, concurrency: int, total: int, *, stream: bool, **fields: object) -> Level:
    """`concurrency` callers, `total` requests. `fields`: more of their body."""
    client = HttpClient(Address.parse(url), api_key=KEY)
    body = body_of(stream=stream, **fields)
    request = client.request("POST", "/v1/chat/completions", body, {})
    waits_ms: list[float] = []
    left, failed = total, 0

    async def caller() -> None:
        nonlocal left, failed
        while left > 0:
            left -= 1
            arrival, began_s = Arrival(), time.perf_counter()
            try:
                await client.send(request, arrival, first_s=120, silence_s=120)
            except UpstreamError:
                arrival.status = 0
            if arrival.status == 200 and (not stream or b"[DONE]" in arrival.tail):
                waits_ms.append((arrival.first_s - began_s) * 1000)
            else:
                failed += 1

    began_s = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    took_s = time.perf_counter() - began_s
    client.close()
    waits_ms.sort()
    if not waits_ms:
        return Level(0.0, 0.0, 0.0, failed)
    p99_ms = waits_ms[min(len(waits_ms) - 1, int(len(waits_ms) * 0.99))]
    return Level((total - failed) / took_s, statistics.median(waits_ms), p99_ms, failed)


def middle(levels: list[Level]) -> Level:
    """Of several rounds: the median of each figure."""
    return Level(
        statistics.median(level.per_s for level in levels),
        statistics.median(level.first_p50_ms for level in levels),
        statistics.median(level.first_p99_ms for level in levels),
        sum(level.num_failed for level in levels),
        statistics.median(level.cpu_us for level in levels),
        statistics.median(level.main_us for level in levels),
    )
