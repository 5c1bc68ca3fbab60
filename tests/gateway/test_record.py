"""Every request leaves exactly one record: answered, cached, refused, failed, cancelled, cut off."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.running_gateway import ADMIN, CHAT, JSON, KEY, RunningGateway, Upstream, run, running_gateway, until


def the_record(place: RunningGateway) -> dict[str, Any]:
    (record,) = place.records()
    return record


@pytest.mark.parametrize(("trusted", "client"), [((), "127.0.0.1"), (("127.0.0.0/8",), "203.0.113.7")])
def test_the_callers_address(tmp_path: Path, trusted: tuple[str, ...], client: str) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), trusted_proxies=trusted) as place:
            # two lines of one header, as a second proxy may send them
            headers = [("x-forwarded-for", "1.2.3.4, 203.0.113.7"), ("x-forwarded-for", "127.0.0.1"),
                       ("forwarded", "for=6.6.6.6"), ("authorization", f"Bearer {KEY}")]  # fmt: skip
            body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
            assert (await place.client.post(CHAT, json=body, headers=headers)).status_code == 200
        assert the_record(place)["client"] == client

    run(main())


def test_an_answer(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            reply = await place.ask(system="x", temperature=0.5)
            assert reply.status_code == 200
            assert reply.json()["choices"][0]["message"]["content"] == "Phnom Penh."
            assert reply.headers["x-cache"] == "bypass"
        record = the_record(place)
        assert (record["status"], record["http_status"]) == ("ok", 200)
        assert record["user_input"] == "What is the capital?"
        assert record["output"] == "Phnom Penh."
        assert record["usage"]["total_tokens"] == 10
        assert record["request_id"] == reply.headers["x-request-id"]
        assert record["response_id"] == "chatcmpl-1"
        assert record["route"]["backend"] == "b0"
        assert record["key_id"].startswith("key-") and KEY not in str(record)

    run(main())


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_stream_passes_untouched_and_usage_is_known_anyway(tmp_path: Path, *, include_usage: bool) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream) as place:
            options = {"include_usage": True} if include_usage else None
            reply = await place.ask(stream=True, stream_options=options)
            direct = await httpx.AsyncClient().post(upstream.url + CHAT, json=upstream.requests[0]) \
                if include_usage else None  # fmt: skip
            assert reply.headers["content-type"].startswith("text/event-stream")
            assert reply.text.endswith("data: [DONE]\n\n")
            assert ('"usage"' in reply.text) is include_usage
            if direct is not None:
                assert reply.text == direct.text.replace("chatcmpl-2", "chatcmpl-1")
        record = the_record(place)
        assert (record["status"], record["output"]) == ("ok", "Phnom Penh.")
        assert record["usage"]["completion_tokens"] == 3
        assert record["latency_ms"]["ttft"] > 0

    run(main())


def test_a_cached_answer_names_the_one_it_repeats(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream) as place:
            first = await place.ask(temperature=0, stream=True)
            again = await place.ask(temperature=0, stream=True)
            assert (first.headers["x-cache"], again.headers["x-cache"]) == ("miss", "hit")
            assert again.text == first.text
            assert again.headers["content-type"] == first.headers["content-type"]
            assert len(upstream.requests) == 1
        computed, cached = place.records()
        assert (computed["status"], cached["status"]) == ("ok", "cached")
        assert cached["output"] == "Phnom Penh."
        assert cached["cache"] == {"state": "hit", "request_id": computed["request_id"]}

    run(main())


@pytest.mark.parametrize("key", ["", "wrong"])
def test_a_refused_key(tmp_path: Path, key: str) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream) as place:
            reply = await place.ask(key=key)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert not upstream.requests
        record = the_record(place)
        assert (record["status"], record["http_status"]) == ("refused", 401)
        assert record["error"]["code"] == "invalid_api_key"

    run(main())


def test_over_a_limit(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), requests_per_minute=1) as place:
            assert (await place.ask()).status_code == 200
            reply = await place.ask()
            assert reply.status_code == 429
            assert 1 <= int(reply.headers["retry-after"]) <= 60
        ok, refused = place.records()
        assert (ok["status"], refused["status"], refused["http_status"]) == ("ok", "refused", 429)
        assert refused["user_input"] == "What is the capital?"

    run(main())


@pytest.mark.parametrize(
    ("content", "status"), [(b"{", 400), (b"", 400), (b"[]", 400), (b"\xff{}", 400), (b"x" * 2000, 413)]
)
def test_a_bad_body(tmp_path: Path, content: bytes, status: int) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), max_body_bytes=1000) as place:
            reply = await place.client.post(CHAT, content=content, headers=JSON | {"authorization": f"Bearer {KEY}"})
            assert reply.status_code == status
        record = the_record(place)
        assert (record["status"], record["http_status"]) == ("refused", status)

    run(main())


def test_an_unknown_model(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            assert (await place.ask(model="missing")).status_code == 404
        assert the_record(place)["error"]["code"] == "model_not_found"

    run(main())


@pytest.mark.parametrize("status", [500, 400])
def test_a_backend_that_answers_with_an_error(tmp_path: Path, status: int) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.status = status
        async with running_gateway(tmp_path, upstream) as place:
            reply = await place.ask(stream=True)
            assert reply.status_code == status
            assert reply.json()["error"]["message"] == "broken on purpose"
        record = the_record(place)
        assert (record["status"], record["http_status"]) == ("failed" if status == 500 else "refused", status)

    run(main())


def test_a_backend_that_hangs(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.hang.clear()
        async with running_gateway(tmp_path, upstream, backend_timeout_s=0.2) as place:
            reply = await place.ask()
            assert reply.status_code == 504
            assert "nothing came for 0.2 s" in reply.json()["error"]["message"]
            await until(lambda: upstream.num_hangups, "the backend still works on it")
        assert the_record(place)["status"] == "failed"

    run(main())


def test_a_backend_that_breaks_off(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.break_after = 2
        async with running_gateway(tmp_path, upstream) as place:
            reply = await place.ask(stream=True)
            assert reply.status_code == 200
            assert "data: [DONE]" not in reply.text
            assert '"code":"upstream_failed"' in reply.text.split("\n\n")[-2]
        record = the_record(place)
        assert (record["status"], record["output"]) == ("failed", "Phnom Penh")

    run(main())


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_who_hangs_up(tmp_path: Path, *, stream: bool) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        if stream:
            upstream.pause_after = 2
        else:
            upstream.hang.clear()
        async with running_gateway(tmp_path, upstream) as place:
            asking = asyncio.create_task(_read_some(place, stream=stream))
            await until(lambda: upstream.requests, "it never came")
            if stream:
                await asking
            else:
                await asyncio.sleep(0.05)
                asking.cancel()
            await until(lambda: upstream.num_hangups, "the backend still works on it")
        record = the_record(place)
        assert record["status"] == "cancelled"
        assert (record["output"] or "") == ("Phnom Penh" if stream else "")
        assert record["error"]["message"] == "the caller hung up"

    run(main())


def _stream(place: RunningGateway, *, stream: bool = True) -> AbstractAsyncContextManager[httpx.Response]:
    body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
    return place.client.stream("POST", CHAT, json=body, headers={"authorization": f"Bearer {KEY}"})


async def _read_some(place: RunningGateway, *, stream: bool) -> None:
    """The first words, then hang up."""
    async with _stream(place, stream=stream) as reply:
        seen = ""
        async for piece in reply.aiter_text():
            seen += piece
            if " Penh" in seen:
                return


def test_a_gateway_that_is_stopped_in_the_middle(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.pause_after = 2
        async with running_gateway(tmp_path, upstream, drain_s=0.1) as place:
            async with _stream(place) as reply:
                pieces = reply.aiter_text()
                seen = ""
                while " Penh" not in seen:
                    seen += await anext(pieces)
                await place.gateway.stop()
                seen += "".join([piece async for piece in pieces])
            assert "the server is shutting down" in seen and "[DONE]" not in seen
            assert '"code":"shutting_down"' in seen
            record = the_record(place)
            assert (record["status"], record["output"]) == ("interrupted", "Phnom Penh")

    run(main())


def test_requests_that_ask_no_model_are_not_on_record(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m")) as place:
            for path in ("/v1/models", "/health", "/metrics", "/nothing"):
                await place.get(path, key=ADMIN)
        assert place.records() == []

    run(main())
