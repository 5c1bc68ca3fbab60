"""POST /v1/workers/NAME: a kind that is given by its import path. The body's fields are the job's, the result's are the reply's.

Does: JSON both ways, media as base64 in a list `media`; with `stream: true` one event for each piece. Does not: know what the
fields mean.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from typing import Any

import msgspec

from tonle.edge.client_connection import Sink
from tonle.errors import InvalidRequest
from tonle.protocol import sse
from tonle.protocol.parse import decode_object
from tonle.workers.kind import Job, Result
from tonle.workers.pace import Pace
from tonle.workers.pool import WorkerPool
from tonle.workers.worker_request import WorkerRequest


async def own_kind(request: WorkerRequest, pool: WorkerPool, sink: Sink) -> None:
    fields = decode_object(request.body)
    media = _media(fields.pop("media", []))
    size = fields.pop("size", 1)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InvalidRequest(f"size must be an integer of at least 1, not {size!r:.60}", param="size")
    job = Job(fields, media, size)
    if fields.get("stream") is True:
        await _stream(job, pool, sink)
        return
    result = await pool.run(job)
    sink.head(200, {"content-type": "application/json"})
    sink.data(msgspec.json.encode(_reply(result)))


async def _stream(job: Job, pool: WorkerPool, sink: Sink) -> None:
    pace, began = Pace(sink), False
    async with contextlib.aclosing(pool.stream(job)) as pieces:
        async for piece in pieces:
            if not began:
                sink.head(200, {"content-type": sse.CONTENT_TYPE})
                began = True
            await pace.room()
            sink.data(sse.DATA + msgspec.json.encode(_reply(piece)) + sse.END)
    if not began:
        sink.head(200, {"content-type": sse.CONTENT_TYPE})
    sink.data(sse.DONE)


def _media(given: Any) -> tuple[bytes, ...]:
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise InvalidRequest("media must be a list of base64 strings", param="media")
    try:
        return tuple(base64.b64decode(one, validate=True) for one in given)
    except (binascii.Error, ValueError):
        raise InvalidRequest("media must be base64", param="media") from None


def _reply(result: Result) -> dict[str, Any]:
    if not result.media:
        return result.fields
    return {**result.fields, "media": [base64.b64encode(one).decode() for one in result.media]}
