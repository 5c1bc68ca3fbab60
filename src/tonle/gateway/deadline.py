"""`by_deadline`: a request's deadline, held wherever it waits until its answer begins.

Does: give up the whole wait, whatever it is for: the server that keeps limits, the writer of records, the cache, an
identical request, a turn in the queue, a connection, the prefill leg, the first byte. Does not: know those places. New ones
need nothing to be told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tonle.gateway.parsed_request import ParsedRequest
from tonle.gateway.refusals import DeadlinePassed

ResultT = TypeVar("ResultT")


async def by_deadline(
    request: ParsedRequest | None,
    work: Awaitable[ResultT],
    *,
    until_begun: Callable[[Callable[[], None]], None] | None = None,
) -> ResultT:
    """The result of `work`. Raises `DeadlinePassed`; then `work` was cancelled.

    `until_begun` is handed the function that lifts the deadline, to be called when the answer begins.
    """
    left_s = None if request is None else request.time_left_s()
    if left_s is None:
        return await work
    timeout = asyncio.timeout(left_s)

    def lift() -> None:
        if not timeout.expired():
            timeout.reschedule(None)

    try:
        async with timeout:
            if until_begun is not None:
                until_begun(lift)
            return await work
    except TimeoutError as error:
        if not timeout.expired():
            raise  # of something else
        raise DeadlinePassed("the request's deadline passed before the answer began") from error
