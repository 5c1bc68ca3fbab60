"""Shadow traffic: a copy of some requests goes to another model; the caller never hears of its answer.

Does: send copies when there is room, count how they fared, keep a record of a copy where its row says so. Does not:
delay or touch the caller's request, queue, or retry.

The caller's own record says where a copy went. What came of it is not part of that record: the caller has the answer,
and the record is closed, before the copy has one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from tonle.config.rows import ShadowRow
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.backend_pool import BackendPool
from tonle.gateway.backends.buffered_reply import BufferedReply
from tonle.gateway.call import Call
from tonle.gateway.outgoing import copy_for, headers_for

log = logging.getLogger("tonle.gateway")

MAX_AT_ONCE = 16  # copies under way; more are left out
_LEFT_OUT = ("stream_options",)


class CopyRecorder(Protocol):
    """Where records of copies go."""

    def open_copy(self, call: Call, request_id: str, body: bytes) -> Callable[[BufferedReply, Exception | None], None]:
        """Returns what closes the record."""
        ...


class Shadows:
    def __init__(
        self,
        rows: Iterable[ShadowRow],
        pool: BackendPool,
        recorder: CopyRecorder,
        *,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._rows = {row.model: row for row in rows}
        self._pool = pool
        self._recorder = recorder
        self._draw = draw
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_sent = 0
        self.num_failed = 0
        self.num_left_out = 0

    def follow(self, call: Call, salt: str) -> None:
        """Called when the caller has the answer and before the record is closed."""
        row = self._rows.get(call.asked_model or "") or self._rows.get(call.model)
        if row is None or self._draw() >= row.share:
            return
        backends = [each for each in self._pool.backends if row.to_model in each.models and each.available]
        if not backends or len(self._tasks) >= MAX_AT_ONCE:
            self.num_left_out += 1
            return
        backend = min(backends, key=lambda each: each.load)
        call.shadow = {"backend": backend.name, "model": row.to_model, "request_id": f"shadow-{call.request_id}"[:128]}
        task = asyncio.create_task(self._send(row, backend, call, salt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, row: ShadowRow, backend: Backend, call: Call, salt: str) -> None:
        assert call.shadow is not None
        began_s, request_id = time.monotonic(), str(call.shadow["request_id"])
        body = copy_for(call, backend, salt, {"model": row.to_model}, _LEFT_OUT)
        headers = headers_for(call, backend, salt) | {"X-Request-Id": request_id}
        close = self._recorder.open_copy(call, request_id, body) if row.record else None
        self.num_sent += 1
        answer, failure = BufferedReply(), None
        try:
            await backend.send("POST", call.path, body, headers, answer, first_s=backend.timeout_s)
            took_ms = (time.monotonic() - began_s) * 1000
            log.info("shadow of %s: %s answered %d in %.1f ms", call.request_id, backend.name, answer.status, took_ms)
        except Exception as error:
            failure = error
            log.warning("shadow of %s: %s failed: %s", call.request_id, backend.name, error)
        finally:
            self.num_failed += answer.status != 200
            if close is not None:
                close(answer, failure)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
