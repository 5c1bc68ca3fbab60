"""An agent's loop through the gateway is one chain of requests in the trail, and never reaches into another tenant's."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.gateway.running_gateway import KEY, RunningGateway, Upstream, run, running_gateway
from tonle.audit.index import Index, Query, Row
from tonle.audit.verify import verify
from tonle.edge.exchange import Exchange

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
OTHER = "another-key-for-tests"


class ToolUpstream(Upstream):
    """Calls a tool until it has three results, then answers with words."""

    def __init__(self, *, prefix: str = "call_abcdefgh") -> None:
        super().__init__("m")
        self.prefix = prefix
        self.may_end = asyncio.Event()  # streams; what follows their last event waits for it
        self.may_end.set()

    def _message(self, body: dict[str, Any]) -> dict[str, Any]:
        num_results = sum(message["role"] == "tool" for message in body["messages"])
        if "tools" not in body or num_results >= 3:
            return {"role": "assistant", "content": "It rains."}
        function = {"name": "weather", "arguments": json.dumps({"day": num_results})}
        call = {"id": f"{self.prefix}{len(self.requests)}", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    def _whole(self, body: dict[str, Any]) -> dict[str, Any]:
        reply = super()._whole(body)
        reply["choices"][0]["message"] = self._message(body)
        return reply

    async def _stream(self, exchange: Exchange, body: dict[str, Any]) -> None:
        message = self._message(body)
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": message["content"]}]
        for index, call in enumerate(message.get("tool_calls") or ()):
            function = call["function"]
            deltas.append({"tool_calls": [{**call, "index": index, "function": {**function, "arguments": ""}}]})
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]})
        exchange.start(content_type="text/event-stream")
        for delta in deltas:
            chunk = {"id": "c", "model": "m", "choices": [{"index": 0, "delta": delta}]}
            exchange.write(b"data: %b\n\n" % msgspec.json.encode(chunk))
            if self.break_after is not None and "tool_calls" in delta:
                await asyncio.sleep(0.01)  # so that it leaves before the connection is cut
                exchange._line.abort()  # type: ignore[attr-defined]
                return
        exchange.write(b"data: [DONE]\n\n")
        await self.may_end.wait()
        exchange.end()


def message_of(reply: httpx.Response) -> dict[str, Any]:
    """The assistant's message, whole or put together from a stream."""
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return dict(reply.json()["choices"][0]["message"])
    message: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": []}
    for line in reply.text.split("\n\n"):
        if not line.startswith("data: {"):
            continue
        delta = json.loads(line[6:])["choices"][0]["delta"]
        message["content"] = delta.get("content") or message["content"]
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                message["tool_calls"].append(call)
            else:
                message["tool_calls"][-1]["function"]["arguments"] += call["function"]["arguments"]
    return message


async def step(place: RunningGateway, messages: list[dict[str, Any]], **fields: Any) -> httpx.Response:
    """Ask once, and append what the assistant said and what its tool returned."""
    reply = await place.ask(messages=messages, tools=[TOOL], **fields)
    assert reply.status_code == 200, reply.text
    message = message_of(reply)
    messages.append(message)
    calls = message.get("tool_calls") or ()
    messages += [{"role": "tool", "tool_call_id": call["id"], "content": "32 degrees"} for call in calls]
    return reply


def beginning(text: str = "Weather?") -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def chain(folder: Path, name: str) -> list[Row]:
    with Index(folder) as index:
        return list(index.find(Query(chain=name)))


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_three_calls_is_one_chain(tmp_path: Path, *, stream: bool) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, ToolUpstream()) as place:
            messages = beginning()
            first = await step(place, messages, stream=stream)
            await place.ask("something else")
            replies = [first, *[await step(place, messages, stream=stream) for _ in range(3)]]
            assert len({reply.headers["x-tonle-chain"] for reply in replies}) == 1
            assert messages[-1]["content"] == "It rains."
        one, between, *others = place.records()
        assert [one["chain_id"], between["chain_id"]] == [one["id"], between["id"]]
        assert (one["previous_id"], between["previous_id"]) == (None, None)
        assert {record["chain_id"] for record in others} == {one["id"]} == {first.headers["x-tonle-chain"]}
        assert [record["previous_id"] for record in others] == [record["id"] for record in [one, *others[:-1]]]
        expected = [one["id"], *[record["id"] for record in others]]
        for name in (one["id"], others[1]["request_id"], others[-1]["id"]):  # any id of any of them will do
            assert [row.id for row in chain(place.audit_dir, name)] == expected
        assert [row.id for row in chain(place.audit_dir, between["id"])] == [between["id"]]
        assert verify(place.audit_dir).ok

    run(main())


