"""The engine's truths: same greedy tokens as transformers, however the work is cut, batched, cached or interrupted."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import FIRST_FAMILIES, tiny_model
from tests.fakes.driver import Driver
from tonle.config.engine import EngineConfig
from tonle.engine.request import GenerationConfig

NEW = 64
LENGTHS = [1, 2, 15, 16, 17, 40, 100, 300]
GREEDY = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False)
TIE = 1e-4  # two logits this close may be ordered either way


def prompts(lengths: list[int], vocab: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, vocab) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def reference(model: Any, prompt: list[int], new: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False,
                         eos_token_id=None, pad_token_id=0)  # fmt: skip
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def assert_same(model: Any, prompt: list[int], ours: list[int], theirs: list[int]) -> None:
    """Equal, or different first where transformers itself sees a tie."""
    if ours == theirs:
        return
    at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    logits = model(torch.tensor([prompt + theirs[:at]])).logits[0, -1].float()
    gap = (logits[theirs[at]] - logits[ours[at]]).item()
    assert abs(gap) < TIE, f"token {at}: ours {ours[at]}, theirs {theirs[at]}, gap {gap}"


@pytest.fixture(scope="module", params=FIRST_FAMILIES)
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def answers(model: Any) -> list[tuple[list[int], list[int]]]:
    asked = prompts(LENGTHS, model.config.vocab_size)
    return [(prompt, reference(model, prompt, NEW)) for prompt in asked]


def check(model: Any, driver: Driver, answers: list[tuple[list[int], list[int]]], **how: Any) -> None:
    outputs = driver.generate([prompt for prompt, _ in answers], GREEDY, **how)
    for (prompt, theirs), ours in zip(answers, outputs, strict=True):
        assert_same(model, prompt, ours, theirs)


def test_alone(model: Any, answers: Any) -> None:
    driver = Driver(model, EngineConfig(max_sequence_length=400))
    for answer in answers:
        check(model, driver, [answer])


def test_in_a_busy_batch_of_32(model: Any, answers: Any) -> None:
    noise = prompts([random.Random(i).randint(1, 200) for i in range(24)], model.config.vocab_size, seed=9)
    crowd = answers + [(prompt, reference(model, prompt, NEW)) for prompt in noise[:4]]
    driver = Driver(model, EngineConfig(max_batch_size=32, max_sequence_length=400))
    outputs = driver.generate([p for p, _ in crowd] + noise[4:], GREEDY, arrive_every=2)
    for (prompt, theirs), ours in zip(crowd, outputs[: len(crowd)], strict=True):
        assert_same(model, prompt, ours, theirs)


@pytest.mark.parametrize("budget", [7, 64])
def test_chunked_is_whole(model: Any, answers: Any, budget: int) -> None:
    config = EngineConfig(max_batch_size=4, max_num_batched_tokens=budget, max_sequence_length=400)
    check(model, Driver(model, config), answers)


def test_a_prefix_hit_is_cold(model: Any, answers: Any) -> None:
    driver = Driver(model, EngineConfig(max_sequence_length=400))
    check(model, driver, answers)
    before = driver.stats.prefix_hits
    check(model, driver, answers)  # now warm
    assert driver.stats.prefix_hits - before > 300
    check(model, driver, [answers[-1]] * 5)  # five at once share one prompt


def test_preempted_is_undisturbed(model: Any, answers: Any) -> None:
    """Room for little more than the longest request: the others are thrown out again and again."""
    spec = model.config
    head_dim = getattr(spec, "head_dim", None) or spec.hidden_size // spec.num_attention_heads
    block_bytes = 2 * spec.num_hidden_layers * 16 * spec.num_key_value_heads * head_dim * 4
    config = EngineConfig(max_sequence_length=400, memory_pool_size=30 * block_bytes)
    driver = Driver(model, config)
    check(model, driver, answers + answers[2:6])
    assert driver.stats.num_preemptions > 0


def test_one_step_of_lag_changes_nothing(model: Any, answers: Any) -> None:
    config = EngineConfig(max_batch_size=5, max_num_batched_tokens=64, max_sequence_length=400)
    check(model, Driver(model, config, lag=1), answers, arrive_every=3)


def test_block_sizes(model: Any, answers: Any) -> None:
    for block_size in (1, 5, 64):
        check(model, Driver(model, EngineConfig(block_size=block_size, max_sequence_length=400)), answers[3:6])


def test_the_same_seed_gives_the_same_text_in_any_company(model: Any) -> None:
    config = GenerationConfig(max_length=40, seed=1234, temperature=0.9, top_p=0.95, early_stopping=False)
    asked = prompts([30], model.config.vocab_size, seed=3)
    alone = Driver(model, EngineConfig(max_sequence_length=400)).generate(asked, config)
    crowd = prompts([5, 60, 200, 9, 100], model.config.vocab_size, seed=4)
    busy = Driver(model, EngineConfig(max_sequence_length=400, max_num_batched_tokens=50))
    assert busy.generate([*crowd[:3], *asked, *crowd[3:]], config, arrive_every=2)[3] == alone[0]


def test_eos_stop_ids_and_min_tokens(model: Any) -> None:
    asked = prompts([20], model.config.vocab_size, seed=5)
    free = Driver(model).generate(asked, GREEDY)[0]
    stop = free[10]
    first = free.index(stop)
    stopping = GenerationConfig(max_length=NEW, do_sample=False, early_stopping=False, stop_token_ids=[stop])
    assert Driver(model).generate(asked, stopping)[0] == free[: first + 1]
    stopping.min_tokens = first + 2
    longer = Driver(model).generate(asked, stopping)[0]
    assert len(longer) >= first + 2 and stop not in longer[: first + 1]
