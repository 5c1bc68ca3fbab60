"""What the numbers mean. Pure functions from moments and counts to a level's report; no clock, no sockets.

One answer is a stream of chunks. With `start` the moment its request was due: in an open loop its planned time, though it may
have left later (a client held up by a slow server must not hide how long a caller would have waited), else when it was sent:

    TTFT   first chunk with text or token ids − start
    E2EL   last chunk with a choice (text, token ids or the finish reason) − start
    TPOT   (E2EL − TTFT) / (output tokens − 1); none for an answer of one token
    ITL    gaps between consecutive chunks with text or token ids: one chunk may carry several tokens

Of other kinds of requests (`kinds/`), TTFT is the first audio byte of speech, E2EL the last byte of the answer, and

    RTFx         seconds of audio / E2EL: how many times faster than real time, the inverse of the real-time factor
    s per item   E2EL / images of the answer

Percentiles interpolate linearly between neighbours (numpy's default). Failed requests count in no latency and in no
throughput.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Literal, TypeVar

import msgspec

from tonle.bench.keeping_up import falling_behind, offered_per_s
from tonle.bench.slo import MOST_FAILED, BoundResult, Latencies, Slo
from tonle.telemetry.percentile import percentile

TokenSource = Literal["usage", "token_ids", "chunks"]
Number = TypeVar("Number", int, float)


class Sample(msgspec.Struct, kw_only=True):
    """One request as the client saw it. Moments are seconds of one clock."""

    index: int
    start_s: float
    end_s: float  # the stream's last byte, or the moment of failure
    arrivals_s: list[float] = []  # of chunks with text or token ids
    last_s: float | None = None  # of the last chunk with a choice
    prompt_tokens: int | None = None  # None: the server did not say
    cached_tokens: int | None = None  # of the prompt; None: the server did not say
    output_tokens: int = 0
    counted_by: TokenSource = "usage"
    finish_reason: str | None = None
    cache_hit: bool | None = None  # from a response cache; None: the server did not say
    due_s: float | None = None  # open loop: its planned time; latencies count from it
    graphemes: int | None = None  # letters of the answer (grapheme clusters), if counted
    items: int | None = None  # texts embedded, documents ranked or images made; None: not of this kind
    audio_s: float | None = None  # seconds of audio, sent to be transcribed or got as speech; None: none, or not known
    conversation: int | None = None  # the conversation that it is a turn of
    turn: int | None = None  # of that conversation, from 0
    record: str | None = None  # id of the audit record that it replays
    changed: str | None = None  # how its answer differs from that record's; None: the same, or not compared
    failure: str | None = None  # "kind: detail"; None = answered in full

    @property
    def begin_s(self) -> float:
        """What latencies count from."""
        return self.start_s if self.due_s is None else self.due_s

    @property
    def delay_s(self) -> float | None:
        """Open loop: how long after its time the request left."""
        return None if self.due_s is None else max(0.0, self.start_s - self.due_s)

    @property
    def ttft_s(self) -> float | None:
        if self.arrivals_s:
            return self.arrivals_s[0] - self.begin_s
        # Tokens whose text never became visible: the chunk that ended the answer is the first sign of them.
        return self.e2el_s if self.output_tokens else None

    @property
    def e2el_s(self) -> float | None:
        return None if self.last_s is None else self.last_s - self.begin_s

    @property
    def tpot_s(self) -> float | None:
        if self.ttft_s is None or self.e2el_s is None or self.output_tokens < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def per_grapheme_s(self) -> float | None:
        if self.ttft_s is None or self.e2el_s is None or self.graphemes is None or self.graphemes < 2:
            return None
        return (self.e2el_s - self.ttft_s) / (self.graphemes - 1)

    @property
    def rtfx(self) -> float | None:
        return _ratio(self.audio_s, self.e2el_s)

    @property
    def s_per_item(self) -> float | None:
        return _ratio(self.e2el_s, self.items)

    @property
    def itl_s(self) -> list[float]:
        return [after - before for before, after in pairwise(self.arrivals_s)]

    @property
    def latencies(self) -> Latencies:
        return Latencies(
            _milliseconds(self.ttft_s),
            _milliseconds(self.tpot_s),
            _milliseconds(self.e2el_s),
            [1e3 * gap for gap in self.itl_s],
        )


class Spread(msgspec.Struct, frozen=True):
    """How one quantity is spread over a level."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float
    count: int


