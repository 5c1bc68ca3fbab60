"""`on_thread`: work that reads many files, off the event loop. `in_turn`: the same, one after the other.

Does: run it on a daemon thread, so that a server that is told to stop does not wait for it. Does not: bound how many wait:
callers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


async def on_thread(work: Callable[[], ResultT], name: str) -> ResultT:
    """Raises what `work` raises."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[ResultT] = loop.create_future()

    def settle(result: ResultT | None, error: BaseException | None) -> None:
        if done.done():  # its caller is gone
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done


async def in_turn(
    lock: asyncio.Lock, work: Callable[[], ResultT], name: str, ended: Callable[[], None] = lambda: None
) -> ResultT:
    """Holds the lock until the work is done, even if its caller hangs up meanwhile: a thread cannot be cancelled. Then calls
    `ended`."""

    async def run() -> ResultT:
        try:
            async with lock:
                return await on_thread(work, name)
        finally:
            ended()

    return await asyncio.shield(asyncio.create_task(run()))
