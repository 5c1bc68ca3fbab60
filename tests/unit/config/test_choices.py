"""The words a field takes, found in its type."""

from __future__ import annotations

import pytest

from tonle.config.choices import choices
from tonle.config.rows import BackendRow, ExperimentRow
from tonle.gateway.admin import KeyRequest
from tonle.protocol.openai import ChatRequest


@pytest.mark.parametrize(
    ("kind", "path", "words"),
    [
        (BackendRow, "role", ["any", "decode", "prefill"]),
        (BackendRow, "url", []),
        (BackendRow, "nothing", []),
        (BackendRow, "role[0].deep", []),
        (ExperimentRow, "arms[0].name", []),
        (KeyRequest, "scopes[3]", ["admin", "metrics", "models"]),
        (KeyRequest, "limits.tokens_per_day", []),
    ],
)
def test_words(kind: type, path: str, words: list[str]) -> None:
    assert choices(kind, path) == words


def test_deep_inside() -> None:
    assert "assistant" in choices(ChatRequest, "messages[0].role")
