"""Shadow traffic: a copy of some requests is sent to another model; its answer never reaches the caller.

Does: send copies while there is room, count how they ended, keep a record of a copy where its row says so. Does not:
delay or change the caller's request, queue, or retry.

The caller's own record says where a copy went. What came of it is not part of that record: the caller has the answer,
and the record is closed, before the copy has one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tonle.config.routing import ShadowConfig
from tonle.edge.buffered_reply import BufferedReply
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.backend_pool import BackendPool
from tonle.gateway.fast_metrics import FastCounter
from tonle.gateway.log_fields import about
from tonle.gateway.outgoing import copy_for, headers_for
from tonle.gateway.stage_results import AcceptedRequest, ShadowCopy
from tonle.protocol.media_paths import is_media

if TYPE_CHECKING:
    from tonle.gateway.recording import Recorder

log = logging.getLogger("tonle.gateway")

MAX_AT_ONCE = 16  # copies under way; more are left out
OUTCOMES = ("answered", "failed", "left_out")
_LEFT_OUT = ("stream_options",)


class Shadows:
    """Owns the copies under way. `requests` counts them by outcome."""

    def __init__(
        self,
        rows: Iterable[ShadowConfig],
        pool: BackendPool,
        recorder: Recorder,
        *,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._rows = {row.model: row for row in rows}
        self._pool = pool
        self._recorder = recorder
        self._draw = draw
        self._tasks: set[asyncio.Task[None]] = set()
        self.requests = FastCounter(
            "tonle:gateway_shadow_requests", "Copies of requests for shadow models, by outcome.", ("outcome",)
        )
        for outcome in OUTCOMES:
            self.requests.add(outcome, count=0)  # a rate needs the zero before the first event

    def follow(self, accepted: AcceptedRequest) -> ShadowCopy | None:
        """Called when the caller has the answer and before the record is closed. None: no copy is sent."""
        row = self._rows.get(accepted.model.asked) or self._rows.get(accepted.model.name)
        if row is None or is_media(accepted.call.path) or self._draw() >= row.share:
            return None
        backends = [each for each in self._pool.backends if row.to_model in each.models and each.available]
        if not backends or len(self._tasks) >= MAX_AT_ONCE:
            self.requests.add("left_out")
            return None
        backend = min(backends, key=lambda each: each.load)
        copy = ShadowCopy(backend.name, row.to_model, f"shadow-{accepted.call.request_id}"[:128])
        task = asyncio.create_task(self._send(row, backend, accepted, copy))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return copy

    async def _send(self, row: ShadowConfig, backend: Backend, accepted: AcceptedRequest, copy: ShadowCopy) -> None:
        began_s, request_id = time.monotonic(), accepted.call.request_id
        body = copy_for(accepted, backend, {"model": row.to_model}, _LEFT_OUT)
        headers = headers_for(accepted, backend) | {"X-Request-Id": copy.request_id}
        close = self._recorder.open_copy(accepted, copy, body) if row.record else None
        answer, failure = BufferedReply(), None
        try:
            await backend.send("POST", accepted.call.path, body, headers, answer, first_s=backend.timeout_s)
            took_ms = (time.monotonic() - began_s) * 1000
            log.info("shadow of %s: %s answered %d in %.1f ms", request_id, backend.name, answer.status, took_ms,
                     extra=about(accepted.call.exchange))  # fmt: skip
        except Exception as error:
            failure = error
            log.warning("shadow of %s: %s failed: %s", request_id, backend.name, error,
                        extra=about(accepted.call.exchange))  # fmt: skip
        finally:
            self.requests.add("answered" if answer.status == 200 and failure is None else "failed")
            if close is not None:
                close(answer, failure)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
