"""Answers that are more than content: calls and thoughts, whole and streamed, from scripted texts.

The front writes what each test tells it to; the formats are Hermes (with `<think>`), which its template names, and plain JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes.front import END, ByteText, FakeFront
from tests.http.serving import events, serving
from tonle.errors import InvalidRequest

PATH = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "time", "parameters": SCHEMA}},
]
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
PARIS, ROME = '{"city": "Paris"}', '{"city": "Rome"}'


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class ThinkingText(ByteText):
    """A template with tools and thoughts."""

    tool_template = "{{ tools }}<tool_call></tool_call><think></think>"


class Fixture:
    def __init__(self, front: FakeFront, client: httpx.Client) -> None:
        self.front = front
        self._client = client

    def post(self, body: dict[str, Any], path: str = PATH) -> httpx.Response:
        reply = self._client.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return reply

    def says(self, text: str) -> None:
        self.front.reply = lambda prompt, index: text

    def message(self, **fields: Any) -> dict[str, Any]:
        """Of the one choice, which must be the same streamed."""
        choice = self.choices(**fields)[0]
        return {**choice["message"], "finish_reason": choice["finish_reason"]}

    def choices(self, **fields: Any) -> list[dict[str, Any]]:
        whole = self.post({**HELLO, **fields}).json()["choices"]
        streamed = joined(events(self.post({**HELLO, **fields, "stream": True}).text))
        for choice in whole:
            message = dict(choice["message"])
            assert message.pop("refusal", None) is None and message.pop("role") == "assistant"
            expected = {**without_ids(message), "finish_reason": choice["finish_reason"]}
            assert without_ids(streamed[choice["index"]]) == {"content": None, **expected}
        return list(whole)

    @property
    def prompt(self) -> str:
        return self.front.text.decode(self.front.submitted[-1][0].prompt)

    @property
    def config(self) -> Any:
        return self.front.submitted[-1][0].config


def joined(chunks: list[Any]) -> dict[int, dict[str, Any]]:
    """The choices that a stream's chunks make, as a client puts them together."""
    assert chunks.pop() == "[DONE]"
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            message = found.setdefault(choice["index"], {"content": None})
            delta = choice["delta"]
            for name in ("content", "reasoning", "reasoning_content"):
                if name in delta:
                    message[name] = (message.get(name) or "") + delta[name]
            if "function_call" in delta:
                call = message.setdefault("function_call", {"name": "", "arguments": ""})
                for name, value in delta["function_call"].items():
                    call[name] += value
            for piece in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if piece["index"] == len(calls):
                    assert set(piece) == {"index", "id", "type", "function"} and piece["function"]["arguments"] == ""
                    calls.append({"id": piece["id"], "type": piece["type"], "function": dict(piece["function"])})
                else:
                    assert set(piece) == {"index", "function"} and set(piece["function"]) == {"arguments"}
                    calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
            if choice["finish_reason"] is not None:
                message["finish_reason"] = choice["finish_reason"]
    return found


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Each call has another id, in OpenAI's form."""
    if "tool_calls" not in message:
        return message
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == len(ids) and all(len(each) == 29 and each.startswith("call_") for each in ids)
    calls = [{name: value for name, value in call.items() if name != "id"} for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def called(*calls: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "arguments": text}} for name, text in calls]


@pytest.fixture(scope="module")
def _server() -> Iterator[tuple[FakeFront, httpx.Client]]:
    front = FakeFront()
    front.text = ThinkingText()
    with serving(front) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield front, client


@pytest.fixture
def server(_server: tuple[FakeFront, httpx.Client]) -> Fixture:
    front, client = _server
    front.__init__()  # type: ignore[misc]
    front.text = ThinkingText()
    assert front.card is not None
    front.card.context_length = 4096
    return Fixture(front, client)


@pytest.fixture(scope="module")
def plain() -> Iterator[Fixture]:
    """A model without tools in its template."""
    front = FakeFront()
    assert front.card is not None
    front.card.context_length = 4096
    with serving(front) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield Fixture(front, client)


# -- calls


def test_a_call(server: Fixture) -> None:
    server.says(hermes("weather", PARIS))
    message = without_ids(server.message())
    assert message == {
        "content": None, "role": "assistant", "refusal": None, "tool_calls": called(("weather", PARIS)),
        "finish_reason": "tool_calls",
    }  # fmt: skip
    assert "[tool weather][tool time]" in server.prompt


