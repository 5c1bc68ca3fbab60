"""`optimized_generate` against transformers on the same weights, and what it does with batches, candidates and mistakes."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes.checkpoints import TURN_END, save_folder, tiny_model, tiny_tokenizer
from tonle.errors import ConfigError, ContextOverflow, InvalidRequest
from tonle.performance_optimizer import (
    OptimizationConfig,
    OptimizationLevel,
    PerformanceOptimizer,
    optimization_config,
)
from tonle.performance_optimizer.levels import PRESETS
from tonle.performance_optimizer.prompts import read_prompts

PAD = 0  # never generated below: rows are cut at the end-of-sequence token before it could be
MIB = 2**20


def small(**settings: Any) -> OptimizationConfig:
    return OptimizationConfig(**({"memory_pool_size": 16 * MIB} | settings))


def ids(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 320) for _ in range(length)]


@pytest.fixture(scope="module")
def model() -> Any:
    """Its end of sequence is a token that it generates within a few steps of some prompts below, and not of others."""
    model = tiny_model("llama", seed=3)
    model.generation_config.eos_token_id = model.config.eos_token_id = greedy(model, [ids(9)], max_new_tokens=12)[
        0, 16
    ].item()
    return model


@pytest.fixture(scope="module")
def optimizer(model: Any) -> Iterator[PerformanceOptimizer]:
    with PerformanceOptimizer(model, small()) as optimizer:
        yield optimizer


@torch.inference_mode()
def greedy(model: Any, prompts: list[list[int]], **options: Any) -> torch.Tensor:
    """transformers, with prompts padded on the left."""
    width = max(map(len, prompts))
    padded = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    found: torch.Tensor = model.generate(padded, attention_mask=mask, do_sample=False, pad_token_id=PAD, **options)
    return found


# -- the same tokens as transformers


@pytest.mark.parametrize("length", [1, 9, 40, 300])
def test_one_prompt_equals_transformers(model: Any, optimizer: PerformanceOptimizer, length: int) -> None:
    prompt = torch.tensor([ids(length)])
    output, stats = optimizer.optimized_generate(prompt, max_length=length + 24, do_sample=False)
    theirs = greedy(model, prompt.tolist(), max_length=length + 24)
    assert output.dtype == torch.int64
    assert torch.equal(output, theirs)
    assert stats["new_tokens"] == theirs.shape[1] - length


def test_the_end_of_sequence_ends_it_and_stays_in_the_output(model: Any, optimizer: PerformanceOptimizer) -> None:
    output, stats = optimizer.optimized_generate(torch.tensor([ids(9)]), max_length=50, do_sample=False)
    assert output.shape[1] < 50
    assert output[0, -1] == model.generation_config.eos_token_id
    assert stats["candidates"][0][0]["finish_reason"] == "stop"


def test_a_batch_padded_on_the_left_equals_transformers(model: Any, optimizer: PerformanceOptimizer) -> None:
    prompts = [ids(9), ids(17, 1), ids(30, 2)]
    theirs = greedy(model, prompts, max_length=60)
    padded, mask = theirs[:, :30], torch.tensor([[0] * (30 - len(p)) + [1] * len(p) for p in prompts])
    output, stats = optimizer.optimized_generate(
        padded, attention_mask=mask, max_length=60, do_sample=False, pad_token_id=PAD
    )
    assert torch.equal(output, theirs)
    assert stats["prompt_tokens"] == 9 + 17 + 30
    assert (
        len({len(of_prompt[0]["new_ids"]) for of_prompt in stats["candidates"]}) > 1
    )  # one ended early: it was padded


def test_padding_is_recognized_without_a_mask_as_in_transformers(model: Any, optimizer: PerformanceOptimizer) -> None:
    padded = torch.tensor([[PAD] * 8 + ids(9), ids(17, 1)])
    with torch.inference_mode():
        theirs = model.generate(padded, do_sample=False, pad_token_id=PAD, max_length=40)
    output, _ = optimizer.optimized_generate(padded, max_length=40, do_sample=False, pad_token_id=PAD)
    assert torch.equal(output, theirs)


def test_lists_of_unequal_lengths(model: Any, optimizer: PerformanceOptimizer) -> None:
    prompts = [ids(4, 5), ids(9), ids(21, 6)]
    output, _ = optimizer.optimized_generate(prompts, max_new_tokens=15, do_sample=False, pad_token_id=PAD)
    rows = [greedy(model, [prompt], max_new_tokens=15)[0].tolist() for prompt in prompts]
    width = max(map(len, rows))
    assert output.tolist() == [row + [PAD] * (width - len(row)) for row in rows]


def test_padding_on_the_right_is_left_out_and_new_tokens_stand_after_it(
    model: Any, optimizer: PerformanceOptimizer
) -> None:
    padded, mask = torch.tensor([[*ids(9), PAD, PAD], ids(11, 1)]), torch.tensor([[1] * 9 + [0] * 2, [1] * 11])
    output, _ = optimizer.optimized_generate(padded, attention_mask=mask, max_length=17, do_sample=False)
    assert torch.equal(output[:, :11], padded)
    assert output[0, 11:17].tolist() == greedy(model, [ids(9)], max_new_tokens=6)[0, 9:].tolist()


@pytest.mark.parametrize(
    "wrap", [torch.tensor, list, tuple, np.array, lambda row: torch.tensor(row, dtype=torch.int32)]
)
def test_one_prompt_in_any_form(optimizer: PerformanceOptimizer, wrap: Any) -> None:
    expected, _ = optimizer.optimized_generate(torch.tensor([ids(9)]), max_length=20, do_sample=False)
    output, _ = optimizer.optimized_generate(wrap(ids(9)), max_length=20, do_sample=False)
    assert torch.equal(output, expected)


def test_penalties_and_least_lengths_as_in_transformers(model: Any, optimizer: PerformanceOptimizer) -> None:
    ours, _ = optimizer.optimized_generate(
        [ids(9)], max_length=40, do_sample=False, repetition_penalty=1.3, min_tokens=20
    )
    theirs = greedy(model, [ids(9)], max_length=40, repetition_penalty=1.3, min_new_tokens=20)
    assert torch.equal(ours, theirs)


def test_a_folder(tmp_path: Path) -> None:
    """Padding is what the folder's own generation_config says."""
    live = save_folder("qwen2", tmp_path, pad_token_id=5)
    with PerformanceOptimizer(tmp_path, small()) as optimizer:
        first = greedy(live, [ids(5)], max_new_tokens=1)[0, -1].item()
        output, stats = optimizer.optimized_generate(
            [ids(5), ids(12, 1)], max_new_tokens=8, do_sample=False, stop_token_ids=[first]
        )
    assert output[0, 6:].tolist() == [5] * (output.shape[1] - 6)
    assert stats["candidates"][1][0]["text"] == tiny_tokenizer().decode(output[1, 12:20], skip_special_tokens=True)


