"""Misspelt settings of the Python library."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import replace
from typing import Any

import pytest

from tonle.bench import BenchOptions, ScenarioOptions
from tonle.config.engine import EngineConfig
from tonle.config.setting_names import unknown_setting
from tonle.dynamic_batching import BatchingConfig
from tonle.engine import LLM
from tonle.inference_optimizer import InferenceConfig
from tonle.performance_optimizer import OptimizationConfig


@pytest.mark.parametrize(
    ("owner", "misspelt", "meant"),
    [
        (EngineConfig, "max_batchsize", "max_batch_size"),
        (BatchingConfig, "max_batchsize", "max_batch_size"),
        (InferenceConfig, "contextwindow", "context_window"),
        (OptimizationConfig, "max_batchsize", "max_batch_size"),
        (ScenarioOptions, "request", "requests"),
        (BenchOptions, "concurency", "concurrency"),
    ],
)
def test_the_error_names_the_class_and_the_nearest_setting(owner: Any, misspelt: str, meant: str) -> None:
    with pytest.raises(TypeError) as caught:
        owner(**{misspelt: 4})
    assert str(caught.value) == f"{owner.__name__} has no setting {misspelt!r}; did you mean {meant}?"
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


def test_a_class_with_a_model_and_settings() -> None:
    with pytest.raises(TypeError, match=r"^LLM\(\) has no setting 'max_batchsize'; did you mean max_batch_size\?$"):
        LLM(max_batchsize=3)


def test_where_nothing_is_near_all_are_listed() -> None:
    assert unknown_setting("Thing", "zzz", ["bb", "aa"]) == "Thing has no setting 'zzz'; it has aa, bb"


def test_other_errors_of_the_constructor_stay() -> None:
    with pytest.raises(TypeError, match="positional"):
        EngineConfig(4)  # type: ignore[misc]


def test_the_class_is_otherwise_as_before() -> None:
    config = EngineConfig(max_batch_size=4)
    assert pickle.loads(pickle.dumps(config)) == config == replace(EngineConfig(), max_batch_size=4)
    assert "max_batch_size" in inspect.signature(EngineConfig).parameters
    with pytest.raises(TypeError, match="did you mean max_batch_size"):
        replace(config, max_batchsize=5)  # type: ignore[call-arg]
