"""A draft model changes no token, whatever it guesses; one that knows the answer saves steps; another vocabulary is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.checkpoints import save_folder
from tests.fakes.driver import Driver
from tonle.config.engine import EngineConfig
from tonle.engine.request import GenerationConfig
from tonle.engine.speculate.draft_cost import Worth
from tonle.errors import ConfigError
from tonle.models.source import resolve

PROMPTS = [[5, 9, 17, 40], [7, 8, 9] * 6, [100 + n for n in range(20)]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two models of one vocabulary."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("large", "small")}
    for seed, path in enumerate(made.values()):
        save_folder("llama", path, seed=seed)
    return made


def engine(folders: dict[str, Path], **settings: Any) -> Driver:
    return Driver(resolve(folders["large"]), EngineConfig(max_sequence_length=128, max_batch_size=4, **settings))


def answers(driver: Driver, config: GenerationConfig) -> list[list[int]]:
    return driver.generate(PROMPTS, config)


@pytest.mark.parametrize("draft", ["large", "small"])
@pytest.mark.parametrize(
    "config",
    [GenerationConfig(max_length=40, do_sample=False, early_stopping=False),
     GenerationConfig(max_length=40, temperature=1.0, seed=3, early_stopping=False)],
    ids=["greedy", "sampled"],
)  # fmt: skip
def test_tokens_are_those_without(folders: dict[str, Path], draft: str, config: GenerationConfig) -> None:
    plain = engine(folders, speculation="off")
    guessed = engine(folders, speculation_model=str(folders[draft]), speculation_length=4)
    assert answers(guessed, config) == answers(plain, config)
    stats = guessed.stats
    assert stats.draft_tokens > 0
    if draft == "large" and not config.do_sample:
        assert stats.accepted_tokens == stats.draft_tokens, "it knows what will come"
        assert stats.num_steps < plain.stats.num_steps


def test_sequences_that_are_preempted_are_followed_again(folders: dict[str, Path]) -> None:
    config = GenerationConfig(max_length=60, do_sample=False, early_stopping=False)
    plain = engine(folders, speculation="off")
    # Nine blocks: one sequence fits, three do not.
    block = 16 * 2 * 2 * 2 * 16 * 4
    tight = engine(folders, speculation_model=str(folders["large"]), memory_pool_size=2 * 9 * block)
    assert answers(tight, config) == answers(plain, config)
    assert tight.stats.num_preemptions > 0 and tight.stats.accepted_tokens == tight.stats.draft_tokens > 0


@pytest.mark.parametrize(("size", "draft_size"), [(336, 320), (320, 336)])
def test_vocabularies_may_be_padded_to_different_sizes(tmp_path: Path, size: int, draft_size: int) -> None:
    """As those of Qwen2.5 are: ids beyond those of the tokenizer come in prompts and answers, and in guesses."""
    folders = {"large": tmp_path / "large", "small": tmp_path / "small"}
    for seed, (path, count) in enumerate(zip(folders.values(), (size, draft_size), strict=True)):
        save_folder("llama", path, seed=seed, vocab_size=count)
    last = size - 1
    biased = {last: 12.0} if size > draft_size else {}
    config = GenerationConfig(max_length=30, do_sample=False, early_stopping=False, logit_bias=biased)
    plain = engine(folders, speculation="off")
    guessed = engine(folders, speculation_model=str(folders["small"]), speculation_length=4)
    _always_guess(guessed)
    prompts = [[5, 9, last, 40], [7, 8, 9] * 6, [last] * 5]
    found = guessed.generate(prompts, config)
    assert found == plain.generate(prompts, config)
    assert guessed.stats.draft_tokens > 20 and (not biased or any(last in answer for answer in found))


def _always_guess(driver: Driver) -> None:
    """In each step, whatever it costs."""
    drafts = driver.loop._scheduler.drafts
    assert drafts is not None
    drafts._drafter.drafter._cost.worth = lambda *args: Worth(0.0, None, False)  # type: ignore[union-attr]


def test_both_caches_share_the_memory(folders: dict[str, Path]) -> None:
    plain = engine(folders, speculation="off", memory_pool_size=2**22)
    guessed = engine(folders, speculation_model=str(folders["large"]), memory_pool_size=2**22)
    assert guessed.card.num_blocks == plain.card.num_blocks // 2, "a model as large takes half"


def test_another_vocabulary_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    save_folder("llama", tmp_path)
    written = tmp_path / "tokenizer.json"
    tokenizer = json.loads(written.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    written.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="has another vocabulary than the model") as caught:
        engine(folders, speculation_model=str(tmp_path))
    assert caught.value.param == "speculation_model"


@pytest.mark.parametrize(
    "settings",
    [{"speculation": "draft_model"}, {"speculation": "suffix", "speculation_model": "x"},
     {"speculation": "off", "speculation_model": "x"}, {"speculation_model": "x", "tensor_parallel_size": 2}],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings).validate()
    assert caught.value.param == "speculation_model"
