"""Whether the client, not the server, was the limit of a level.

Does: judge how busy each process of the client was, how late its timers fired and how late it sent, and say what to do.
Does not: measure these (`client.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from tonle.bench.measure import LevelReport

BUSY_SHARE = 0.7  # of one core; above it the client's own speed is part of the result
COMFORTABLE_SHARE = 0.5
LATE_TIMER_MS = 10.0  # p99; a client that keeps up has about 1 ms
LATE_SEND_MS = 20.0


def is_limit(level: LevelReport) -> bool:
    return level.client_cpu_share > BUSY_SHARE


def client_remarks(level: LevelReport) -> Iterator[str]:
    """What the reader should know about the client; nothing if it kept up."""
    late_ms = max((client.late_p99_ms for client in level.clients), default=0.0)
    if is_limit(level):
        yield (
            f"the client was the limit, or near it: its busiest process used {level.client_cpu_share:.0%} of a core, so that "
            f"latencies include its own delays; {_more_processes(level)}"
        )
    elif late_ms > LATE_TIMER_MS:
        yield (
            f"the client had to wait for a core: its timers fired {late_ms:.0f} ms late (p99), and latencies include that; "
            "leave it a core of its own, or run it on another machine"
        )
    if level.max_send_delay_ms is not None and level.max_send_delay_ms > LATE_SEND_MS:
        yield f"a request left {level.max_send_delay_ms:.0f} ms after its time; its latencies include that"


def _more_processes(level: LevelReport) -> str:
    shares = [client.cpu_share for client in level.clients] or [level.client_cpu_share]
    wanted = max(len(shares) + 1, math.ceil(sum(shares) / COMFORTABLE_SHARE))
    cores = os.cpu_count() or 1
    if level.concurrency is None and level.rate is None:
        return "a replay is sent by one process: replay at a lower --speed, or on a faster machine"
    if len(shares) < cores:
        return f"spread it with --processes {min(wanted, cores)}"
    return "this machine has no more cores for it: run the client on a larger one"
