"""Python's own settings for a process that is a gateway: its threads and its collector give way to the event loop."""

from __future__ import annotations

import gc
import sys

# Records and keys are written on threads. At Python's own 5 ms, a caller's first byte would wait for them that long.
SWITCH_S = 0.0005
# A request makes no cycles, so there is little to find: look after as many new objects as a few hundred requests hold.
# At Python's own 700, the collector walks over every request under way several times before it ends.
COLLECT_AFTER = (50_000, 20, 20)


def let_loop_first() -> None:
    """Threads hand over sooner."""
    sys.setswitchinterval(SWITCH_S)


def rest_collector() -> None:
    """What is here now stays: the collector need not look at it again, nor look as often. Once, when all is built."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