def test_without_a_length_there_are_128_new_tokens(optimizer: PerformanceOptimizer) -> None:
    output, _ = optimizer.optimized_generate(ids(5), do_sample=False, early_stopping=False)
    assert output.shape == (1, 5 + 128)


# -- candidates


@torch.inference_mode()
def mean_logprob(model: Any, prompt: list[int], new: list[int]) -> float:
    table = model(torch.tensor([prompt + new])).logits[0].float().log_softmax(-1)
    return sum(table[len(prompt) - 1 + i, token].item() for i, token in enumerate(new)) / len(new)


def test_the_best_candidate_is_returned(model: Any, optimizer: PerformanceOptimizer) -> None:
    prompts = [ids(9), ids(40, 1)]
    output, stats = optimizer.optimized_generate(prompts, max_new_tokens=12, temperature=0.9, seed=7, pad_token_id=PAD)
    assert [len(of_prompt) for of_prompt in stats["candidates"]] == [4, 4]
    for row, prompt, candidates in zip(output.tolist(), prompts, stats["candidates"], strict=True):
        recomputed = [mean_logprob(model, prompt, candidate["new_ids"]) for candidate in candidates]
        assert [candidate["score"] for candidate in candidates] == pytest.approx(recomputed, abs=1e-3)
        assert len({tuple(candidate["new_ids"]) for candidate in candidates}) > 1
        best = candidates[recomputed.index(max(recomputed))]["new_ids"]
        assert row[: len(prompt) + len(best)] == prompt + best
    assert stats["generated_tokens"] > stats["new_tokens"]
    assert "4 candidates" in stats["mode"]


