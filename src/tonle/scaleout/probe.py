"""`ReplicaProbe`: asks one replica over HTTP whether it is ready, and how much it has to do.

Does: one look, bounded in time and size, by the way that gateways reach it. Does not: judge.
"""

from __future__ import annotations

import asyncio
import time

from tonle.edge.buffered_reply import BufferedReply, fetch
from tonle.edge.client import Address, HttpClient, UpstreamError
from tonle.observe.backend_state import read_metrics
from tonle.scaleout.demand import ReplicaLoad

TIMEOUT_S = 3.0


class ReplicaProbe:
    def __init__(self, url: str, *, api_key: str | None) -> None:
        self._client = HttpClient(Address.parse(url), api_key=api_key)

    def close(self) -> None:
        self._client.close()

    async def is_ready(self) -> bool:
        reply = await self._get("/health/ready")
        return reply is not None and reply.status == 200

    async def load(self) -> ReplicaLoad | None:
        """None: it does not tell."""
        reply = await self._get("/metrics")
        if reply is None or reply.status != 200:
            return None
        state = await asyncio.to_thread(read_metrics, "", reply.body, time.time())
        if state.running is None or state.waiting is None:
            return None
        return ReplicaLoad(running=state.running, waiting=state.waiting, kv_use=state.kv_usage or 0.0)

    async def _get(self, path: str) -> BufferedReply | None:
        try:
            return await fetch(self._client, self._client.request("GET", path, b"", {}), timeout_s=TIMEOUT_S)
        except UpstreamError:
            return None
