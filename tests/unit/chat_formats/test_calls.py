"""Calls in the writing of each format become parts; what is no call stays content."""

from __future__ import annotations

import json

import pytest

from tests.unit.chat_formats.examples import TOOLS, VARIANTS, joined, read, variant
from tonle.chat_formats import find_format

_ARGUMENTS = {"city": 'Kâmpŏt "ភ្នំ"\n\\', "days": 3}
_CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
_READ = ("call", ["get_weather", '{"city": "Paris"}'])


@pytest.mark.parametrize("name", VARIANTS)
class TestEachFormat:
    def test_one_call(self, name: str) -> None:
        ((kind, (tool, arguments)),) = joined(
            read(variant(name), variant(name).write_calls([("get_weather", _ARGUMENTS)]))
        )
        assert (kind, tool, json.loads(arguments)) == ("call", "get_weather", _ARGUMENTS)

    def test_text_before_and_several_calls(self, name: str) -> None:
        calls = variant(name).write_calls(
            [("get_weather", {"city": "Paris"}), ("now", {}), ("get_weather", {"city": "X"})]
        )
        assert joined(read(variant(name), f"Let me look.\n{calls}")) == [
            ("text", "Let me look."),
            _READ,
            ("call", ["now", "{}"]),
            ("call", ["get_weather", '{"city": "X"}']),
        ]

    def test_an_unknown_tool_is_content(self, name: str) -> None:
        text = variant(name).write_calls([("drop_table", {"city": "Paris"})])
        assert joined(read(variant(name), text)) == [("text", text)]

    def test_without_tools_all_is_content(self, name: str) -> None:
        text = variant(name).write_calls([("get_weather", {"city": "Paris"})])
        assert joined(read(variant(name), f"{text} \n", tools=[])) == [("text", f"{text} \n")]

    def test_an_answer_that_breaks_off_keeps_what_came(self, name: str) -> None:
        text = variant(name).write_calls([("get_weather", {"city": "Paris", "days": 3})])
        whole = '{"city": "Paris", "days": 3}'
        longest = ""
        for size in range(text.index("get_weather") + len("get_weather") + 2, len(text)):
            parts = joined(read(variant(name), text[:size]))
            if parts and parts[0][0] == "call":
                ((_, (tool, arguments)),) = parts
                assert tool == "get_weather"
                assert whole.startswith(arguments), text[:size]
                assert len(arguments) >= len(longest)
                longest = arguments
        assert longest in (whole, whole[:-1])

    def test_arguments_come_as_they_are_written(self, name: str) -> None:
        text = variant(name).write_calls([("get_weather", {"city": "a long name", "days": 3})])
        parser = variant(name).parser(TOOLS, thinking=None)
        came = [len(parser.push(char)) for char in text]
        values = 1 if name == "pythonic" else 8  # Python's values come when they are whole
        assert sum(came) > values, "nothing came before the end"
        assert came.index(1) <= text.index("3")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"<tool_call>{_CALL}</tool_call>", [_READ]),
        (f"<tool_call>\n{_CALL}\n", [_READ]),  # no closing tag
        (f"<tool_call>\n{_CALL[:-1]}\n</tool_call>", [_READ]),  # no closing bracket
        (f"<tool_call>\n{_CALL}\n{_CALL}\n</tool_call>", [_READ, _READ]),
        (f"<tool_call>\n{_CALL}\n<tool_call>\n{_CALL}\n</tool_call>", [_READ, _READ]),
        (f"<tool_call>[{_CALL}, {_CALL}]</tool_call>", [_READ, _READ]),
        (f"<tool_call>{_CALL}</tool_call> Done. ", [_READ, ("text", " Done.")]),
        (f"<<tool_call>{_CALL}</tool_call>", [("text", "<"), _READ]),
        (f"<tool_call><tool_call>{_CALL}</tool_call>", [("text", "<tool_call>"), _READ]),
        ("<tool_call>nothing</tool_call>", [("text", "<tool_call>nothing</tool_call>")]),
        ('<tool_call>{"name": "get_weather", "arguments": 3}', [("text", '<tool_call>{"name": "get_weather", "arguments": 3}')]),
        ('<tool_call>{"name": "now", "arguments": null}', [("call", ["now", "{}"])]),
        ('<tool_call>{"name": "now"}', [("call", ["now", "{}"])]),
        ('<tool_call>{"name": "now", "arguments": ""}', [("call", ["now", "{}"])]),
        ('<tool_call>{"name": "now", "argum', [("call", ["now", ""])]),
        ('<tool_call>{"name": "no', [("text", '<tool_call>{"name": "no')]),
        ('<tool_call>{"name": "now", "arguments": {"a": ]', [("call", ["now", '{"a": ']), ("text", "]")]),
        ('<tool_call>{"name": "now", "arguments": {"a": [{"b": "]}\\""}]}}', [("call", ["now", '{"a": [{"b": "]}\\""}]}'])]),
        ('<tool_call>{"parameters": {"a": 1}, "id": [{}], "name": "now"}</tool_call>', [("call", ["now", '{"a": 1}'])]),
        ('<tool_call>{"arguments": {"a": 1}, "id": 7}', [("text", '<tool_call>{"arguments": {"a": 1}, "id": 7}')]),
        (
            r'<tool_call>{"name": "now", "arguments": "{\"a\": \"\ud83d\ude00 \\n \ud83d\"}"}',
            [("call", ["now", '{"a": "😀 \\n \ufffd"}'])],
        ),
        ('<tool_call>{"name": "now", "arguments": "soon"}', [("text", '<tool_call>{"name": "now", "arguments": "soon"}')]),
    ],
)  # fmt: skip
def test_hermes(text: str, expected: list[tuple[str, object]]) -> None:
    assert joined(read(find_format(None, "hermes"), text)) == expected


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("json", f"```json\n{_CALL}\n```", [_READ]),
        ("json", f"Look:\n```\n[{_CALL}]\n```\nso", [("text", "Look:"), _READ, ("text", "\n\nso")]),
        ("json", '```json\n{"a": 1}\n```', [("text", '```json\n{"a": 1}\n```')]),
        ("json", '{"name": "Anna", "age": 3}', [("text", '{"name": "Anna", "age": 3}')]),
        ("json", '{"colour": {"name": "now"}}', [("text", '{"colour": {"name": "now"}}')]),
        ("json", '{"name": "now", "arguments": null}', [("call", ["now", "{}"])]),
        ("json", f"[1] {_CALL}, as I said [2]", [("text", "[1]"), _READ, ("text", " , as I said [2]")]),
        ("gemma", '```tool_code\n{"name": "now", "parameters": {}}\n```', [("call", ["now", "{}"])]),
        ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}', [("call", ["now", "{}"])]),
        ("llama3", '{"type": "function", "name": "now", "parameters": {}}', [("call", ["now", "{}"])]),
        ("llama3", "<|python_tag|>print(1)", [("text", "<|python_tag|>print(1)")]),
        ("mistral", f"[TOOL_CALLS] [{_CALL[:-1]}, \"id\": \"abcdefghi\"}}]", [_READ]),
        ("mistral", '[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{"a": 1}', [("call", ["now", '{"a": 1}'])]),
        ("mistral", "[TOOL_CALLS]soon[ARGS]{}", [("text", "[TOOL_CALLS]soon[ARGS]{}")]),
        ("phi4", f"functools[{_CALL}, {_CALL}]", [_READ, _READ]),
        ("phi4", "import functools, and [1]", [("text", "import functools, and [1]")]),
        ("phi4", f"<|tool_call|>[{_CALL}]", [_READ]),
        ("pythonic", "[now(city='it\\'s', days=-1.5e3)]", [("call", ["now", '{"city": "it\'s", "days": -1500.0}'])]),
        ("pythonic", "<|python_start|>[now(a=true, b=None)]<|python_end|>", [("call", ["now", '{"a": true, "b": null}'])]),
        ("pythonic", "[now(c=(1, [2]), d={'e': \"),]\"})]", [("call", ["now", '{"c": [1, [2]], "d": {"e": "),]"}}'])]),
        ("pythonic", "[now(a=oops)]", [("call", ["now", '{"a": "oops"}'])]),
        ("pythonic", "[see now](http://x)", [("text", "[see now](http://x)")]),
        (
            "functiongemma",
            "<start_function_call>call:now{a:{b:[1,<escape>},<escape>],c:{}}}<end_function_call>",
            [("call", ["now", '{"a": {"b": [1, "},"], "c": {}}}'])],
        ),
        (
            "qwen3_coder",
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n7\n</parameter>\n<parameter=days>\n7\n</parameter>\n</function>",
            [("call", ["get_weather", '{"city": "7", "days": 7}'])],
        ),
        ("qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>\n!", [("call", ["now", "{}"]), ("text", "\n!")]),
    ],
)  # fmt: skip
def test_other_writing(name: str, text: str, expected: list[tuple[str, object]]) -> None:
    assert joined(read(find_format(None, name), text)) == expected


