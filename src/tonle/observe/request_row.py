"""`row_of`: a `SeenRequest` as the dashboard's table and explanations show it.

Does: choose the fields and name them. Does not: check who may see them.
"""

from __future__ import annotations

from typing import Any

from tonle.observe.seen_request import SeenRequest


def row_of(seen: SeenRequest) -> dict[str, Any]:
    """`queue_s` is all it waited, here and in an engine that tells."""
    engine_s = seen.engine_s or {}
    return {
        "id": seen.id,
        "number": seen.number,
        "time": seen.arrived,
        "path": seen.path,
        "model": seen.model,
        "adapter": seen.adapter,
        "key": seen.key_name,
        "key_id": seen.key_id,
        "backend": seen.backend,
        "pool": seen.pool,
        "why": seen.why,
        "failed": seen.failed,
        "fallback": seen.fallback,
        "region": seen.region,
        "status": seen.status,
        "http_status": seen.http_status,
        "error": seen.error,
        "stream": seen.stream,
        "prompt_tokens": seen.prompt_tokens,
        "cached_tokens": seen.cached_tokens,
        "completion_tokens": seen.completion_tokens,
        "audio_s": seen.audio_s,
        "characters": seen.characters,
        "images": seen.images,
        "queue_s": seen.queued_s + engine_s.get("queue", 0.0),
        "ttft_s": seen.ttft_s,
        "itl_s": seen.itl_s,
        "total_s": seen.total_s,
        "cache": seen.cache,
        "experiment": seen.experiment,
        "arm": seen.arm,
        "trace_id": seen.trace_id,
        "cost": seen.cost,
    }
