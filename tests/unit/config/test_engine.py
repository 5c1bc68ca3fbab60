"""`EngineConfig` takes every documented name, in the constructor and later; what has no effect is explained, once."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tonle.config import no_effect
from tonle.config.engine import EngineConfig
from tonle.config.no_effect import explain, explain_once
from tonle.errors import ConfigError

log = logging.getLogger("tonle.test")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has said nothing yet."""
    monkeypatch.setattr(no_effect, "_said", set())


def said_of(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> dict[str, str]:
    """Level by setting, and what is said is what `explain` says."""
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="tonle"):
        explain_once(log, config.without_effect())
    for record in caplog.records:
        name, _, sentence = record.getMessage().partition(": ")
        assert sentence == explain(name.partition("=")[0], getattr(config, name.partition("=")[0]))
    return {record.getMessage().partition("=")[0]: record.levelname for record in caplog.records}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_batch_size": 32, "max_sequence_length": 2048, "enable_kv_cache": True, "batch_timeout_ms": 50.0},
        {"enable_dynamic_batching": True, "kv_cache_max_size": 1000, "memory_pool_size": 2 * 1024**3, "gc_threshold": 0.8,
         "enable_metrics": True, "log_level": "INFO"},
        {"log_level": "DEBUG", "enable_metrics": True, "profile_performance": True},
        {"batch_timeout_ms": 100, "enable_continuous_batching": False},
        {"gpu_memory_utilization": 0.5, "memory_pool_size": None},
        {"enable_speculative_decoding": False, "enable_gradient_checkpointing": False},
        {"enable_speculative_decoding": True, "speculation_length": 4}, {"speculation": "suffix"},
    ],
)  # fmt: skip
def test_what_acts_is_not_explained(settings: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(**settings)
    config.validate()
    assert said_of(config, caplog) == {}


@pytest.mark.parametrize(
    ("settings", "levels"),
    [
        ({"max_batch_size": 1, "batch_timeout_ms": 0, "enable_speculative_decoding": True}, {"batch_timeout_ms": "INFO"}),
        ({"max_batch_size": 64, "batch_timeout_ms": 100, "enable_continuous_batching": True}, {"batch_timeout_ms": "INFO"}),
        ({"enable_gradient_checkpointing": True, "memory_efficient_attention": True},
         {"enable_gradient_checkpointing": "WARNING", "memory_efficient_attention": "INFO"}),
        ({"memory_efficient_attention": False}, {"memory_efficient_attention": "WARNING"}),
        ({"enable_kv_cache": False}, {"enable_kv_cache": "WARNING"}),
        ({"gpu_memory_utilization": 0.5}, {"gpu_memory_utilization": "WARNING"}),
    ],
)  # fmt: skip
def test_what_does_not_act_is_accepted_and_explained(
    settings: dict[str, Any], levels: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig()
    for name, value in settings.items():
        setattr(config, name, value)
    config.validate()
    assert config == EngineConfig(**settings)
    assert said_of(config, caplog) == levels
    assert said_of(config, caplog) == {}, "once per process"


def test_a_line_that_the_level_hides_is_said_when_it_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    asked = [("memory_efficient_attention", True)]
    with caplog.at_level(logging.WARNING, logger="tonle"):
        explain_once(log, asked)
    assert not caplog.records
    with caplog.at_level(logging.INFO, logger="tonle"):
        explain_once(log, asked)
    assert "is always on (paged attention)" in caplog.text


def test_the_words() -> None:
    assert "has no meaning in inference" in str(explain("enable_gradient_checkpointing", True))
    for name in ("enable_speculative_decoding", "max_batch_size", "no_such_setting"):
        assert explain(name, False) is None
    assert explain("enable_kv_cache", True) is None and explain("memory_efficient_attention", None) is None


def test_settings_are_assigned_later() -> None:
    config = EngineConfig(max_batch_size=8)
    assert config.max_batch_size is not None
    config.max_batch_size *= 2
    config.max_sequence_length = 1024
    config.enable_continuous_batching = config.enable_dynamic_batching = True
    config.batch_timeout_ms = 10
    config.validate()
    assert config.max_batch_size == 16


def test_a_misspelt_name_is_told_with_the_closest_one() -> None:
    config = EngineConfig()
    with pytest.raises(AttributeError, match=r"no setting 'max_batch_sise'; did you mean max_batch_size\?"):
        config.max_batch_sise = 4  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"no setting 'zzz'; it has activation_bits, "):
        config.zzz = 4  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="max_batch_sise"):
        EngineConfig(max_batch_sise=4)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("name", "value"),
    [("enable_speculative_decoding", "yes"), ("enable_gradient_checkpointing", 1), ("memory_efficient_attention", "on"),
     ("enable_kv_cache", None), ("batch_timeout_ms", "fast")],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_an_error(name: str, value: Any) -> None:
    config = EngineConfig()
    setattr(config, name, value)
    with pytest.raises(ConfigError, match=f"{name} must be"):
        config.validate()


def test_without_a_kv_cache_nothing_is_reused() -> None:
    assert EngineConfig().reuses_prefixes
    assert not EngineConfig(enable_kv_cache=False).reuses_prefixes
    assert not EngineConfig(enable_prefix_caching=False).reuses_prefixes