def test_a_seed_repeats_and_equal_prompts_differ(optimizer: PerformanceOptimizer) -> None:
    first, _ = optimizer.optimized_generate([ids(9), ids(9)], max_new_tokens=12, seed=1, early_stopping=False)
    again, _ = optimizer.optimized_generate([ids(9), ids(9)], max_new_tokens=12, seed=1, early_stopping=False)
    assert torch.equal(first, again)
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("greedy_by", [{"do_sample": False}, {"temperature": 0.0}])
def test_greedy_has_one_candidate_and_says_so(model: Any, optimizer: PerformanceOptimizer, greedy_by: Any) -> None:
    _, stats = optimizer.optimized_generate(ids(9), max_new_tokens=4, **greedy_by)
    (candidate,) = stats["candidates"][0]
    assert candidate["score"] == pytest.approx(mean_logprob(model, ids(9), candidate["new_ids"]), abs=1e-3)
    assert [len(of_prompt) for of_prompt in stats["candidates"]] == [1]
    assert stats["mode"] == "greedy: one candidate per prompt, as all would be equal"


@pytest.mark.parametrize(("settings", "own", "expected"), [
    ({}, False, "4 candidates"),
    ({"num_parallel_samples": 2}, False, "2 candidates"),
    ({"enable_parallel_sampling": False}, False, "greedy"),
    ({"enable_parallel_sampling": False}, True, "sampled: one candidate"),
])  # fmt: skip
def test_whether_it_samples(settings: Any, own: bool, expected: str) -> None:
    """Several candidates are sampled; a single one is as the model's own generation_config has it."""
    model = tiny_model("llama")
    model.generation_config.do_sample = own
    with PerformanceOptimizer(model, small(**settings)) as optimizer:
        _, stats = optimizer.optimized_generate(ids(9), max_new_tokens=2)
    assert expected in stats["mode"]


def test_candidates_share_the_blocks_of_their_prompt(model: Any) -> None:
    """Counted while all of them run, by a callback of the engine's own: a prompt of 40 blocks, which takes two steps."""
    held: list[int] = []
    with PerformanceOptimizer(model, small(num_parallel_samples=6)) as optimizer:
        engine = optimizer.engine
        deliver, num_blocks = engine._deliver, engine.get_stats()["cache_info"]["num_blocks"]

        def watch(message: Any) -> None:
            stats = message.stats
            if stats.num_running == 6 and len(message.tokens) == 6:  # past the prompt
                held.append(round(stats.kv_usage * num_blocks))
            deliver(message)

        engine._deliver = watch  # type: ignore[method-assign]
        optimizer.optimized_generate(ids(16 * 40 + 1), max_new_tokens=10, temperature=1.0, early_stopping=False)
    assert set(held) == {40 + 6}  # the prompt once, and one block for each candidate


# -- statistics and life


