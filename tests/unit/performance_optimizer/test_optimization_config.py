"""Levels, what is set over them, and what `explain` says: the truth about the engine that is built."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest

from tests.fakes.checkpoints import tiny_model
from tonle.config import no_effect
from tonle.errors import ConfigError
from tonle.performance_optimizer import OptimizationConfig, OptimizationLevel, PerformanceOptimizer
from tonle.performance_optimizer.optimization_config import ENGINE_FIELDS, FIELDS

MIB = 2**20


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(no_effect, "_said", set())


def test_documented_defaults() -> None:
    config = OptimizationConfig()
    assert config.level is OptimizationLevel.BALANCED
    assert (config.enable_speculative_decoding, config.speculation_length) == (True, 4)
    assert (config.enable_parallel_sampling, config.num_parallel_samples) == (True, 4)
    assert (config.enable_memory_pooling, config.compile_model) == (True, True)
    assert (config.enable_gradient_checkpointing, config.memory_efficient_attention) == (False, True)


@pytest.mark.parametrize("gpu", [False, True])
def test_levels_differ(gpu: bool) -> None:
    configs = [OptimizationConfig(level=level).engine_config(gpu=gpu) for level in OptimizationLevel]
    for name in ("max_batch_size", "max_num_batched_tokens", "memory_pool_size"):
        assert len({getattr(config, name) for config in configs}) == 4
    for config in configs:
        config.validate()
        assert config.enable_prefix_caching  # without it candidates would not share their prompt's blocks


def test_what_is_set_wins_over_the_level_in_any_order() -> None:
    config = OptimizationConfig(level="AGGRESSIVE", max_batch_size=3)
    config.level = OptimizationLevel.MEMORY_OPTIMIZED
    assert config.engine_config(gpu=False).max_batch_size == 3
    assert config.engine_config(gpu=False).memory_pool_size == 256 * MIB
    config.max_batch_size = None  # type: ignore[assignment]
    assert config.max_batch_size == 4


@pytest.mark.parametrize(("settings", "expected"), [
    ({}, 4),
    ({"level": "conservative"}, 1),
    ({"level": "conservative", "num_parallel_samples": 8}, 8),
    ({"level": "conservative", "enable_parallel_sampling": True}, 4),
    ({"level": "aggressive", "num_parallel_samples": 8}, 8),
    ({"enable_parallel_sampling": False, "num_parallel_samples": 8}, 1),
])  # fmt: skip
def test_number_of_candidates(settings: Any, expected: int) -> None:
    assert OptimizationConfig(**settings).num_candidates == expected


@pytest.mark.parametrize("level", list(OptimizationLevel))
def test_explain_says_what_the_engine_is_built_with(level: OptimizationLevel) -> None:
    config = OptimizationConfig(level=level, max_num_batched_tokens=100)
    if level is OptimizationLevel.AGGRESSIVE:
        config.memory_pool_size = 48 * MIB
    lines = (line.split() for line in config.explain(gpu=False).splitlines())
    said = {words[0]: words[1:] for words in reversed(list(lines)) if words}
    with PerformanceOptimizer(tiny_model("llama"), config) as optimizer:
        built = optimizer.engine.config
    for name in ENGINE_FIELDS:
        value = getattr(built, name)
        if name == "memory_pool_size":
            number, unit = said[name][:2]
            assert int(number) * {"GiB": 2**30, "MiB": MIB}[unit.rstrip("*")] == value
        elif name == "enable_speculative_decoding":  # left to the engine, which has it on a CPU
            assert (value, said[name][0], built.guesses_by) == (None, "True", "auto")
        else:
            assert said[name][0].rstrip("*") == str(value)
    assert said["max_num_batched_tokens"][0] == "100*"  # given, not the level's
    assert said["max_batch_size"][0][-1] != "*"


def test_explain_has_every_setting_and_reads_well() -> None:
    for level in OptimizationLevel:
        for gpu in (False, True):
            text = OptimizationConfig(level=level).explain(gpu=gpu)
            assert all(name in text for name in FIELDS if name not in ("level", "device"))
            assert level.name in text
            assert max(map(len, text.splitlines())) <= 120


def test_a_misspelt_setting_is_named() -> None:
    config = OptimizationConfig()
    with pytest.raises(AttributeError, match="no setting 'speculation_lenght'; did you mean speculation_length"):
        config.speculation_lenght = 4
    with pytest.raises(AttributeError, match="no setting 'speculation_lenght'"):
        _ = config.speculation_lenght  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"no setting 'xyz'; it has .*enable_.*level"):
        OptimizationConfig(xyz=1)


@pytest.mark.parametrize(("name", "value", "message"), [
    ("level", "fast", "one of CONSERVATIVE, BALANCED, AGGRESSIVE, MEMORY_OPTIMIZED, not 'fast'"),
    ("num_parallel_samples", 0, "whole number between 1 and 64, not 0"),
    ("num_parallel_samples", True, "whole number between 1 and 64, not True"),
    ("speculation_length", -1, "between 1 and 32, not -1"),
    ("compile_model", "yes", "True or False, not 'yes'"),
    ("max_batch_size", 0, "at least 1, not 0"),
    ("kv_cache_dtype", "int3", "auto, float32, fp8 or int8, not 'int3'"),
])  # fmt: skip
def test_values_are_checked_when_they_are_set(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OptimizationConfig(**{name: value})
    with pytest.raises(ConfigError, match=message):
        setattr(OptimizationConfig(), name, value)


def test_copies_are_equal_and_apart() -> None:
    config = OptimizationConfig(level="aggressive", num_parallel_samples=8)
    other = copy.copy(config)
    assert other == config
    assert repr(other) == "OptimizationConfig(level=AGGRESSIVE, num_parallel_samples=8)"
    other.num_parallel_samples = 2
    assert config.num_parallel_samples == 8


def test_what_has_no_effect_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tonle.performance_optimizer")
    config = OptimizationConfig(
        level=OptimizationLevel.AGGRESSIVE, enable_speculative_decoding=True, speculation_length=6, compile_model=True,
        enable_memory_pooling=True, memory_efficient_attention=True, enable_gradient_checkpointing=True,
    )  # fmt: skip
    for _ in range(2):
        PerformanceOptimizer(None, config)
    said = [(record.levelname, record.getMessage().split(":")[0]) for record in caplog.records]
    assert sorted(said) == [
        ("INFO", "compile_model=True"),
        ("INFO", "enable_memory_pooling=True"),
        ("INFO", "memory_efficient_attention=True"),
        ("WARNING", "enable_gradient_checkpointing=True"),
    ]


def test_what_was_not_asked_for_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tonle.performance_optimizer")
    PerformanceOptimizer(None, OptimizationConfig(num_parallel_samples=2, enable_speculative_decoding=False))
    assert not caplog.records


def test_speculation_reaches_the_engine() -> None:
    for gpu in (False, True):
        usual = OptimizationConfig().engine_config(gpu=gpu)
        assert (usual.guesses_by, usual.speculation_length) == ("auto", 4)
    asked = OptimizationConfig(enable_speculative_decoding=True, speculation_length=6).engine_config(gpu=False)
    assert (asked.guesses_by, asked.speculation_length) == ("suffix", 6)
    assert OptimizationConfig(enable_speculative_decoding=False).engine_config(gpu=False).guesses_by == "off"


def test_switching_off_what_is_always_on_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    PerformanceOptimizer(
        None, OptimizationConfig(enable_memory_pooling=False, compile_model=False, memory_efficient_attention=False)
    )
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 3
