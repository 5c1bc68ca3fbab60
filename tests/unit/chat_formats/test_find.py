"""The format is found in the chat template, or by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.chat_formats.examples import TOOLS
from tonle.chat_formats import find_format
from tonle.chat_formats.find import ALIASES, FORMATS
from tonle.errors import ConfigError

_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<tool_call>\\n{\"name\": <function-name>}\\n</tool_call>", "hermes"),
        ("<tool_call>\\n<function=f>\\n<parameter=p>\\n</parameter></function></tool_call>", "qwen3_coder"),
        ("<|start_header_id|>ipython {'\"parameters\": '}", "llama3"),
        ("Respond in the format [func_name1(params_name1=params_value1)]", "pythonic"),
        ("[AVAILABLE_TOOLS][TOOL_CALLS] [", "mistral"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral"),
        ("<|tool|>{{ tools }}<|/tool|>", "phi4"),
        ("functools[{\"name\": …}]", "phi4"),
        ("respond only with <|tool_call|> followed by a JSON list", "phi4"),
        ("<start_of_turn>model\n<start_function_call>call:", "functiongemma"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "gpt_oss"),
    ],
)  # fmt: skip
def test_by_the_tags_of_a_template_with_tools(template: str, name: str) -> None:
    found = find_format(_TOOLS + template)
    assert found.name == name
    assert found.system_prompt(TOOLS) is None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "json"),
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}", "json"),
        ("<start_of_turn>user\n", "gemma"),
        ("{{ message['tools'] }}<|tool|><|/tool|>", "phi4"),  # a key of a message, not the tools of a request
        (_TOOLS + "<tool_call>{name}\n<arg_key>", "json"),  # GLM's writing, which is not known
        (_TOOLS + "<|unknown_tool_calls_begin|>", "json"),
    ],
)
def test_a_template_that_does_not_tell_of_tools_gets_a_system_prompt(template: str | None, name: str) -> None:
    found = find_format(template)
    assert found.name == name
    prompt = found.system_prompt(TOOLS)
    assert prompt is not None
    assert "get_weather" in prompt
    assert found.write_calls([("get_weather", {"city": "..."})]) in prompt
    assert found.system_prompt([]) is None


@pytest.mark.parametrize("name", [*FORMATS, *ALIASES])
def test_by_name(name: str) -> None:
    assert find_format(None, name).name == ALIASES.get(name, name)


def test_names_of_vllm() -> None:
    expected = {
        "hermes": "hermes",
        "llama3_json": "llama3",
        "mistral": "mistral",
        "phi4_mini_json": "phi4",
        "openai": "gpt_oss",
    }
    assert {name: find_format("", name).name for name in expected} == expected


def test_all_names_are_in_the_docs() -> None:
    page = (Path(__file__).parents[3] / "docs" / "tools.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for name in FORMATS:
        (row,) = [row for row in rows if re.match(rf"\| `{name}`.*arguments|\| `{name}`.*whole", row)]
        for alias in (alias for alias, meant in ALIASES.items() if meant == name):
            assert f"`{alias}`" in row.split("|")[1]


def test_a_name_that_is_not_known() -> None:
    with pytest.raises(ConfigError, match=r"no tool call format 'hermse'; the names are auto, hermes, .*llama3_json"):
        find_format(None, "hermse")


def test_another_format_than_the_template_speaks_is_told_by_a_system_prompt() -> None:
    hermes = _TOOLS + "<tool_call></tool_call>"
    assert find_format(hermes, "hermes").system_prompt(TOOLS) is None
    assert find_format(hermes, "json").system_prompt(TOOLS) is not None
    # in a template whose writing is not known here, the user knows better
    assert find_format(_TOOLS, "hermes").system_prompt(TOOLS) is None
