"""Ollama's API through a gateway, with Ollama's own client and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ollama
import pytest

from tests.gateway.running_gateway import KEY, RunningGateway, run, running_gateway
from tests.gateway.scripted_chat import ScriptedChat, call

ASK: Any = {"model": "m", "messages": [{"role": "user", "content": "What is the capital?"}]}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
NAMED = {"authorization": f"Bearer {KEY}"}


def client_of(place: RunningGateway) -> ollama.AsyncClient:
    return ollama.AsyncClient(place.url, headers=NAMED)


def test_chat_generate_and_embed_with_the_client(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ScriptedChat("m")
        async with running_gateway(tmp_path, backend) as place, client_of(place) as client:
            backend.extra_headers = [("x-prefill-time", "0.25"), ("x-decode-time", "0.5")]
            reply = await client.chat(**(ASK | {"model": "m:latest"}), format=SCHEMA, think=True,
                                      options={"num_predict": 9, "temperature": 0.5, "stop": ["END"],
                                               "repeat_penalty": 1.1})  # fmt: skip
            assert (reply.message.content, reply.done, reply.done_reason, reply.model) == (
                "Phnom Penh.",
                True,
                "stop",
                "m:latest",
            )
            assert (reply.prompt_eval_count, reply.eval_count, reply.load_duration) == (20, 6, 0)
            assert (reply.prompt_eval_duration, reply.eval_duration) == (250_000_000, 500_000_000)
            assert reply.total_duration and reply.created_at
            sent = backend.requests[-1]
            assert (sent["model"], sent["max_tokens"], sent["temperature"], sent["stop"]) == ("m", 9, 0.5, ["END"])
            assert sent["repetition_penalty"] == 1.1 and sent["response_format"]["json_schema"]["schema"] == SCHEMA
            assert sent["chat_template_kwargs"] == {"enable_thinking": True}
            one = await client.generate("m", "Where?", system="Be brief.", format="json", think="low")
            assert one.response == "Phnom Penh." and backend.requests[-1]["response_format"] == {"type": "json_object"}
            assert [message["role"] for message in backend.requests[-1]["messages"]] == ["system", "user"]
            assert backend.requests[-1]["reasoning_effort"] == "low"
            raw = await client.generate("m", "The capital is", raw=True)
            assert raw.response == "Phnom Penh." and backend.paths[-1] == "/v1/completions"
            assert backend.requests[-1]["prompt"] == "The capital is" and backend.requests[-1]["max_tokens"] == 128
            assert (await client.embed("m", ["a", "b"])).embeddings == [[0.0, 0.5], [1.0, 0.5]]
            assert (await client.embeddings("m", "a")).embedding == [0.0, 0.5]
            loaded = await client.generate("m")
            assert (loaded.response, loaded.done_reason, backend.paths[-1]) == ("", "load", "/tokenize")
        records = place.records()
        assert [record["endpoint"] for record in records] == [
            "/api/chat", "/api/generate", "/api/generate", "/api/embed", "/api/embeddings", "/api/generate",
        ]  # fmt: skip
        assert records[0]["output"] == "Phnom Penh." and all(record["status"] == "ok" for record in records)

    run(main())


def test_a_streamed_answer_is_the_whole_one_in_lines(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ScriptedChat("m")
        backend.message = {
            "role": "assistant", "content": "ភ្នំពេញ is it.", "reasoning_content": "Let me think.",
            "tool_calls": [call("get_weather", '{"city": "Phnom Penh"}'), call("now", "", call_id="b")],
        }  # fmt: skip
        backend.finish_reason = "tool_calls"
        async with running_gateway(tmp_path, backend) as place, client_of(place) as client:
            whole = await client.chat(**ASK, tools=[TOOL])
            parts = [part async for part in await client.chat(**ASK, tools=[TOOL], stream=True)]
            assert "".join(part.message.content or "" for part in parts) == whole.message.content == "ភ្នំពេញ is it."
            assert "".join(part.message.thinking or "" for part in parts) == whole.message.thinking == "Let me think."
            calls = [each for part in parts for each in part.message.tool_calls or ()]
            assert calls == whole.message.tool_calls
            assert [(each.function.name, each.function.arguments) for each in calls] == [
                ("get_weather", {"city": "Phnom Penh"}), ("now", {})]  # fmt: skip
            assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
            assert (parts[-1].eval_count, parts[-1].done_reason) == (6, "stop")
            plain = await place.client.post("/api/chat", json=ASK, headers=NAMED)  # a stream by default
            assert plain.headers["content-type"] == "application/x-ndjson"
            assert json.loads(plain.text.splitlines()[-1])["done"] is True
            backend.message, backend.finish_reason = {"content": "one two"}, "length"
            for raw in (False, True):
                texts = [part async for part in await client.generate("m", "Count:", stream=True, raw=raw)]
                assert "".join(part.response or "" for part in texts) == "one two" and texts[-1].done_reason == "length"

    run(main())


def test_results_find_their_calls(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ScriptedChat("m")
        async with running_gateway(tmp_path, backend) as place, client_of(place) as client:
            calls = [{"function": {"name": name, "arguments": {"x": 1}}} for name in ("first", "second", "second")]
            messages = [
                *ASK["messages"], {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": calls},
                {"role": "tool", "content": "2a", "tool_name": "second"}, {"role": "tool", "content": "1"},
                {"role": "tool", "content": "2b", "tool_name": "second"},
            ]  # fmt: skip
            await client.chat(model="m", messages=messages)
            _, assistant, *results = backend.requests[-1]["messages"]
            ids = [each["id"] for each in assistant["tool_calls"]]
            assert len(set(ids)) == 3 and assistant["reasoning_content"] == "Hm."
            assert [each["tool_call_id"] for each in results] == [ids[1], ids[0], ids[2]]

    run(main())


def test_pages_of_models(tmp_path: Path) -> None:
    async def main() -> None:
        async with running_gateway(tmp_path, ScriptedChat("m", "other")) as place, client_of(place) as client:
            assert [model.model for model in (await client.list()).models] == ["m", "other"]
            assert [model.name for model in (await client.ps()).models] == ["m", "other"]
            shown = await client.show("m:latest")
            assert shown.capabilities == ["completion", "tools"] and shown.modelinfo is not None
            assert shown.modelinfo["general.architecture"] == "transformer"
            assert (await place.client.get("/api/version")).json()["version"]
            assert (await place.client.get("/")).text == "Ollama is running"
            assert (await place.client.head("/")).status_code == 200
            assert "Tonle" in (await place.client.get("/", headers={"accept": "text/html"})).text
            with pytest.raises(ollama.ResponseError, match="no model 'x'") as unknown:
                await client.show("x")
            assert unknown.value.status_code == 404
            for path in ("/api/pull", "/api/push", "/api/create", "/api/copy", "/api/blobs/sha256:ab"):
                refused = await place.client.post(path, json={"model": "m"}, headers=NAMED)
                assert refused.status_code == 501 and "does not download" in refused.json()["error"]
            with pytest.raises(ollama.ResponseError, match="does not download"):
                await client.delete("m")
            assert (await place.client.get("/api/tags")).json()["error"].startswith("an API key is required")

    run(main())


def test_every_error_has_ollamas_shape(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ScriptedChat("m")
        async with running_gateway(tmp_path, backend, retries=0) as place, client_of(place) as client:
            images = [{"role": "user", "content": "?", "images": ["aGk="]}]
            cases: list[tuple[str, dict[str, Any], int, str]] = [
                ("/api/chat", {"model": "x", "messages": ASK["messages"]}, 404, "'x'"),
                ("/api/chat", {"messages": [1]}, 400, "messages"),
                ("/api/chat", {"model": "m", "messages": images}, 400, "text only"),
                ("/api/chat", {**ASK, "format": "yaml"}, 400, "JSON schema"),
                ("/api/chat", {**ASK, "options": {"num_predict": 0}}, 400, "num_predict"),
                ("/api/generate", {"model": "m", "prompt": "a", "suffix": "b"}, 400, "fill in the middle"),
                ("/api/generate", {"model": "m", "prompt": "a", "template": "b"}, 400, "template"),
                ("/api/generate", {"model": "m", "prompt": "a", "context": [1]}, 400, "/api/chat"),
                ("/api/generate", {"model": "m", "prompt": "a", "raw": True, "logprobs": True}, 400, "raw"),
                ("/api/nothing", {}, 404, "nothing at"),
                ("/api/embed", {"model": "m"}, 400, "input is missing"),
            ]
            for path, body, status, said in cases:
                reply = await place.client.post(path, json=body, headers=NAMED)
                assert (reply.status_code, list(reply.json())) == (status, ["error"]), reply.text
                assert said in reply.json()["error"], reply.text
            ours = await place.client.post("/api/v1/inference", json={}, headers=NAMED)
            assert ours.json()["error"]["message"] == "user_input is missing"
            begun = b'data: {"choices": [{"index": 0, "delta": {"content": "Phnom"}}]}\n\n'
            cut = b'{"index": 0, "function": {"name": "f", "arguments": "{"}}'
            half = b'data: {"choices": [{"delta": {"tool_calls": [%b]}}]}\n\n' % cut
            ended = b'data: {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}\n\ndata: [DONE]\n\n'
            for rest, said in ((b"", "broke off"), (b'data: {"error": {"message": "no memory"}}\n\n', "no memory"),
                               (half + ended, "not a JSON object")):  # fmt: skip
                backend.raw_stream = begun + rest
                with pytest.raises(ollama.ResponseError, match=said):
                    [part async for part in await client.chat(**ASK, stream=True)]
        assert [record["status"] for record in place.records()][-3:] == ["failed"] * 3

    run(main())


def test_options_without_effect_are_told(tmp_path: Path) -> None:
    async def main() -> None:
        backend = ScriptedChat("m")
        async with running_gateway(tmp_path, backend) as place:
            body = {**ASK, "stream": False, "keep_alive": "5m", "options": {"num_ctx": 4096, "mirostat": 1, "top_a": 2}}
            reply = await place.client.post("/api/chat", json=body, headers=NAMED)
            assert {each["param"] for each in reply.json()["warnings"]} == {
                "options.num_ctx", "options.mirostat", "options.top_a"}  # fmt: skip
            assert set(backend.requests[-1]) == {"model", "messages"}

    run(main())
