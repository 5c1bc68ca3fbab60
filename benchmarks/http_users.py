"""The closed loop of users over HTTP, in as many processes as it takes not to be the limit itself.

Does: share one list of jobs between processes, send each as a stream as `tonle bench` does, hand back samples.
Does not: start servers. Moments come from the system's monotonic clock, which processes of one machine share.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

from benchmarks.closed_loop import Sample
from benchmarks.workload import Job
from tonle.bench.drive import send_job
from tonle.bench.measure import Sample as HttpSample
from tonle.bench.options import BenchOptions
from tonle.bench.workload import build_job
from tonle.edge.client import Address, HttpClient
from tonle.edge.listening import run

TIMEOUT_S = 600.0
_shared: dict[str, Any] = {}  # in a client process: the place in the list of jobs, and the line all start from


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the users saw, and what sending and reading cost."""

    samples: list[Sample]
    seconds: float  # first request to last byte
    cpu_s: float  # of all client processes


class Users:
    """Owns the client processes; use as a context manager."""

    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes
        context = multiprocessing.get_context("spawn")
        self._place = context.Value("q", 0)
        initargs = (self._place, context.Barrier(num_processes))
        self._pool = ProcessPoolExecutor(num_processes, context, _begin, initargs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def drive(self, url: str, model: str, jobs: list[Job], users: int, *, api_key: str | None = None) -> Outcome:
        """Raises `RuntimeError` if an answer was not what was asked for."""
        self._place.value = 0
        shares = [users // self.num_processes + (place < users % self.num_processes)
                  for place in range(self.num_processes)]  # fmt: skip
        # One task per process: each waits at the barrier until all have their connections.
        futures = [self._pool.submit(_drive, url, model, jobs, share, api_key) for share in shares]
        results = [future.result() for future in futures]
        samples = [sample for found, _ in results for sample in found]
        if failures := [sample.failure for sample in samples if sample.failure is not None]:
            raise RuntimeError(f"{len(failures)} of {len(samples)} requests failed, the first with: {failures[0]}")
        seconds = max(sample.end_s for sample in samples) - min(sample.start_s for sample in samples)
        return Outcome([_plain(sample) for sample in samples], seconds, sum(cpu_s for _, cpu_s in results))


def _plain(sample: HttpSample) -> Sample:
    """As the loop without HTTP has it."""
    assert sample.ttft_s is not None and sample.e2el_s is not None
    return Sample(sample.ttft_s, sample.e2el_s, sample.output_tokens, sample.prompt_tokens or 0, sample.itl_s)


# -- in a client process


def _begin(place: Any, barrier: Any) -> None:
    _shared.update(place=place, barrier=barrier)


def _drive(url: str, model: str, jobs: list[Job], users: int, api_key: str | None) -> tuple[list[HttpSample], float]:
    return run(_drive_all(url, model, jobs, users, api_key))


async def _drive_all(
    url: str, model: str, jobs: list[Job], users: int, api_key: str | None
) -> tuple[list[HttpSample], float]:
    client = HttpClient(Address.parse(url), api_key=api_key)
    await client.prepare(users)
    options = BenchOptions(url=url, ignore_eos=True, temperature=0.0)
    samples: list[HttpSample] = []

    async def user() -> None:
        while (place := _take()) < len(jobs):
            prompt, count = jobs[place]
            job = build_job(options, model, "completions", place, prompt, count)
            samples.append(await send_job(client, job, timeout_s=TIMEOUT_S))

    _shared["barrier"].wait(TIMEOUT_S)
    began_s = time.process_time()
    await asyncio.gather(*(user() for _ in range(users)))
    client.close()
    return samples, time.process_time() - began_s


def _take() -> int:
    place = _shared["place"]
    with place.get_lock():
        taken: int = place.value
        place.value += 1
    return taken
