"""The words a field takes, found in its type."""

from __future__ import annotations

import pytest

from tonle.config.allowed_values import allowed_values
from tonle.config.routing import BackendConfig, ExperimentConfig
from tonle.gateway.admin import KeyRequest
from tonle.protocol.openai import ChatRequest


@pytest.mark.parametrize(
    ("kind", "path", "words"),
    [
        (BackendConfig, "role", ["any", "decode", "prefill"]),
        (BackendConfig, "url", []),
        (BackendConfig, "nothing", []),
        (BackendConfig, "role[0].deep", []),
        (ExperimentConfig, "arms[0].name", []),
        (KeyRequest, "scopes[3]", ["admin", "dashboard", "gateway", "metrics", "models", "priority"]),
        (KeyRequest, "limits.tokens_per_day", []),
    ],
)
def test_words(kind: type, path: str, words: list[str]) -> None:
    assert allowed_values(kind, path) == words


def test_deep_inside() -> None:
    assert "assistant" in allowed_values(ChatRequest, "messages[0].role")
