"""Whatever goes wrong in whatever order: every job has exactly one outcome, and the right one if it has a result."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.workers.pools import lines, run, running, until
from tonle.errors import InternalError, InvalidRequest, TonleError, WorkerDied, WorkerTimedOut
from tonle.workers.kind import Job, Result
from tonle.workers.pool import MAX_RUNS, WorkerPool

NUM_JOBS = 40
WEIGHTS = {
    "echo": 40,
    "refuse": 5,
    "raise": 4,
    "die once": 3,
    "die": 1,
    "hang": 1,
    "hang once": 1,
    "stream": 8,
    "leave": 8,
}
MAY_FAIL = (WorkerDied, WorkerTimedOut)  # a job whose worker is killed twice by others


class Outcomes:
    """Of jobs by name, as their callers saw them."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[str]] = {}

    def note(self, name: str, outcome: str) -> None:
        self.by_name.setdefault(name, []).append(outcome)


async def one_caller(pool: WorkerPool, name: str, do: str, media: bytes, folder: Path, outcomes: Outcomes) -> None:
    fields: dict[str, Any] = {"name": name, "do": do, "flag": str(folder / name)}
    job = Job(fields, (media,), size=1 + len(media))
    try:
        if do == "stream":
            await read_stream(pool, Job(fields | {"pieces": 4}, (media,)), media)
        elif do == "leave":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.001):
                    check(await pool.run(Job(fields | {"do": "echo"}, (media,))), name, media)
        else:
            check(await pool.run(job, timeout_s=0.4 if do.startswith("hang") else None), name, media)
            assert do not in ("refuse", "raise", "die", "hang"), f"{do} has a result"
        outcomes.note(name, "result")
    except TonleError as error:
        expected = {"refuse": (InvalidRequest,), "raise": (InternalError,), "hang": (WorkerTimedOut, WorkerDied)}
        assert isinstance(error, (*MAY_FAIL, *expected.get(do, ()), InternalError))
        outcomes.note(name, type(error).__name__)


def check(result: Result, name: str, media: bytes) -> None:
    assert result.fields["name"] == name and bytes(result.media[0]) == media


async def read_stream(pool: WorkerPool, job: Job, media: bytes) -> None:
    numbers = []
    async with contextlib.aclosing(pool.stream(job)) as pieces:
        async for piece in pieces:
            assert bytes(piece.media[0]) == media
            numbers.append(piece.fields["number"])
    assert numbers == [0, 1, 2, 3]


async def kill_now_and_then(pool: WorkerPool, draw: random.Random) -> None:
    for _ in range(2):
        await until(lambda: pool.num_running)
        if pids := pool.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(pids), signal.SIGKILL)
        await asyncio.sleep(draw.random() * 0.5)


@pytest.mark.parametrize("seed", [1, 2])
def test_every_job_has_exactly_one_outcome(seed: int, tmp_path: Path) -> None:
    draw, outcomes, notes = random.Random(seed), Outcomes(), tmp_path / "notes"

    async def steps() -> None:
        settings: dict[str, Any] = {
            "instances": 2, "max_batch": draw.choice([1, 4, 16]), "max_queue": 1000,
            "min_instances": draw.choice([0, 2]), "strategy": draw.choice(["naive", "bucketed", "memory_aware"]),
            "options": {"notes": str(notes)},
        }  # fmt: skip
        async with running(**settings) as pool:
            kinds = draw.choices(list(WEIGHTS), list(WEIGHTS.values()), k=NUM_JOBS)
            callers = [
                one_caller(
                    pool, f"job{number}", do, draw.randbytes(draw.choice([0, 10, 5000, 50_000])), tmp_path, outcomes
                )
                for number, do in enumerate(kinds)
            ]
            killer = asyncio.create_task(kill_now_and_then(pool, draw))
            await asyncio.gather(*callers)
            killer.cancel()
            await asyncio.wait([killer])
            await until(lambda: not pool.num_running)
            assert pool.num_waiting == 0
            assert (await pool.run(Job({"name": "after"}), timeout_s=30)).fields["name"] == "after"

    run(steps())
    assert sorted(outcomes.by_name) == sorted(f"job{number}" for number in range(NUM_JOBS))
    assert all(len(found) == 1 for found in outcomes.by_name.values())
    assert max(Counter(line for line in lines(notes) if line != "warm-up").values()) <= MAX_RUNS
