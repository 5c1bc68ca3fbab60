"""How large a prompt is taken to be before a backend has counted it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tonle.gateway.parsed_request import ParsedRequest, estimate_prompt

PLAIN = ParsedRequest(
    body={}, raw=b"", rewritten=False, warnings=(), asked_model=None, stream=False, wants_usage=False, adds_usage=False,
    prompt_tokens=0, new_tokens=0, priority=0, deadline_s=None, user=None, strict=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({}, 0),
        ({"prompt": "a" * 40}, 11),
        ({"prompt": ["a" * 40, "b" * 40]}, 22),
        ({"prompt": [5] * 1000}, 1000),
        ({"prompt": [[5] * 10, [6] * 20]}, 30),
        ({"prompt": []}, 0),
        ({"prompt": [None, "a"]}, 2),
        ({"messages": [{"role": "user", "content": "a" * 40}, {"content": [{"text": "b" * 40}]}]}, 22),
        ({"messages": "wrong", "prompt": 5}, 0),
        # What becomes part of the prompt beside messages: tools, schemas, and calls in the history.
        ({"messages": [], "tools": [{"a": "b" * 32}]}, 10),
        ({"messages": [], "functions": [{"a": "b" * 32}], "response_format": {"a": "b" * 34}}, 21),
        ({"messages": [{"tool_calls": [{"function": {"name": "abc", "arguments": "x" * 40}}]}]}, 12),
        ({"messages": [{"role": "tool", "content": "a" * 40}]}, 11),
        ({"messages": [{"tool_calls": [7, {}, {"function": 8}]}, {"tool_calls": 9}], "tools": None}, 0),
    ],
)
def test_token_ids_are_counted_and_text_is_estimated(body: dict[str, Any], tokens: int) -> None:
    assert estimate_prompt(body) == tokens


def test_tools_are_a_part_of_the_beginning_of_a_prompt() -> None:
    """Requests with other tools share no cached prefix, whatever their messages; the window is left to the messages."""

    def beginning(**fields: Any) -> str:
        body = {
            "messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "x" * 100}],
            **fields,
        }
        return msgspec.structs.replace(PLAIN, body=body).prefix_text(50)

    tools = [{"function": {"name": "weather", "description": "y" * 1000}}]
    assert beginning() == "Be kind.\x00" + "x" * 42
    assert beginning(tools=tools) == beginning(tools=tools, tool_choice="required")
    assert beginning(tools=tools).endswith(beginning())
    others = [{"function": {"name": "time"}}]
    assert len({beginning(**fields)[:20] for fields in ({}, {"tools": tools}, {"tools": others})}) == 3
