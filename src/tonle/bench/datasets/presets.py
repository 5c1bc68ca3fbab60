"""Named workloads: lengths, shared prefixes and turns as they are met in practice.

Does: name them, and turn a name into settings of `BenchOptions`. Does not: draw prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tonle.bench.options import NO_PAUSE, Pause, Span
from tonle.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Preset:
    about: str
    input_tokens: Span
    output_tokens: Span
    shared_prefix_tokens: int = 0
    prefixes: int = 1
    prefix_skew: float = 0.0
    turns: Span | None = None
    think_time: Pause = NO_PAUSE

    def __str__(self) -> str:
        parts = [f"{self.input_tokens} tokens in, {self.output_tokens} out"]
        if self.shared_prefix_tokens:
            several = f"one of {self.prefixes} prefixes" if self.prefixes > 1 else "a prefix"
            parts.append(f"after {several} of {self.shared_prefix_tokens}")
        if self.turns is not None:
            parts.append(f"{self.turns} turns, {self.think_time} s apart")
        return f"{self.about}: {', '.join(parts)}"


PRESETS = {
    "chat": Preset("questions and answers", Span(32, 400), Span(128, 512)),
    "long": Preset("long prompts of very different lengths", Span(1000, 20_000), Span(100, 2000)),
    "short": Preset("classification and extraction", Span(16, 256), Span(1, 16)),
    "rag": Preset(
        "questions about retrieved documents, some of them asked for often", Span(64, 512), Span(64, 256),
        shared_prefix_tokens=2000, prefixes=20, prefix_skew=1.0,
    ),
    "agent": Preset(
        "tool loops on one system prompt: many short turns", Span(50, 400), Span(30, 200),
        shared_prefix_tokens=1500, turns=Span(4, 10), think_time=Pause(0.1, 1.0),
    ),
    "conversation": Preset(
        "people who read an answer before they go on", Span(20, 200), Span(64, 256), turns=Span(2, 6),
        think_time=Pause(2.0, 10.0),
    ),
}  # fmt: skip


def preset_settings(name: str) -> dict[str, Any]:
    """Settings of `BenchOptions`, such as `BenchOptions(**preset_settings("chat"), concurrency=(8,))`. Raises `ConfigError`."""
    preset = PRESETS.get(name)
    if preset is None:
        raise ConfigError(f"there is no preset {name!r}; presets: {', '.join(PRESETS)}", param="preset")
    return {
        "input_tokens": preset.input_tokens,
        "output_tokens": preset.output_tokens,
        "shared_prefix_tokens": preset.shared_prefix_tokens,
        "prefixes": preset.prefixes,
        "prefix_skew": preset.prefix_skew,
        "turns": preset.turns,
        "think_time": preset.think_time,
    }


def preset_list() -> str:
    """One line for each."""
    width = max(map(len, PRESETS))
    return "\n".join(f"{name:{width}}  {preset}" for name, preset in PRESETS.items())