class FailureGroup(msgspec.Struct, frozen=True):
    """Failures that differ in numbers and ids at most; `example` is the first of them, word for word."""

    example: str
    count: int


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One request in a saved report. Milliseconds; None = not reached or not told."""

    index: int
    start_s: float  # when it was due, after the level's first request
    delay_ms: float | None = None  # open loop: how long after that it was sent
    ttft_ms: float | None
    tpot_ms: float | None
    e2el_ms: float | None
    itl_ms: list[float]
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    finish_reason: str | None
    failure: str | None
    graphemes: int | None = None
    conversation: int | None = None
    turn: int | None = None
    record: str | None = None
    changed: str | None = None
    good: bool | None = None  # keeps the SLO; None: there is none, or it failed
    items: int | None = None
    audio_s: float | None = None

    @property
    def rtfx(self) -> float | None:
        return _ratio(self.audio_s, None if self.e2el_ms is None else self.e2el_ms / 1e3)

    @property
    def s_per_item(self) -> float | None:
        return _ratio(None if self.e2el_ms is None else self.e2el_ms / 1e3, self.items)


class ChangedAnswer(msgspec.Struct, frozen=True):
    """A replayed request that was answered in another way than it was recorded."""

    record: str  # the id of the audit record
    how: str


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU of the machine that the client runs on, over a level. NVML's readings, a few per second."""

    name: str
    utilization: float | None  # mean share of time in which a kernel ran, 0..1
    memory_used: int | None  # bytes, the most that was seen
    memory_total: int | None
    power_w: float | None = None  # mean


