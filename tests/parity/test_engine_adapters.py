"""A request with a LoRA adapter gets what the merged weights give, whatever adapters are computed beside it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.adapters import merge, write_adapter
from tests.fakes.checkpoints import tiny_model
from tests.fakes.driver import Driver
from tests.parity.test_engine import assert_same, prompts, reference
from tonle.config.engine import EngineConfig
from tonle.engine.request import GenerationConfig
from tonle.models.load.transformers_model import live_spec

NEW = 24
GREEDY = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False)
NAMES = ("one", "two", "three", "four", "five")
MODULES = {
    "one": ("q", "k", "v", "o", "gate", "up", "down"),
    "two": ("q", "v"),
    "three": ("o", "down"),
    "four": ("gate", "up"),
}
PROMPTS = prompts([40, 17, 3], 320)


def model_of(family: str) -> Any:
    """With untied embeddings: tied ones make such small models repeat their last token, whatever the layers compute."""
    return tiny_model(family, tie_word_embeddings=False)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folders(family: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    spec = live_spec(model_of(family))
    root = tmp_path_factory.mktemp(family)
    for seed, name in enumerate(NAMES):
        write_adapter(root / name, spec, rank=1 + 3 * seed, modules=MODULES.get(name, ("q", "up")), seed=seed)
    return {name: root / name for name in NAMES}


@pytest.fixture(scope="module")
def answers(family: str, folders: dict[str, Path]) -> dict[str | None, tuple[Any, list[list[int]]]]:
    """By adapter: the merged model, and what `transformers` computes with it for each prompt."""
    spec = live_spec(model_of(family))
    merged: dict[str | None, Any] = {None: model_of(family)}
    for seed, name in enumerate(NAMES):
        adapter = write_adapter(
            folders[name], spec, rank=1 + 3 * seed, modules=MODULES.get(name, ("q", "up")), seed=seed
        )
        merged[name] = merge(model_of(family), adapter)
    return {name: (model, [reference(model, prompt, NEW) for prompt in PROMPTS]) for name, model in merged.items()}


def config(folders: dict[str, Path], **settings: Any) -> EngineConfig:
    lora = {name: str(folders[name]) for name in NAMES}
    return EngineConfig(lora=lora, max_sequence_length=128, **settings)


def crowd() -> list[tuple[int, str | None]]:
    """Prompts, by place, with each adapter and without, in an order of no meaning."""
    every = [(i, name) for i in range(len(PROMPTS)) for name in (None, *NAMES)]
    random.Random(3).shuffle(every)
    return every


def check(driver: Driver, answers: dict[str | None, tuple[Any, list[list[int]]]], arrive_every: int = 0) -> None:
    asked = crowd()
    outputs = driver.generate(
        [PROMPTS[i] for i, _ in asked], GREEDY, adapters=[name for _, name in asked], arrive_every=arrive_every
    )
    for (i, name), ours in zip(asked, outputs, strict=True):
        model, theirs = answers[name]
        assert_same(model, PROMPTS[i], ours, theirs[i])


def test_the_adapters_matter(answers: Any) -> None:
    """Else the tests below would pass without them."""
    for i in range(len(PROMPTS)):
        assert len({tuple(theirs[i]) for _, theirs in answers.values()}) == len(NAMES) + 1


def test_in_a_mixed_batch(family: str, folders: Any, answers: Any) -> None:
    """Equal prompts with different adapters arrive together, and again: no cached prefix is shared between them."""
    driver = Driver(model_of(family), config(folders))
    check(driver, answers)
    hits = driver.stats.prefix_hits
    check(driver, answers)
    assert driver.stats.prefix_hits - hits == len(NAMES) * (32 + 16) + 32 + 16, (
        "each finds its own prefix, and only that"
    )


@pytest.mark.parametrize(("slots", "lag"), [(1, 0), (2, 1)])
def test_more_adapters_than_slots_and_than_memory(
    family: str, folders: Any, answers: Any, slots: int, lag: int
) -> None:
    driver = Driver(model_of(family), config(folders, max_loras=slots, max_cpu_loras=2, max_num_batched_tokens=48), lag)
    check(driver, answers, arrive_every=2)


def test_preempted(family: str, folders: Any, answers: Any) -> None:
    own = Driver(model_of(family), config(folders))
    per_block = 16 * 2**20 // own.card.num_blocks
    driver = Driver(model_of(family), config(folders, max_loras=3, memory_pool_size=12 * per_block))
    check(driver, answers)
    assert driver.stats.num_preemptions > 0
