"""POST /v1/chat/completions: shapes, fields, streams."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from tests.fakes.front import CACHED_TOKENS, END, FakeFront
from tests.http.serving import events
from tonle.engine.request import RequestPriority

PATH = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
PROMPT = "<user>hi\n<assistant>"
REPLY = "សួស្តី, I am scripted."


def test_whole_answer(client: httpx.Client, front: FakeFront) -> None:
    reply = client.post(PATH, json=HELLO)
    assert reply.status_code == 200
    body = reply.json()
    num_prompt, num_new = len(PROMPT) + 1, len(REPLY.encode()) + 1
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == "scripted"
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"content": REPLY, "role": "assistant", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
    }
    assert "warnings" not in body and "x-tonle-warnings" not in reply.headers
    assert float(reply.headers["x-process-time"]) >= 0
    assert body["id"] == front.submitted[0][0].request_id.replace("req-", "chatcmpl-")
    assert reply.headers["x-request-id"] == body["id"].replace("chatcmpl-", "req-")
    assert front.text.decode(front.submitted[0][0].prompt) == PROMPT
    assert front.cancelled.empty()


def test_stream(client: httpx.Client) -> None:
    reply = client.post(PATH, json={**HELLO, "stream": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["x-request-id"].startswith("req-")
    first, *middle, last, done = events(reply.text)
    assert first["choices"] == [
        {"index": 0, "delta": {"content": "", "role": "assistant"}, "logprobs": None, "finish_reason": None}
    ]
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == REPLY
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in middle), "no empty chunks between"
    assert last["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    assert done == "[DONE]"
    answer_id = reply.headers["x-request-id"].replace("req-", "chatcmpl-")
    assert {chunk["id"] for chunk in (first, *middle, last)} == {answer_id}
    assert all(chunk["object"] == "chat.completion.chunk" and "usage" not in chunk for chunk in (first, *middle, last))


def test_stream_usage(client: httpx.Client) -> None:
    whole = client.post(PATH, json=HELLO).json()["usage"]
    body = {**HELLO, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(client.post(PATH, json=body).text)
    assert usage["choices"] == [] and usage["usage"] == whole and done == "[DONE]"
    assert all(chunk["usage"] is None for chunk in chunks)


def test_stream_continuous_usage(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, usage, _ = events(client.post(PATH, json={**HELLO, "stream": True, "stream_options": options}).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == usage["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
def test_n(client: httpx.Client, stream: bool) -> None:
    body = {**HELLO, "n": 3, "stream": stream}
    reply = client.post(PATH, json=body)
    texts = ["", "", ""]
    if stream:
        chunks = events(reply.text)[:-1]
        for chunk in chunks:
            choice = chunk["choices"][0]
            texts[choice["index"]] += choice["delta"].get("content", "")
        order = [chunk["choices"][0]["index"] for chunk in chunks]
        assert order != sorted(order), "choices interleave"
        assert sum("role" in chunk["choices"][0]["delta"] for chunk in chunks) == 3
    else:
        for choice in reply.json()["choices"]:
            texts[choice["index"]] = choice["message"]["content"]
        assert reply.json()["usage"]["prompt_tokens"] == len(PROMPT) + 1, "the prompt counts once"
    assert texts == [REPLY, REPLY + "!", REPLY + "!!"]


def test_logprobs(client: httpx.Client, front: FakeFront) -> None:
    front.reply = lambda prompt, index: "កa"
    body = {**HELLO, "logprobs": True, "top_logprobs": 2}
    content = client.post(PATH, json=body).json()["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xE1], [0x9E], [0x80], [0x61], list(b"<end>")]
    assert content[3]["token"] == "a" and content[3]["logprob"] == -0.5
    assert content[3]["top_logprobs"] == [
        {"token": "a", "logprob": -0.5, "bytes": [97]},
        {"token": "b", "logprob": -1.5, "bytes": [98]},
    ]
    streamed = []
    for chunk in events(client.post(PATH, json={**body, "stream": True}).text)[:-1]:
        streamed += (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    assert streamed == content, "tokens without text yet bring their log-probabilities all the same"


def test_logprobs_without_alternatives(client: httpx.Client) -> None:
    content = client.post(PATH, json={**HELLO, "logprobs": True}).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"] == []


def test_prompt_logprobs(client: httpx.Client) -> None:
    records = client.post(PATH, json={**HELLO, "prompt_logprobs": 2}).json()["prompt_logprobs"]
    assert records[0] is None and len(records) == len(PROMPT) + 1
    assert records[1]["60"] == {"logprob": -0.5, "decoded_token": "<", "rank": 1}


def test_token_ids(client: httpx.Client, front: FakeFront) -> None:
    body = {**HELLO, "return_token_ids": True}
    whole = client.post(PATH, json=body).json()
    assert whole["choices"][0]["token_ids"] == [*REPLY.encode(), END]
    assert whole["prompt_token_ids"] == front.text.encode(PROMPT)
    first, *chunks, _ = events(client.post(PATH, json={**body, "stream": True}).text)
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]
    streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert streamed == whole["choices"][0]["token_ids"]


@pytest.mark.parametrize("stop", ["scr", ["x", "scr"]])
def test_stop(client: httpx.Client, stop: str | list[str]) -> None:
    choice = client.post(PATH, json={**HELLO, "stop": stop}).json()["choices"][0]
    assert choice["message"]["content"] == REPLY.partition("scr")[0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == "scr"
    last = events(client.post(PATH, json={**HELLO, "stop": stop, "stream": True}).text)[-2]["choices"][0]
    assert last["finish_reason"] == "stop" and last["stop_reason"] == "scr"


def test_max_tokens(client: httpx.Client) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        body = client.post(PATH, json={**HELLO, name: 5}).json()
        assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 5
    assert client.post(PATH, json={**HELLO, "max_tokens": 9, "max_completion_tokens": 3}).json()["usage"][
        "completion_tokens"
    ] == 3  # fmt: skip


def test_every_field_reaches_the_engine(client: httpx.Client, front: FakeFront) -> None:
    body = {
        **HELLO, "temperature": 0.3, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"65": 3, "66": -100}, "seed": 2**64 - 1,
        "stop": ["~"], "stop_token_ids": [9], "min_tokens": 2, "ignore_eos": True, "max_tokens": 40,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "priority": "high", "n": 1,
    }  # fmt: skip
    reply = client.post(PATH, json=body)
    assert reply.status_code == 200 and "warnings" not in reply.json()
    generation, priority = front.submitted[0]
    config = generation.config
    assert priority is RequestPriority.HIGH
    assert (config.temperature, config.top_p, config.top_k, config.min_p) == (0.3, 0.9, 7, 0.1)
    assert (config.repetition_penalty, config.presence_penalty, config.frequency_penalty) == (1.2, 0.5, -0.5)
    assert config.logit_bias == {65: 3.0, 66: -100.0} and config.seed == 2**64 - 1
    assert config.stop == ["~"] and config.stop_token_ids == [9] and config.include_stop_text
    assert config.min_tokens == 2 and config.max_length == 40 and not config.early_stopping
    assert not config.skip_special_tokens


def test_defaults_and_nulls(client: httpx.Client, front: FakeFront) -> None:
    nothing = dict.fromkeys(("model", "temperature", "top_p", "top_k", "n", "stream", "stop", "seed", "user", "tools"))
    reply = client.post(PATH, json={**HELLO, **nothing})
    assert reply.status_code == 200 and "warnings" not in reply.json()
    config = front.submitted[0][0].config
    assert config.temperature == 1.0 and config.top_p == 1.0 and config.top_k == 0 and config.seed is None
    assert front.card is not None
    assert config.max_length == front.card.context_length - len(front.submitted[0][0].prompt)


def test_messages_reach_the_template(client: httpx.Client, front: FakeFront) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    body = {"messages": messages, "add_generation_prompt": False, "chat_template_kwargs": {"thinking": False}}
    reply = client.post(PATH, json=body)
    assert "warnings" not in reply.json()
    prompt = front.text.decode(front.submitted[0][0].prompt)
    call = '{"name": "f", "arguments": {}}'  # its template knows no tools
    assert prompt == f"<developer>be brief\n<user>a\nb\n<assistant>{call}\n<user>Result:\n42\n[thinking=False]"


def test_long_prompts_are_translated_off_the_loop(client: httpx.Client, front: FakeFront) -> None:
    assert front.card is not None
    front.card = msgspec.structs.replace(front.card, context_length=90_000)
    reply = client.post(PATH, json={"messages": [{"role": "user", "content": "x" * 50_000}], "max_tokens": 3})
    assert reply.json()["usage"]["prompt_tokens"] > 50_000


def test_model_names(client: httpx.Client) -> None:
    assert client.post(PATH, json={**HELLO, "model": "nickname"}).json()["model"] == "nickname"
    assert client.post(PATH, json={**HELLO, "model": "scripted"}).json()["model"] == "scripted"


def test_request_id(client: httpx.Client) -> None:
    reply = client.post(PATH, json=HELLO, headers={"X-Request-Id": "trace-1:a.b_c"})
    assert reply.headers["x-request-id"] == "trace-1:a.b_c" and reply.json()["id"] == "chatcmpl-trace-1:a.b_c"
    for odd in ("a b", "x" * 129, "<script>", ""):
        reply = client.post(PATH, json=HELLO, headers={"X-Request-Id": odd})
        assert reply.headers["x-request-id"] == reply.json()["id"].replace("chatcmpl-", "req-") != odd


def test_warnings(client: httpx.Client) -> None:
    body = {**HELLO, "user": "me", "top_a": 1, "cache_salt": "x", "stream_options": None, "store": True}
    reply = client.post(PATH, json=body)
    assert [warning["param"] for warning in reply.json()["warnings"]] == ["cache_salt", "top_a", "store"]
    assert reply.headers["x-tonle-warnings"] == "3; cache_salt, top_a, store"
    streamed = client.post(PATH, json={**body, "stream": True})
    first, *rest = events(streamed.text)
    assert first["warnings"] == reply.json()["warnings"]
    assert all("warnings" not in chunk for chunk in rest[:-1])
    assert streamed.headers["x-tonle-warnings"] == reply.headers["x-tonle-warnings"]


def test_warning_header_is_safe(client: httpx.Client) -> None:
    reply = client.post(PATH, json={**HELLO, "a\r\nset-cookie: x": 1, "ខ្មែរ": 1, "l" * 5000: 1})
    assert reply.status_code == 200
    assert "set-cookie" not in reply.headers
    assert len(reply.headers["x-tonle-warnings"]) <= 256