def test_stats(optimizer: PerformanceOptimizer) -> None:
    _, stats = optimizer.optimized_generate([ids(9), ids(20)], max_new_tokens=5, do_sample=False, early_stopping=False)
    assert (stats["prompt_tokens"], stats["new_tokens"], stats["generated_tokens"]) == (29, 10, 10)
    assert stats["tokens_per_second"] == pytest.approx(10 / stats["seconds"])
    assert 0 < stats["first_token_s"] <= stats["first_token_max_s"] <= stats["seconds"]
    assert stats["acceptance_rate"] is None or 0 <= stats["acceptance_rate"] <= 1  # guesses are made where they pay
    assert stats["peak_memory"] > 50 * MIB
    shown = str(stats)
    assert all(name in shown for name in stats)
    assert max(map(len, shown.splitlines())) < 120


def test_many_threads_share_one_engine(model: Any) -> None:
    outputs: dict[int, torch.Tensor] = {}
    with PerformanceOptimizer(model, small()) as optimizer:

        def work(length: int) -> None:
            outputs[length], _ = optimizer.optimized_generate(ids(length), max_new_tokens=8, do_sample=False)

        threads = [threading.Thread(target=work, args=(length,)) for length in (3, 9, 30, 50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len({id(optimizer.engine) for _ in range(2)}) == 1
    for length, output in outputs.items():
        assert torch.equal(output, greedy(model, [ids(length)], max_new_tokens=8))
    assert len(outputs) == 4


def test_closed_is_closed() -> None:
    optimizer = PerformanceOptimizer(tiny_model("llama"), small())
    optimizer.optimized_generate(ids(3), max_new_tokens=2)
    engine = optimizer.engine
    optimizer.close()
    optimizer.close()
    assert engine.get_stats()["engine_status"] == "stopped"
    with pytest.raises(ConfigError, match="was closed; make a new one"):
        optimizer.optimized_generate(ids(3), max_new_tokens=2)


def test_a_copy_of_the_config_is_kept(model: Any) -> None:
    config = small()
    optimizer = PerformanceOptimizer(model, config)
    config.num_parallel_samples = 9
    assert optimizer.config.num_parallel_samples == 4


def test_a_level_that_the_model_cannot_have_in_full(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """fp8 keys and values, here on a CPU, are the level's wish; asked for by name they are an error."""
    wish = replace(PRESETS[OptimizationLevel.BALANCED], kv_cache_dtype=("fp8", "fp8"))
    monkeypatch.setitem(PRESETS, OptimizationLevel.BALANCED, wish)
    monkeypatch.setattr(optimization_config, "_has_fp8", lambda device: True)
    with PerformanceOptimizer(model, small()) as optimizer:
        optimizer.optimized_generate(ids(9), max_new_tokens=2)
        assert optimizer.engine.config.kv_cache_dtype == "auto"
    assert "level BALANCED would use an fp8 KV cache, but" in caplog.text
    with pytest.raises(ConfigError, match="fp8"):
        PerformanceOptimizer(model, small(kv_cache_dtype="fp8")).optimized_generate(ids(9))


@pytest.mark.parametrize(("device", "runs_on"), [("auto", "cuda:1"), ("cpu", "cpu"), ("cuda", "cuda")])
def test_where_a_live_model_runs(device: str, runs_on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is, unless the config names a device; and what that device can do decides about fp8."""
    asked: list[str | None] = []

    def capability(of: str | None) -> tuple[int, int]:
        asked.append(of)
        return (9, 0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    live = SimpleNamespace(state_dict=dict, device="cuda:1")
    config = OptimizationConfig(level=OptimizationLevel.AGGRESSIVE, device=device)
    assert PerformanceOptimizer(live, config)._device() == runs_on
    assert config.value("kv_cache_dtype", gpu=True) == "fp8" and asked == ["cuda" if device == "cuda" else None]


def test_without_a_mask_padding_at_either_end_of_a_tensor_is_left_out() -> None:
    padded = torch.tensor([[PAD, 5, PAD, 6], [7, 8, PAD, PAD]])
    assert read_prompts(padded, pad_id=PAD).stripped == [[5, PAD, 6], [7, 8]]
    assert read_prompts(padded.tolist(), pad_id=PAD).stripped == padded.tolist(), "lists have lengths of their own"


# -- mistakes


@pytest.mark.parametrize(("call", "message"), [
    ({"input_ids": ids(9), "max_length": 9}, "longest prompt already has 9.*max_length=9 leaves no new one"),
    ({"input_ids": [ids(3), ids(9)], "max_length": 8}, "longest prompt already has 9"),
    ({"input_ids": ids(9), "max_length": 20, "max_new_tokens": 5}, "max_length .* or max_new_tokens, not both"),
    ({"input_ids": ids(9), "max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1, not 0"),
    ({"input_ids": ids(9), "max_length": "20"}, "max_length must be a whole number of at least 1, not '20'"),
    ({"input_ids": "Hello"}, r"must be a tensor \[batch, prompt\].*, not 'Hello'"),
    ({"input_ids": torch.zeros(1, 3)}, r"not a torch.float32 of shape \[1, 3\]"),
    ({"input_ids": torch.zeros(1, 1, 3, dtype=torch.int64)}, r"not a torch.int64 of shape \[1, 1, 3\]"),
    ({"input_ids": {"input_ids": [1]}}, r"of a tokenizer's output pass \*\*inputs"),
    ({"input_ids": []}, "input_ids is empty"),
    ({"input_ids": [[3], []]}, "row 1 of input_ids has no token to continue"),
    ({"input_ids": [[3, 4], [5, 6]], "attention_mask": [[1, 1], [0, 0]]}, "row 1 of input_ids has no token"),
    ({"input_ids": [[3, 4, 5]], "attention_mask": [[1, 0, 1]]}, "row 0 .*in the middle of a prompt"),
    ({"input_ids": [[3, 4, 5]], "attention_mask": [[1, 1]]}, "attention_mask must have the shape of input_ids"),
    ({"input_ids": [3, 320]}, r"token ids must lie in 0\.\.319"),
    ({"input_ids": ids(9), "temperature": -1.0}, "temperature must be between 0 and 100"),
])  # fmt: skip
def test_what_is_wrong_is_said(optimizer: PerformanceOptimizer, call: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        optimizer.optimized_generate(**call)


def test_unknown_keywords_are_answered_with_the_known_ones(optimizer: PerformanceOptimizer) -> None:
    with pytest.raises(TypeError, match=r"\(\) has no setting 'num_beams'; it has .*max_length, .*temperature, "):
        optimizer.optimized_generate(ids(9), num_beams=4)
    with pytest.raises(TypeError, match=r"\(\) has no setting 'temprature'; did you mean temperature\?"):
        optimizer.optimized_generate(ids(9), temprature=1)


def test_one_prompt_too_long_ends_the_others(model: Any) -> None:
    with PerformanceOptimizer(model, small()) as optimizer:
        with pytest.raises(ContextOverflow, match="the context holds 1024"):
            optimizer.optimized_generate([ids(9), ids(1000)], max_new_tokens=900, do_sample=False, early_stopping=False)
        engine = optimizer.engine
        optimizer.optimized_generate(ids(5), max_new_tokens=2)  # by now the engine has seen the first prompt, too
        for _ in range(6000):
            if not engine.get_stats()["num_running"]:
                break
            threading.Event().wait(0.02)
        assert engine.get_stats()["num_running"] == 0
        assert engine.get_stats()["generation_tokens"] < 900  # stopped, not finished


def test_a_config_of_another_kind_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="config must be an OptimizationConfig"):
        PerformanceOptimizer(model, {"level": "aggressive"})  # type: ignore[arg-type]


def test_the_default_end_of_sequence_pads(optimizer: PerformanceOptimizer, model: Any) -> None:
    output, _ = optimizer.optimized_generate([ids(9), ids(12, 1)], max_new_tokens=14, do_sample=False)
    assert output[0, -1] == model.generation_config.eos_token_id != TURN_END
