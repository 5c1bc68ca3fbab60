"""Shadow traffic: a copy of some requests goes to another model, and its answer is thrown away.

Does: send copies when there is room, count how they fared. Does not: delay or touch the caller's request, or queue.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable

import msgspec

from tonle.config.rows import ShadowRow
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.gather import Gather
from tonle.gateway.backends.pool import Pool
from tonle.gateway.call import OWN_FIELDS, Call

log = logging.getLogger("tonle.gateway")

MAX_AT_ONCE = 16  # copies under way; more are left out


class Shadows:
    def __init__(self, rows: Iterable[ShadowRow], pool: Pool, *, draw: Callable[[], float] = random.random) -> None:
        self._rows = {row.model: row for row in rows}
        self._pool = pool
        self._draw = draw
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_sent = 0
        self.num_failed = 0
        self.num_left_out = 0

    def follow(self, call: Call) -> None:
        """Called when the caller has the answer."""
        row = self._rows.get(call.asked_model or "") or self._rows.get(call.model)
        if row is None or self._draw() >= row.share:
            return
        backends = [each for each in self._pool.backends if row.to_model in each.models and each.available]
        if not backends or len(self._tasks) >= MAX_AT_ONCE:
            self.num_left_out += 1
            return
        body = {name: value for name, value in call.body.items() if name not in (*OWN_FIELDS, "stream_options")}
        body |= {"model": row.to_model, "stream": False}
        backend = min(backends, key=lambda each: each.load)
        task = asyncio.create_task(self._send(backend, call.path, msgspec.json.encode(body), call.request_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, backend: Backend, path: str, body: bytes, request_id: str) -> None:
        began_s = time.monotonic()
        self.num_sent += 1
        answer = Gather()
        try:
            headers = {"X-Request-Id": f"shadow-{request_id}"[:128]}
            await backend.send("POST", path, body, headers, answer, first_s=backend.timeout_s)
            took_ms = (time.monotonic() - began_s) * 1000
            log.info("shadow of %s: %s answered %d in %.1f ms", request_id, backend.name, answer.status, took_ms)
            self.num_failed += answer.status != 200
        except Exception as error:
            self.num_failed += 1
            log.warning("shadow of %s: %s failed: %s", request_id, backend.name, error)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
