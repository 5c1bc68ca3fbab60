"""Python's own settings for a process that serves HTTP: its threads and its garbage collector give way to the event loop."""

from __future__ import annotations

import gc
import sys

# Records and keys are written on threads. At Python's own 5 ms, a caller's first byte would wait for them that long.
SWITCH_S = 0.0005
# A request makes no cycles, so there is little to find: look after as many new objects as a few hundred requests hold.
# At Python's own 700, the collector walks over every request under way several times before it ends.
COLLECT_AFTER = (50_000, 20, 20)


def shorten_thread_switches() -> None:
    """A thread that computes hands over to the event loop sooner."""
    sys.setswitchinterval(SWITCH_S)


def freeze_objects() -> None:
    """What exists now stays: the collector need not look at it again, nor as often at the rest. Call once, when all is built."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
