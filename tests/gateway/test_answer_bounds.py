"""Answers without measure: what a backend sends is bounded, and reading it takes time in proportion to its size."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.running_gateway import Upstream, run, running_gateway, until
from tonle.edge.client import Address, HttpClient
from tonle.gateway import relay
from tonle.gateway.backends.transport import HttpTransport
from tonle.protocol import answers, sse
from tonle.protocol.answers import Collector
from tonle.protocol.replies import EventReader

MIB = 1024**2
CHUNKED = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE, STREAM = CHUNKED % b"application/json", CHUNKED % b"text/event-stream"
ERROR = b"HTTP/1.1 500 Oops\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"


class Endless:
    """A server that answers every request with `begin`, then the same piece for as long as it is read."""

    def __init__(self, begin: bytes, piece: bytes, *, most: int) -> None:
        self.begin, self.piece, self.most = begin, piece, most
        self.num_sent = 0
        self.num_closed = 0  # connections that the gateway closed

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(self.begin)
            part = b"%x\r\n%b\r\n" % (len(self.piece), self.piece)
            while self.num_sent < self.most:
                writer.write(part)
                self.num_sent += len(part)
                await writer.drain()
        except ConnectionError:
            self.num_closed += 1
        writer.close()


@contextlib.asynccontextmanager
async def behind(folder: Path, endless: Endless, **settings: Any) -> AsyncIterator[Any]:
    server = await asyncio.start_server(endless.serve, "127.0.0.1", 0)
    try:
        async with running_gateway(folder, Upstream("m"), **settings) as place:
            address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
            place.gateway.pool.backends[0].transport = HttpTransport(HttpClient(address))
            yield place
    finally:
        server.close()


@pytest.mark.parametrize("begin", [WHOLE, ERROR], ids=["answer", "error"])
def test_a_whole_answer_without_end_is_a_502(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes) -> None:
    monkeypatch.setattr(relay, "MAX_ANSWER_BYTES", MIB, raising=False)
    endless = Endless(begin, b" " * 65536, most=64 * MIB)

    async def main() -> None:
        async with behind(tmp_path, endless, retries=0) as place:
            reply = await place.ask()
            assert reply.status_code == 502 and "too large" in reply.json()["error"]["message"]
            await until(lambda: endless.num_closed, "the connection is still open")
            assert endless.num_sent < endless.most
        assert place.records()[0]["status"] == "failed"

    run(main())


@pytest.mark.parametrize("include_usage", [True, False])
@pytest.mark.parametrize("begin", [b'data: {"choices":[{"delta":{"content":"', b"data: x\r\ndata: "])
def test_an_event_without_end_ends_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: bytes, *, include_usage: bool
) -> None:
    """With and without the usage chunk: what may have to be taken out of a stream is held back."""
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", MIB, raising=False)
    first = b'data: {"choices":[{"index":0,"delta":{"content":"Hi"}}]}\n\n'
    opening = b"%b%x\r\n%b\r\n" % (STREAM, len(first + begin), first + begin)
    endless = Endless(opening, b"a" * 65536, most=64 * MIB)

    async def main() -> None:
        async with behind(tmp_path, endless) as place:
            options = {"include_usage": True} if include_usage else None
            reply = await place.ask(stream=True, stream_options=options)
            assert "Hi" in reply.text and '"code":"upstream_failed"' in reply.text[-400:]
            await until(lambda: endless.num_closed, "the connection is still open")
            assert endless.num_sent < endless.most
        (record,) = place.records()
        assert (record["status"], record["output"]) == ("failed", "Hi")

    run(main())


def test_an_endless_error_is_not_kept_by_a_hedged_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.gateway.race.MAX_ANSWER_BYTES", MIB, raising=False)
    endless = Endless(ERROR, b" " * 65536, most=64 * MIB)

    async def main() -> None:
        async with behind(tmp_path, endless, hedge_after_s=30.0, retries=0) as place:
            reply = await place.ask(stream=True)
            assert reply.status_code == 502 and endless.num_sent < endless.most

    run(main())


# -- in proportion


def pieces_of(event: bytes, size: int = 4096) -> Iterator[bytes]:
    for start in range(0, len(event), size):
        yield event[start : start + size]


TEXT = "a" * (4 * MIB)
LARGE = [
    b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % TEXT.encode(),
    b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\r\n\r\n' % TEXT.encode(),
    b'data: {"choices":[{"index":0,"delta":\rdata:'
    + b" \rdata:" * 100_000
    + b'{"content":"%b"}}]}\r\r' % TEXT.encode(),
]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each search for the ends of events looked at."""
    seen: list[int] = []
    split = sse.split

    def counted(stream: bytes) -> list[bytes]:
        seen.append(len(stream))
        return split(stream)

    monkeypatch.setattr(sse, "split", counted)
    monkeypatch.setattr("tonle.protocol.replies.split", counted, raising=False)
    return seen


