"""A deadline holds wherever a request can wait: one test for each place, in the order a request comes to them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.stores import Store
from tests.gateway.running_gateway import RunningGateway, Upstream, rows, running_gateway, until
from tests.gateway.test_hangups_pay import deaf_port
from tonle.audit.trail import AuditTrail
from tonle.config.routing import BackendConfig
from tonle.edge.listening import run
from tonle.edge.server import HttpServer

NEVER_S = 200.0  # longer than the test waits: without the deadline, it fails
GIVE_UP_S = 120.0


def too_late(reply: httpx.Response) -> None:
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded"), reply.text


async def ask_soon(place: RunningGateway, *, within_s: float = 0.3, **fields: Any) -> httpx.Response:
    """With a deadline. Where something must happen before it passes, give it time: machines may be busy."""
    async with asyncio.timeout(GIVE_UP_S):
        return await place.ask(headers={"x-request-deadline-ms": f"{within_s * 1000:.0f}"}, **fields)


def test_waiting_for_the_server_that_keeps_limits(tmp_path: Path, store: Store) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        settings: dict[str, Any] = {"state_db": store.url, "store_timeout_s": NEVER_S, "max_concurrent_per_key": 1}
        async with running_gateway(tmp_path, upstream, **settings) as place:
            assert (await place.ask()).status_code == 200
            store.freeze()
            try:
                too_late(await ask_soon(place))
            finally:
                store.thaw()
            status = 0
            for _ in range(2400):  # it holds no slot
                if (status := (await place.ask()).status_code) == 200:
                    break
                await asyncio.sleep(0.05)
            assert status == 200
            assert len(upstream.requests) == 2

    run(main())


def test_waiting_for_the_writer_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        monkeypatch.setattr("tonle.gateway.recording.ROOM_S", NEVER_S)
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream) as place:
            with monkeypatch.context() as patch:
                patch.setattr(AuditTrail, "crowded", True)
                too_late(await ask_soon(place))
            assert not upstream.requests

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_waiting_for_an_identical_request(tmp_path: Path, *, stream: bool) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with running_gateway(tmp_path, upstream) as place:
            first = asyncio.create_task(place.ask(temperature=0, stream=stream))
            await until(lambda: upstream.requests, "it never came")
            too_late(await ask_soon(place, temperature=0, stream=stream))
            upstream.hang.set()
            assert (await first).status_code == 200
            again = await ask_soon(place, within_s=GIVE_UP_S, temperature=0, stream=stream)
            assert (again.status_code, again.headers["x-cache"]) == (200, "hit")
        assert len(upstream.requests) == 1

    run(main())


def test_waiting_for_the_cache_server(tmp_path: Path, redis: Store) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream, cache=redis.url, store_timeout_s=NEVER_S) as place:
            redis.freeze()
            try:
                too_late(await ask_soon(place, temperature=0))
            finally:
                redis.thaw()
            assert not upstream.requests

    run(main())


def test_waiting_in_the_queue(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with running_gateway(tmp_path, upstream, max_concurrent=1) as place:
            gate = place.gateway.pool.backends[0].gate
            first = asyncio.create_task(place.ask("first"))
            await until(lambda: upstream.requests, "it never came")
            gate.service_s = 0.01
            too_late(await ask_soon(place))
            assert gate.num_queued == 0
            upstream.hang.set()
            assert (await first).status_code == 200

    run(main())


def test_waiting_for_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(port: int) -> None:
        row = BackendConfig(url=f"http://127.0.0.1:{port}", name="deaf", models=("m",), kind="openai")
        async with running_gateway(tmp_path, backends=lambda: (row,), probe_interval_s=0) as place:
            (backend,) = place.gateway.pool.backends
            backend.transport._client._connect_timeout_s = NEVER_S  # type: ignore[attr-defined]
            too_late(await ask_soon(place))
            assert backend.breaker.state == "closed" and backend.num_failed == 0

    with deaf_port() as port:
        run(main(port))


@contextlib.asynccontextmanager
async def silent_after(head: bytes) -> AsyncIterator[str]:
    """A server that answers every request with `head`, and then says nothing more."""
    writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for writer in writers:
            writer.close()


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n"


def test_waiting_for_the_first_event_of_a_stream_whose_head_has_come(tmp_path: Path) -> None:
    """vLLM sends the head at once, and the first event when the prompt is computed."""

    async def main() -> None:
        async with silent_after(HEAD % b"text/event-stream") as url:
            row = BackendConfig(url=url, name="b0", models=("m",), kind="vllm")
            async with running_gateway(tmp_path, backends=lambda: (row,), probe_interval_s=0) as place:
                too_late(await ask_soon(place, stream=True))

    run(main())


@pytest.mark.parametrize("with_head", [False, True])
def test_waiting_for_the_prefill_leg(tmp_path: Path, *, with_head: bool) -> None:
    async def main() -> None:
        decode = Upstream("m", owned_by="vllm")
        async with silent_after(HEAD % b"application/json" if with_head else b"") as url:

            def backends() -> tuple[BackendConfig, ...]:
                (row,) = rows(decode, role="decode", models=("m",), kind="vllm")
                return BackendConfig(url=url, name="prefill", role="prefill", models=("m",), kind="vllm"), row

            settings: dict[str, Any] = {"prefill_threshold": 0, "probe_interval_s": 0}
            async with running_gateway(tmp_path, decode, backends=backends, **settings) as place:
                too_late(await ask_soon(place))
            assert not decode.requests

    run(main())


def test_waiting_for_both_backends_of_a_hedge(tmp_path: Path) -> None:
    async def main() -> None:
        upstreams = Upstream("m"), Upstream("m")
        for each in upstreams:
            each.hang.clear()
        async with running_gateway(tmp_path, *upstreams, hedge_after_s=0.05) as place:
            too_late(await ask_soon(place, within_s=2, stream=True))
            assert [len(each.requests) for each in upstreams] == [1, 1]
            await until(lambda: all(each.num_hangups for each in upstreams), "one of them works on")
            for each in upstreams:
                each.hang.set()

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_has_begun_may_take_longer(tmp_path: Path, *, stream: bool) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.pause_after = 1
        async with running_gateway(tmp_path, upstream) as place:
            within_s = 2.0 if stream else GIVE_UP_S
            asking = asyncio.create_task(ask_soon(place, within_s=within_s, stream=stream))
            if stream:
                await until(lambda: upstream.requests, "it never came")
                await asyncio.sleep(within_s + 0.1)
                assert not asking.done()
            upstream.resume.set()
            reply = await asking
            assert reply.status_code == 200 and "deadline" not in reply.text
            assert not stream or reply.text.endswith("data: [DONE]\n\n")

    run(main())


def test_a_stream_kept_alive_by_comments_is_told_in_an_event(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with running_gateway(tmp_path, upstream, keep_alive_s=0.05) as place:
            reply = await ask_soon(place, within_s=1.5, stream=True)
            assert reply.status_code == 200 and '"code":"deadline_exceeded"' in reply.text.split("\n\n")[-2]
            upstream.hang.set()
        (record,) = place.records()
        assert record["status"] == "failed" and record["error"]["code"] == "deadline_exceeded"

    run(main())


def test_who_hangs_up_before_the_deadline_has_hung_up(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with running_gateway(tmp_path, upstream) as place:
            asking = asyncio.create_task(place.ask(headers={"x-request-deadline-ms": "100000"}))
            await until(lambda: upstream.requests, "it never came")
            asking.cancel()
            server: HttpServer = place.gateway.server
            await until(lambda: server.num_active == 0, "it works on")
            upstream.hang.set()
        (record,) = place.records()
        assert record["status"] == "cancelled"

    run(main())
