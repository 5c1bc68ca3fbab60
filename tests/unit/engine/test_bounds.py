"""What one request may ask for is bounded."""

from __future__ import annotations

import pytest

from tonle.engine.request import GenerationConfig
from tonle.errors import InvalidRequest


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GenerationConfig(stop=["x" * 1025]), "at most 1024 characters"),
        (GenerationConfig(stop=["x"] * 17), "at most 16 strings"),
        (GenerationConfig(logit_bias=dict.fromkeys(range(1025), 1.0)), "logit_bias takes at most 1024"),
        (GenerationConfig(stop_token_ids=list(range(1025))), "stop_token_ids takes at most 1024"),
        (GenerationConfig(n=65), "n must be between 1 and 64"),
        (GenerationConfig(logprobs=21), "logprobs must be between 0 and 20"),
    ],
)
def test_sizes(config: GenerationConfig, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        config.validate()


def test_sizes_at_the_bound() -> None:
    GenerationConfig(
        stop=["x" * 1024] * 16, logit_bias=dict.fromkeys(range(1024), 1.0), stop_token_ids=list(range(1024)), n=64
    ).validate()
