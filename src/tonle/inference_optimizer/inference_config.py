"""`InferenceConfig`: the settings of an optimized engine, beside those of the engine below it (`EngineConfig`)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tonle.config.setting_names import named_settings
from tonle.config.types import wrong_type
from tonle.errors import ConfigError


@named_settings
@dataclass(slots=True, kw_only=True)
class InferenceConfig:
    """Settings of `create_optimized_engine`, which copies and checks them; later edits have no effect on that engine."""

    # Prompts
    max_context_length: int | None = 2048  # most tokens of a prompt, as the chat template writes it; None = the model's
    context_window: int | None = 10  # most messages of the history; None = all
    system_prompt: str | None = None  # before the history, unless that begins with a system message

    # Answers
    max_tokens: int = 256  # most new tokens
    temperature: float = 0.0  # 0 = always the most likely token
    top_p: float | None = None  # None = the model's

    # Cache
    cache_max_size: int = 1000  # answers
    cache_ttl_seconds: float = 3600.0

    # Metrics
    sla_seconds: float = 2.0  # P95 latency target
    metrics_window: int = 1000  # most requests that percentiles, rates and the target look back on
    metrics_window_seconds: float = 300.0  # and for how long

    warm_up: bool = True  # one short request before the engine is returned

    def validate(self) -> None:
        """Raise `ConfigError` naming the field, its value and what it must be. Sampling defaults are checked elsewhere."""
        if (wrong := wrong_type(self)) is not None:
            raise ConfigError(wrong[1], param=wrong[0])
        least = {
            "max_context_length": 16,
            "context_window": 1,
            "max_tokens": 1,
            "cache_max_size": 1,
            "metrics_window": 1,
        }
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} must be at least {low}, not {value}", param=name)
        for name in ("cache_ttl_seconds", "sla_seconds", "metrics_window_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be more than 0, not {getattr(self, name)}", param=name)

    @classmethod
    def names(cls) -> list[str]:
        return [field.name for field in fields(cls)]