class ClientUse(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the client, over a level: whether it kept up."""

    cpu_share: float  # CPU seconds of its event loop's thread per second
    late_p99_ms: float  # how late its timers fired; a client that keeps up has about 1 ms
    late_max_ms: float


class LevelReport(msgspec.Struct, frozen=True, kw_only=True):
    """One level: what was asked of the server, and what came of it."""

    label: str
    concurrency: int | None  # closed loop
    rate: float | None  # open loop, requests per second asked for
    requests: int
    succeeded: int
    failed: int
    duration_s: float  # first request sent, in an open loop due, to last answer ended
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float  # prompt and output
    prompt_tokens: int | None  # None: the server does not say
    cached_tokens: int | None
    output_tokens: int
    counted_by: list[TokenSource]  # where output_tokens comes from; ["usage"] is exact
    ttft_ms: Spread | None  # None: no request got that far
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2el_ms: Spread | None
    failures: list[FailureGroup]  # most frequent first
    reconnects: int  # requests sent again because an idle connection had been closed by the server
    client_cpu_share: (
        float  # CPU seconds per second of the client's busiest process; near 1 the client itself is the limit
    )
    max_send_delay_ms: float | None  # open loop: the latest a request left after its time
    interrupted: bool
    rows: list[RequestRow] | None  # only if asked for
    warmup: int = 0  # requests sent before, and not counted
    slo: list[BoundResult] = []  # of the SLO, if one was given
    goodput_per_s: float | None = None  # answered requests that each keep the SLO, per second
    good_share: float | None = None  # of all requests, also failed ones
    graphemes_per_s: float | None = None
    ms_per_grapheme: Spread | None = None  # after the first chunk, as TPOT is
    gpus: list[GpuReport] = []
    clients: list[ClientUse] = []  # one for each process of the client
    changed: list[ChangedAnswer] = []  # of a replay, in the order of arrival
    offered_per_s: float | None = None  # open loop: as requests were due; random gaps differ from `rate`
    falling_behind: float | None = None  # open loop: seconds that answers take longer per second; about 0: it keeps up
    items: int | None = None  # of answered requests; None: this kind of requests has none
    items_per_s: float | None = None
    s_per_item: Spread | None = None  # of each request
    audio_s: float | None = None  # of answered requests; None: there is none, or no answer said how long it is
    audio_s_per_s: float | None = None
    rtfx: Spread | None = None  # of each request

    @property
    def gpu_use(self) -> float | None:
        """Mean share of time in which a kernel ran, over all GPUs; None: none was read."""
        shares = [gpu.utilization for gpu in self.gpus if gpu.utilization is not None]
        return math.fsum(shares) / len(shares) if shares else None

    @property
    def gpu_memory(self) -> int | None:
        """Bytes of all GPUs, the most that was seen of each."""
        return _total(gpu.memory_used for gpu in self.gpus)

    @property
    def holds_slo(self) -> bool:
        """Every bound holds and nearly all requests were answered: bounds on ITL and TPOT count answered ones only."""
        return self.failed <= MOST_FAILED * self.requests and all(result.holds for result in self.slo)


class Circumstances(msgspec.Struct, frozen=True, kw_only=True):
    """What a level's samples cannot tell about it."""

    label: str
    concurrency: int | None = None
    rate: float | None = None
    reconnects: int = 0
    interrupted: bool = False
    warmup: int = 0
    slo: Slo = Slo()
    gpus: list[GpuReport] = []
    clients: list[ClientUse] = []


def spread(values: Iterable[float | None], *, scale: float = 1.0) -> Spread | None:
    """Summarize the values that are there, times `scale`; None if none is."""
    ordered = sorted(value * scale for value in values if value is not None)
    if not ordered:
        return None
    p50, p90, p95, p99 = (percentile(ordered, percent) for percent in (50, 90, 95, 99))
    mean = math.fsum(ordered) / len(ordered)
    return Spread(mean, p50, p90, p95, p99, ordered[0], ordered[-1], len(ordered))


def group_failures(failures: Iterable[str]) -> list[FailureGroup]:
    """Failures alike but for numbers and ids, most frequent first. The kind, before the colon, stays whole."""
    groups: dict[tuple[str, str], tuple[str, int]] = {}
    for failure in failures:
        kind, _, detail = failure.partition(": ")
        key = (kind, re.sub(r"\w*\d\w*", "#", detail))
        example, count = groups.get(key, (failure, 0))
        groups[key] = (example, count + 1)
    ranked = sorted(groups.values(), key=lambda group: -group[1])
    return [FailureGroup(example, count) for example, count in ranked]


def report_level(samples: list[Sample], circumstances: Circumstances, *, keep_rows: bool = False) -> LevelReport:
    """Everything a level's report says, from its samples."""
    good = [sample for sample in samples if sample.failure is None]
    begin_s = min((sample.begin_s for sample in samples), default=0.0)
    duration_s = max((sample.end_s for sample in samples), default=0.0) - begin_s
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    output_tokens = sum(sample.output_tokens for sample in good)
    prompt_tokens = _total(sample.prompt_tokens for sample in good)
    delays_s = [sample.delay_s for sample in samples if sample.delay_s is not None]
    slo = circumstances.slo
    num_good = sum(slo.is_good(sample.latencies) for sample in good) if slo else None
    graphemes = _total(sample.graphemes for sample in good)
    items, audio_s = _total(sample.items for sample in good), _total(sample.audio_s for sample in good)
    return LevelReport(
        label=circumstances.label,
        concurrency=circumstances.concurrency,
        rate=circumstances.rate,
        requests=len(samples),
        succeeded=len(good),
        failed=len(samples) - len(good),
        duration_s=duration_s,
        requests_per_s=len(good) * per_s,
        output_tokens_per_s=output_tokens * per_s,
        total_tokens_per_s=(output_tokens + (prompt_tokens or 0)) * per_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=_total(sample.cached_tokens for sample in good),
        output_tokens=output_tokens,
        counted_by=sorted({sample.counted_by for sample in good}),
        ttft_ms=spread((sample.ttft_s for sample in good), scale=1e3),
        tpot_ms=spread((sample.tpot_s for sample in good), scale=1e3),
        itl_ms=spread((gap for sample in good for gap in sample.itl_s), scale=1e3),
        e2el_ms=spread((sample.e2el_s for sample in good), scale=1e3),
        failures=group_failures(sample.failure for sample in samples if sample.failure is not None),
        reconnects=circumstances.reconnects,
        client_cpu_share=max((client.cpu_share for client in circumstances.clients), default=0.0),
        max_send_delay_ms=max(delays_s) * 1e3 if delays_s else None,
        interrupted=circumstances.interrupted,
        rows=[_row(sample, begin_s, slo) for sample in samples] if keep_rows else None,
        warmup=circumstances.warmup,
        slo=slo.judge([sample.latencies for sample in good], len(samples) - len(good)),
        goodput_per_s=None if num_good is None else num_good * per_s,
        good_share=None if num_good is None or not samples else num_good / len(samples),
        graphemes_per_s=None if graphemes is None else graphemes * per_s,
        ms_per_grapheme=spread((sample.per_grapheme_s for sample in good), scale=1e3),
        gpus=circumstances.gpus,
        clients=circumstances.clients,
        offered_per_s=offered_per_s(samples),
        changed=[
            ChangedAnswer(sample.record, sample.changed)
            for sample in sorted(samples, key=lambda sample: sample.index)
            if sample.record is not None and sample.changed is not None
        ],
        falling_behind=falling_behind(good),
        items=items,
        items_per_s=None if items is None else items * per_s,
        s_per_item=spread(sample.s_per_item for sample in good),
        audio_s=audio_s,
        audio_s_per_s=None if audio_s is None else audio_s * per_s,
        rtfx=spread(sample.rtfx for sample in good),
    )


def _total(counts: Iterable[Number | None]) -> Number | None:
    """The sum of the counts that are there; None if none is."""
    there = [count for count in counts if count is not None]
    return sum(there, start=type(there[0])(0)) if there else None


def _ratio(above: float | None, below: float | None) -> float | None:
    """None: one of them is not there, or there is nothing to divide by."""
    return above / below if above is not None and below else None


def _row(sample: Sample, begin_s: float, slo: Slo) -> RequestRow:
    return RequestRow(
        index=sample.index,
        start_s=round(sample.begin_s - begin_s, 6),
        delay_ms=_milliseconds(sample.delay_s),
        ttft_ms=_milliseconds(sample.ttft_s),
        tpot_ms=_milliseconds(sample.tpot_s),
        e2el_ms=_milliseconds(sample.e2el_s),
        itl_ms=[round(gap * 1e3, 3) for gap in sample.itl_s],
        prompt_tokens=sample.prompt_tokens,
        cached_tokens=sample.cached_tokens,
        output_tokens=sample.output_tokens,
        finish_reason=sample.finish_reason,
        failure=sample.failure,
        graphemes=sample.graphemes,
        conversation=sample.conversation,
        turn=sample.turn,
        record=sample.record,
        changed=sample.changed,
        good=slo.is_good(sample.latencies) if slo and sample.failure is None else None,
        items=sample.items,
        audio_s=sample.audio_s,
    )


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
