"""Jobs through real workers: batches, media, errors, what a kind is told."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.workers.pools import ONE_BY_ONE, metric, run, running, until
from tonle.errors import CapacityError, InternalError, InvalidRequest, TonleError
from tonle.workers.kind import Job
from tonle.workers.shared_media import INLINE_BYTES


async def error_of(coroutine: object) -> TonleError:
    with pytest.raises(TonleError) as raised:
        await coroutine  # type: ignore[misc]
    return raised.value


def test_results_come_in_order_from_batches_and_media_in_both_ways(tmp_path: Path) -> None:
    async def steps() -> None:
        notes = tmp_path / "notes"
        async with running(max_batch=4, options={"notes": str(notes)}) as pool:
            assert notes.read_text() == "warm-up\n"  # before it was ready
            assert pool.facts["device"] == "cpu" and pool.why_not_ready() is None
            results = await pool.run_all([Job({"name": number}) for number in range(10)])
            assert [result.fields["name"] for result in results] == list(range(10))
            assert [result.fields["batch_size"] for result in results] == [4] * 8 + [2] * 2

            sizes = [0, 1, INLINE_BYTES - 1, INLINE_BYTES, 1_000_003]
            media = tuple(os.urandom(size) for size in sizes)
            result = await pool.run(Job({"reverse": True}, media))
            assert [bytes(one) for one in result.media] == [one[::-1] for one in media]
            result = await pool.run(Job({}, (bytearray(media[4]), memoryview(media[4])[3:])))  # handed on as it is
            assert [bytes(one) for one in result.media] == [media[4], media[4][3:]]

            # Batches are of jobs near in size.
            sizes = [10, 900, 12, 910]
            results = await pool.run_all([Job({}, size=size) for size in sizes])
            assert [result.fields["batch_size"] for result in results] == [4] * 4
            assert metric(pool, "batch_size_count") == 6 and metric(pool, "batch_size_sum") == 16
            await until(lambda: metric(pool, "jobs_total", outcome="success") == 16)
            assert metric(pool, "instances_ready") == 1 and metric(pool, "queue_length") == 0
            assert await pool.run_all([]) == []
        assert pool.num_ready == 0 and pool.why_not_ready() == "the pool is shutting down"

    run(steps())


def test_units_bound_a_batch_and_a_larger_job_runs_by_itself() -> None:
    async def steps() -> None:
        async with running(max_batch=8, max_batch_units=100, strategy="bucketed", bucket_size=25) as pool:
            sizes = [50, 50, 50, 1000, 20, 20]
            results = await pool.run_all([Job({}, size=size) for size in sizes])
            assert [result.fields["batch_size"] for result in results] == [2, 2, 1, 1, 2, 2]

    run(steps())


def test_a_kind_that_does_not_batch_gets_one_job_at_a_time_and_its_instances_the_rest(tmp_path: Path) -> None:
    async def steps() -> None:
        flag = tmp_path / "flag"
        async with running(ONE_BY_ONE, instances=2, max_wait_ms=1000) as pool:
            jobs = [Job({"name": number, "do": "wait", "flag": str(flag)}) for number in range(3)]
            waiting = asyncio.create_task(pool.run_all(jobs))
            await until(lambda: pool.num_running == 2)
            assert (pool.num_waiting, metric(pool, "running")) == (1, 2)
            flag.touch()
            results = await waiting
            assert {result.fields["batch_size"] for result in results} == {1}
            assert len({result.fields["pid"] for result in results[:2]}) == 2
            pieces = [piece async for piece in pool.stream(Job({"name": "whole"}))]  # it does not stream
            assert [piece.fields["name"] for piece in pieces] == ["whole"]

    run(steps())


def test_errors_travel_as_what_they_are() -> None:
    async def steps() -> None:
        async with running(max_batch=3) as pool:
            jobs = [Job({"name": 1}), Job({"do": "refuse"}), Job({"name": 3})]
            results = await asyncio.gather(*map(pool.run, jobs), return_exceptions=True)
            assert type(results[1]) is InvalidRequest
            assert (results[1].message, results[1].param) == ("not like this", "name")
            assert [results[place].fields for place in (0, 2)] == [  # type: ignore[union-attr]
                {"name": name, "pid": pool.pids[0], "batch_size": 3} for name in (1, 3)
            ]
            error = await error_of(pool.run(Job({"do": "busy"})))
            assert type(error) is CapacityError and error.retry_after_s == 7.0
            error = await error_of(pool.run(Job({"do": "raise"})))
            assert type(error) is InternalError and "secret" not in error.message
            error = await error_of(pool.run(Job({"do": "raise ours"})))
            assert type(error) is InvalidRequest and error.param == "all"
            assert type(await error_of(pool.run(Job({"do": "unsendable"})))) is InternalError
            assert type(await error_of(pool.run(Job({}, ("text",))))) is InternalError  # type: ignore[arg-type]
            with pytest.raises(TypeError):
                await pool.run(Job({"value": object()}))
            assert (await pool.run(Job({"name": "still there"}))).fields["pid"] == pool.pids[0]
            await until(lambda: metric(pool, "jobs_total", outcome="error") == 6)

    run(steps())


def test_after_an_error_of_the_device_the_worker_is_replaced() -> None:
    async def steps() -> None:
        async with running() as pool:
            pid = pool.pids[0]
            assert type(await error_of(pool.run(Job({"do": "broken device"})))) is InternalError
            result = await pool.run(Job({}))
            assert result.fields["pid"] != pid

    run(steps())


def test_a_part_of_a_gpu_is_named_by_a_variable_and_instances_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    async def steps() -> None:
        async with running(device="MIG-0123/4/5", model="some/folder") as pool:
            assert pool.facts == {"device": "cuda:0", "visible": "MIG-0123/4/5", "threads": "3"}
            assert pool.model == "some/folder"

    run(steps())
