"""`BenchOptions`: what to send, how much of it at once, and to whom.

Does: hold and check the settings of one benchmark, and read the command line's notations (`1,4,16`, `32-400`, `1-20`).
Does not: talk to a server or read files.
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tonle.bench.datasets.check import check_data
from tonle.bench.datasets.shipped import is_shipped
from tonle.bench.kinds.metrics import METRICS, RequestKind
from tonle.bench.kinds.settings import check_kind
from tonle.bench.load import Arrivals, Load
from tonle.bench.slo import NO_SLO, Slo
from tonle.bench.sweep import Sweep, SweepKind
from tonle.config.setting_names import named_settings
from tonle.errors import ConfigError

Endpoint = Literal["chat", "completions"]
DataFormat = Literal["jsonl", "sharegpt", "openai-batch"]
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


@dataclass(frozen=True, slots=True)
class Pause:
    """Seconds drawn evenly from `low` to `high`."""

    low: float
    high: float

    @classmethod
    def parse(cls, text: str, name: str) -> Pause:
        """Read `2`, `0.5` or `1-5`."""
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:-\s*(\d+(?:\.\d+)?)\s*)?", text)
        if match is None:
            raise ConfigError(f"{name} is seconds such as 2 or a range such as 0.5-5, not {text!r}", param=name)
        low = float(match[1])
        return cls(low, float(match[2]) if match[2] else low)

    def draw(self, rng: random.Random) -> float:
        return rng.uniform(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g}-{self.high:g}"


NO_PAUSE = Pause(0.0, 0.0)


def parse_numbers(text: str, name: str) -> tuple[float, ...]:
    """Read `1,4,16`."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = (math.nan,)
    if not all(map(math.isfinite, numbers)):
        raise ConfigError(f"{name} is a number or a list of numbers such as 1,4,16, not {text!r}", param=name)
    return numbers


