"""Workers that die, hang, grow or cannot start, and what becomes of their jobs."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.workers.pools import lines, metric, new_pool, run, running, until
from tonle.errors import CapacityError, ConfigError, InternalError, ModelError, WorkerDied, WorkerTimedOut
from tonle.workers.kind import Job


def test_a_killed_workers_job_runs_exactly_once_more_elsewhere(tmp_path: Path) -> None:
    async def steps() -> None:
        notes, flag = tmp_path / "notes", tmp_path / "flag"
        async with running(instances=2, options={"notes": str(notes)}) as pool:
            before = set(pool.pids)
            waiting = asyncio.create_task(pool.run(Job({"name": "a", "do": "wait", "flag": str(flag)})))
            await until(lambda: "a" in lines(notes))
            (busy,) = (one.pid for one in pool._instances if one.jobs)
            assert busy is not None
            os.kill(busy, signal.SIGKILL)
            await until(lambda: lines(notes).count("a") == 2)
            flag.touch()
            result = await waiting
            assert result.fields["pid"] in before - {busy}
            await until(lambda: pool.num_ready == 2)  # the place is taken again
            assert lines(notes).count("a") == 2
            assert metric(pool, "restarts_total", reason="died") == 1

    run(steps())


def test_one_that_kills_its_worker_twice_fails_and_its_batch_mates_do_not(tmp_path: Path) -> None:
    async def steps() -> None:
        notes = tmp_path / "notes"
        async with running(max_batch=3, options={"notes": str(notes)}) as pool:
            jobs = [Job({"name": "first"}), Job({"name": "deadly", "do": "die"}), Job({"name": "last"})]
            first, deadly, last = await asyncio.gather(*map(pool.run, jobs), return_exceptions=True)
            assert isinstance(deadly, WorkerDied) and "SIGKILL" in deadly.message
            assert not isinstance(first, BaseException) and first.fields["name"] == "first"
            assert not isinstance(last, BaseException) and last.fields["batch_size"] == 1
            assert [lines(notes).count(name) for name in ("first", "deadly", "last")] == [2, 2, 1]

    run(steps())


def test_a_hung_worker_is_replaced_and_only_the_job_that_hangs_is_too_late(tmp_path: Path) -> None:
    async def steps() -> None:
        notes = tmp_path / "notes"
        async with running(max_batch=2, options={"notes": str(notes)}) as pool:
            quick, hung = await asyncio.gather(
                pool.run(Job({"name": "quick"})),
                pool.run(Job({"name": "hung", "do": "hang"}), timeout_s=0.4),
                return_exceptions=True,
            )
            assert isinstance(hung, WorkerTimedOut) and hung.status == 504
            assert not isinstance(quick, BaseException) and quick.fields["name"] == "quick"
            assert lines(notes).count("hung") <= 2  # with the other, then by itself
            with pytest.raises(WorkerTimedOut):
                await pool.run(Job({"name": "alone", "do": "hang"}), timeout_s=0.2)
            assert lines(notes).count("alone") <= 1
            assert (await pool.run(Job({}))).fields["batch_size"] == 1
            assert metric(pool, "restarts_total", reason="hung") == 3
            await until(lambda: metric(pool, "jobs_total", outcome="timeout") == 2)

    run(steps())


def test_a_worker_that_grows_too_large_is_replaced_after_its_batch() -> None:
    async def steps() -> None:
        async with running(max_memory_mb=300) as pool:
            pid = pool.pids[0]
            result = await pool.run(Job({"do": "leak", "mb": 100}))
            assert (await pool.run(Job({}))).fields["pid"] == pid  # within the bound
            result = await pool.run(Job({"do": "leak", "mb": 300}))
            assert result.fields["pid"] == pid  # it was answered
            assert (await pool.run(Job({}))).fields["pid"] != pid
            assert metric(pool, "restarts_total", reason="memory") == 1
            assert metric(pool, "restarts_total", reason="died") == 0

    run(steps())


@pytest.mark.parametrize(
    ("settings", "expected", "message"),
    [
        ({"options": {"refuse": "no such folder"}}, ModelError, "no such folder"),
        ({"options": {"crash": "odd"}}, InternalError, "KeyError: 'odd'"),
        ({"options": {"die_unless": "/nowhere/at/all"}}, InternalError, "signal SIGKILL"),
        ({"max_memory_mb": 1}, ConfigError, "raise it"),
        ({"kind": "tests.workers.nothing:Here"}, ConfigError, "PYTHONPATH"),
        ({"kind": "tests.workers.kinds:Nothing"}, ConfigError, "has no 'Nothing'"),
        ({"kind": "tests.workers.kinds:NotAKind"}, ConfigError, "not a subclass"),
    ],
)
def test_what_keeps_a_worker_from_starting_is_told(
    settings: dict[str, object], expected: type[Exception], message: str
) -> None:
    async def steps() -> None:
        pool = new_pool(**settings)  # type: ignore[arg-type]
        await pool.start()
        waiting = asyncio.create_task(pool.run(Job({})))
        try:
            with pytest.raises(expected, match=message):
                await pool.wait_ready()
            with pytest.raises(CapacityError, match=message):  # callers are told to try again: it is tried again
                await waiting
            assert message in (pool.why_not_ready() or "")
        finally:
            await pool.stop()

    run(steps())


def test_a_worker_that_could_not_start_is_tried_again(tmp_path: Path) -> None:
    async def steps() -> None:
        flag = tmp_path / "flag"
        pool = new_pool(options={"die_unless": str(flag)})
        await pool.start()
        try:
            with pytest.raises(InternalError):
                await pool.wait_ready()
            flag.touch()
            await until(lambda: pool.num_ready)
            assert (await pool.run(Job({"name": "now"}))).fields["name"] == "now"
            assert pool.failure is None
        finally:
            await pool.stop()

    run(steps())


def test_a_worker_that_does_not_load_in_time_is_ended() -> None:
    async def steps() -> None:
        pool = new_pool(load_timeout_s=0.01)
        await pool.start()
        try:
            with pytest.raises(InternalError, match="load_timeout_s"):
                await pool.wait_ready()
        finally:
            await pool.stop()

    run(steps())
