"""What turns adaptive tuning on, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tonle.config import values
from tonle.config.engine import EngineConfig
from tonle.config.load_settings import load
from tonle.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "on"),
    [
        ({}, False),
        ({"adaptive": False}, False),
        ({"target_itl_ms": 50.0}, True),
        ({"target_ttft_ms": 500.0}, True),
        ({"adaptive": True, "target_itl_ms": 50}, True),
        ({"adaptive": False, "target_itl_ms": 50.0}, False),
    ],
)
def test_a_target_turns_it_on_unless_told_otherwise(settings: dict[str, Any], on: bool) -> None:
    config = EngineConfig(**settings)
    config.validate()
    assert config.tunes_itself is on


def test_without_a_target_it_says_which_to_set() -> None:
    with pytest.raises(ConfigError, match=r"set target_itl_ms .* target_ttft_ms .* or both") as refused:
        EngineConfig(adaptive=True).validate()
    assert refused.value.param == "adaptive"


@pytest.mark.parametrize("value", [0.0, -5.0, float("inf"), float("nan"), "soon"])
@pytest.mark.parametrize("name", ["target_itl_ms", "target_ttft_ms"])
def test_a_target_is_a_number_of_milliseconds(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be a number") as refused:
        EngineConfig(**{name: value}).validate()
    assert refused.value.param == name


def test_the_flags_of_serve() -> None:
    config = load({"target_itl": "50", "target_ttft": "1.5s"}, environ={})
    assert (config.engine().target_itl_ms, config.engine().target_ttft_ms) == (50, 1500)
    assert config.engine().tunes_itself and not load({}, environ={}).engine().tunes_itself
    with pytest.raises(ConfigError, match="--target-itl must be a number of milliseconds above 0"):
        load({"target_itl": "0"}, environ={})


@pytest.mark.parametrize(
    ("text", "ms"), [("50", 50), (50, 50), (12.5, 12.5), ("50ms", 50), ("0.05s", 50), ("2s", 2000)]
)
def test_milliseconds(text: object, ms: float) -> None:
    assert values.milliseconds().read(text) == pytest.approx(ms)


@pytest.mark.parametrize("text", ["", "ms", "soon", "-3", "0", True, None, float("nan"), [50]])
def test_no_milliseconds(text: object) -> None:
    with pytest.raises(ValueError, match="must be a number of milliseconds above 0"):
        values.milliseconds().read(text)
