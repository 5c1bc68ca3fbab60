"""The estimate against what real forward passes allocate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tonle.dynamic_batching import MemoryEstimator
from tonle.errors import ConfigError

MIB = 1024**2


def measured_mb(model: Any, batch_size: int, length: int) -> float:
    """MiB at the peak, above what was there before: every allocation and release that the profiler saw."""
    ids = torch.randint(5, 90, (batch_size, length))
    with torch.inference_mode():
        model(ids)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            kept = model(ids)
    now = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    del kept
    return peak / MIB


def _bert(**more: Any) -> Any:
    return BertModel(BertConfig(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=512,
                                vocab_size=100, **more))  # fmt: skip


def _llama(kind: Any = LlamaForCausalLM, **more: Any) -> Any:
    sizes = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "intermediate_size": 352, "vocab_size": 100}  # fmt: skip
    return kind(LlamaConfig(**(sizes | more)))


MODELS = {
    "bert": _bert,
    "bert eager": lambda: _bert(attn_implementation="eager"),
    "distilbert": lambda: DistilBertModel(DistilBertConfig(dim=128, n_layers=3, n_heads=4, hidden_dim=512, vocab_size=100)),
    "llama": lambda: _llama(),
    "llama eager": lambda: _llama(attn_implementation="eager"),
    "llama, hidden states": lambda: _llama(LlamaModel),
    "llama, large vocabulary": lambda: _llama(vocab_size=4000),
    "llama, nothing kept": lambda: _llama(LlamaModel, use_cache=False),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1,
                    intermediate_size=512, vocab_size=500)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_the_estimate_is_within_15_percent_of_what_a_forward_pass_allocates(name: str) -> None:
    model = MODELS[name]().eval()
    estimator = MemoryEstimator.of(model)
    for batch_size, length in ((1, 64), (4, 128), (2, 384)):
        measured = measured_mb(model, batch_size, length)
        assert estimator.estimate_mb(batch_size, length) == pytest.approx(measured, rel=0.15), (batch_size, length)


def test_the_document_example_counts_keys_and_values() -> None:
    estimator = MemoryEstimator(model_hidden_size=4096, num_layers=32, num_heads=32)
    assert estimator.kv_mb(2048) == pytest.approx(1024)  # 2 × 32 layers × 4096 × 2048 tokens × 2 bytes
    grouped = MemoryEstimator(4096, 32, 32, num_kv_heads=8)
    assert grouped.kv_mb(2048) == pytest.approx(256)
    assert grouped.activation_mb(2048) == estimator.activation_mb(2048)


def test_a_longer_sequence_never_needs_less() -> None:
    estimator = MemoryEstimator(256, 4, 4, dtype=torch.float16, vocab_size=1000, eager_attention=True)
    sizes = [estimator.sequence_mb(length) for length in range(1, 3000, 7)]
    assert sizes == sorted(sizes)


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(ConfigError, match="num_layers must be an integer of at least 1, not 0"):
        MemoryEstimator(64, 0, 4)
    with pytest.raises(ConfigError, match="dtype must be one of"):
        MemoryEstimator(64, 1, 4, dtype="int3")
    with pytest.raises(ConfigError, match="does not name its hidden size"):
        MemoryEstimator.of(object())
