"""The inference service: its endpoint, its health and its latency target, and what web pages may do."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.gateway.running_gateway import KEY, RunningGateway, Upstream, run, running_gateway
from tonle.gateway.call import ReplyFacts
from tonle.gateway.inference_service import Message, WrappedReply, kept_history
from tonle.gateway.refusals import UpstreamFailed
from tonle.observe.sla import Sla

PATH = "/api/v1/inference"


async def infer(place: RunningGateway, **fields: Any) -> dict[str, Any]:
    reply = await place.post(PATH, {"user_input": "I feel anxious.", **fields}, key=KEY)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def test_a_question_gets_an_answer_and_its_facts(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream) as place:
            history = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi!"}]
            first = await infer(place, conversation_history=history, max_tokens=20)
            assert first["response"] == "Phnom Penh."
            assert first["metadata"]["cache_hit"] is False and first["metadata"]["latency"] > 0
            assert first["metadata"]["total_tokens"] == 10
            assert upstream.requests[0]["messages"] == [*history, {"role": "user", "content": "I feel anxious."}]
            assert upstream.requests[0]["max_tokens"] == 20
            again = await infer(place, conversation_history=history, max_tokens=20)
            assert again["metadata"]["cache_hit"] is True and again["response"] == first["response"]
            fresh = await infer(place, conversation_history=history, max_tokens=20, use_cache=False)
            assert fresh["metadata"]["cache_hit"] is False
            assert (await place.post(PATH, {"question": "?"}, key=KEY)).status_code == 400
            assert (await place.post(PATH, {"user_input": "x"}, key="wrong")).status_code == 401
        assert [record["status"] for record in place.records()] == ["ok", "cached", "ok", "refused", "refused"]

    run(main())


async def stream(place: RunningGateway, **fields: Any) -> list[Any]:
    """The events of a streamed answer; the last is `[DONE]` if it ended well."""
    reply = await place.post(PATH, {"user_input": "I feel anxious.", "stream": True, **fields}, key=KEY)
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream"), reply.text
    events = [event for event in reply.text.split("\n\n") if event and not event.startswith(":")]
    assert all(event.startswith("data: ") for event in events)
    return [data if data == "[DONE]" else json.loads(data) for data in (event[6:] for event in events)]


def test_a_streamed_answer_ends_with_the_same_facts_as_a_whole_one(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream) as place:
            *pieces, last, done = await stream(place)
            assert pieces == [{"response": "Phnom"}, {"response": " Penh"}, {"response": "."}] and done == "[DONE]"
            assert last["response"] == ""
            whole = await infer(place, use_cache=False)
            varies = ("latency", "queue_time", "request_id")
            known = [{name: value for name, value in facts.items() if name not in varies}
                     for facts in (last["metadata"], whole["metadata"])]  # fmt: skip
            assert known[0] == known[1] and known[0]["total_tokens"] == 10 and known[0]["finish_reason"] == "stop"
            assert last["metadata"]["latency"] > 0 and last["metadata"]["request_id"]
            *again, cached, _ = await stream(place)
            assert again == pieces and cached["metadata"]["cache_hit"] is True and len(upstream.requests) == 2
            warned = await stream(place, context_window=10_000, use_cache=False)
            assert warned[-2]["metadata"]["warnings"][0]["param"] == "context_window"
        records = place.records()
        assert [record["status"] for record in records] == ["ok", "ok", "cached", "ok"]
        assert records[0]["output"] == "Phnom Penh." and records[0]["usage"]["total_tokens"] == 10

    run(main())


def test_a_streamed_answer_that_fails_ends_with_an_error_event(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream, retries=0) as place:
            upstream.break_after = 1
            first, error = await stream(place)
            assert first == {"response": "Phnom"} and error["error"]["code"] == "upstream_failed"
            upstream.break_after, upstream.stream_error = None, "out of memory"
            *_, error = await stream(place)
            assert error == {"error": {"message": "out of memory"}}
            upstream.status = 500
            refused = await place.post(PATH, {"user_input": "x", "stream": True}, key=KEY)
            assert refused.status_code == 500 and "broken on purpose" in refused.json()["error"]["message"]
        assert [record["status"] for record in place.records()] == ["failed", "failed", "failed"]

    run(main())


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_are_found_however_the_stream_is_cut(size: int) -> None:
    chunks = [{"model": "m", "choices": [{"index": 0, "delta": {"content": piece}}]} for piece in ("a", "ខ្មែរ")]
    chunks.append(
        {"model": "m", "choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}
    )
    sent = b": queued\n\n" + b"".join(b"data: %b\r\n\r\n" % msgspec.json.encode(chunk) for chunk in chunks)
    exchange: Any = Written()
    request: Any = SimpleNamespace(history_dropped=0)
    outlet = WrappedReply(exchange, request, ReplyFacts())
    for start in range(0, len(sent), size):
        outlet.write(sent[start : start + size])
    outlet.end()
    comment, first, second, last, done, _ = exchange.written.split(b"\n\n")
    assert (comment, done) == (b": queued", b"data: [DONE]")
    assert [msgspec.json.decode(event[6:]) for event in (first, second)] == [{"response": "a"}, {"response": "ខ្មែរ"}]
    assert msgspec.json.decode(last[6:])["metadata"]["total_tokens"] == 3


class Written:
    """An exchange that keeps what is written."""

    elapsed_s, request_id, written = 0.5, "r", b""

    def write(self, piece: bytes) -> None:
        self.written += piece

    def end(self) -> None: ...


def test_old_history_is_left_out(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream, context_window=3) as place:
            history = [{"role": "user", "content": f"message {index}"} for index in range(8)]
            answer = await infer(place, conversation_history=history, system_prompt="Be kind.")
            texts = [message["content"] for message in upstream.requests[0]["messages"]]
            assert texts == ["Be kind.", "message 5", "message 6", "message 7", "I feel anxious."]
            assert answer["metadata"]["history_messages_dropped"] == 5

    run(main())


def test_no_answer_is_sent_without_its_question(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream, context_window=3) as place:
            history = [
                {"role": role, "content": f"{role} {turn}"} for turn in range(3) for role in ("user", "assistant")
            ]
            answer = await infer(place, conversation_history=history)
            texts = [message["content"] for message in upstream.requests[0]["messages"]]
            assert texts == ["user 2", "assistant 2", "I feel anxious."]
            assert answer["metadata"]["history_messages_dropped"] == 4

    run(main())


def test_history_fits_the_context() -> None:
    history = [Message("system", "rules"), *(Message("user", "x" * 40) for _ in range(10))]
    kept = kept_history(history, [Message("user", "x" * 40)], window=None, max_tokens=50)
    assert kept[0].content == "rules" and len(kept) == 4  # 2 + 3 * 11 + 11 tokens
    assert kept_history(history, [], window=2, max_tokens=None) == [history[0], *history[-2:]]
    assert kept_history([], [], window=1, max_tokens=1) == []


def test_health_says_whether_the_promise_is_kept_and_why_not(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), sla_p95_s=600.0) as place:
            await infer(place)
            health = (await place.client.get("/health")).json()
            assert (health["status"], health["meets_sla"], health["requests"]) == ("healthy", True, 1)
            assert 0 < health["latency_s"]["p95"] < 600
            metrics = (await place.get("/metrics", key=KEY)).text
            assert "tonle:meets_sla 1.0" in metrics
            assert 'tonle:gateway_requests_total{http_status="200",status="ok"} 1.0' in metrics
            assert (await place.client.get("/health/ready")).status_code == 200

    run(main())


def test_a_broken_promise_names_its_cause() -> None:
    now_s = 0.0
    sla = Sla(2.0, clock=lambda: now_s)
    for _ in range(90):
        sla.add(0.5, 0.0, 0.1, failed=False)
    assert sla.report()["meets_sla"] is True
    for _ in range(10):
        sla.add(5.0, 4.0, 4.5, failed=False)
    report: dict[str, Any] = sla.report()
    assert report["meets_sla"] is False and report["why_not"]["mostly"] == "queue"
    assert report["burn_rate"] == 2.0
    now_s = 1000.0
    assert sla.report()["meets_sla"] is True  # that was long ago


def test_web_pages_may_not_call_unless_they_are_named(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), cors_origins=("https://good.example",)) as place:
            for origin, allowed in (("https://good.example", True), ("https://evil.example", False)):
                reply = await place.client.options(PATH, headers={"origin": origin})
                assert ("access-control-allow-origin" in reply.headers) is allowed
                assert ("x-request-id" in reply.headers.get("access-control-expose-headers", "")) is allowed
            asked = await place.ask(headers={"origin": "https://good.example"})
            assert asked.headers["access-control-allow-origin"] == "https://good.example"
            assert "x-process-time" in asked.headers

    run(main())


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[5]}', b'{"choices":[{}]}', b"[" * 5000, b"\xff"]
)
def test_an_answer_that_is_no_chat_completion_is_the_backends_failure(body: bytes) -> None:
    reply = WrappedReply(SimpleNamespace(), SimpleNamespace(history_dropped=0), ReplyFacts())  # type: ignore[arg-type]
    with pytest.raises(UpstreamFailed, match="not a chat completion"):
        reply.reply(body)
