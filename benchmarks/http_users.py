"""The closed loop of users over HTTP, in as many processes as it takes not to be the limit itself.

Does: send a list of jobs with the client of `tonle bench --processes`, hand back samples. Does not: start servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.closed_loop import Sample
from benchmarks.workload import Job
from tonle.bench.client import LevelTask
from tonle.bench.client_processes import ClientProcesses
from tonle.bench.load import Load
from tonle.bench.measure import Sample as HttpSample
from tonle.bench.options import BenchOptions
from tonle.bench.workload import Job as HttpJob
from tonle.bench.workload import Phase, build_job
from tonle.edge.listening import run


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the users saw, and what sending and reading cost."""

    samples: list[Sample]
    seconds: float  # first request to last byte
    cpu_s: float  # of all client processes


@dataclass(frozen=True, slots=True)
class JobList:
    """A `Workload` of these jobs."""

    options: BenchOptions
    model: str
    list: list[Job]
    kind: str = "ids"

    def jobs(self, level: int, phase: Phase) -> Iterator[HttpJob]:
        for place, (prompt, count) in enumerate(self.list):
            yield build_job(self.options, self.model, "completions", place, prompt, count)

    def num_requests(self, level: int, num_jobs: int | None) -> int | None:
        return num_jobs

    def pass_over(self, num_jobs: int) -> None:
        """There is one level."""

    def notes(self) -> list[str]:
        return []


class Users:
    def __init__(self, num_processes: int) -> None:
        self.num_processes = num_processes

    def drive(self, url: str, model: str, jobs: list[Job], users: int, *, api_key: str | None = None) -> Outcome:
        """Raises `RuntimeError` if an answer was not what was asked for."""
        options = BenchOptions(
            url=url, api_key=api_key, ignore_eos=True, temperature=0.0, requests=len(jobs), processes=self.num_processes
        )
        samples, cpu_share = run(
            _drive(options, LevelTask(JobList(options, model, jobs), 0, Load("concurrency", users)))
        )
        if failures := [sample.failure for sample in samples if sample.failure is not None]:
            raise RuntimeError(f"{len(failures)} of {len(samples)} requests failed, the first with: {failures[0]}")
        seconds = max(sample.end_s for sample in samples) - min(sample.start_s for sample in samples)
        return Outcome([_plain(sample) for sample in samples], seconds, cpu_share * seconds)


async def _drive(options: BenchOptions, task: LevelTask) -> tuple[list[HttpSample], float]:
    samples: list[HttpSample] = []
    sender = ClientProcesses(options)
    try:
        await sender.prepare(task)
        await sender.drive(samples.append)
        return samples, sum(use.cpu_share for use in sender.uses())
    finally:
        await sender.close()


def _plain(sample: HttpSample) -> Sample:
    """As the loop without HTTP has it."""
    assert sample.ttft_s is not None and sample.e2el_s is not None
    return Sample(sample.ttft_s, sample.e2el_s, sample.output_tokens, sample.prompt_tokens or 0, sample.itl_s)
