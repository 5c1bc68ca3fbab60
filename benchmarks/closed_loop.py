"""A closed loop of users: each sends its next request when the last one is answered.

Does: drive anything with `generate(prompt, count)` yielding lists of new tokens, and summarize. Does not: know engines.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from statistics import mean

from benchmarks.workload import Job

Generate = Callable[[list[int], int], AsyncIterator[list[int]]]


@dataclass
class Sample:
    """One answered request, seconds."""

    ttft: float
    latency: float
    tokens: int
    prompt: int
    gaps: list[float] = field(default_factory=list)

    @property
    def tpot(self) -> float:
        return (self.latency - self.ttft) / max(1, self.tokens - 1)


async def drive(generate: Generate, jobs: list[Job], users: int) -> dict[str, float]:
    samples: list[Sample] = []
    queue = iter(jobs)

    async def user() -> None:
        for prompt, count in queue:
            samples.append(await ask(generate, prompt, count))

    began = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(users)))
    return summarize(samples, time.perf_counter() - began, users)


async def ask(generate: Generate, prompt: list[int], count: int) -> Sample:
    began = time.perf_counter()
    first = last = None
    got = 0
    gaps = []
    async for tokens in generate(prompt, count):
        now = time.perf_counter()
        if not tokens:
            continue
        if last is None:
            first = now
        else:
            gaps.append(now - last)
        last = now
        got += len(tokens)
    if first is None or last is None or got != count:
        raise RuntimeError(f"asked for {count} tokens and got {got}")
    return Sample(first - began, last - began, got, len(prompt), gaps)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share / 100 * (len(ordered) - 1)))] if ordered else float("nan")


def summarize(samples: list[Sample], seconds: float, users: int) -> dict[str, float]:
    """Milliseconds, and tokens per second."""
    ttft = [s.ttft * 1e3 for s in samples]
    latency = [s.latency * 1e3 for s in samples]
    tpot = [s.tpot * 1e3 for s in samples]
    gaps = [gap * 1e3 for s in samples for gap in s.gaps]
    out = sum(s.tokens for s in samples)
    return {
        "users": users, "requests": len(samples), "seconds": seconds, "requests_per_s": len(samples) / seconds,
        "out_tok_s": out / seconds, "total_tok_s": (out + sum(s.prompt for s in samples)) / seconds,
        "ttft_mean": mean(ttft), "ttft_p50": percentile(ttft, 50), "ttft_p99": percentile(ttft, 99),
        "tpot_mean": mean(tpot), "tpot_p99": percentile(tpot, 99), "itl_p50": percentile(gaps, 50),
        "itl_p99": percentile(gaps, 99), "e2e_mean": mean(latency), "e2e_p99": percentile(latency, 99),
    }  # fmt: skip
