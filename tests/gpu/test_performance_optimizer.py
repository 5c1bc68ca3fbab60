"""On a GPU: a live model, every level, candidates that share a prompt of several steps, and what memory is reported."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.fakes.checkpoints import tiny_model
from tonle.performance_optimizer import OptimizationConfig, OptimizationLevel, PerformanceOptimizer

pytestmark = pytest.mark.gpu
MIB = 2**20


def ids(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 320) for _ in range(length)]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    yield tiny_model("llama", seed=3).to("cuda")
    torch.cuda.empty_cache()


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], new: int) -> list[int]:
    found = model.generate(torch.tensor([prompt], device="cuda"), do_sample=False, max_new_tokens=new, pad_token_id=0)
    return found[0].tolist()


@pytest.mark.parametrize("level", list(OptimizationLevel))
def test_every_level(model: Any, level: OptimizationLevel) -> None:
    config = OptimizationConfig(level=level)
    if level is OptimizationLevel.AGGRESSIVE:
        config.memory_pool_size = 512 * MIB  # else all that is free, which others may use
    fp8 = level in (OptimizationLevel.AGGRESSIVE, OptimizationLevel.MEMORY_OPTIMIZED)
    fp8 = fp8 and torch.cuda.get_device_capability() >= (8, 9)
    prompts = [ids(9), ids(300, 1), ids(40, 2)]
    with PerformanceOptimizer(model, config) as optimizer:
        tensor = torch.tensor([prompts[0]], device="cuda")
        one, stats = optimizer.optimized_generate(tensor, max_new_tokens=24, do_sample=False)
        output, _ = optimizer.optimized_generate(prompts, max_new_tokens=24, do_sample=False, pad_token_id=0)
        built = optimizer.engine.config
    assert one.device.type == "cuda"
    assert built.kv_cache_dtype == ("fp8" if fp8 else "auto")
    assert built.max_batch_size == config.max_batch_size
    assert stats["peak_memory"] == pytest.approx(torch.cuda.max_memory_allocated(), rel=0.5)
    for row, prompt in zip(output.tolist(), prompts, strict=True):
        assert row[: len(prompt)] == prompt
        theirs = greedy(model, prompt, 24)
        if not fp8:  # exact, in float32
            assert row[: len(theirs)] == theirs
    if not fp8:
        assert one[0].tolist() == greedy(model, prompts[0], 24)


def test_candidates_share_a_prompt_of_several_steps(model: Any) -> None:
    """Steps are launched one ahead here: what a candidate takes over may still be on its way."""
    config = OptimizationConfig(num_parallel_samples=6, max_num_batched_tokens=128, memory_pool_size=64 * MIB)
    prompt, options = ids(901), {"max_new_tokens": 16, "seed": 5, "early_stopping": False}
    with PerformanceOptimizer(model, config) as optimizer:
        before = optimizer.engine.get_stats()["prompt_tokens"]
        shared, stats = optimizer.optimized_generate(prompt, **options)
        computed = optimizer.engine.get_stats()["prompt_tokens"] - before
        apart, others = optimizer.optimized_generate(prompt, use_cache=False, **options)
    assert computed == 901 + 5 * 5  # 56 blocks once, and the last 5 tokens by each candidate
    assert torch.equal(shared, apart)
    assert stats["candidates"][0][0]["score"] == pytest.approx(others["candidates"][0][0]["score"], abs=1e-3)


def test_a_model_that_the_kernels_cannot_run_keeps_plain_keys_and_values(caplog: pytest.LogCaptureFixture) -> None:
    """head_dim 18."""
    model = tiny_model("llama", hidden_size=72).to("cuda")
    with PerformanceOptimizer(model, OptimizationConfig(level="memory_optimized")) as optimizer:
        output, _ = optimizer.optimized_generate(ids(9), max_new_tokens=4, do_sample=False)
        assert optimizer.engine.config.kv_cache_dtype == "auto"
    assert output[0].tolist() == greedy(model, ids(9), 4)
    assert "would use an fp8 KV cache, but" in caplog.text