def test_the_next_request_may_come_before_the_stream_is_closed(tmp_path: Path) -> None:
    """Clients go on at [DONE]; the backend's connection, and so the record, may be closed later."""

    async def main() -> None:
        upstream = ToolUpstream()
        async with running_gateway(tmp_path, upstream) as place:
            messages = beginning()
            await step(place, messages, stream=True)
            upstream.may_end.clear()
            body = {"model": "m", "messages": messages, "tools": [TOOL], "stream": True}
            headers = {"authorization": f"Bearer {KEY}"}
            async with place.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as second:
                lines = []
                async for line in second.aiter_lines():
                    lines.append(line)
                    if line == "data: [DONE]":
                        break
                message = message_of(httpx.Response(200, headers=second.headers, text="\n".join(lines)))
                [call] = message["tool_calls"]
                messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "32 degrees"}]
                await step(place, messages)
                upstream.may_end.set()
                await second.aclose()
        records = {record["request_id"]: record for record in place.records()}
        second_record = records[second.headers["x-request-id"]]
        [third] = [record for record in records.values() if record["previous_id"] == second_record["id"]]
        assert third["chain_id"] == second_record["chain_id"] != second_record["id"]

    run(main())


def test_after_a_restart_the_chain_is_found_in_the_records(tmp_path: Path) -> None:
    async def main() -> None:
        messages = beginning()
        async with running_gateway(tmp_path, ToolUpstream()) as place:
            await step(place, messages)
            await step(place, messages)
        upstream = ToolUpstream(prefix="call_restarted")
        async with running_gateway(tmp_path, upstream) as place:
            await step(place, messages)
            await step(place, messages)
        first, second, third, fourth = place.records()
        assert (third["previous_id"], third["chain_id"]) == (None, third["id"])  # the gateway had forgotten
        assert (fourth["previous_id"], fourth["chain_id"]) == (third["id"], third["id"])
        for name in (first["id"], third["id"], fourth["id"]):
            found = chain(place.audit_dir, name)
            assert [row.id for row in found] == [record["id"] for record in (first, second, third, fourth)]
            assert {row.chain_id for row in found} == {first["id"]}
            assert [row.previous_id for row in found] == [None, first["id"], second["id"], third["id"]]
        assert verify(place.audit_dir).ok

    run(main())


@pytest.mark.parametrize("restart", [False, True])
def test_ids_of_another_tenant_link_nothing(tmp_path: Path, *, restart: bool) -> None:
    async def main() -> None:
        messages = beginning()
        async with running_gateway(tmp_path, ToolUpstream(), api_key=(KEY, OTHER)) as place:
            await step(place, messages)
            if not restart:
                await step(place, messages, key=OTHER)
        if restart:
            async with running_gateway(tmp_path, ToolUpstream(), api_key=(KEY, OTHER)) as place:
                await step(place, messages, key=OTHER)
        mine, theirs = place.records()
        assert mine["key_id"] != theirs["key_id"]
        assert (theirs["previous_id"], theirs["chain_id"]) == (None, theirs["id"])
        assert [row.id for row in chain(place.audit_dir, mine["id"])] == [mine["id"]]

    run(main())


