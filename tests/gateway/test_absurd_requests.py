"""Requests and answers no honest program sends: they are refused or bounded, and nothing is kept for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.gateway.running_gateway import CHAT, KEY, Upstream, run, running_gateway
from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.client import Address, HttpClient
from tonle.edge.exchange import Exchange
from tonle.gateway.admission import Gate, Ticket
from tonle.gateway.relay import Relay
from tonle.gateway.routing.router import Router
from tonle.protocol.answers import Collector


class Pressed(BufferedReply):
    """Keeps what it was given to press."""

    def attach(self, press: Callable[[bool], None]) -> None:
        self.press = press


def test_pressure_after_the_end_does_not_stop_the_next_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            client = HttpClient(Address.parse(place.url))
            request, first = client.request("GET", "/health", b"", {}), Pressed()
            connection = await client.take()
            await connection.exchange(request, first, first_s=60, silence_s=60)
            client.put(connection)
            first.press(True)  # the caller of the first answer became full after its end
            assert await client.take() is connection
            second = BufferedReply()
            await connection.exchange(request, second, first_s=60, silence_s=60)
            assert second.status == 200
            client.close()

    run(main())


def test_a_connection_goes_back_unpaused() -> None:
    async def main() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(2):
                await reader.readuntil(b"\r\n\r\n")
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await reader.read()
            writer.close()

        class Full(Pressed):
            def data(self, piece: bytes) -> None:
                super().data(piece)
                self.press(True)  # with the last byte

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = HttpClient(Address.parse(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        connection = await client.take()
        for answer in (Full(), BufferedReply()):
            await connection.exchange(client.request("GET", "/", b"", {}), answer, first_s=60, silence_s=60)
            assert answer.body == b"ok"
        connection.close()
        server.close()

    run(main())


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_absurd_lengths_are_refused_and_hold_no_place(tmp_path: Path, name: str) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream, max_concurrent=1) as place:
            for asked in (2**31, 2**63, 10**400):
                reply = await place.ask(**{name: asked})
                assert (reply.status_code, reply.json()["error"]["param"]) == (400, name)
            assert (await place.ask(**{name: 2**31 - 1})).status_code == 200
            assert place.gateway.pool.backends[0].gate.num_inside == 0
        assert len(upstream.requests) == 1 and len(place.records()) == 4

    run(main())


def test_the_gate_counts_only_what_it_let_in() -> None:
    gate = Gate(max_concurrent=1, max_queued=1, max_queued_tokens=10)
    with pytest.raises(OverflowError):
        gate.ask(Ticket("a", 2, 1, 10**400))
    ticket = Ticket("a", 2, 1, 1)
    assert gate.ask(ticket)
    gate.leave(ticket, used_tokens=10**400)  # so the backend says
    assert gate.num_inside == 0


DONE = b"data: [DONE]\n\n"
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


@pytest.mark.parametrize(
    ("stream", "kept"),
    [
        (CHUNK + b'data: {"error":{"message":"out of memory"}}\n\n' + DONE, False),
        (CHUNK, False),
        (CHUNK + DONE, True),
        (CHUNK + DONE.rstrip(), True),  # its last event is never ended
    ],
    ids=["error", "broken off", "whole", "no last line end"],
)
def test_only_whole_streams_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bytes, *, kept: bool
) -> None:
    async def answer(upstream: Upstream, exchange: Exchange, body: dict[str, Any]) -> None:
        exchange.start(content_type="text/event-stream")
        exchange.write(stream)
        exchange.end()

    monkeypatch.setattr(Upstream, "_stream", answer)

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            replies = [await place.ask(temperature=0, stream=True) for _ in range(2)]
            assert [reply.headers["x-cache"] for reply in replies] == ["miss", "hit" if kept else "miss"]
            assert [reply.content for reply in replies] == [stream] * 2

    run(main())


@pytest.mark.parametrize(
    "extra",
    [b'"x":' + b"[" * 985 + b"]" * 985, b'"x":[' + b",".join([b"[5]"] * 100_000) + b"]", b'"n":5000'],
    ids=["deep", "many", "answers"],
)
def test_bodies_beyond_a_bound_reach_no_backend_and_are_on_record(tmp_path: Path, extra: bytes) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream) as place:
            body = b'{"model":"m","messages":[{"role":"user","content":"hi"}],%b}' % extra
            for path in (CHAT, "/v1/embeddings"):
                headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
                reply = await place.client.post(path, content=body, headers=headers)
                assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_value"
            assert (await place.ask()).status_code == 200
        assert [record["status"] for record in place.records()] == ["refused", "refused", "ok"]
        assert len(upstream.requests) == 1

    run(main())


def test_a_deadline_of_thousands_of_digits_is_a_refusal_with_a_record(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            for text in ("9" * 5000, "0", "1" * 10):
                assert (await place.ask(headers={"x-request-deadline-ms": text})).status_code == 400
            assert (await place.ask(headers={"x-request-deadline-ms": "0060000"})).status_code == 200
        assert len(place.records()) == 4

    run(main())


def test_a_bug_on_the_way_in_leaves_one_record_and_no_lease(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(router: Router, *args: object) -> None:
        raise ZeroDivisionError("a bug")

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), max_concurrent_per_key=1) as place:
            with monkeypatch.context() as patch:
                patch.setattr(Router, "resolve", broken)
                assert (await place.ask()).status_code == 500
            assert (await place.ask()).status_code == 200
        first, second = place.records()
        assert (first["status"], first["error"]["code"], second["status"]) == ("failed", "ZeroDivisionError", "ok")

    run(main())


def test_an_answer_that_cannot_be_read_leaves_one_record_and_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(relay: Relay) -> None:
        raise ZeroDivisionError("a bug")

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), max_concurrent_per_key=1) as place:
            with monkeypatch.context() as patch:
                patch.setattr(Relay, "answer", broken)
                assert (await place.ask()).status_code == 200
            assert (await place.ask(text="again")).status_code == 200
        first, second = place.records()
        assert (first["error"]["code"], second["status"]) == ("ZeroDivisionError", "ok")

    run(main())


def test_malformed_tool_calls_are_kept_as_they_came() -> None:
    calls = [{"index": [1], "function": {"name": 5}}, {"function": 7}, {"index": 1, "function": {"arguments": "{"}}]
    collector = Collector("application/json")
    collector.feed(msgspec.json.encode({"choices": [{"index": 0, "message": {"tool_calls": calls}}]}))
    kept = collector.finish().choices[0].tool_calls
    assert kept[0]["function"] == {"name": "5", "arguments": ""} and kept[1]["function"]["arguments"] == "{"
