"""Which numbers each kind of requests has, and how reports call them. Every table, chart and comparison reads them from here.

Does: name the fields of `LevelReport` and `RequestRow`. Does not: compute them (`measure.py`) or print.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tonle.bench.measure import LevelReport, RequestRow, Spread
from tonle.bench.slo import Metric

RequestKind = Literal["chat", "embeddings", "rerank", "asr", "tts", "images"]
Unit = Literal["ms", "s", "×"]


@dataclass(frozen=True, slots=True)
class Rate:
    """Something per second, over a level."""

    name: str
    head: str  # of a narrow column
    field: str  # of `LevelReport`
    total: str  # of `LevelReport`: the sum over answered requests that it comes from
    amount: str  # of `RequestRow`: a request's part of that sum

    def of(self, level: LevelReport) -> float | None:
        """None: the server did not say, or no request was answered."""
        return None if getattr(level, self.total) is None else getattr(level, self.field)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value of each request, several for ITL. Its field of `LevelReport` holds how it is spread."""

    name: str
    title: str
    field: str  # of `LevelReport` and of `RequestRow`
    meaning: str
    unit: Unit = "ms"
    more_is_better: bool = False
    few: tuple[str, ...] = ("p50", "p99")  # what a narrow table shows of it
    many: tuple[str, ...] = ("p50", "p95", "p99")
    histogram: bool = True

    @property
    def name_and_unit(self) -> str:
        return f"{self.name}, ms" if self.unit == "ms" else self.name

    def of(self, level: LevelReport) -> Spread | None:
        spread: Spread | None = getattr(level, self.field)
        return spread

    def values(self, row: RequestRow) -> list[float]:
        """Of an answered request; a failed one has none."""
        if row.failure is not None:
            return []
        value: float | list[float] | None = getattr(row, self.field)
        return value if isinstance(value, list) else [] if value is None else [value]


@dataclass(frozen=True, slots=True)
class KindMetrics:
    """The first rate is what levels are compared by, the first quantity is drawn against it."""

    rates: tuple[Rate, ...]
    quantities: tuple[Quantity, ...]
    limits: tuple[Metric, ...] = ("e2el",)  # that an SLO can be about
    items: str | None = None  # what the items of a request are

    @property
    def throughput(self) -> Rate:
        return self.rates[0]

    @property
    def times(self) -> tuple[Quantity, ...]:
        """Those in milliseconds."""
        return tuple(quantity for quantity in self.quantities if quantity.unit == "ms")

    def speed(self, level: LevelReport) -> float:
        """What levels are compared by; requests per second where the server did not say enough to know it."""
        found = self.throughput.of(level)
        return level.requests_per_s if found is None else found

    def speed_unit(self, level: LevelReport) -> str:
        return "req/s" if self.throughput.of(level) is None else self.throughput.name


TTFT = Quantity(
    "TTFT", "Time to first token (TTFT)", "ttft_ms",
    "time to first token: from the moment a request was due to its first chunk with text",
)  # fmt: skip
TPOT = Quantity(
    "TPOT", "Time per output token (TPOT)", "tpot_ms", "time per output token after the first, of each request",
    few=("p50",), many=("p50", "p95"), histogram=False,
)  # fmt: skip
ITL = Quantity(
    "ITL", "Gaps between tokens (ITL)", "itl_ms",
    "inter-token latency: the gaps between consecutive chunks, of all requests together", few=(), many=("p50", "p99"),
)  # fmt: skip
CHAT_E2EL = Quantity(
    "E2EL", "End to end (E2EL)", "e2el_ms",
    "end-to-end latency: from the moment a request was due to the end of its answer", many=("p50", "p99"),
    histogram=False,
)  # fmt: skip
E2EL = Quantity("E2EL", CHAT_E2EL.title, "e2el_ms", CHAT_E2EL.meaning)
FIRST_AUDIO = Quantity(
    "first audio", "Time to first audio byte", "ttft_ms",
    "time to first audio byte: from the moment a request was due to the first byte of sound; an SLO calls it TTFT",
)  # fmt: skip
RTFX = Quantity(
    "RTFx", "Times faster than real time (RTFx)", "rtfx",
    "seconds of audio by seconds of end-to-end latency, of each request: the inverse of the real-time factor",
    unit="×", more_is_better=True, few=("p50", "min"), many=("p50", "min"), histogram=False,
)  # fmt: skip
S_PER_IMAGE = Quantity(
    "s per image", "Seconds per image", "s_per_item", "end-to-end latency by images, of each request",
    unit="s", few=("p50", "p99"), histogram=False,
)  # fmt: skip

TOKENS = Rate("tok/s", "tok/s", "total_tokens_per_s", "prompt_tokens", "prompt_tokens")
AUDIO = Rate("audio s/s", "audio s/s", "audio_s_per_s", "audio_s", "audio_s")


def _items(name: str) -> Rate:
    return Rate(f"{name}/s", f"{name}/s", "items_per_s", "items", "items")


METRICS: dict[RequestKind, KindMetrics] = {
    "chat": KindMetrics(
        (Rate("output tok/s", "out tok/s", "output_tokens_per_s", "output_tokens", "output_tokens"),),
        (TTFT, TPOT, ITL, CHAT_E2EL),
        ("ttft", "tpot", "itl", "e2el"),
    ),
    "embeddings": KindMetrics((_items("inputs"), TOKENS), (E2EL,), items="inputs"),
    "rerank": KindMetrics((_items("documents"), TOKENS), (E2EL,), items="documents"),
    "asr": KindMetrics((AUDIO,), (E2EL, RTFX)),
    "tts": KindMetrics((AUDIO,), (FIRST_AUDIO, E2EL, RTFX), ("ttft", "e2el")),
    "images": KindMetrics((_items("images"),), (E2EL, S_PER_IMAGE), items="images"),
}
