"""Results in pieces: as they are made, until the caller or the worker is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from tests.workers.pools import lines, numbers_of, run, running, until
from tonle.errors import CapacityError, InternalError, WorkerDied, WorkerTimedOut
from tonle.workers import pending_job
from tonle.workers.kind import Job


def test_pieces_come_one_by_one_and_an_error_after_them() -> None:
    async def steps() -> None:
        async with running() as pool:
            media = os.urandom(10_000)
            pieces = [piece async for piece in pool.stream(Job({"pieces": 5}, (media,)))]
            assert [piece.fields["number"] for piece in pieces] == [0, 1, 2, 3, 4]
            assert all(bytes(piece.media[0]) == media for piece in pieces)

            numbers: list[int] = []
            with pytest.raises(InternalError, match="log"):
                await numbers_of(pool.stream(Job({"pieces": 5, "do": "raise", "at": 2})), numbers)
            assert numbers == [0, 1]
            assert [piece async for piece in pool.stream(Job({"pieces": 0}))] == []

    run(steps())


def test_a_caller_that_is_gone_ends_the_stream_in_the_worker(tmp_path: Path) -> None:
    async def steps() -> None:
        async with running() as pool:
            for number, leaves in enumerate(("closes", "is cancelled")):
                closed = tmp_path / f"closed{number}"
                job = Job({"pieces": 10**9, "do": "endless", "closed": str(closed)})
                if leaves == "closes":
                    async with contextlib.aclosing(pool.stream(job)) as pieces:
                        await anext(pieces)
                else:
                    task = asyncio.create_task(numbers_of(pool.stream(job), []))
                    await until(lambda: pool.num_running)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                await until(closed.exists)
                await until(lambda: not pool.num_running)
            assert (await pool.run(Job({"name": "next"}))).fields["pid"] == pool.pids[0]

    run(steps())


def test_a_stream_that_has_begun_is_not_run_again_and_one_that_has_not_is(tmp_path: Path) -> None:
    async def steps() -> None:
        notes = tmp_path / "notes"
        async with running(instances=2, options={"notes": str(notes)}) as pool:
            numbers: list[int] = []
            with pytest.raises(WorkerDied, match="middle"):
                await numbers_of(pool.stream(Job({"name": "begun", "pieces": 5, "do": "die", "at": 2})), numbers)
            assert numbers == [0, 1] and lines(notes).count("begun") == 1
            with pytest.raises(WorkerDied):
                await numbers_of(pool.stream(Job({"name": "not begun", "pieces": 5, "do": "die", "at": 0})), [])
            assert lines(notes).count("not begun") == 2

    run(steps())


def test_a_stream_that_stops_coming_is_too_late() -> None:
    async def steps() -> None:
        async with running(timeout_s=3.0) as pool:
            numbers: list[int] = []
            with pytest.raises(WorkerTimedOut):
                await numbers_of(pool.stream(Job({"pieces": 5, "do": "hang", "at": 1})), numbers)
            assert numbers == [0]

    run(steps())


def test_what_a_caller_does_not_read_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pending_job, "MAX_UNREAD_BYTES", 1_000_000)

    async def steps() -> None:
        async with running() as pool:
            closed = tmp_path / "closed"
            job = Job({"pieces": 10**9, "closed": str(closed)}, (os.urandom(100_000),))
            pieces = pool.stream(job)
            await anext(pieces)
            await until(closed.exists)
            num_pieces = 0
            with pytest.raises(CapacityError, match="slowly"):
                async for _ in pieces:
                    num_pieces += 1
            assert 10 <= num_pieces <= 12

    run(steps())