def test_text_and_several_calls(server: Fixture) -> None:
    server.says(f"Let me see.\n{hermes('weather', PARIS)}\n{hermes('time', ROME)}")
    message = without_ids(server.message())
    assert message["content"] == "Let me see."
    assert message["tool_calls"] == called(("weather", PARIS), ("time", ROME))
    server.says(f"{hermes('weather', PARIS)}\n{hermes('time', ROME)}")
    assert len(server.message(parallel_tool_calls=False)["tool_calls"]) == 1


def test_no_call(server: Fixture) -> None:
    server.says("It is sunny. <tool> is no tag.")
    message = server.message()
    assert message["content"] == "It is sunny. <tool> is no tag." and "tool_calls" not in message
    assert message["finish_reason"] == "stop"


def test_a_call_that_is_cut_off(server: Fixture) -> None:
    server.says(hermes("weather", PARIS))
    message = server.message(max_tokens=56)
    assert message["finish_reason"] == "length" and message["tool_calls"][0]["function"]["arguments"] == '{"city": "P'


def test_each_of_n(server: Fixture) -> None:
    server.front.reply = lambda prompt, index: hermes("weather", PARIS) if index else "No."
    first, second = server.choices(n=2)
    assert first["message"]["content"] == "No." and first["finish_reason"] == "stop"
    assert second["message"]["tool_calls"] and second["finish_reason"] == "tool_calls"


def test_none_means_that_calls_are_text(server: Fixture) -> None:
    server.says(hermes("weather", PARIS))
    message = server.message(tool_choice="none")
    assert message["content"] == hermes("weather", PARIS) and message["finish_reason"] == "stop"
    assert "[tool" not in server.prompt and server.config.structured is None


def test_what_must_be_called_is_bound_by_a_grammar(server: Fixture) -> None:
    server.says(hermes("weather", PARIS))
    assert server.message()["tool_calls"] and server.config.structured is None, "the model may choose"
    assert server.message(tool_choice="required")["finish_reason"] == "tool_calls"
    grammar = server.config.structured.grammar
    assert "weather" in grammar and "time" in grammar
    named = {"type": "function", "function": {"name": "weather"}}
    assert server.message(tool_choice=named)["finish_reason"] == "stop", "as OpenAI has it"
    assert "time" not in server.config.structured.grammar and "[tool time]" in server.prompt
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]  # type: ignore[dict-item]
    server.message(tools=strict)
    assert "weather" in server.config.structured.grammar


