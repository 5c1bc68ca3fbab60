"""`detail_of`: a few words beside each span of a waterfall.

Does: write what is known of the span beyond its length. Does not: say what it means for the request (`sentences.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from tonle.observe.seen_request import SeenRequest
from tonle.observe.spans import (
    ACCEPT,
    DECODE,
    DELIVER,
    ENGINE_QUEUE,
    GATEWAY_QUEUE,
    PREFILL,
    SEND,
    WORKER,
    is_for_workers,
    waited_s,
)
from tonle.observe.time_words import count, length, ms
from tonle.telemetry.time_spent import TimeSpent


def detail_of(name: str, seen: SeenRequest, spent: TimeSpent | None) -> str:
    """Empty if there is nothing to add."""
    if name == ACCEPT:
        return "read, checked, charged" if seen.accepted_s is not None else "refused"
    if name == GATEWAY_QUEUE:
        return _gateway_queue(seen)
    if name == SEND:
        return "made into tokens" if seen.is_local else f"to {seen.backend}" if seen.backend else ""
    if name == ENGINE_QUEUE:
        return "" if spent is None else ", ".join(f"{wait.why} {ms(wait.seconds)}" for wait in spent.waits)
    if name == PREFILL:
        return _prefill(seen, spent)
    if name == DECODE:
        return _decode(seen, spent)
    if name == WORKER:
        return _worker(seen)
    assert name == DELIVER
    if seen.status == "cached":
        return "from the response cache"
    return "the rest of the answer, network" if is_for_workers(seen) else "text and network"


def _worker(seen: SeenRequest) -> str:
    at = "" if seen.is_local or not seen.backend else f"at {seen.backend}"
    where = " ".join(part for part in (f"pool {seen.pool}" if seen.pool else "", at) if part)
    return ", ".join(part for part in (where, *_media(seen)) if part)


def _media(seen: SeenRequest) -> Iterator[str]:
    if seen.audio_s:
        yield f"{length(seen.audio_s)} of sound"
    if seen.images:
        yield count(seen.images, "image")


def _gateway_queue(seen: SeenRequest) -> str:
    parts = [f"queued {ms(waited_s(seen))}"] if waited_s(seen) else []
    if seen.failed:
        parts.append(f"failed: {', '.join(dict.fromkeys(seen.failed))}")
    return ", ".join(parts)


def _prefill(seen: SeenRequest, spent: TimeSpent | None) -> str:
    if spent is None:
        tokens = count(seen.prompt_tokens, "token") if seen.prompt_tokens else ""
        return f"{tokens}, {seen.cached_tokens:,} cached" if tokens and seen.cached_tokens else tokens
    steps = f" in {count(spent.num_chunks, 'step')}" if spent.num_chunks else ""
    return f"{spent.cached_tokens:,} tokens cached, {spent.computed_tokens:,} computed{steps}"


def _decode(seen: SeenRequest, spent: TimeSpent | None) -> str:
    tokens = count(seen.completion_tokens, "token")
    if spent is None or not spent.num_steps:
        return tokens
    return f"{tokens} in {count(spent.num_steps, 'step')}"
