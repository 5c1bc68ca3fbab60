"""`Pace`: a streamed reply waits while its caller does not read.

    pace = Pace(sink)
    async for piece in pieces:
        await pace.room()
        sink.data(piece)

Does: wait. Does not: bound what a worker makes meanwhile: the pool does (`pending_job.py`).
"""

from __future__ import annotations

import asyncio

from tonle.edge.client_connection import Sink


class Pace:
    def __init__(self, sink: Sink) -> None:
        """Before the sink's first byte."""
        self._room = asyncio.Event()
        self._room.set()
        sink.attach(self._press)

    async def room(self) -> None:
        """Until more may be sent."""
        await self._room.wait()

    def _press(self, is_full: bool) -> None:
        if is_full:
            self._room.clear()
        else:
            self._room.set()