def test_calls_or_json(server: Fixture) -> None:
    """With a schema for the answer, the model may call or answer by the schema; where it must call, it does."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "ក"}}}
    server.says('"ក"')
    assert server.message(response_format=schema)["content"] == '"ក"'
    assert '%json {"const"' in server.config.structured.grammar, "as it is"
    assert "weather" in server.config.structured.grammar
    server.message(response_format=schema, tool_choice="required")
    assert "const" not in server.config.structured.grammar
    server.message(response_format=schema, tool_choice="none")
    assert server.config.structured.json == {"const": "ក"}
    reply = httpx.post(str(server._client.base_url) + PATH, json={**HELLO, "regex": "a+"})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "regex"
    assert "tool_choice none or required" in reply.json()["error"]["message"]


def test_the_older_form(server: Fixture) -> None:
    server.says(hermes("weather", PARIS))
    functions = [tool["function"] for tool in TOOLS]
    message = server.message(tools=None, functions=functions)
    assert message["function_call"] == {"name": "weather", "arguments": PARIS} and message["content"] is None
    assert message["finish_reason"] == "function_call" and "tool_calls" not in message


def test_plain_json_for_templates_without_tools(plain: Fixture) -> None:
    plain.says('{"name": "weather", "arguments": {"city": "Paris"}}')
    message = without_ids(plain.message())
    assert message["tool_calls"] == called(("weather", PARIS)) and message["content"] is None
    assert plain.prompt.startswith("<system>") and '"name": "weather"' in plain.prompt and "[tool" not in plain.prompt
    assistant = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": PARIS}}]}  # fmt: skip
    result = {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}
    plain.message(messages=[*HELLO["messages"], assistant, result])
    assert '"weather", "arguments": {"city": "Paris"}' in plain.prompt and "Result of weather:\nsunny" in plain.prompt


def test_thoughts_text_and_a_call(server: Fixture) -> None:
    server.says(f"<think>Hm.</think>Look: {hermes('weather', PARIS)}")
    message = server.message()
    assert message["content"] == "Look:" and message["reasoning_content"] == "Hm."


# -- thoughts


def test_thoughts(server: Fixture) -> None:
    server.says("<think>\nIt is late.\n</think>\n\nGood night.")
    message = server.message(tools=None)
    assert message["content"] == "Good night."
    assert message["reasoning_content"] == message["reasoning"] == "It is late."
    usage = server.post({**HELLO, "tools": None}).json()["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": len("<think>\nIt is late.\n</think>")}
    stream = {**HELLO, "tools": None, "stream": True, "stream_options": {"include_usage": True}}
    assert events(server.post(stream).text)[-2]["usage"] == usage


def test_thoughts_where_they_are_not_wanted(server: Fixture) -> None:
    server.says("<think>Hm.</think>Yes.")
    for fields in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        message = server.message(tools=None, **fields)
        assert message["content"] == "Yes." and "reasoning" not in message and "reasoning_content" not in message
    assert server.message(tools=None, separate_reasoning=False)["content"] == "<think>Hm.</think>Yes."


def test_a_thought_without_an_end(server: Fixture) -> None:
    server.says("<think>On and on")
    message = server.message(tools=None)
    assert message["content"] is None and message["reasoning_content"] == "On and on"


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({"reasoning_effort": "high"}, "[reasoning_effort=high][enable_thinking=True][thinking=True]"),
        ({"reasoning_effort": "minimal"}, "[reasoning_effort=low][enable_thinking=True][thinking=True]"),
        ({"reasoning_effort": "none"}, "[enable_thinking=False][thinking=False]"),
        ({"enable_thinking": False}, "[enable_thinking=False][thinking=False]"),
        ({"thinking": {"type": "disabled"}}, "[enable_thinking=False][thinking=False]"),
        ({"thinking": True}, "[enable_thinking=True][thinking=True]"),
        ({"reasoning": {"effort": "low"}}, "[reasoning_effort=low][enable_thinking=True][thinking=True]"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "[enable_thinking=False]"),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": 1}},
            "[reasoning_effort=low][enable_thinking=1][thinking=True]",
        ),
    ],
)
def test_variables_of_the_template(server: Fixture, fields: dict[str, Any], variables: str) -> None:
    reply = server.post({**HELLO, "tools": None, **fields})
    assert server.prompt == f"<user>hi\n{variables}<assistant>" and "warnings" not in reply.json()


@pytest.mark.parametrize(
    "fields",
    [{"thinking_token_budget": 7}, {"thinking": {"budget_tokens": 7}}, {"reasoning": {"max_tokens": 7}}],
)
def test_a_budget(server: Fixture, fields: dict[str, Any]) -> None:
    server.post({**HELLO, "tools": None, **fields})
    thinking = server.config.thinking
    assert thinking.budget == 7 and not thinking.is_open
    assert bytes(thinking.start) == b"<think>" and bytes(thinking.end) == b"</think>"
    assert bytes(thinking.end) in bytes(thinking.closing)


def test_a_structure_begins_behind_the_thoughts(server: Fixture) -> None:
    server.says('Hm.</think>{"a": 1}')
    body = {"tools": None, "response_format": {"type": "json_object"}}
    opened = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "<think>"}],
              "add_generation_prompt": False, "continue_final_message": True}  # fmt: skip
    message = server.message(**body, **opened)
    assert message["content"] == '{"a": 1}' and message["reasoning_content"] == "Hm."
    assert server.config.thinking.is_open and server.config.structured.json_object
    assert server.post({**HELLO, "tools": None}) and server.config.thinking is None, "nothing to hold it to"
    server.post({**HELLO, **body})
    assert server.config.thinking is not None and not server.config.thinking.is_open
    server.post({**HELLO, **body, "reasoning_effort": "none"})
    assert server.config.thinking is None and server.config.structured.json_object, "bound from its first letter"


def test_a_model_that_does_not_think_says_so(plain: Fixture) -> None:
    plain.says("Yes.")
    body = {**HELLO, "tools": None, "reasoning_effort": "high", "thinking_token_budget": 5}
    warnings = plain.post(body).json()["warnings"]
    assert [each["param"] for each in warnings] == ["reasoning_effort", "thinking_token_budget"]
    assert plain.config.thinking is None
    strict = httpx.post(f"{plain._client.base_url}{PATH}", json=body, headers={"X-Tonle-Strict": "1"})
    assert strict.status_code == 400 and strict.json()["error"]["param"] == "reasoning_effort"


# -- beside them


def test_log_probabilities_and_token_ids(server: Fixture) -> None:
    text = f"<think>Hm.</think>Well.{hermes('weather', PARIS)}"
    server.says(text)
    fields = {"logprobs": True, "return_token_ids": True}
    choice = server.post({**HELLO, **fields}).json()["choices"][0]
    assert choice["token_ids"] == [*text.encode(), END] and len(choice["logprobs"]["content"]) == len(text) + 1
    chunks = events(server.post({**HELLO, **fields, "stream": True}).text)[:-1]
    choices = [each["choices"][0] for each in chunks if each["choices"]]
    assert [token for each in choices for token in each.get("token_ids", ())] == choice["token_ids"]
    streamed = [entry for each in choices for entry in (each["logprobs"] or {"content": []})["content"]]
    assert streamed == choice["logprobs"]["content"]


def test_usage_throughout(server: Fixture) -> None:
    server.says("<think>Hm.</think>Yes.")
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server.post({**HELLO, "stream": True, "stream_options": options}).text)[:-1]
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks[1:]]
    assert counts == sorted(counts) and counts[-1] == len("<think>Hm.</think>")


def test_a_stop_string(server: Fixture) -> None:
    server.says(hermes("weather", PARIS) + " and more")
    message = server.message(stop=[" and"])
    assert message["tool_calls"] and message["finish_reason"] == "tool_calls" and message["content"] is None


def test_messages_of_an_agent_loop(server: Fixture) -> None:
    server.says("It is sunny.")
    assistant = {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": PARIS}}]}  # fmt: skip
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]}
    reply = server.post({**HELLO, "messages": [*HELLO["messages"], assistant, result]}).json()
    assert reply["choices"][0]["message"]["content"] == "It is sunny." and "warnings" not in reply
    assert "<tool>sunny\n" in server.prompt


def test_tokenize_with_tools(server: Fixture, plain: Fixture) -> None:
    for each in (server, plain):
        each.says("Yes.")
        each.post(HELLO)
        body = {"messages": HELLO["messages"], "tools": TOOLS, "chat_template_kwargs": {}}
        tokens = each.post(body, "/tokenize").json()
        assert tokens["tokens"] == each.front.submitted[-1][0].prompt and "warnings" not in tokens
    tokens = server.post({**body, "chat_template_kwargs": {"x": 1}}, "/tokenize").json()["tokens"]
    assert server.front.text.decode(tokens).endswith("[x=1]<assistant>")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [
            {"type": "function", "function": {"name": TOOLS[0]["function"]["name"]}}]}}},
        {"functions": [TOOLS[0]["function"]]},
        {"functions": [TOOLS[0]["function"]], "function_call": "none"},
        {"tools": None, "reasoning_effort": "high"},
        {"tools": None, "enable_thinking": False},
        {"tools": None, "thinking": {"type": "disabled"}},
        {"tools": None, "reasoning": {"effort": "low"}},
    ],
)  # fmt: skip
def test_tokenize_sees_every_field_that_changes_a_prompt(server: Fixture, fields: dict[str, Any]) -> None:
    server.says("Yes.")
    body = {"messages": HELLO["messages"], **fields}
    server.post(body)
    tokens = server.post(body, "/tokenize").json()
    assert tokens["tokens"] == server.front.submitted[-1][0].prompt and "warnings" not in tokens


def test_a_prompt_that_is_cut(server: Fixture) -> None:
    server.post({**HELLO, "tools": None, "truncate_prompt_tokens": 5})
    assert server.prompt == "tant>"
    long = [{"role": "user", "content": "x" * 5000}]
    server.post({**HELLO, "tools": None, "messages": long, "truncate_prompt_tokens": -1, "max_tokens": 96})
    assert len(server.front.submitted[-1][0].prompt) == 4000


def test_a_grammar_that_the_engine_refuses(server: Fixture) -> None:
    server.front.refusal = InvalidRequest("the schema says nothing", param="structured")
    client = server._client
    error = client.post(PATH, json={**HELLO, "tools": None, "guided_json": {}}).json()["error"]
    assert error["param"] == "guided_json" and error["message"] == "guided_json: the schema says nothing"
    error = client.post(PATH, json={**HELLO, "tool_choice": "required"}).json()["error"]
    assert error["param"] == "tools"
    remote = {"type": "object", "properties": {"a": {"$ref": "https://x.example/y"}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": remote}}]
    error = client.post(PATH, json={**HELLO, "tools": tools, "tool_choice": "required"}).json()["error"]
    assert error["param"] == "tools[2].function.parameters" and "nothing is fetched" in error["message"]
    server.front.refusal = None
    assert server.message(tools=tools), "no grammar, nothing to refuse"


def test_arguments_are_json(server: Fixture) -> None:
    server.says(hermes("weather", '{"city": "ភ្នំពេញ \\"x\\" }{"}'))
    (call,) = server.message()["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": 'ភ្នំពេញ "x" }{'}
