"""A backend in this process hands its answer over as an object: the bytes pass unread, and nothing is lost for it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.gateway.running_gateway import RunningGateway, Upstream, run, running_gateway
from tonle.edge.client import Sink, UpstreamError
from tonle.gateway.answer_reader import AnswerReader
from tonle.protocol.answers import Answer, Choice

USAGE = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6, "cached_tokens": None}


class Local:
    """Replaces a backend's transport. Sends text that no parser could read, and says what it means."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.know_first = True  # before the head, or after it
        self.failure: Exception | None = None

    async def send(self, method: str, path: str, body: bytes, headers: dict[str, str], sink: Sink, *, first_s: float,
                   silence_s: float) -> None:  # fmt: skip
        asked = json.loads(body)
        self.bodies.append(asked)
        stream = asked.get("stream") is True
        answer, choice = Answer(model="m", response_id="local-1"), Choice()
        sink.attach(lambda full: None)
        if self.know_first:
            sink.know(answer)
        sink.head(200, {"content-type": "text/event-stream" if stream else "application/json"})
        if not self.know_first:
            sink.know(answer)
        answer.choices[0] = choice
        for piece in ("Phnom", " Penh"):
            choice.pieces.append(piece)
            answer.last_s = time.monotonic()
            answer.first_s = answer.first_s or answer.last_s
            sink.data(b"<%b>" % piece.encode())
        if self.failure is not None:
            raise self.failure
        choice.finish_reason, answer.usage, answer.complete = "stop", USAGE, True

    def close(self) -> None: ...


def make_local(place: RunningGateway, number: int = 0) -> Local:
    backend = place.gateway.pool.backends[number]
    backend.transport, backend.local = Local(), True
    return backend.transport


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("know_first", [True, False])
def test_the_object_is_what_is_recorded_charged_and_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, stream: bool, know_first: bool
) -> None:
    fed: list[bytes] = []
    feed = AnswerReader.feed
    monkeypatch.setattr(AnswerReader, "feed", lambda self, piece: (fed.append(piece), feed(self, piece))[1])

    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            local = make_local(place)
            local.know_first = know_first
            reply = await place.ask(stream=stream, temperature=0)
            assert (reply.status_code, reply.text) == (200, "<Phnom>< Penh>")
            assert not fed, "the bytes were read"
            assert "stream_options" not in local.bodies[0], "usage was asked for, which the object carries"
            again = await place.ask(stream=stream, temperature=0)
            assert (again.headers["x-cache"], again.text) == ("hit", reply.text) and len(local.bodies) == 1
            keys = await place.gateway.limiter.used_today([reply_key(place)])
            assert keys == {reply_key(place): 6}
        first, second = place.records()
        assert (first["status"], first["output"], first["usage"]) == ("ok", "Phnom Penh", USAGE)
        assert first["finish_reason"] == "stop" and first["response_id"] == "local-1"
        assert (first["latency_ms"]["ttft"] is not None) is stream and second["status"] == "cached"

    run(main())


def reply_key(place: RunningGateway) -> str:
    return next(key.id for key in place.gateway.ring._fixed if not key.may("admin"))


def test_an_answer_that_breaks_off_is_recorded_as_far_as_it_came_and_not_cached(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            local = make_local(place)
            local.failure = UpstreamError("engine failed", began=True)
            reply = await place.ask(stream=True, temperature=0)
            assert reply.text.startswith("<Phnom>< Penh>data: ") and "broke off" in reply.text
            local.failure = None
            assert (await place.ask(stream=True, temperature=0)).headers["x-cache"] == "miss"
        first, _ = place.records()
        assert (first["status"], first["output"]) == ("failed", "Phnom Penh")

    run(main())


def test_after_a_local_backend_failed_the_bytes_of_the_next_are_read(tmp_path: Path) -> None:
    async def main() -> None:
        upstreams = Upstream("m"), Upstream("m")
        async with running_gateway(tmp_path, *upstreams, prefix_affinity=False) as place:
            local = make_local(place)
            local.failure = UpstreamError("engine failed")
            reply = await place.ask()  # whole: the caller has seen nothing of the first
            assert (reply.status_code, reply.headers["x-tonle-backend"]) == (200, "b1")
            assert len(local.bodies) == 1
        (record,) = place.records()
        assert record["output"] == "Phnom Penh." and record["route"]["failed"] == ["b0"]
        assert record["usage"]["total_tokens"] == 10

    run(main())


def test_a_hedged_stream_takes_the_object_of_the_winner(tmp_path: Path) -> None:
    async def main() -> None:
        slow, other = Upstream("m"), Upstream("m")
        slow.hang.clear()
        async with running_gateway(tmp_path, slow, other, hedge_after_s=0.05, prefix_affinity=False) as place:
            make_local(place, 1)
            reply = await place.ask(stream=True)
            assert reply.text == "<Phnom>< Penh>" and "x-tonle-backend" not in reply.headers
            slow.hang.set()
        (record,) = place.records()
        assert (record["output"], record["usage"], record["route"]["why"]) == ("Phnom Penh", USAGE, "hedge")

    run(main())


def test_a_remote_backend_is_still_asked_for_usage(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream) as place:
            reply = await place.ask(stream=True)
            assert b'"usage"' not in reply.content
            assert upstream.requests[0]["stream_options"] == {"include_usage": True}
            assert msgspec.json.decode(reply.content.split(b"\n\n")[0][6:])["choices"]

    run(main())
