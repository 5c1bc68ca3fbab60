"""Embeddings are transformers' last hidden states, pooled; however prompts are cut, batched, cached or interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.adapters import merge, write_adapter
from tests.fakes.checkpoints import tiny_model
from tests.fakes.driver import Driver
from tests.parity.test_engine import prompts
from tonle.config.engine import EngineConfig
from tonle.engine.request import POOLINGS, GenerationConfig
from tonle.models.load.transformers_model import live_spec

PROMPTS = prompts([1, 2, 15, 16, 17, 40, 100, 300], 320)
CLOSE = 2e-5  # of numbers around 1, in float32


@torch.inference_mode()
def expected(model: Any, prompt: list[int], pooling: str) -> np.ndarray:
    states = model.base_model(torch.tensor([prompt])).last_hidden_state[0]
    pooled = states[-1] if pooling == "last" else states.mean(dim=0)
    return np.asarray(pooled.float())


def assert_pooled(model: Any, asked: list[list[int]], found: list[np.ndarray], pooling: str) -> None:
    for prompt, vector in zip(asked, found, strict=True):
        np.testing.assert_allclose(vector, expected(model, prompt, pooling), rtol=CLOSE, atol=CLOSE)


@pytest.fixture(scope="module", params=["llama", "qwen3", "mistral"])
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_as_transformers(model: Any, pooling: str) -> None:
    """All at once, then cut into chunks of ten tokens, and one step ahead."""
    for settings, lag in (({}, 0), ({"max_num_batched_tokens": 10}, 0), ({"max_num_batched_tokens": 32}, 1)):
        driver = Driver(model, EngineConfig(**settings), lag=lag)
        assert_pooled(model, PROMPTS, driver.embed(PROMPTS, pooling), pooling)
        assert driver.stats.generation_tokens == 0 and not driver.stats.num_running
        assert driver.stats.prompt_tokens == sum(map(len, PROMPTS))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_blocks_run_out(pooling: str) -> None:
    """Prompts lose their rows halfway and begin again: nothing is counted twice."""
    model = tiny_model("llama")
    block = 2 * 2 * 16 * 2 * 16 * 4  # layers, k and v, tokens, heads, dim, bytes
    config = EngineConfig(max_num_batched_tokens=12, memory_pool_size=24 * block, max_sequence_length=352)
    driver = Driver(model, config)
    answers = [driver.ask(PROMPTS[3], GenerationConfig(max_length=60, early_stopping=False)) for _ in range(2)]
    wanted = [driver.ask(prompt, GenerationConfig(max_length=0)) for prompt in PROMPTS[::-1]]
    for request in wanted:
        request.pooling = pooling
    driver.run([*answers, *wanted], arrive_every=1)
    found = {handle: vector for step in driver.steps for handle, vector in step.embeddings.items()}
    vectors = [np.frombuffer(found[request.handle], dtype="<f4") for request in wanted]
    assert_pooled(model, PROMPTS[::-1], vectors, pooling)
    assert driver.stats.num_preemptions > 0


def test_a_full_context_has_an_embedding() -> None:
    model = tiny_model("llama")
    (prompt,) = prompts([128], 320)
    driver = Driver(model, EngineConfig(max_sequence_length=128))
    for pooling in POOLINGS:
        assert_pooled(model, [prompt], driver.embed([prompt], pooling), pooling)


def test_the_prefix_cache_serves_last_and_not_mean() -> None:
    model = tiny_model("llama")
    (prompt,) = prompts([100], 320)
    for pooling, hits in (("last", 96), ("mean", 0)):
        driver = Driver(model, EngineConfig())
        for _ in range(2):
            assert_pooled(model, [prompt], driver.embed([prompt], pooling), pooling)
        assert driver.stats.prefix_hits == hits


def test_beside_answers_with_adapters(tmp_path: Path) -> None:
    """Each with its own adapter or none, while others are answered: every one as if it were alone."""
    family = "llama"
    spec = live_spec(tiny_model(family, tie_word_embeddings=False))
    models: dict[str | None, Any] = {None: tiny_model(family, tie_word_embeddings=False)}
    for seed, name in enumerate(("one", "two")):
        adapter = write_adapter(tmp_path / name, spec, rank=4 + seed, modules=("q", "v", "up", "down"), seed=seed)
        models[name] = merge(tiny_model(family, tie_word_embeddings=False), adapter)
    lora = {name: str(tmp_path / name) for name in ("one", "two")}
    for lag in (0, 1):
        driver = Driver(
            models[None], EngineConfig(lora=lora, max_num_batched_tokens=48, max_sequence_length=352), lag=lag
        )
        crowd = [(prompt, name) for prompt in PROMPTS for name in (None, "one", "two")]
        requests = []
        for place, (prompt, name) in enumerate(crowd):
            requests.append(driver.ask(prompt, GenerationConfig(max_length=0), name))
            requests[-1].pooling = POOLINGS[place % 2]
        answers = [
            driver.ask(prompt, GenerationConfig(max_length=30, do_sample=False), "two") for prompt in PROMPTS[:3]
        ]
        driver.run([*answers, *requests], arrive_every=1)
        found = {handle: vector for step in driver.steps for handle, vector in step.embeddings.items()}
        for request, (prompt, name) in zip(requests, crowd, strict=True):
            vector = np.frombuffer(found[request.handle], dtype="<f4")
            assert_pooled(models[name], [prompt], [vector], request.pooling)


@pytest.mark.parametrize("start", [0, 1, 17, 40, 99])
def test_a_part_of_a_prompts_log_probabilities(start: int) -> None:
    """From a place on: the same as those of all of it, and what stands before may come from the cache."""
    model = tiny_model("llama")
    (prompt,) = prompts([100], 320)
    driver = Driver(model, EngineConfig(max_num_batched_tokens=30))
    plain = GenerationConfig(max_length=1, do_sample=False)
    driver.generate([prompt], plain)
    whole, part = (
        logprobs_of(driver, prompt, GenerationConfig(max_length=1, do_sample=False, prompt_logprobs=0, **some))
        for some in ({}, {"prompt_logprobs_start": start})
    )
    first = max(1, start)
    assert sorted(part) == list(range(first, 100))
    np.testing.assert_allclose([part[place] for place in part], [whole[place] for place in part], atol=1e-5)
    assert driver.stats.prefix_hits == (max(0, start - 1) // 16) * 16


def logprobs_of(driver: Driver, prompt: list[int], config: GenerationConfig) -> dict[int, float]:
    before = len(driver.steps)
    driver.generate([prompt], config)
    return {
        first + i: record.logprob
        for step in driver.steps[before:]
        for first, records in step.prompt_logprobs.values()
        for i, record in enumerate(records)
    }