def test_an_answer_from_the_cache_continues_the_loop_that_got_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, ToolUpstream()) as place:
            for _ in range(2):
                messages = beginning()
                await step(place, messages, temperature=0)
                await step(place, messages, temperature=0)
        one, two, cached, cached_too = place.records()
        assert [record["status"] for record in (one, two, cached, cached_too)] == ["ok", "ok", "cached", "cached"]
        assert (two["previous_id"], cached["previous_id"], cached_too["previous_id"]) == (one["id"], None, cached["id"])

    run(main())


@pytest.mark.parametrize("prefix", ["call_", "functions.weather:"])
def test_ids_that_any_answer_may_have_link_nothing(tmp_path: Path, prefix: str) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, ToolUpstream(prefix=prefix)) as place:
            messages = beginning()
            await step(place, messages)
            await step(place, messages)
        assert [record["previous_id"] for record in place.records()] == [None, None]
        assert len(chain(place.audit_dir, place.records()[0]["id"])) == 1

    run(main())


def test_a_session_named_by_its_caller_is_a_chain(tmp_path: Path) -> None:
    async def main() -> None:
        session = {"x-session-id": "dara@example.org"}
        async with running_gateway(tmp_path, Upstream("m"), api_key=(KEY, OTHER)) as place:
            first = await place.ask("one", headers=session)
            await place.ask("two", headers=session)
            await place.ask("three", headers=session, key=OTHER)
        async with running_gateway(tmp_path, Upstream("m"), api_key=(KEY, OTHER)) as place:
            await place.ask("four", headers=session)
        one, two, three, four = place.records()
        assert one["chain_id"] == two["chain_id"] == four["chain_id"] == first.headers["x-tonle-chain"]
        assert three["chain_id"] != one["chain_id"]
        assert (two["previous_id"], three["previous_id"]) == (one["id"], None)
        found = chain(place.audit_dir, first.headers["x-tonle-chain"])
        assert [row.id for row in found] == [one["id"], two["id"], four["id"]]
        assert "dara" not in json.dumps(place.records())

    run(main())


def test_a_stream_that_broke_off_in_a_call_is_not_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        upstreams = [ToolUpstream(), ToolUpstream()]
        for upstream in upstreams:
            upstream.break_after = 1
        async with running_gateway(tmp_path, *upstreams, retries=3) as place:
            reply = await place.ask(tools=[TOOL], stream=True)
            assert "call_abcdefgh" in reply.text and "broke off" in reply.text
            assert sum(len(upstream.requests) for upstream in upstreams) == 1
        [record] = place.records()
        assert record["status"] == "failed"
        assert record["choices"][0]["tool_calls"][0]["function"] == {"name": "weather", "arguments": ""}

    run(main())


def test_an_answer_for_one_schema_is_not_given_for_another(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        async with running_gateway(tmp_path, upstream) as place:
            for properties in ({"a": {}, "b": {}}, {"b": {}, "a": {}}, {"a": {}, "b": {}}):
                form = {"type": "json_schema", "json_schema": {"schema": {"properties": properties}}}
                await place.ask(temperature=0, response_format=form)
            for choice in ("auto", "required", "auto"):
                await place.ask(temperature=0, tools=[TOOL], tool_choice=choice)
        assert [record["status"] for record in place.records()] == ["ok", "ok", "cached"] * 2

    run(main())


def test_without_a_trail_there_is_no_chain(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, Upstream("m"), audit_dir=None) as place:
            assert "x-tonle-chain" not in (await place.ask()).headers
        upstream = Upstream("m")
        upstream.extra_headers = [("x-tonle-chain", "theirs")]  # a server with a trail of its own
        async with running_gateway(tmp_path, upstream, audit_dir=None) as place:
            assert (await place.ask()).headers["x-tonle-chain"] == "theirs"

    run(main())


def test_of_two_trails_the_caller_is_told_the_chain_in_the_nearer(tmp_path: Path) -> None:
    async def main() -> None:
        upstream = Upstream("m")
        upstream.extra_headers = [("x-tonle-chain", "theirs")]
        async with running_gateway(tmp_path, upstream) as place:
            reply = await place.ask()
        assert reply.headers.get_list("x-tonle-chain") == [place.records()[0]["id"]]

    run(main())
