"""Several instances of a model without a batch dimension against one, in a worker pool: jobs per second, and latency.

    python -m benchmarks.worker_instances --device cuda --instances 1,2,4,8
    python -m benchmarks.worker_instances --device cpu --instances 1,2           # one thread for each instance

Models: `worker_models.py`. The same users wait for every number of instances: each sends its next job when the last is done, so
latency includes the queue. Does: check that every instance returns what this process computes, before it measures; end in time.
Does not: measure HTTP, or a trained model.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import time
from dataclasses import dataclass, field

import numpy as np
import torch

from benchmarks.worker_models import HOP, RATE, Models
from tonle.workers.kind import Job, Result
from tonle.workers.pool import WorkerPool
from tonle.workers.pool_config import PoolConfig

KIND = "benchmarks.worker_models:Models"
NUM_JOBS = 16  # of each model, again and again; their results are known
FRAMES = (80, 480)  # of the voice: 0.9 to 5.6 s of sound
LOAD_S = 90.0  # for the instances of a pool to start
MAX_OFF = {"voice": 64, "picture": 2}  # steps of int16 and uint8: another order of summing rounds differently
COLUMNS = ("model", "instances", "jobs/s", "× one", "p50, ms", "p95, ms", "in the worker p50, ms", "GPU memory, MiB")


@dataclass
class Point:
    """One model with one number of instances; 0: in this process, without a pool."""

    model: str
    instances: int
    jobs_per_s: float
    latencies_s: list[float]
    runs_s: list[float]  # in the worker, without the queue
    gpu_mib: float | None

    def row(self, one: float | None) -> list[str]:
        p50, p95 = np.percentile(self.latencies_s, [50, 95]) * 1000
        return [
            self.model,
            str(self.instances) if self.instances else "no pool",
            f"{self.jobs_per_s:.1f}",
            f"{self.jobs_per_s / one:.2f}" if one else "–",
            f"{p50:.0f}",
            f"{p95:.0f}",
            f"{np.percentile(self.runs_s, 50) * 1000:.1f}",
            "–" if self.gpu_mib is None else f"{self.gpu_mib:.0f}",
        ]


@dataclass
class Work:
    """The jobs of one model, and what this process makes of them."""

    model: str
    jobs: list[Job]
    expected: list[bytes] = field(default_factory=list)

    def check(self, number: int, result: Result) -> int:
        """How far the furthest value is off. Ends the program if that is too far."""
        kind = np.int16 if self.model == "voice" else np.uint8
        ours, theirs = np.frombuffer(self.expected[number], kind), np.frombuffer(result.media[0], kind)
        if ours.shape != theirs.shape:
            sys.exit(f"{self.model}, job {number}: {theirs.size} values, and {ours.size} in this process")
        off = int(np.abs(ours.astype(np.int32) - theirs.astype(np.int32)).max())
        if off > MAX_OFF[self.model]:
            sys.exit(f"{self.model}, job {number}: a value is {off} steps from what this process computed")
        return off


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN_S:5.1f} s] {text}", flush=True)


def work_of(model: str) -> Work:
    draws = random.Random(1)
    fields = [
        {"model": model, "seed": seed} | ({"frames": draws.randint(*FRAMES)} if model == "voice" else {})
        for seed in range(NUM_JOBS)
    ]
    return Work(model, [Job(each) for each in fields])


def alone(kind: Models, work: Work, seconds: float) -> Point:
    """Every job once in this process, for its result; then the same for as long as a pool has."""
    for job in work.jobs:
        (result,) = kind.run([job])
        if not isinstance(result, Result):
            raise result
        work.expected.append(bytes(result.media[0]))
    if len(set(work.expected)) < len(work.jobs) or any(len(set(each)) < 32 for each in work.expected):
        sys.exit(f"{work.model}: results are silent or alike: comparing them would tell nothing")
    times_s: list[float] = []
    began_s = time.perf_counter()
    for job in itertools.cycle(work.jobs):
        one_s = time.perf_counter()
        kind.run([job])
        times_s.append(time.perf_counter() - one_s)
        if time.perf_counter() - began_s > seconds:
            break
    return Point(work.model, 0, len(times_s) / sum(times_s), times_s, times_s, None)


async def check(pool: WorkerPool, work: Work) -> None:
    """All jobs at once, so that every instance gets some."""
    results = await pool.run_all(work.jobs)
    furthest = max(work.check(number, result) for number, result in enumerate(results))
    verdict = f"within {furthest} of {MAX_OFF[work.model]} steps of" if furthest else "the same, byte by byte, as"
    say(f"{work.model}: {len(results)} results are {verdict} those of this process")


async def measure(pool: WorkerPool, work: Work, instances: int, users: int, seconds: float) -> Point:
    """A closed loop. Jobs that end within `seconds` count; latency is from submission to result."""
    latencies_s: list[float] = []
    runs_s: list[float] = []
    numbers = itertools.cycle(range(len(work.jobs)))
    began_s = time.perf_counter()

    async def user() -> None:
        while time.perf_counter() - began_s < seconds:
            number = next(numbers)
            sent_s = time.perf_counter()
            result = await pool.run(work.jobs[number])
            if (now_s := time.perf_counter()) - began_s <= seconds:
                latencies_s.append(now_s - sent_s)
                runs_s.append(result.fields["run_s"])

    await asyncio.gather(*(user() for _ in range(users)))
    if not latencies_s:
        sys.exit(f"no job of {work.model} ended within {seconds:g} s; give more --seconds")
    return Point(work.model, instances, len(latencies_s) / seconds, latencies_s, runs_s, None)


def free_mib(device: str) -> float | None:
    """Of the GPU, whoever uses it."""
    return torch.cuda.mem_get_info(torch.device(device))[0] / 2**20 if device.startswith("cuda") else None


async def measure_pool(options: argparse.Namespace, works: list[Work], instances: int) -> list[Point]:
    config = PoolConfig(kind=KIND, name=f"instances-{instances}", device=options.device, instances=instances,
                        options={"width": options.width}, timeout_s=60.0, load_timeout_s=LOAD_S)  # fmt: skip
    before = free_mib(options.device)
    say(f"{instances} {'instance starts' if instances == 1 else 'instances start'}")
    points = []
    async with WorkerPool(config) as pool:
        for work in works:
            await check(pool, work)
        after = free_mib(options.device)
        for work in works:
            point = await measure(pool, work, instances, options.users, options.seconds)
            point.gpu_mib = before - after if before is not None and after is not None else None
            say(f"{work.model}, {instances}: {point.jobs_per_s:.1f} jobs/s")
            points.append(point)
    return points


def print_table(points: list[Point]) -> None:
    ones = {point.model: point.jobs_per_s for point in points if point.instances == 1}
    print("\n| " + " | ".join(COLUMNS) + " |\n" + "|---" * len(COLUMNS) + "|")
    for point in sorted(points, key=lambda point: point.model, reverse=True):
        print("| " + " | ".join(point.row(ones.get(point.model))) + " |")


async def main_of(options: argparse.Namespace) -> None:
    kind = Models()
    kind.load(None, options.device, {"width": options.width})
    for job in kind.warm_up():
        kind.run([job])
    works = [work_of(model) for model in options.models]
    points = []
    for work in works:
        points.append(alone(kind, work, options.seconds / 2))
        say(f"{work.model}, in this process, no pool: {points[-1].jobs_per_s:.1f} jobs/s")
    for instances in options.instances:
        left_s = options.limit - (time.monotonic() - BEGAN_S)
        if left_s < len(works) * options.seconds:
            say(f"{instances} instances are left out: --limit is {options.limit:g} s")
            continue
        points += await measure_pool(options, works, instances)
    print_table(points)


def device_line(device: str) -> str:
    name = torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else "CPU, one thread each"
    return f"{name}, torch {torch.__version__}; sound of {FRAMES[0] * HOP / RATE:.1f} to {FRAMES[1] * HOP / RATE:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1")
    parser.add_argument("--instances", default="1,2,4,8", help="numbers with commas; the first should be 1")
    parser.add_argument("--models", default="voice,picture", help="some of voice, picture")
    parser.add_argument("--users", type=int, default=16, help="jobs that are under way at any time")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each model with each number of instances")
    parser.add_argument("--limit", type=float, default=120.0, help="after so many seconds no further number is begun")
    parser.add_argument("--width", type=int, default=1, help="multiplies channels: larger models, fewer gaps to fill")
    options = parser.parse_args()
    options.instances = [int(each) for each in options.instances.split(",")]
    options.models = options.models.split(",")
    if unknown := set(options.models) - set(MAX_OFF):
        parser.error(f"there is no model {sorted(unknown)[0]}; --models takes voice, picture")
    if min(options.instances) < 1:
        parser.error("--instances takes numbers of at least 1")
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("there is no CUDA device; --device cpu works")
    if options.device == "cuda":
        options.device = "cuda:0"
    say(device_line(options.device))
    asyncio.run(main_of(options))


BEGAN_S = time.monotonic()

if __name__ == "__main__":
    main()
