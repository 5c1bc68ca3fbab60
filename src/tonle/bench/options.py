"""`BenchOptions`: what to send, how much of it at once, and to whom.

Does: hold and check the settings of one benchmark, and read the command line's notations (`1,4,16`, `32-400`).
Does not: talk to a server or read files.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tonle.bench.load import Load
from tonle.config.setting_names import named_settings
from tonle.errors import ConfigError

Endpoint = Literal["chat", "completions"]
PromptKind = Literal["auto", "ids", "words"]


@dataclass(frozen=True, slots=True)
class Span:
    """A whole number drawn evenly from `low` to `high`, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, name: str) -> Span:
        """Read `128` or `32-400`."""
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", text)
        if match is None:
            raise ConfigError(f"{name} is a number such as 128 or a range such as 32-400, not {text!r}", param=name)
        low = int(match[1])
        return cls(low, int(match[2]) if match[2] else low)

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def parse_numbers(text: str, name: str) -> tuple[float, ...]:
    """Read `1,4,16`."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{name} is a number or a list of numbers such as 1,4,16, not {text!r}", param=name) from None


@named_settings
@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Settings of one benchmark. `validate` says which one makes no sense."""

    # Target
    url: str = "http://127.0.0.1:8000"  # with or without /v1
    model: str | None = None  # None: the first that /v1/models lists
    api_key: str | None = field(default=None, repr=False)  # never written to a report
    endpoint: Endpoint | None = None  # None: completions, or chat for lines of `file` that hold messages
    verify_tls: bool = True

    # Load
    concurrency: tuple[int, ...] = (1,)  # closed loop, one level each
    rates: tuple[float, ...] = ()  # open loop, requests per second, one level each; replaces concurrency
    requests: int | None = None  # per level; None: `Load.default_requests`, or no limit if duration_s is set
    duration_s: float | None = None  # per level: no new request after this; those under way are awaited
    warmup: int = 2  # requests before each level that are not counted
    timeout_s: float = 600.0  # per request, from sending to the end of the stream

    # Prompts
    file: Path | None = None  # JSONL; None: synthetic prompts
    input_tokens: Span = Span(128, 128)  # a prompt's own tokens, after the shared prefix
    output_tokens: Span = Span(64, 64)
    shared_prefix_tokens: int = 0
    prompt_kind: PromptKind = "auto"
    seed: int = 0

    # Sampling
    ignore_eos: bool | None = None  # None: on for synthetic prompts, off for a file's
    temperature: float = 0.0
    extra_body: dict[str, Any] = field(default_factory=dict)  # more fields for every body; None takes a field out

    # Report
    keep_requests: bool = False  # one row per request in the report

    @property
    def levels(self) -> list[Load]:
        if self.rates:
            return [Load("rate", rate) for rate in self.rates]
        return [Load("concurrency", users) for users in self.concurrency]

    @property
    def ignores_eos(self) -> bool:
        return self.file is None if self.ignore_eos is None else self.ignore_eos

    def num_requests(self, load: Load) -> int | None:
        """Requests of a level; None = until `duration_s` is over."""
        if self.requests is not None or self.duration_s is not None:
            return self.requests
        return load.default_requests

    def validate(self) -> None:
        """Raise `ConfigError` naming the setting, its value and what it takes."""
        if not self.concurrency and not self.rates:
            raise ConfigError("concurrency needs at least one number of users, such as 1,4,16", param="concurrency")
        for name, values in (("concurrency", self.concurrency), ("rate", self.rates)):
            for value in values:
                self._check(name, value, positive=True)
        self._check("requests", self.requests, positive=True)
        self._check("duration", self.duration_s, positive=True)
        self._check("timeout", self.timeout_s, positive=True)
        self._check("warmup", self.warmup)
        self._check("shared_prefix_tokens", self.shared_prefix_tokens)
        self._check("temperature", self.temperature)
        for name, span in (("input_tokens", self.input_tokens), ("output_tokens", self.output_tokens)):
            if not 1 <= span.low <= span.high:
                raise ConfigError(f"{name} {span} must be at least 1 and go upwards", param=name)
        for name in ("messages", "n", "prompt", "stream"):
            if name in self.extra_body:
                raise ConfigError(
                    f"extra_body must not hold {name!r}: the benchmark sets it itself", param="extra_body"
                )
        self._check_prompts()

    def _check_prompts(self) -> None:
        if self.prompt_kind == "ids" and self.endpoint == "chat":
            raise ConfigError(
                "the chat endpoint takes no token ids: use prompt kind words, or the completions endpoint",
                param="prompt_kind",
            )
        if self.file is not None and (self.shared_prefix_tokens or self.prompt_kind != "auto"):
            raise ConfigError("a shared prefix and a prompt kind are for synthetic prompts, not for a file's",
                              param="file")  # fmt: skip

    @staticmethod
    def _check(name: str, value: float | None, *, positive: bool = False) -> None:
        if value is None:
            return
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            raise ConfigError(f"{name} must be {'more than' if positive else 'at least'} 0, not {value:g}", param=name)
