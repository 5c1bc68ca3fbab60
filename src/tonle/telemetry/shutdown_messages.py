"""Log lines while a server stops: how to stop at once, how many requests are left, how many were cut off.

Does: log. Does not: stop anything.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable

log = logging.getLogger("tonle.server")

REMIND_S = 5.0
AT_ONCE = "press Ctrl-C again to stop at once"


def requests(number: int) -> str:
    return f"{number} request{'s' * (number != 1)}"


def say_stopping(num_running: int, drain_s: float) -> None:
    if num_running:
        log.info("stopping: %s to finish, at most %g s; %s", requests(num_running), drain_s, AT_ONCE)
    else:
        log.info("stopping")


async def remind(num_running: Callable[[], int], drain_s: float) -> None:
    """Logs every few seconds what is left, until cancelled or until nothing is: silence would look like a hang."""
    ends = time.monotonic() + drain_s
    while True:
        await asyncio.sleep(REMIND_S)
        left_s = math.ceil(ends - time.monotonic())
        if left_s <= 0 or not (running := num_running()):
            return
        log.info("still stopping: %s to finish, at most %d s more; %s", requests(running), left_s, AT_ONCE)


def say_stopped(num_cut: int) -> None:
    if num_cut:
        log.warning("stopped; %s cut off", requests(num_cut))
    else:
        log.info("stopped")