class TestGptOss:
    def test_thoughts_a_preamble_and_a_call(self) -> None:
        text = (
            "<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
            "One moment.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
            '{"city":"Paris"}<|call|>'
        )
        chat_format = find_format(None, "gpt_oss")
        assert joined(read(chat_format, text, thinking=chat_format.thinking)) == [
            ("thought", "I need the weather."),
            ("text", "One moment."),
            ("call", ["get_weather", '{"city":"Paris"}']),
        ]
        assert joined(read(chat_format, text))[0] == ("text", "I need the weather.\nOne moment.")

    def test_a_recipient_beside_the_role(self) -> None:
        text = ' to=functions.now<|channel|>commentary json<|message|>{"a": "<|"}<|call|>'
        assert joined(read(find_format(None, "gpt_oss"), text)) == [("call", ["now", '{"a": "<|"}'])]

    def test_text_without_a_header_and_a_header_that_breaks_off(self) -> None:
        chat_format = find_format(None, "gpt_oss")
        assert joined(read(chat_format, "Plain < text")) == [("text", "Plain < text")]
        assert joined(read(chat_format, "<|channel|>final<|message|>Hi<|end|><|start|>assis")) == [("text", "Hi")]

    def test_another_recipient_is_content(self) -> None:
        text = "<|channel|>analysis to=browser.search<|message|>{}"
        assert joined(read(find_format(None, "gpt_oss"), text)) == [("text", text)]


def test_what_cannot_become_a_call_is_released_at_once() -> None:
    parser = find_format(None, "hermes").parser(TOOLS, thinking=None)
    came = ["".join(part.text for part in parser.push(char)) for char in "1 < 2 <tools> <!"]  # type: ignore[union-attr]
    assert came == ["1", "", "", " <", " 2", "", "", "", "", "", "", " <tools", ">", "", "", " <!"]
