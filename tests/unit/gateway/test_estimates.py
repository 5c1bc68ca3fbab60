"""How large a prompt is taken to be before a backend has counted it."""

from __future__ import annotations

from typing import Any

import pytest

from tonle.gateway.parsed_request import estimate_prompt


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
    ],
)
def test_token_ids_are_counted_and_text_is_estimated(body: dict[str, Any], tokens: int) -> None:
    assert estimate_prompt(body) == tokens
