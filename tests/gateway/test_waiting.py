"""Admission as callers meet it: turns, deadlines, comments, and a full line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.running_gateway import ADMIN, Upstream, run, running_gateway, until
from tonle.gateway.relay import Relay


@asynccontextmanager
async def one_inside(tmp_path: Path, *, stream: bool = False, **settings: Any) -> AsyncIterator[tuple[Any, ...]]:
    """A gateway whose only backend slot is taken by a request that hangs: the gateway, the backend, its gate, that request."""
    upstream = Upstream("m")
    upstream.hang.clear()
    async with running_gateway(tmp_path, upstream, max_concurrent=1, **settings) as place:
        gate = place.gateway.pool.backends[0].gate
        running = asyncio.create_task(place.ask("running", stream=stream))
        await until(lambda: gate.num_inside == 1, "it never came")
        yield place, upstream, gate, running


def test_requests_wait_their_turn(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with running_gateway(tmp_path, upstream, max_concurrent=2) as place:
            asking = [asyncio.create_task(place.ask(f"{index}")) for index in range(5)]
            gate = place.gateway.pool.backends[0].gate
            await until(lambda: gate.num_queued == 3 and upstream.requests, "they do not wait")
            await asyncio.sleep(0.05)
            assert len(upstream.requests) == 2
            upstream.hang.set()
            replies = await asyncio.gather(*asking)
            assert [reply.status_code for reply in replies] == [200] * 5
            assert max(float(reply.headers["x-tonle-queue-time"]) for reply in replies) > 0
        assert max(record["latency_ms"]["queue"] for record in place.records()) > 0

    run(main())


def test_a_full_line_is_429_with_the_time_to_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with running_gateway(tmp_path, upstream, max_concurrent=1, max_queued=1) as place:
            asking = [asyncio.create_task(place.ask(f"{index}")) for index in range(2)]
            await until(lambda: place.gateway.pool.backends[0].gate.num_queued == 1, "it does not wait")
            reply = await place.ask("one too many")
            assert (reply.status_code, reply.json()["error"]["code"]) == (429, "queue_full")
            assert reply.json()["error"]["type"] == "rate_limit_error"
            assert f"try again in {reply.headers['retry-after']} s" in reply.json()["error"]["message"]
            assert int(reply.headers["retry-after"]) >= 1
            upstream.hang.set()
            await asyncio.gather(*asking)

    run(main())


def test_one_key_that_fills_the_queue_does_not_keep_others_out(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with running_gateway(tmp_path, upstream, max_concurrent=1, max_queued=4) as place:
            gate = place.gateway.pool.backends[0].gate
            greedy = [asyncio.create_task(place.ask(f"{index}")) for index in range(5)]
            await until(lambda: gate.num_queued == 4, "they do not wait")
            assert (await place.ask("one too many")).status_code == 429
            other = asyncio.create_task(place.ask("another key", key=ADMIN))
            await until(lambda: any(each.done() for each in greedy), "none gave way")
            (refused,) = [each.result() for each in greedy if each.done()]
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert "holds the largest part of it; try again in" in refused.json()["error"]["message"]
            upstream.hang.set()
            assert (await other).status_code == 200
            assert sorted(reply.status_code for reply in await asyncio.gather(*greedy)) == [200] * 4 + [429]
        assert len(place.records()) == 7

    run(main())


def test_one_wish_without_end_does_not_fill_the_line(tmp_path: Path) -> None:
    """The backend does not say how much it writes at the most."""

    async def main() -> None:
        async with one_inside(tmp_path) as (place, upstream, gate, running):
            asking = [running]
            asking.append(asyncio.create_task(place.ask("for ever", max_tokens=2**31 - 1)))
            await until(lambda: gate.num_queued == 1, "it does not wait")
            asking.append(asyncio.create_task(place.ask("one more", max_tokens=10)))
            await until(lambda: gate.num_queued == 2 or asking[2].done(), "it neither waits nor is refused")
            assert gate.num_queued == 2
            upstream.hang.set()
            assert [reply.status_code for reply in await asyncio.gather(*asking)] == [200] * 3

    run(main())


def test_a_deadline_ends_the_wait(tmp_path: Path) -> None:
    async def main() -> None:
        async with one_inside(tmp_path) as (place, upstream, gate, running):
            gate.service_s = 0.01  # there is no way to know that this one takes long
            late = await place.ask(headers={"x-request-deadline-ms": "100"})
            assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
            assert gate.num_queued == 0
            gate.service_s = 60.0
            hopeless = await place.ask(headers={"x-request-deadline-ms": "50000"})
            assert (hopeless.status_code, hopeless.headers["retry-after"]) == (504, "60")
            assert (await place.ask(headers={"x-request-deadline-ms": "soon"})).status_code == 400
            upstream.hang.set()
            await running
            upstream.hang.clear()
            slow = await place.ask(headers={"x-request-deadline-ms": "100"})  # inside, and the backend is slow
            assert slow.status_code == 504

    run(main())


@pytest.fixture
def comments(monkeypatch: pytest.MonkeyPatch) -> set[Relay]:
    """The streams that were sent a comment."""
    seen: set[Relay] = set()
    comment = Relay._comment

    def noted(relay: Relay) -> None:
        comment(relay)
        seen.add(relay)

    monkeypatch.setattr(Relay, "_comment", noted)
    return seen


def test_a_waiting_stream_is_kept_alive(tmp_path: Path, comments: set[Relay]) -> None:
    async def main() -> None:
        async with one_inside(tmp_path, stream=True, keep_alive_s=0.05) as (place, upstream, gate, running):
            waiting = asyncio.create_task(place.ask("waiting", stream=True))
            await until(lambda: gate.num_queued == 1, "it does not wait")
            await until(lambda: len(comments) == 2, "not both were kept alive")
            upstream.hang.set()
            first, second = await running, await waiting
            assert first.text.startswith(": working\n\n")
            assert second.text.startswith(": queued, 0 others wait\n\n")
            for reply in (first, second):
                assert reply.text.endswith("data: [DONE]\n\n")
        assert [record["output"] for record in place.records()] == ["Phnom Penh."] * 2

    run(main())


def test_an_error_after_a_comment_is_an_event(tmp_path: Path, comments: set[Relay]) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        upstream.status = 400
        async with running_gateway(tmp_path, upstream, keep_alive_s=0.05) as place:
            asking = asyncio.create_task(place.ask(stream=True))
            await until(lambda: comments, "it was not kept alive")
            upstream.hang.set()
            reply = await asking
            assert reply.status_code == 200
            assert reply.text.split("\n\n")[-2].startswith('data: {"error":{"message":"broken on purpose"')

    run(main())


def test_who_hangs_up_while_waiting_leaves_the_line(tmp_path: Path) -> None:
    async def main() -> None:
        async with one_inside(tmp_path) as (place, upstream, gate, running):
            waiting = asyncio.create_task(place.ask("waiting"))
            await until(lambda: gate.num_queued == 1, "it does not wait")
            waiting.cancel()
            await until(lambda: gate.num_queued == 0, "it still waits")
            upstream.hang.set()
            await running
            assert len(upstream.requests) == 1
        assert sorted(record["status"] for record in place.records()) == ["cancelled", "ok"]

    run(main())


def test_a_callers_own_deadline_says_nothing_about_the_backend(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with running_gateway(tmp_path, upstream, breaker_failures=2, cache=None) as place:
            (backend,) = place.gateway.pool.backends
            for deadline_ms in ("1", "1", "100", "100", "100"):
                reply = await place.ask(headers={"x-request-deadline-ms": deadline_ms})
                assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
            assert (backend.breaker.state, backend.num_failed) == ("closed", 0)
            upstream.hang.set()
            assert (await place.ask()).status_code == 200

    run(main())
