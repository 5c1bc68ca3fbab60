"""`PendingJob`: a job from its submission to its one outcome, and who waits for it.

Does: settle it once: with a result, pieces and an end, an error, or nothing because the caller is gone. Does not: know where
it waits or runs.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

import msgspec

from tonle.errors import CapacityError, TonleError
from tonle.workers.kind import Job, Result

MAX_UNREAD_BYTES = 64 * 1024**2  # pieces that the caller has not taken; beyond, the stream is cut off


class PendingJob:
    """Of `WorkerPool.run`: `future` gets the result."""

    is_stream = False

    def __init__(self, job: Job, timeout_s: float) -> None:
        """Raises `TypeError` if a field cannot be sent."""
        self.job = job
        self.fields = msgspec.Raw(msgspec.msgpack.encode(job.fields))
        self.timeout_s = timeout_s
        self.submitted_s = time.monotonic()
        self.num_runs = 0  # begun
        self.item_id: int | None = None  # in the batcher
        self.has_begun = False  # a piece of it was handed on: it cannot be run again
        self.future: asyncio.Future[Result | None] = asyncio.get_running_loop().create_future()
        self.future.add_done_callback(_look_at_error)

    @property
    def is_over(self) -> bool:
        """It has its outcome, or the caller is gone."""
        return self.future.done()

    def finish(self, result: Result | None) -> None:
        if not self.is_over:
            self.future.set_result(result)

    def fail(self, error: TonleError) -> None:
        if not self.is_over:
            self.future.set_exception(error)

    def drop(self) -> None:
        """The caller is gone."""
        self.future.cancel()


class PendingStream(PendingJob):
    """Of `WorkerPool.stream`: pieces come first, then the future's None."""

    is_stream = True

    def __init__(self, job: Job, timeout_s: float) -> None:
        super().__init__(job, timeout_s)
        self._pieces: deque[Result] = deque()
        self._num_bytes = 0  # in them
        self._changed = asyncio.Event()
        self.future.add_done_callback(lambda _: self._changed.set())

    def add(self, piece: Result) -> None:
        self.has_begun = True
        if self.is_over:
            return
        self._pieces.append(piece)
        self._num_bytes += sum(len(media) for media in piece.media)
        self._changed.set()
        if self._num_bytes > MAX_UNREAD_BYTES:
            self.fail(CapacityError("the answer was cut off: it was read too slowly"))

    async def next(self) -> Result | None:
        """None after the last one. Raises `TonleError`."""
        while not self._pieces:
            if self.future.done():
                return self.future.result()
            self._changed.clear()
            await self._changed.wait()
        piece = self._pieces.popleft()
        self._num_bytes -= sum(len(media) for media in piece.media)
        return piece


def _look_at_error(future: asyncio.Future[Result | None]) -> None:
    """Of several jobs that fail together only one's error is raised; asyncio would complain about the others."""
    if not future.cancelled():
        future.exception()
