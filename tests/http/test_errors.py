"""What goes wrong is said in OpenAI's shape, with the field and the reason; nothing wrong reaches the engine."""

from __future__ import annotations

import asyncio
import json
import socket
import time
import urllib.error
import urllib.request
from typing import Any

import httpx
import msgspec
import pytest

from tests.fakes.front import FakeFront
from tests.http.serving import events, serving
from tonle.edge.buffered_reply import BufferedReply
from tonle.errors import CapacityError, ConfigError, ModelError
from tonle.replica.dispatch import ReplicaTransport
from tonle.replica.replica import Replica, ReplicaOptions

JSON = {"content-type": "application/json"}
PATH = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}


def called(arguments: str) -> dict[str, Any]:
    """A chat in which an assistant called a tool."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "1"}]}


def refused(reply: httpx.Response, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json" and reply.headers["x-request-id"]
    body = reply.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is empty; send a JSON object"),
        (b"{", "the body is not valid JSON: it ends too early (byte 1)"),
        (b'{"messages": @}', "the body is not valid JSON: invalid character (byte 13)"),
        (b"[]", "the body must be a JSON object, not a list"),
        (b'"hello"', "the body must be a JSON object, not a string"),
        (b'{"messages": "\xff"}', "the body is not valid UTF-8 (byte 14)"),
        (
            b'{"a":' + b"[" * 20_000,
            "the body is nested too deeply: at most 128 lists and objects may stand inside each other",
        ),
        (b'{"a": "\\ud800"}', "the body is not valid JSON: it has half of a surrogate pair (byte 7)"),
        (b'{"a": 1e400}', "the body contains a number that is out of range"),
        (b'{"a": NaN}', "the body is not valid JSON: invalid character (byte 6)"),
    ],
)
def test_bad_bodies(client: httpx.Client, body: bytes, message: str) -> None:
    error = refused(client.post(PATH, content=body, headers=JSON), 400)
    assert error == {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_value"}


@pytest.mark.parametrize(
    ("field", "param", "message"),
    [
        ({"max_tokens": "3"}, "max_tokens", "must be an integer, not a string"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, not 0"),
        ({"max_tokens": -5}, "max_tokens", "max_tokens must be at least 1"),
        ({"max_tokens": 10**30}, "max_tokens", "must be at most"),
        ({"max_tokens": 2000}, "max_tokens", "the model's context is 512 tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be at least 1, not 0"),
        ({"max_completion_tokens": 2000}, "max_completion_tokens", "Ask for at most"),
        ({"temperature": -1}, "temperature", "must be between 0 and 100, not -1"),
        ({"temperature": "hot"}, "temperature", "must be a number, not a string"),
        ({"top_p": 0}, "top_p", "0 excluded"),
        ({"top_k": -2}, "top_k", "must be at least 0"),
        ({"n": 0}, "n", "must be between 1 and"),
        ({"n": 9}, "n", "more than the 8 answers"),
        ({"stop": [""]}, "stop", "empty string"),
        ({"stop": 5}, "stop", "must be a string or a list, not an integer"),
        ({"seed": 2**64}, "seed", "must fit in 64 bits"),
        ({"seed": 10**400}, "seed", "must fit in 64 bits"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "must be token ids"),
        ({"logit_bias": {" 1_0 ": 1}}, "logit_bias", "must be token ids"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "must be token ids"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias", "at most 1024 tokens, not 1025"),
        ({"stop": ["a" * 1001]}, "stop", "at most 1000 characters"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids", "at most 1024 tokens"),
        ({"priority": "x" * 5000}, "priority", "0 to 3, not 'xxx"),
        ({"x": json.loads("[" * 200 + "]" * 200)}, "x", "nested too deeply"),
        ({"chat_template_kwargs": {"x": json.loads("[" * 200 + "]" * 200)}}, "chat_template_kwargs", "nested too deeply"),
        (called("[" * 2000), "messages[0].tool_calls[0].function.arguments", "nested too deeply"),
        (called("[" * 200 + "]" * 200), "messages[0].tool_calls[0].function.arguments", "nested too deeply"),
        ({"logit_bias": {"258": 1}}, "logit_bias", "the model has tokens 0 to 257, not 258"),
        ({"logit_bias": {"1": 101}}, "logit_bias", "between -100 and 100"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "the model has tokens 0 to 257"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "top_logprobs must be between 0 and 20"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not available with stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream: true"),
        ({"priority": "urgent"}, "priority", "critical, high, normal, low or 0 to 3"),
        ({"priority": 4}, "priority", "critical, high, normal, low or 0 to 3"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "must be between 0 and 5"),
        ({"messages": []}, "messages", "send at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "must be one of assistant, developer"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "is missing"),
        ({"messages": "hi"}, "messages", "must be a list, not a string"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type", "text only"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "is missing"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "Shorten the prompt"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "must be function, not 'web_search'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"functions": [{}]}, "functions[0].name", "is missing"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "must be one of json_object, json_schema"),
        ({"guided_json": {}, "regex": "a"}, "regex", "guided_json and regex both say what the answer must be"),
        ({"guided_choice": []}, "guided_choice", "give at least one text"),
        ({"thinking_token_budget": -1}, "thinking_token_budget", "must be at least 0"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "must be at least 1, or -1"),
        ({"allowed_token_ids": [258]}, "allowed_token_ids", "the model has tokens 0 to 257"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", "send one of them"),
        ({"modalities": ["text", "audio"]}, "modalities", "text only"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"best_of": 2}, "best_of", "choose"),
    ],
)  # fmt: skip
def test_bad_fields(client: httpx.Client, front: FakeFront, field: dict[str, Any], param: str, message: str) -> None:
    error = refused(client.post(PATH, json={**HELLO, **field}), 400)
    assert error["param"] == param and message in error["message"], error
    assert not front.submitted


def test_context_overflow_has_openais_code(client: httpx.Client) -> None:
    assert refused(client.post(PATH, json={**HELLO, "max_tokens": 2000}), 400)["code"] == "context_length_exceeded"


def test_unknown_model(client: httpx.Client) -> None:
    error = refused(client.post(PATH, json={**HELLO, "model": "gpt-4"}), 404)
    assert error["code"] == "model_not_found" and error["param"] == "model"
    assert "scripted" in error["message"] and "nickname" in error["message"]


def test_strict_header(client: httpx.Client, front: FakeFront) -> None:
    strict = {"X-Tonle-Strict": "1"}
    error = refused(client.post(PATH, json={**HELLO, "top_a": 1}, headers=strict), 400)
    assert error["param"] == "top_a" and "top_a: unknown field" in error["message"]
    assert not front.submitted
    assert client.post(PATH, json=HELLO, headers=strict).status_code == 200
    assert client.post("/tokenize", json={"prompt": "x", "y": 1}, headers=strict).status_code == 400


def test_strict_server() -> None:
    with serving(FakeFront(), strict=True) as url:
        assert httpx.post(url + PATH, json={**HELLO, "store": True}).status_code == 400
        assert httpx.post(url + PATH, json=HELLO).status_code == 200


def test_unknown_path_and_method(client: httpx.Client) -> None:
    nothing = refused(client.get("/v1/nothing"), 404)
    assert nothing["code"] == "not_found" and "GET /docs" in nothing["message"]
    assert client.get("/docs").status_code == 200
    assert refused(client.post("/v2"), 404)["code"] == "not_found"
    reply = client.get(PATH)
    assert refused(reply, 405)["code"] == "method_not_allowed" and reply.headers["allow"] == "POST"
    assert refused(client.delete("/v1/models"), 405)["message"].endswith("use GET.")
    assert "\\n" in refused(client.get("/a%0Ab"), 404)["message"]


def test_overload(client: httpx.Client, front: FakeFront) -> None:
    front.refusal = CapacityError("the queue is full", retry_after_s=2.3)
    for stream in (False, True):
        reply = client.post(PATH, json={**HELLO, "stream": stream})
        error = refused(reply, 503)
        assert reply.headers["retry-after"] == "3"
        assert error["type"] == "service_unavailable_error" and error["code"] == "overloaded"


def test_not_ready(client: httpx.Client, front: FakeFront) -> None:
    front.card = None
    reply = client.post(PATH, json=HELLO)
    assert "still being loaded" in refused(reply, 503)["message"] and reply.headers["retry-after"]
    front.failure = ModelError("weights are missing")
    assert "weights are missing" in refused(client.post(PATH, json=HELLO), 503)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_engine_dies_before_the_first_token(client: httpx.Client, front: FakeFront, stream: bool) -> None:
    front.die_after = 0
    error = refused(client.post(PATH, json={**HELLO, "stream": stream}), 500)
    assert error["type"] == "server_error" and error["code"] == "engine_died"


def test_engine_dies_in_the_middle(client: httpx.Client, front: FakeFront) -> None:
    front.die_after = 20
    error = refused(client.post(PATH, json=HELLO), 500)
    reply = client.post(PATH, json={**HELLO, "stream": True})
    assert reply.status_code == 200
    *chunks, last = events(reply.text)
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks).startswith("សួស្តី")
    assert last == {"error": error}, "the same body, and no [DONE] after it"


def test_one_of_several_prompts_fails(client: httpx.Client, front: FakeFront) -> None:
    front.die_after = 3
    front.reply = lambda prompt, index: "x" * (1 if prompt == "short" else 50)
    refused(client.post("/v1/completions", json={"prompt": ["short", "long"], "max_tokens": 60}), 500)


def test_what_is_inside_stays_inside(client: httpx.Client, front: FakeFront) -> None:
    def broken(prompt: str, index: int) -> str:
        raise RuntimeError("secret")

    front.reply = broken
    error = refused(client.post(PATH, json=HELLO), 500)
    assert error["code"] == "internal_error" and "secret" not in error["message"]


def test_body_too_large(client: httpx.Client, url: str) -> None:
    reply = client.post(PATH, content=b"x" * 3_000_000, headers=JSON)
    assert refused(reply, 413)["code"] == "request_too_large" and reply.headers["connection"] == "close"

    def pieces() -> Any:  # no Content-Length: chunked
        for _ in range(30):
            yield b"x" * 100_000

    refused(client.post(PATH, content=pieces(), headers=JSON), 413)
    assert client.post(PATH, json=HELLO).status_code == 200


def test_body_too_large_from_a_caller_who_sends_before_listening(url: str) -> None:
    """Not a reset connection: the reason."""
    with pytest.raises(urllib.error.HTTPError) as error:
        urllib.request.urlopen(urllib.request.Request(url + PATH, b"x" * 3_000_000, JSON), timeout=60)
    with error.value as reply:
        assert reply.status == 413 and b"request_too_large" in reply.read()


def test_body_too_large_is_refused_before_it_is_sent(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        lines = [f"POST {PATH} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Content-Length: 999999999",
                 "Expect: 100-continue"]  # fmt: skip
        connection.sendall("\r\n".join(lines).encode() + b"\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_choices must be more than 0"):
        ReplicaOptions(max_choices=0)


def test_draining_refuses_new_work() -> None:
    replica, reply = Replica(FakeFront(), ReplicaOptions()), BufferedReply()  # type: ignore[arg-type]
    replica.draining = True
    transport = ReplicaTransport(replica)
    asyncio.run(transport.send("POST", PATH, msgspec.json.encode(HELLO), {}, reply, first_s=9, silence_s=9))
    assert reply.status == 503 and b"shutting down" in reply.body and b'"code":"shutting_down"' in reply.body


def log_line(caplog: pytest.LogCaptureFixture, request_id: str) -> tuple[str, str]:
    """The server is in a thread and writes it after the reply: wait for it."""
    found: list[tuple[str, str]] = []
    for _ in range(12_000):
        lines = [(record.levelname, record.getMessage()) for record in caplog.records]
        if found := [line for line in lines if f"id {request_id}" in line[1]]:
            break
        time.sleep(0.01)
    (line,) = found
    return line


def test_the_log_says_why(client: httpx.Client, front: FakeFront, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="tonle")
    client.post(PATH, json={**HELLO, "model": "no\nsuch"}, headers={"x-request-id": "one"})
    level, line = log_line(caplog, "one")
    assert level == "INFO" and "404" in line and "id one: there is no model 'no\\nsuch' here" in line
    front.refusal = CapacityError("the queue is full")
    client.post(PATH, json=HELLO, headers={"x-request-id": "two"})
    level, line = log_line(caplog, "two")
    assert level == "WARNING" and line.endswith("id two: the queue is full")


def test_the_log_tells_of_a_stream_that_broke_off(
    client: httpx.Client, front: FakeFront, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tonle")
    front.die_after = 20
    client.post(PATH, json={**HELLO, "stream": True}, headers={"x-request-id": "three"})
    level, line = log_line(caplog, "three")
    assert level == "WARNING" and f"{PATH} 200" in line and "id three: " in line
