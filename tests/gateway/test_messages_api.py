"""Anthropic's Messages API through a gateway, with Anthropic's own client and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.gateway.running_gateway import KEY, RunningGateway, run, running_gateway
from tests.gateway.scripted_chat import ScriptedChat, call

PATH = "/v1/messages"
ASK = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "What is the capital?"}]}
WEATHER: Any = {
    "name": "get_weather", "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip


def client_of(place: RunningGateway, key: str = KEY) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=place.url, api_key=key, max_retries=0)


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    found = []
    for event in text.split("\n\n"):
        if event and not event.startswith(":"):
            kind, data = event.split("\n")
            found.append((kind.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(kind == body["type"] for kind, body in found)
    return found


def test_the_client_gets_a_message(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ScriptedChat("m")
        async with running_gateway(tmp_path, backend) as place, client_of(place) as client:
            message = await client.messages.create(**ASK, system=[{"type": "text", "text": "Be brief."}],
                                                   stop_sequences=["END"], metadata={"user_id": "u1"})  # fmt: skip
            assert (message.role, message.type, message.stop_reason, message.model) == (
                "assistant",
                "message",
                "end_turn",
                "m",
            )
            assert [block.type for block in message.content] == ["text"] and message.content[0].text == "Phnom Penh."
            usage = message.usage
            assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (4, 16, 6)
            sent = backend.requests[-1]
            assert sent["messages"] == [{"role": "system", "content": "Be brief."}, ASK["messages"][0]]
            assert (sent["max_tokens"], sent["stop"], sent["model"]) == (50, ["END"], "m")
            backend.stop_reason = "END"
            stopped = await _create(place, temperature=1)
            assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "END")
            assert (
                await client.messages.count_tokens(model="m", messages=ASK["messages"], tools=[WEATHER])
            ).input_tokens == 11
            assert (
                backend.paths[-1] == "/tokenize"
                and backend.requests[-1]["tools"][0]["function"]["name"] == "get_weather"
            )
        assert [record["endpoint"] for record in place.records()] == [PATH, PATH, f"{PATH}/count_tokens"]
        assert place.records()[0]["output"] == "Phnom Penh." and place.records()[0]["status"] == "ok"

    run(main())


def test_counting_tokens_costs_no_time_of_a_device_and_says_nothing_about_speed(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, ScriptedChat("m"), price_per_hour=3600.0) as place:
            body = {"model": "m", "messages": ASK["messages"]}
            for path in ("/tokenize", f"{PATH}/count_tokens"):
                reply = await place.client.post(path, json=body, headers={"x-api-key": KEY})
                assert reply.status_code == 200, reply.text
                assert place.gateway.observed is not None
                (seen,) = place.gateway.observed.request_log.newest(1)
                assert (seen.path, seen.device_s, seen.cost) == (path, 0.0, 0.0)
            assert (await place.get("/health")).json()["requests"] == 0
            assert 'tonle:sla_requests_total{target="e2e"} 0.0' in (await place.get("/metrics")).text

    run(main())


async def _create(place: RunningGateway, **fields: Any) -> dict[str, Any]:
    reply = await place.client.post(PATH, json={**ASK, **fields}, headers={"x-api-key": KEY})
    assert reply.status_code == 200, reply.text
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    return dict(reply.json())


def _without_id(message: anthropic.types.Message) -> str:
    """Of the message; the signature of its thoughts is that, too."""
    return message.to_json(exclude_none=True, indent=None).replace(message.id, "")


def test_a_streamed_message_is_the_whole_one_in_events(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ScriptedChat("m")
        backend.message = {
            "role": "assistant", "content": "ភ្នំពេញ is it.", "reasoning_content": "Let me think.",
            "tool_calls": [call("get_weather", '{"city": "Phnom Penh"}'), call("get_weather", '{"city": "Paris"}', call_id="b")],
        }  # fmt: skip
        backend.finish_reason = "tool_calls"
        async with running_gateway(tmp_path, backend) as place, client_of(place) as client:
            whole = await client.messages.create(**ASK, tools=[WEATHER])
            async with client.messages.stream(**ASK, tools=[WEATHER]) as stream:
                streamed = await stream.get_final_message()
            assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
            assert whole.content[2].input == {"city": "Phnom Penh"} and whole.stop_reason == "tool_use"
            assert _without_id(streamed) == _without_id(whole) and streamed.id != whole.id
            reply = await place.client.post(PATH, json={**ASK, "stream": True}, headers={"x-api-key": KEY})
            events = events_of(reply.text)
            kinds = [kind for kind, _ in events if kind != "content_block_delta"]
            block = ["content_block_start", "content_block_stop"]
            assert kinds == ["message_start", *block * 4, "message_delta", "message_stop"]
            deltas = {body["delta"]["type"] for kind, body in events if kind == "content_block_delta"}
            assert deltas == {"thinking_delta", "signature_delta", "text_delta", "input_json_delta"}
            assert reply.headers["content-type"].startswith("text/event-stream") and "[DONE]" not in reply.text

    run(main())


def test_a_loop_of_tools_and_thinking_sends_the_chat_that_a_backend_expects(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ScriptedChat("m")
        async with running_gateway(tmp_path, backend) as place, client_of(place) as client:
            backend.message = {
                "content": None,
                "reasoning": "Hm.",
                "tool_calls": [call("get_weather", '{"city": "Paris"}')],
            }
            messages: list[Any] = list(ASK["messages"])
            first = await client.messages.create(
                model="m", max_tokens=2000, messages=messages, tools=[WEATHER],
                tool_choice={"type": "any", "disable_parallel_tool_use": True},
                thinking={"type": "enabled", "budget_tokens": 1024},
            )  # fmt: skip
            sent = backend.requests[-1]
            assert (sent["tool_choice"], sent["parallel_tool_calls"], sent["thinking_token_budget"]) == (
                "required",
                False,
                1024,
            )
            assert sent["chat_template_kwargs"] == {"enable_thinking": True}
            assert first.stop_reason == "tool_use"  # although the backend says stop
            messages += [
                {"role": "assistant", "content": first.content},
                {"role": "user", "content": [
                    {"type": "text", "text": "Here."},
                    {"type": "tool_result", "tool_use_id": "call_a", "is_error": True,
                     "content": [{"type": "text", "text": "no net"}]},
                ]},
            ]  # fmt: skip
            backend.message = {"content": "Sorry."}
            last = await client.messages.create(model="m", max_tokens=9, messages=messages, tools=[WEATHER],
                                                tool_choice={"type": "tool", "name": "get_weather"})  # fmt: skip
            assert last.content[0].text == "Sorry."
            assistant, result, user = backend.requests[-1]["messages"][1:]
            assert assistant["reasoning_content"] == "Hm." and assistant["tool_calls"][0]["id"] == "call_a"
            assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}
            assert result == {"role": "tool", "tool_call_id": "call_a", "content": "Error: no net"}
            assert user == {"role": "user", "content": "Here."}
            assert backend.requests[-1]["tool_choice"] == {"type": "function", "function": {"name": "get_weather"}}

    run(main())


def test_every_error_has_anthropics_shape(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ScriptedChat("m")
        async with running_gateway(tmp_path, backend, max_body_bytes=2000) as place:
            post = place.client.post
            large = {**ASK, "system": "x" * 3000}
            cases = [
                (await post(PATH, json=ASK), 401, "authentication_error"),
                (await post(PATH, json=ASK, headers={"x-api-key": "wrong"}), 401, "authentication_error"),
                (await post(PATH, json=large, headers={"x-api-key": KEY}), 413, "request_too_large"),
                (await post(PATH, content=b"{", headers={"x-api-key": KEY, "content-type": "application/json"}), 400,
                 "invalid_request_error"),
                (await post(PATH, content=b"x", headers={"x-api-key": KEY, "content-type": "text/plain"}), 415,
                 "invalid_request_error"),
                (await post(PATH, json={**ASK, "model": "claude"}, headers={"x-api-key": KEY}), 404, "not_found_error"),
                (await post(f"{PATH}/batches", json={}, headers={"x-api-key": KEY}), 404, "not_found_error"),
                (await place.client.get(PATH, headers={"x-api-key": KEY}), 405, "invalid_request_error"),
                (await post(PATH, json={**ASK, "max_tokens": None}, headers={"x-api-key": KEY}), 400, "invalid_request_error"),
            ]  # fmt: skip
            backend.status = 503
            cases.append((await post(PATH, json=ASK, headers={"x-api-key": KEY}), 503, "overloaded_error"))
            for reply, status, kind in cases:
                body = reply.json()
                assert (reply.status_code, body["type"], body["error"]["type"]) == (status, "error", kind), reply.text
                assert body["error"]["message"] and body["request_id"] == reply.headers["request-id"]
            assert cases[-2][0].json()["error"]["message"] == "max_tokens must be an integer, not null"
            async with client_of(place, "wrong") as client:
                with pytest.raises(anthropic.AuthenticationError):
                    await client.messages.create(**ASK)
        assert {record["endpoint"] for record in place.records()} == {PATH}

    run(main())


def test_a_stream_that_fails_ends_with_an_error_event(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ScriptedChat("m")
        begun = b'data: {"id": "x", "model": "m", "choices": [{"index": 0, "delta": {"content": "Phnom"}}]}\n\n'
        named = b'data: {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}}]}\n\n'
        async with running_gateway(tmp_path, backend, retries=0) as place, client_of(place) as client:
            for rest, said in (
                (b"", "broke off"), (b'data: {"error": {"message": "out of memory"}}\n\n', "out of memory"),
                (named, "without a name"), (b"data: <html>\n\n", "broke off"),
            ):  # fmt: skip
                backend.raw_stream = begun + rest
                with pytest.raises(anthropic.APIStatusError, match=said):
                    async with client.messages.stream(**ASK) as stream:
                        await stream.get_final_message()
        assert [record["status"] for record in place.records()] == ["failed"] * 4

    run(main())


def test_answers_come_from_the_cache_and_unknown_fields_are_told(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ScriptedChat("m")
        async with running_gateway(tmp_path, backend) as place:
            first = await _create(place, temperature=0, speed="fast", cache_control={"type": "ephemeral"})
            assert [warning["param"] for warning in first["warnings"]] == ["speed"]
            again = await _create(place, temperature=0, speed="fast")
            assert again == first | {"id": again["id"]} and len(backend.requests) == 1
            chat = await place.ask("What is the capital?", temperature=0.0, max_tokens=50)
            assert chat.headers["x-cache"] == "hit"  # the same chat request
            reply = await place.client.post(PATH, json={**ASK, "temperature": 0, "stream": True, "speed": "fast"},
                                            headers={"x-api-key": KEY})  # fmt: skip
            start = events_of(reply.text)[0][1]["message"]
            assert start["warnings"] == first["warnings"] and reply.headers["x-tonle-warnings"] == "1; speed"

    run(main())
