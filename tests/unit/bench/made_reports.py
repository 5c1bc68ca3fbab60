"""Reports made up from a seed: levels whose latencies, failures, GPUs and changed answers are chosen, not measured."""

from __future__ import annotations

import random
from typing import Any

from tonle.bench.measure import Circumstances, GpuReport, LevelReport, Sample, report_level
from tonle.bench.report import BenchReport, Environment
from tonle.bench.slo import Slo

NO_SLO = Slo()
SLO = Slo.parse(["ttft-p95=200ms", "itl-p99=50ms"])
GPU = GpuReport(name="Test GPU", utilization=0.83, memory_used=61 * 2**30, memory_total=80 * 2**30, power_w=512.0)


def made_samples(
    *, requests: int = 40, users: int = 4, gap_s: float = 0.02, ttft_s: float = 0.1, failed: int = 0, seed: int = 0,
    tokens: tuple[int, int] = (8, 24), prompt: tuple[int, int] = (32, 64), noise: float = 0.2,
) -> list[Sample]:  # fmt: skip
    """Of a closed loop. The same seed has the same lengths, whatever the latencies are."""
    lengths, times = random.Random(f"{seed}/lengths"), random.Random(f"{seed}/{gap_s}/{ttft_s}/times")
    free_s = [0.0] * users
    samples = []
    for index in range(requests):
        user = min(range(users), key=lambda each: free_s[each])
        start_s = free_s[user]
        count, prompt_tokens = lengths.randint(*tokens), lengths.randint(*prompt)
        now_s = start_s + ttft_s * times.lognormvariate(0, noise)
        arrivals_s = [now_s]
        for _ in range(count - 1):
            now_s += gap_s * times.lognormvariate(0, noise)
            arrivals_s.append(now_s)
        failure = "HTTP 503: busy" if index >= requests - failed else None
        samples.append(
            Sample(
                index=index, start_s=100 + start_s, end_s=100 + now_s,
                arrivals_s=[] if failure else [100 + at for at in arrivals_s],
                last_s=None if failure else 100 + now_s, prompt_tokens=None if failure else prompt_tokens,
                cached_tokens=0, output_tokens=0 if failure else count, finish_reason="length", failure=failure,
            )
        )  # fmt: skip
        free_s[user] = now_s + 1e-3
    return samples


def made_level(
    users: int = 4, *, rows: bool = True, slo: Slo = NO_SLO, gpus: list[GpuReport] | None = None, **changes: Any
) -> LevelReport:
    circumstances = Circumstances(label=f"concurrency {users}", concurrency=users, warmup=2, slo=slo, gpus=gpus or [])
    return report_level(made_samples(users=users, **changes), circumstances, keep_rows=rows)


def made_report(levels: list[LevelReport], **changes: Any) -> BenchReport:
    fields: dict[str, Any] = {
        "started_at": "2025-01-31T09:30:00+00:00", "url": "http://127.0.0.1:1", "model": "tiny", "prompt_kind": "ids",
        "settings": {"input_tokens": "32-64", "output_tokens": "8-24", "seed": 0, "warmup": 2, "file": None},
        "environment": Environment("0.1.0", "3.11.7", "Linux", 2, "uvloop 0.22"), "levels": levels, "notes": [],
        "interrupted": False,
    }  # fmt: skip
    return BenchReport(**(fields | changes))
