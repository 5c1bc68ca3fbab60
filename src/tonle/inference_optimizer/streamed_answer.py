"""`StreamedAnswer`: an answer's text as it is generated, for a thread or for an event loop.

Does: carry text from the engine's event loop to the caller. Does not: generate; a request that no caller reads any more is
cancelled.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self


class Pipe:
    """Text from one thread to another. None is the end."""

    def __init__(self) -> None:
        self._pieces: deque[str | None] = deque()
        self._waiter: Future[str | None] | None = None
        # Reentrant: a garbage collection inside `put` may end the very stream it is for.
        self._lock = threading.RLock()

    def put(self, piece: str | None) -> None:
        with self._lock:
            waiter, self._waiter = self._waiter, None
            if waiter is not None and waiter.set_running_or_notify_cancel():
                waiter.set_result(piece)
            else:
                self._pieces.append(piece)

    def get(self) -> Future[str | None]:
        """The next piece, now or later. One reader at a time."""
        ready: Future[str | None] = Future()
        with self._lock:
            if self._pieces:
                ready.set_result(self._pieces.popleft())
            else:
                self._waiter = ready
        return ready

    def give_up(self, waiting: Future[str | None]) -> None:
        """The reader of `waiting` was interrupted: what came for it meanwhile is for the next `get`."""
        with self._lock:
            if not waiting.cancel():
                self._pieces.appendleft(waiting.result())


class StreamedAnswer:
    """Iterate it, with `for` or `async for`, for pieces of text; `metadata` is there after the last one.

    The request is under way from the start. It is cancelled by `close()`, and when this object is no longer used.
    """

    def __init__(
        self, begin: Callable[[Callable[[str], None]], Future[tuple[str, dict[str, Any]]]], owner: object
    ) -> None:
        """`begin` starts the request and gets where to put its text. `owner` is kept from being freed meanwhile."""
        self.metadata: dict[str, Any] | None = None
        self._owner = owner
        self._ended = False
        pipe = self._pipe = Pipe()
        self._result = begin(pipe.put)
        self._result.add_done_callback(lambda _: pipe.put(None))
        weakref.finalize(self, self._result.cancel).atexit = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        piece = None if self._ended else self._next()
        if piece is None:
            self._end()
            raise StopIteration
        return piece

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        piece = None if self._ended else await self._anext()
        if piece is None:
            self._end()
            raise StopAsyncIteration
        return piece

    def _next(self) -> str | None:
        waiting = self._pipe.get()
        try:
            return waiting.result()
        except BaseException:  # Ctrl-C
            self._pipe.give_up(waiting)
            raise

    async def _anext(self) -> str | None:
        waiting = self._pipe.get()
        try:
            return await asyncio.wrap_future(waiting)
        except asyncio.CancelledError:  # such as by a timeout around `anext`
            self._pipe.give_up(waiting)
            raise

    def _end(self) -> None:
        """Raises what ended the request, once."""
        if not self._ended:
            self._ended = True
            try:
                self.metadata = self._result.result()[1]
            except concurrent.futures.CancelledError:  # by `close`
                return

    def close(self) -> None:
        """Stop the request if it still runs, and free what it holds."""
        self._ended = self._result.cancel() or self._ended

    async def aclose(self) -> None:
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
