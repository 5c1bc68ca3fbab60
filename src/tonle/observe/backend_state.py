"""`BackendState`: what a backend tells about itself. `read_metrics`: the same, from the text of its /metrics.

Does: pick the few lines that are needed, in vLLM's names and ours. Does not: fetch them, or read the rest.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tonle.telemetry.time_spent import MISS_REASONS

_MOST = 1 << 48  # of any figure: no server has counted more, and sums of these still fit in 64 bits


class BackendState(msgspec.Struct, frozen=True, kw_only=True):
    """None: it does not tell. Counters only grow, until it is restarted."""

    name: str
    running: int | None = None  # sequences
    waiting: int | None = None
    kv_usage: float | None = None  # share of KV blocks in use, 0..1
    prefix_hits: int | None = None  # counter, prompt tokens
    prefix_queries: int | None = None  # counter, prompt tokens
    prefix_missed: dict[str, int] | None = None  # counters, prompt tokens by reason (`telemetry/time_spent.py`)
    generation_tokens: int | None = None  # counter
    prompt_tokens: int | None = None  # counter, cached ones included
    draft_tokens: int | None = None  # counter, of speculation
    accepted_tokens: int | None = None  # counter
    gpu_utilization: float | None = None  # 0..1
    gpu_memory_used: int | None = None  # bytes
    gpu_memory_total: int | None = None  # bytes
    at: float  # unix seconds


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _sum(values: list[float]) -> int:
    return min(round(sum(values)), _MOST)


# field -> its names, the current one first, and what several series (of one engine each) make together
_FIELDS: dict[str, tuple[tuple[bytes, ...], Callable[[list[float]], float]]] = {
    "running": ((b"vllm:num_requests_running",), _sum),
    "waiting": ((b"vllm:num_requests_waiting",), _sum),
    "kv_usage": ((b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"), _mean),
    "prefix_hits": ((b"vllm:prefix_cache_hits_total", b"vllm:gpu_prefix_cache_hits_total"), _sum),
    "prefix_queries": ((b"vllm:prefix_cache_queries_total", b"vllm:gpu_prefix_cache_queries_total"), _sum),
    "generation_tokens": ((b"vllm:generation_tokens_total",), _sum),
    "prompt_tokens": ((b"vllm:prompt_tokens_total",), _sum),
    "draft_tokens": ((b"vllm:spec_decode_num_draft_tokens_total",), _sum),
    "accepted_tokens": ((b"vllm:spec_decode_num_accepted_tokens_total",), _sum),
    "gpu_utilization": ((b"tonle:gpu_utilization",), _mean),
    "gpu_memory_used": ((b"tonle:gpu_memory_used_bytes",), _sum),
    "gpu_memory_total": ((b"tonle:gpu_memory_total_bytes",), _sum),
}
_MISSED = b"tonle:prefix_cache_missed_tokens_total"
_REASON = b'reason="'


def read_metrics(name: str, text: bytes, at: float) -> BackendState:
    """`text`: an exposition in Prometheus' format. What is malformed is left out."""
    text = b"\n" + text
    found: dict[str, float] = {}
    for field, (names, combine) in _FIELDS.items():
        for wanted in names:
            if values := [value for _, value in _samples(text, wanted)]:
                found[field] = combine(values)
                break
    missed: dict[str, int] = {}
    for labels, value in _samples(text, _MISSED):
        _, _, rest = labels.partition(_REASON)
        reason = rest.partition(b'"')[0].decode(errors="replace")
        if reason in MISS_REASONS:
            missed[reason] = min(missed.get(reason, 0) + round(value), _MOST)
    return msgspec.convert({"name": name, "at": at, "prefix_missed": missed or None, **found}, BackendState)


def _samples(text: bytes, name: bytes) -> list[tuple[bytes, float]]:
    """Labels and value of each line of that metric. A search for the name costs a fraction of reading all lines."""
    found = []
    start = b"\n" + name
    place = text.find(start)
    while place >= 0:
        end = text.find(b"\n", place + 1)
        line = text[place + len(start) : end if end >= 0 else len(text)]
        labels, brace, rest = line.rpartition(b"}")
        if line[:1] in (b"{", b" ", b"\t") and bool(brace) == (line[:1] == b"{"):
            parts = rest.split()  # the value, perhaps a timestamp
            value = _number(parts[0]) if parts else None
            if value is not None:
                found.append((labels, value))
        place = text.find(start, place + len(start))
    return found


def _number(text: bytes) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value <= _MOST else None  # NaN is neither