def parse_ramp(text: str, name: str) -> tuple[float, float]:
    """Read `1-20` or `0.5-8`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*-\s*(\d+(?:\.\d+)?)\s*", text)
    if match is None:
        raise ConfigError(f"{name} is two rates such as 1-20, in requests per second, not {text!r}", param=name)
    return float(match[1]), float(match[2])


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

    # Kind of requests
    kind: RequestKind = "chat"  # chat: also completions
    items: Span | None = None  # texts to embed, documents to rank, images per request; None: `kinds/workload.py` says
    sentences: Span | None = None  # of each text
    audio_seconds: Pause | None = None  # asr: of made-up sounds; None: 2 to 15

    # Load
    concurrency: tuple[int, ...] = (1,)  # closed loop, one level each
    rates: tuple[float, ...] = ()  # open loop, requests per second, one level each; replaces concurrency
    ramp: tuple[float, float] | None = None  # open loop: a rate that rises over duration_s; replaces the two above
    sweep: SweepKind | None = None  # search the highest load; starts at the one rate or concurrency that is given
    max_levels: int = 16  # of a sweep
    arrivals: Arrivals | None = None  # of an open loop; None: gamma if burstiness is set, else poisson
    burstiness: float | None = None  # of gamma arrivals: 1 is Poisson, less comes in bursts
    requests: int | None = None  # per level; None: `Load.default_requests`, or no limit if duration_s is set
    duration_s: float | None = None  # per level: no new request after this; those under way are awaited
    warmup: int = 2  # requests before each level that are not counted
    timeout_s: float = 600.0  # per request, from sending to the end of the stream
    processes: int = 1  # that the client's work is spread over
    slo: Slo = NO_SLO  # every level is judged by it

    # Prompts
    file: Path | None = (
        None  # prompts, or the name of a set that comes with Tonle (`khmer`); asr: a folder; None: synthetic
    )
    format: DataFormat | None = None  # of `file`; None: found by looking at it
    input_tokens: Span = Span(128, 128)  # a prompt's own tokens, after the shared prefix
    output_tokens: Span = Span(64, 64)
    shared_prefix_tokens: int = 0
    prefixes: int = 1  # so many different shared prefixes; each request has one of them
    prefix_skew: float = 0.0  # Zipf's exponent: 0 draws them evenly, 1 takes the n-th 1/n as often as the first
    turns: Span | None = None  # of each conversation; None: single requests, or all that a file's conversation has
    think_time: Pause = NO_PAUSE  # seconds between an answer and the next turn
    answers_as_recorded: bool = True  # ShareGPT: ask for answers about as long as the file's; False: output_tokens
    prompt_kind: PromptKind = "auto"
    seed: int = 0

    # Replay of an audit trail, in place of prompts and load
    replay: Path | None = None
    speed: float = 1.0  # so many times as fast as recorded
    since: str | None = None  # ISO 8601, UTC if it has no zone
    until: str | None = None

    # Sampling
    ignore_eos: bool | None = None  # None: on for synthetic prompts, off for a file's and for a replay
    temperature: float = 0.0
    extra_body: dict[str, Any] = field(default_factory=dict)  # more fields for every body; None takes a field out

    # Report
    graphemes: bool | None = None  # count the letters of answers; None: for a set that comes with Tonle
    keep_requests: bool = True  # one row per request in the report

    @property
    def levels(self) -> list[Load]:
        """Those known beforehand: a sweep has none."""
        arrivals, burstiness = self.gaps
        if self.replay is not None:
            return [Load("replay", self.speed)]
        if self.sweep is not None:
            return []
        if self.ramp is not None:
            return [Load("ramp", *self.ramp, arrivals=arrivals, burstiness=burstiness)]
        if self.rates:
            return [Load("rate", rate, arrivals=arrivals, burstiness=burstiness) for rate in self.rates]
        return [Load("concurrency", users) for users in self.concurrency]

    @property
    def gaps(self) -> tuple[Arrivals, float]:
        """How gaps between requests of an open loop are drawn, and the shape of gamma gaps."""
        if self.arrivals is None:
            return ("poisson", 1.0) if self.burstiness is None else ("gamma", self.burstiness)
        return self.arrivals, 1.0 if self.burstiness is None else self.burstiness

    def new_sweep(self) -> Sweep:
        assert self.sweep is not None
        start = (self.rates or (1.0,))[0] if self.sweep == "rate" else self.concurrency[0]
        arrivals, burstiness = self.gaps
        return Sweep(
            self.sweep, start, max_levels=self.max_levels, arrivals=arrivals, burstiness=burstiness, metrics=METRICS[self.kind]
        )  # fmt: skip

    @property
    def repeats_prompts(self) -> bool:
        """Each run sends the same prompts, whatever its seed: those of a file or of a trail."""
        return self.file is not None or self.replay is not None

    @property
    def ignores_eos(self) -> bool:
        return not self.repeats_prompts if self.ignore_eos is None else self.ignore_eos

    @property
    def counts_graphemes(self) -> bool:
        return self.kind == "chat" and is_shipped(self.file) if self.graphemes is None else self.graphemes

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
        self._check_load()
        self._check("requests", self.requests, positive=True)
        self._check("duration", self.duration_s, positive=True)
        self._check("timeout", self.timeout_s, positive=True)
        self._check("warmup", self.warmup)
        self._check("processes", self.processes, positive=True)
        self._check("shared_prefix_tokens", self.shared_prefix_tokens)
        self._check("temperature", self.temperature)
        for name, span in (("input_tokens", self.input_tokens), ("output_tokens", self.output_tokens)):
            if not 1 <= span.low <= span.high:
                raise ConfigError(f"{name} {span} must be at least 1 and go upwards", param=name)
        self._check("prefix_skew", self.prefix_skew)
        self._check("speed", self.speed, positive=True)
        check_kind(self)
        check_data(self)

    def _check_load(self) -> None:
        is_open = bool(self.rates or self.ramp is not None or self.sweep == "rate")
        if (self.arrivals is not None or self.burstiness is not None) and not is_open:
            raise ConfigError("arrivals and burstiness are for an open loop: give a rate, a ramp or a sweep by rate",
                              param="arrivals")  # fmt: skip
        self._check("burstiness", self.burstiness, positive=True)
        if self.burstiness is not None and self.arrivals not in (None, "gamma"):
            raise ConfigError(f"burstiness is for gamma arrivals, not for {self.arrivals} ones", param="burstiness")
        if self.ramp is not None:
            self._check_ramp(self.ramp)
        if self.sweep is not None:
            self._check_sweep(self.rates if self.sweep == "rate" else self.concurrency)

    def _check_ramp(self, ramp: tuple[float, float]) -> None:
        if self.rates or self.sweep is not None:
            raise ConfigError("a ramp has its own rates: give no rate and no sweep with it", param="ramp")
        if self.duration_s is None:
            raise ConfigError("a ramp needs a duration, over which the rate rises", param="ramp")
        for rate in ramp:
            self._check("ramp", rate)
        if ramp[0] == ramp[1]:
            raise ConfigError(f"a ramp goes from one rate to another, such as 1-20, not {ramp[0]:g}-{ramp[1]:g}",
                              param="ramp")  # fmt: skip

    def _check_sweep(self, starts: tuple[float, ...]) -> None:
        if self.sweep == "concurrency" and self.rates:
            raise ConfigError("a sweep by concurrency is a closed loop: give no rate with it", param="sweep")
        if len(starts) > 1:
            raise ConfigError(f"a sweep starts at one {self.sweep}; give one number, or none", param="sweep")
        if self.max_levels < 2:
            raise ConfigError(f"max_levels must be at least 2, not {self.max_levels}", param="max_levels")

    @staticmethod
    def _check(name: str, value: float | None, *, positive: bool = False) -> None:
        if value is None:
            return
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            raise ConfigError(f"{name} must be {'more than' if positive else 'at least'} 0, not {value:g}", param=name)
