"""Each setting of an engine does what it says, seen from outside: in results, in `get_stats` and in the log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fakes.checkpoints import tiny_model
from tonle.config import no_effect
from tonle.engine import EngineConfig, GenerationConfig, InferenceEngine
from tonle.engine.inference_engine import InferenceEngine as Engine
from tonle.errors import ConfigError

GREEDY = GenerationConfig(max_length=6, do_sample=False, early_stopping=False)
PROMPT = list(range(3, 103))  # 100 tokens: 6 whole blocks of 16
BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # keys and values, layers, tokens, heads, their size, float32


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def run(engine: Engine, prompt: list[int] = PROMPT, config: GenerationConfig = GREEDY) -> Any:
    return engine.result(engine.submit_request(prompt, config), timeout=60)


def wait(condition: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def others(count: int) -> list[list[int]]:
    """Prompts of 3 whole blocks that share no beginning."""
    return [[3 + number, *range(3, 51)] for number in range(count)]


# -- the cache


def test_memory_pool_size_is_the_bytes_of_the_pool(model: Any) -> None:
    for num_blocks in (20, 40):
        config = EngineConfig(memory_pool_size=num_blocks * BLOCK_BYTES + 5)
        with InferenceEngine(model, None, config) as engine:
            assert engine.get_stats()["cache_info"]["num_blocks"] == num_blocks


def test_kv_cache_dtype_int8_holds_more_tokens_and_answers(model: Any) -> None:
    """A head of 16 numbers takes 20 bytes, with its scale, in place of 64."""
    with InferenceEngine(model, None, EngineConfig(memory_pool_size=64 * BLOCK_BYTES, kv_cache_dtype="int8")) as engine:
        assert engine.get_stats()["cache_info"]["num_blocks"] == 64 * 64 // 20
        first, second = run(engine), run(engine)
        assert len(first.output_ids[0]) == 6 and second.usage.cached_tokens == 96
        assert first.output_ids == second.output_ids


@pytest.mark.parametrize(("dtype", "settings", "words"), [
    (torch.float32, {"kv_cache_dtype": "fp8"}, "fp8 needs the CUDA kernels, which do not run here; set int8"),
    (torch.bfloat16, {"kv_cache_dtype": "int8"}, "int8 needs a model computed in float32, and this one .* bfloat16"),
    (torch.bfloat16, {"kv_cache_dtype": "float32"}, "float32 needs a model computed in float32, and .* bfloat16"),
    (torch.float32, {"kv_cache_dtype": "int4"}, "must be auto, float32, fp8 or int8, not 'int4'"),
])  # fmt: skip
def test_a_cache_dtype_that_cannot_be_is_refused(dtype: torch.dtype, settings: dict[str, Any], words: str) -> None:
    with (
        pytest.raises(ConfigError, match=words) as caught,
        InferenceEngine(tiny_model("llama").to(dtype), None, EngineConfig(**settings)),
    ):
        pass
    assert caught.value.param == "kv_cache_dtype"


@pytest.mark.parametrize("num_bytes", [10**15, 10**19])
def test_a_pool_larger_than_the_memory_is_refused(model: Any, num_bytes: int) -> None:
    with (
        pytest.raises(ConfigError, match=r"cannot be allocated: .* Set memory_pool_size .* lower") as caught,
        InferenceEngine(model, None, EngineConfig(memory_pool_size=num_bytes)),
    ):
        pass
    assert caught.value.param == "memory_pool_size"


@pytest.mark.parametrize(("settings", "most"), [({}, 30), ({"kv_cache_max_size": 7}, 7), ({"gc_threshold": 0.25}, 10)])
def test_idle_blocks_are_bounded(model: Any, settings: dict[str, Any], most: int) -> None:
    config = EngineConfig(memory_pool_size=40 * BLOCK_BYTES, **settings)
    with InferenceEngine(model, None, config) as engine:
        for prompt in others(10):
            run(engine, prompt)
        wait(lambda: engine.get_stats()["num_running"] == 0)
        assert engine.get_stats()["cache_info"]["num_entries"] == most


@pytest.mark.parametrize("settings", [{}, {"enable_kv_cache": False}, {"enable_prefix_caching": False}])
def test_reuse_between_requests(model: Any, settings: dict[str, Any]) -> None:
    with InferenceEngine(model, None, EngineConfig(**settings)) as engine:
        first, second = run(engine), run(engine)
        assert first.usage.cached_tokens == 0 and second.usage.cached_tokens == (0 if settings else 96)
        assert first.output_ids == second.output_ids
        assert (engine.get_stats()["cache_info"]["num_entries"] == 0) == bool(settings)


def test_a_request_may_leave_the_cache_alone(model: Any) -> None:
    with InferenceEngine(model, None) as engine:
        known = run(engine)
        fresh = run(
            engine, config=GenerationConfig(max_length=6, do_sample=False, early_stopping=False, use_cache=False)
        )
        assert fresh.usage.cached_tokens == 0 and fresh.output_ids == known.output_ids
        assert run(engine).usage.cached_tokens == 96, "its own blocks can be found, as those of any request"


def test_optimize_memory_forgets_what_is_cached(model: Any) -> None:
    with InferenceEngine(model, None) as engine:
        run(engine)
        assert run(engine).usage.cached_tokens == 96
        engine.optimize_memory()
        wait(lambda: engine.get_stats()["cache_info"]["num_entries"] == 0)
        assert run(engine).usage.cached_tokens == 0
    engine.optimize_memory()  # harmless once it is stopped, and before it was started
    InferenceEngine(model, None).optimize_memory()


# -- batching


@pytest.mark.parametrize(
    ("settings", "size"),
    [({"max_batch_size": 1, "batch_timeout_ms": 0}, 1), ({"enable_dynamic_batching": False}, 1), ({"max_batch_size": 3}, 3),
     ({"max_batch_size": 4, "enable_continuous_batching": False, "batch_timeout_ms": 60_000}, 4)],
)  # fmt: skip
def test_how_many_rows_a_step_has(model: Any, settings: dict[str, Any], size: int) -> None:
    """The last one waits until its batch is full: with a minute to wait, no smaller batch is ever formed."""
    config = GenerationConfig(max_length=40, do_sample=False, early_stopping=False)
    with InferenceEngine(model, None, EngineConfig(**settings)) as engine:
        requests = [engine.submit_request(prompt, config) for prompt in others(8)]
        for request_id in requests:
            engine.result(request_id, timeout=60)
        assert engine.get_stats()["performance_metrics"]["batch_size"]["max"] == size


# -- watching


def test_stats_have_the_same_keys_at_any_time(model: Any) -> None:
    engine = InferenceEngine(model, None, EngineConfig(profile_performance=True))
    before = engine.get_stats()
    assert (before["engine_status"], before["memory_usage"], before["cache_info"]["num_entries"]) == ("stopped", 0.0, 0)
    assert before["performance_metrics"] == {} and before["gpu"] is None and before["model"] is None
    with engine:
        run(engine)
        during = engine.get_stats()
    after = engine.get_stats()
    assert set(before) == set(during) == set(after) and set(before["cache_info"]) == set(during["cache_info"])
    assert during["engine_status"] == "running" and after["engine_status"] == "stopped"
    assert during["model"]["max_batch_size"] == 32 and during["model"]["device"] == "cpu" and during["gpu"] is None
    assert after["memory_usage"] == 0.0 and after["cache_info"]["num_entries"] == 0
    assert after["generation_tokens"] == 6 and after["prompt_tokens"] == 100, "what was counted stays"
    assert after["performance_metrics"] == during["performance_metrics"]
    with engine:
        assert engine.get_stats()["performance_metrics"] == {} and engine.get_stats()["generation_tokens"] == 0


def test_performance_metrics(model: Any) -> None:
    with InferenceEngine(model, None) as engine:
        for prompt in others(5):
            run(engine, prompt)
        metrics = engine.get_stats()["performance_metrics"]
    assert set(metrics) == {"batch_processing_time", "tokens_per_second", "batch_size", "queue_time",
                            "time_to_first_token", "request_latency"}  # fmt: skip
    for name in ("queue_time", "time_to_first_token", "request_latency"):
        assert metrics[name]["count"] == 5
    for name, summary in metrics.items():
        assert summary["min"] <= summary["p50"] <= summary["p95"] <= summary["p99"] <= summary["max"], name
        assert 0 <= summary["min"] <= summary["mean"] <= summary["max"], name
    assert metrics["time_to_first_token"]["mean"] < metrics["request_latency"]["mean"]
    steps, rate = metrics["batch_processing_time"], metrics["tokens_per_second"]
    assert steps["min"] > 0 and steps["count"] == 5 * 6 - 1, "how long the last step took is not known yet"
    assert rate["mean"] == pytest.approx(29 / (steps["mean"] * steps["count"])), "tokens by time, not a mean of rates"


def test_without_metrics_none_are_kept(model: Any) -> None:
    with InferenceEngine(model, None, EngineConfig(enable_metrics=False)) as engine:
        run(engine)
        stats = engine.get_stats()
    assert stats["performance_metrics"] == {} and "num_steps" not in stats and "profile" not in stats


def test_the_profile_adds_up_to_the_time_of_steps(model: Any) -> None:
    with InferenceEngine(model, None, EngineConfig(profile_performance=True)) as engine:
        run(engine)
        profile = engine.get_stats()["profile"]
    assert {"build", "forward", "sample", "rest"} == set(profile)
    assert profile["forward"]["seconds"] > 0 and profile["forward"]["ms_per_step"] > 0
    assert sum(part["share"] for part in profile.values()) == pytest.approx(1)


def test_the_start_of_an_engine_explains_what_has_no_effect(
    model: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(no_effect, "_said", set())
    asked = EngineConfig(max_sequence_length=256, enable_gradient_checkpointing=True)
    with caplog.at_level(logging.INFO):
        InferenceEngine(model, None, asked)
        assert not caplog.records, "not when it is made"
        for config in (asked, asked, EngineConfig(max_sequence_length=256)):
            with InferenceEngine(model, None, config):
                pass
    [line] = [record for record in caplog.records if not record.getMessage().startswith("KV cache of ")]
    assert line.levelname == "WARNING"
    assert line.getMessage().startswith("enable_gradient_checkpointing=True: gradient checkpointing has no meaning in ")


def test_speculation_is_on_unless_it_is_switched_off(model: Any) -> None:
    answers, drafted = [], {}
    for name, settings in {
        "usual": {}, "asked for": {"enable_speculative_decoding": True, "speculation_length": 2},
        "off": {"enable_speculative_decoding": False}, "also off": {"speculation": "off"},
    }.items():  # fmt: skip
        long = GenerationConfig(max_length=60, do_sample=False, early_stopping=False)
        with InferenceEngine(model, None, EngineConfig(max_sequence_length=256, **settings)) as engine:
            answers.append(run(engine, [5, 6, 7] * 20, long).output_ids)
            drafted[name] = engine.get_stats()["speculation"]
            before = drafted[name]["draft_tokens"]
            run(engine, [5, 6, 7] * 20, GenerationConfig(max_length=9, do_sample=False, speculate=False))
            assert engine.get_stats()["speculation"]["draft_tokens"] == before
    assert drafted["usual"]["draft_tokens"] >= drafted["usual"]["accepted_tokens"] > 0
    assert drafted["asked for"]["draft_tokens"] <= 2 * drafted["asked for"]["drafts"] > 0
    assert drafted["off"] == drafted["also off"] == {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
    assert answers[0] == answers[1] == answers[2] == answers[3]


@pytest.mark.parametrize(("settings", "param"), [
    ({"speculation": "eagle"}, "speculation"), ({"speculation_length": 0}, "speculation_length"),
    ({"speculation": "off", "enable_speculative_decoding": True}, "speculation"),
    ({"speculation": "suffix", "enable_speculative_decoding": False}, "speculation"),
])  # fmt: skip
def test_speculation_that_cannot_be_is_refused(settings: dict[str, Any], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings).validate()
    assert caught.value.param == param


def test_at_debug_each_request_has_a_line(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    try:
        with InferenceEngine(model, None, EngineConfig(log_level="DEBUG")) as engine:
            request_id = run(engine).request_id
    finally:
        logging.getLogger("tonle").setLevel(logging.INFO)
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "DEBUG"]
    assert line.startswith(f"request {request_id}: 100 prompt tokens, 0 of them cached, 6 new; waited ")