@pytest.mark.parametrize("event", LARGE, ids=["\\n", "\\r\\n", "\\r"])
def test_a_large_event_in_many_pieces_is_put_together_once(event: bytes, work: list[int]) -> None:
    reader = EventReader()
    replies = [reply for piece in pieces_of(event) for reply in reader.feed(piece)]
    replies += reader.feed(b'data: {"id": "next"}\n\n')  # the \n of a last \r\n might still have come
    assert [reply.id for reply in replies] == [None, "next"] and reader.problem is None
    assert replies[0].choices is not None and replies[0].choices[0].delta is not None
    assert replies[0].choices[0].delta.content == TEXT
    assert sum(work) < 6 * len(event)


@pytest.mark.parametrize("event", LARGE, ids=["\\n", "\\r\\n", "\\r"])
def test_so_it_is_where_events_are_held_back(event: bytes, work: list[int]) -> None:
    collector = Collector("text/event-stream", swallow_usage=True)
    passed = [collector.feed(piece) for piece in (*pieces_of(event), b"data: [DONE]\n\n")]
    assert b"".join(passed) == event + b"data: [DONE]\n\n"
    answer = collector.finish()
    assert (answer.text, answer.complete) == (TEXT, True)
    assert sum(work) < 6 * len(event)


def test_lines_without_a_line_feed_are_searched_once() -> None:
    """Two searches per line, each to the end of the stream, would take minutes."""
    stream = b"data: 1\r" * 200_000
    assert sse.split(stream + b"\rdata: 2\r\r\n") == [stream + b"\r", b"data: 2\r\r\n", b""]


def test_an_event_that_is_too_large_is_given_up_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", MIB, raising=False)
    reader, collector = EventReader(), Collector("text/event-stream", swallow_usage=True)
    passed = b""
    for piece in (*pieces_of(LARGE[0]), b'data: {"id": "next"}\n\n'):
        reader.feed(piece)
        passed += collector.feed(piece)
    assert reader.problem is not None and "more than" in reader.problem
    assert collector.oversized and passed + collector.rest() == LARGE[0] + b'data: {"id": "next"}\n\n'
    assert collector.finish().complete is False


# -- what is kept for the record


def chunk(**delta: Any) -> bytes:
    import msgspec

    return b"data: %b\n\n" % msgspec.json.encode({"choices": [{"index": 0, "delta": delta}]})


def test_the_text_that_is_kept_is_bounded_and_usage_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_TEXT_CHARS", 10_000, raising=False)
    collector = Collector("text/event-stream")
    for _ in range(5000):
        collector.feed(chunk(content="abcd") + chunk(reasoning_content="efgh"))
    collector.feed(b'data: {"choices":[],"usage":{"total_tokens":9}}\n\ndata: [DONE]\n\n')
    answer = collector.finish()
    kept = answer.choices[0]
    assert len(kept.text) + sum(map(len, kept.reasoning)) == 10_000
    assert answer.cut and answer.complete and answer.usage == {"total_tokens": 9}


def test_many_small_pieces_are_not_kept_one_by_one() -> None:
    collector = Collector("text/event-stream")
    for number in range(20_000):
        collector.feed(chunk(content=f"word{number} "))
    assert len(collector.answer.choices[0].pieces) < 10_000
    assert collector.finish().text.endswith("word19998 word19999 ")


def test_the_arguments_of_a_tool_call_are_put_together_once() -> None:
    collector = Collector("text/event-stream")
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    collector.feed(chunk(tool_calls=[call]))
    for _ in range(3000):
        collector.feed(chunk(tool_calls=[{"index": 0, "function": {"arguments": "ab"}}]))
    parts = collector.answer.choices[0].tool_calls[0]["function"]["arguments"]
    assert isinstance(parts, list), "a text that grows by two letters is copied as a whole each time"
    (found,) = collector.finish().choices[0].tool_calls.values()
    assert found == {"id": "c", "type": "function", "function": {"name": "f", "arguments": "ab" * 3000}}


def test_the_number_of_choices_that_are_kept_is_bounded() -> None:
    collector = Collector("text/event-stream")
    for number in range(5000):
        collector.feed(b'data: {"choices":[{"index":%d,"delta":{"content":"x"}}]}\n\n' % number)
    assert len(collector.finish().choices) <= answers.MAX_CHOICES


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
def test_a_reply_that_is_too_deep_is_not_read_and_nothing_is_raised(content_type: str) -> None:
    deep = b'{"choices":[],"error":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    collector = Collector(content_type)
    collector.feed(b"data: %b\n\n" % deep if content_type == "text/event-stream" else deep)
    assert collector.finish().error is None


def test_of_a_reply_with_too_many_parts_only_usage_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes of JSON each become an object of a hundred."""
    monkeypatch.setattr(answers, "MAX_PARTS", 1000, raising=False)
    collector = Collector("application/json")
    collector.feed(b'{"choices":[' + b"{}," * 400_000 + b'{}],"usage":{"total_tokens":9}}')
    answer = collector.finish()
    assert not answer.choices and answer.usage == {"total_tokens": 9}
    assert "too large to record" in answer.raw
