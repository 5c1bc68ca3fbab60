"""More jobs than a pool takes, callers that leave, instances that come and go with the load, the end of a pool."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from tests.workers.pools import ONE_BY_ONE, lines, metric, new_pool, run, running, until
from tonle.errors import CapacityError, ShuttingDown
from tonle.workers.kind import Job


def test_a_full_queue_refuses_and_says_when_to_come_again(tmp_path: Path) -> None:
    async def steps() -> None:
        flag = tmp_path / "flag"
        async with running(ONE_BY_ONE, max_queue=3) as pool:
            await pool.run(Job({}))
            pool._job_s = 4.0  # seconds per job
            waits = Job({"do": "wait", "flag": str(flag)})
            tasks = [asyncio.create_task(pool.run(waits)) for _ in range(4)]
            await until(lambda: (pool.num_running, pool.num_waiting) == (1, 3))
            with pytest.raises(CapacityError) as refused:
                await pool.run_all([waits, waits])
            assert refused.value.retry_after_s == pytest.approx(12.0) and "3 jobs wait" in refused.value.message
            with pytest.raises(CapacityError):
                await anext(pool.stream(waits))
            assert metric(pool, "refused_total") == 3
            tasks[3].cancel()
            await until(lambda: pool.num_waiting == 2)
            more = asyncio.create_task(pool.run_all([waits] * 5))  # there is room: a request is taken as a whole
            await until(lambda: pool.num_waiting == 7)
            flag.touch()
            assert len(await asyncio.gather(*tasks[:3])) == 3 and len(await more) == 5
            assert await pool.run(Job({})) is not None

    run(steps())


def test_a_caller_that_is_gone_leaves_nothing_in_the_queue_and_its_result_is_dropped(tmp_path: Path) -> None:
    async def steps() -> None:
        flag, notes = tmp_path / "flag", tmp_path / "notes"
        async with running(ONE_BY_ONE, options={"notes": str(notes)}) as pool:
            first, second, third = (
                asyncio.create_task(pool.run(Job({"name": name, "do": "wait", "flag": str(flag)})))
                for name in ("running", "waiting", "stays")
            )
            await until(lambda: "running" in lines(notes))
            first.cancel(), second.cancel()
            await until(lambda: second.cancelled() and first.cancelled())
            assert (pool.num_running, pool.num_waiting) == (1, 1)
            flag.touch()
            assert (await third).fields["name"] == "stays"
            assert lines(notes) == ["warm-up", "running", "stays"]
            assert metric(pool, "jobs_total", outcome="abort") == 2

    run(steps())


def test_the_first_error_of_a_request_cancels_the_rest_of_it(tmp_path: Path) -> None:
    async def steps() -> None:
        notes = tmp_path / "notes"
        async with running(ONE_BY_ONE, options={"notes": str(notes)}) as pool:
            with pytest.raises(CapacityError, match="later"):
                await pool.run_all([Job({"name": "a"}), Job({"do": "busy"}), *[Job({"name": "c"})] * 50])
            await until(lambda: not pool.num_running)
            assert pool.num_waiting == 0 and lines(notes).count("c") <= 1

    run(steps())


def test_instances_start_on_demand_and_end_when_idle(tmp_path: Path) -> None:
    async def steps() -> None:
        flag = tmp_path / "flag"
        async with running(ONE_BY_ONE, instances=3, min_instances=0, idle_unload_s=0.1) as pool:
            assert pool.num_ready == 0 and pool.why_not_ready() is None
            assert (await pool.run(Job({"name": "cold"}))).fields["name"] == "cold"
            await until(lambda: pool.num_ready == 0)  # unloaded
            waits = Job({"do": "wait", "flag": str(flag)})
            waiting = asyncio.create_task(pool.run_all([waits] * 5))
            await until(lambda: pool.num_running == 3)  # one after the other, as many as may
            flag.touch()
            assert len(await waiting) == 5
            await until(lambda: pool.num_ready == 0)
            assert all(metric(pool, "restarts_total", reason=reason) == 0 for reason in ("died", "failed", "memory"))

    run(steps())


def test_the_least_number_of_instances_stays(tmp_path: Path) -> None:
    async def steps() -> None:
        flag = tmp_path / "flag"
        async with running(ONE_BY_ONE, instances=2, min_instances=1, idle_unload_s=0.05) as pool:
            pid = pool.pids[0]
            waiting = asyncio.create_task(pool.run_all([Job({"do": "wait", "flag": str(flag)})] * 2))
            await until(lambda: pool.num_running == 2)
            flag.touch()
            await waiting
            await until(lambda: pool.num_ready == 1)
            assert pool.pids == [pid]

    run(steps())


def test_a_pool_that_stops_finishes_what_runs_and_fails_what_waits(tmp_path: Path) -> None:
    async def steps() -> None:
        flag = tmp_path / "flag"
        pool = new_pool(ONE_BY_ONE)
        with pytest.raises(ShuttingDown, match="not started"):
            await pool.run(Job({}))
        await pool.start()
        tasks = [asyncio.create_task(pool.run(Job({"do": "wait", "flag": str(flag)}))) for _ in range(2)]
        await until(lambda: pool.num_running == 1)
        stopping = asyncio.create_task(pool.stop())
        with pytest.raises(ShuttingDown):
            await tasks[1]
        with pytest.raises(ShuttingDown):
            await pool.run(Job({}))
        flag.touch()
        assert (await tasks[0]).fields["batch_size"] == 1
        await stopping

    run(steps())


def test_a_pool_can_stop_at_any_moment() -> None:
    async def steps() -> None:
        for num_turns in (0, 1, 3, 10, 100):
            pool = new_pool(instances=2)
            await pool.start()
            task = asyncio.create_task(pool.run(Job({})))
            for _ in range(num_turns):
                await asyncio.sleep(0.001)
            await pool.stop()
            with contextlib.suppress(ShuttingDown):  # it may be that it was quick enough
                await task

    run(steps())
