"""Priority needs a right: without it, no spelling of it reaches a backend, in any field."""

from __future__ import annotations

import http.client
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes.front import FakeFront
from tests.gateway.running_gateway import ADMIN, KEY, Upstream, running_gateway
from tests.http.serving import serving
from tonle.edge.listening import run
from tonle.engine.request import RequestPriority

# 0 to 3 as Tonle reads them, -5 as vLLM would, and what only a change of case makes a word of the table.
SPELLINGS: list[Any] = [
    0, 1, -5, "critical", "CRITICAL", "high", "High", "crıtıcal", "CRİTİCAL", "hıgh", "0", "-5", 0.0, 1e0, True, False,
    [0], {"value": 0}, "ﬀ",
]  # fmt: skip
ABOVE_NORMAL = (None, 2, 3)  # what a backend may get from a key without the right


@pytest.mark.parametrize("owned_by", ["tonle", "vllm", "openai"])
def test_without_the_right_no_spelling_reaches_a_backend(tmp_path: Path, owned_by: str) -> None:
    async def main() -> None:
        upstream = Upstream("m", owned_by=owned_by)
        async with running_gateway(tmp_path, upstream) as place:
            for asked in SPELLINGS:
                reply = await place.ask(priority=asked)
                assert reply.status_code == 200 and "priority" in reply.headers["x-tonle-warnings"], asked
                assert (await place.ask(priority=asked, headers={"x-tonle-strict": "1"})).status_code == 400
            sent = [body.get("priority") for body in upstream.requests]
            assert len(sent) == len(SPELLINGS)
            assert all(priority in ABOVE_NORMAL and priority is not True for priority in sent), sent
            upstream.requests.clear()
            reply = await place.ask(vllm_xargs={"priority": -5, "kept": 1}, service_tier="priority")
            assert reply.headers["x-tonle-warnings"] == "2; vllm_xargs.priority, service_tier"
            (body,) = upstream.requests
            assert body["vllm_xargs"] == {"kept": 1} and "service_tier" not in body

    run(main())


def test_a_field_named_twice_is_read_as_the_backend_would_read_it(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m", owned_by="tonle")
        async with running_gateway(tmp_path, upstream) as place:
            for pair in (b'"priority": "low", "priority": 0', b'"priority": 0, "priority": null'):
                raw = b'{"model": "m", "messages": [{"role": "user", "content": "x"}], %b}' % pair
                headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
                assert (
                    await place.client.post("/v1/chat/completions", content=raw, headers=headers)
                ).status_code == 200
        assert [body.get("priority") for body in upstream.requests] == [2, None]

    run(main())


def test_with_the_right_it_is_passed_on_to_replicas_as_it_was_asked_for(tmp_path: Path) -> None:
    async def main() -> None:
        ours, other = Upstream("m", owned_by="tonle"), Upstream("v", owned_by="vllm")
        async with running_gateway(tmp_path, ours, other) as place:
            for asked in ("critical", 0, "low"):
                assert "x-tonle-warnings" not in (await place.ask(priority=asked, key=ADMIN)).headers
            assert (await place.ask(model="v", priority=0, key=ADMIN)).status_code == 200
        assert [body["priority"] for body in ours.requests] == ["critical", 0, "low"]
        assert "priority" not in other.requests[0]  # vLLM refuses it, unless it schedules by priority

    run(main())


def _ask(url: str, key: str, priority: Any) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    body = msgspec.json.encode({"messages": [{"role": "user", "content": "hi"}], "priority": priority})
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    connection.request("POST", "/v1/chat/completions", body, headers)
    reply = connection.getresponse()
    answer: dict[str, Any] = msgspec.json.decode(reply.read())
    connection.close()
    return reply.status, answer


def test_the_engine_in_this_process_gets_no_more_than_the_key_may_ask_for() -> None:
    front = FakeFront()
    with serving(front, api_key=("plain",), admin_key=("boss",)) as url:
        for asked in SPELLINGS:
            status, answer = _ask(url, "plain", asked)
            assert status == 200 and answer["warnings"][0]["param"] == "priority", asked
        assert {priority for _, priority in front.submitted} == {RequestPriority.NORMAL}
        front.submitted.clear()
        assert _ask(url, "boss", "critical")[0] == 200 and _ask(url, "boss", "HIGH")[0] == 200
        assert [priority for _, priority in front.submitted] == [RequestPriority.CRITICAL, RequestPriority.HIGH]
        for wrong in ("crıtıcal", "High", -1, 4):
            status, answer = _ask(url, "boss", wrong)
            assert (status, answer["error"]["param"]) == (400, "priority")
            assert "critical, high, normal, low or 0 to 3" in answer["error"]["message"]
