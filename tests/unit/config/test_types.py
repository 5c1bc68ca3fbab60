"""Settings made in Python: wrong types are named before anything computes with them."""

from __future__ import annotations

from typing import Any

import pytest

from tonle.config.engine import EngineConfig
from tonle.config.types import wrong_type
from tonle.engine.request import GenerationConfig
from tonle.errors import ConfigError, InvalidRequest


@pytest.mark.parametrize(("wrong", "said"), [
    ({"stop": "END"}, "stop must be a list of strings, not 'END'"),
    ({"stop": None}, "stop must be a list of strings, not None"),
    ({"stop": ["a", 1]}, "stop must be a list of strings, not ['a', 1]"),
    ({"logit_bias": None}, "logit_bias must be a dict of whole numbers to numbers, not None"),
    ({"stop_token_ids": None}, "stop_token_ids must be a list of whole numbers, not None"),
    ({"seed": 1.5}, "seed must be a whole number or None, not 1.5"),
    ({"logprobs": 1.5}, "logprobs must be a whole number or None, not 1.5"),
    ({"do_sample": "no"}, "do_sample must be True or False, not 'no'"),
    ({"stop": ["a" * 100, 1]}, f"stop must be a list of strings, not ['{'a' * 58}…"),
    ({"stop": object}, "stop must be a list of strings, not <class 'object'>"),
])  # fmt: skip
def test_generation(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        GenerationConfig(**wrong).validate()
    assert caught.value.message == said and caught.value.param == next(iter(wrong))


@pytest.mark.parametrize(("wrong", "said"), [
    ({"max_batch_size": "a"}, "max_batch_size must be a whole number or None, not 'a'"),
    ({"memory_pool_size": "big"}, "memory_pool_size must be a whole number or None, not 'big'"),
    ({"enable_metrics": "yes"}, "enable_metrics must be True or False, not 'yes'"),
    ({"batch_timeout_ms": None}, "batch_timeout_ms must be a number, not None"),
    ({"device": 0}, "device must be a string, not 0"),
])  # fmt: skip
def test_engine(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**wrong).validate()
    assert caught.value.message == said and caught.value.param == next(iter(wrong))


def test_right_ones_pass() -> None:
    assert wrong_type(EngineConfig()) is None and wrong_type(EngineConfig(batch_timeout_ms=5)) is None
    assert wrong_type(GenerationConfig(temperature=1, stop=["a"], logit_bias={3: 1}, seed=4)) is None
