"""The default model says what transformers says with the same weights."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.driver import Driver
from tests.parity.test_engine import assert_same, reference
from tests.parity.test_forward import read_by_transformers
from tonle.config.engine import EngineConfig
from tonle.engine.request import GenerationConfig
from tonle.engine.text import load_text
from tonle.models.source import ModelSource

pytestmark = pytest.mark.model

NEW = 64
GREEDY = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False)
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "ភ្នំពេញ គឺជា",
    "Once upon a time, in a village by a great river, there lived " * 12,
]


@pytest.fixture(scope="module")
def theirs(default_model: ModelSource) -> Any:
    return read_by_transformers(default_model.path)


def test_greedy_tokens_alone_and_in_a_busy_batch(default_model: ModelSource, theirs: Any) -> None:
    text = load_text(default_model)
    prompts = [[text.encode("x")[0]], *(text.encode(prompt) for prompt in PROMPTS)]
    answers = [reference(theirs, prompt, NEW) for prompt in prompts]
    driver = Driver(default_model, EngineConfig(memory_pool_size=2**29, activation_bits=16))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same(theirs, prompt, driver.generate([prompt], GREEDY)[0], answer)
    crowd = [text.encode(f"{i}. Tell me about the number {i}") for i in range(27)]
    outputs = driver.generate([*prompts, *crowd], GREEDY, arrive_every=1)
    for prompt, answer, output in zip(prompts, answers, outputs, strict=False):
        assert_same(theirs, prompt, output, answer)
