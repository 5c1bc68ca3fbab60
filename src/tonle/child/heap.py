"""Memory goes back to the system once it is free.

Does: tell the C library to take large blocks from the system one by one, and few heaps for all threads; have it return free
pages within its heap after a peak. Does not: apply to the engine's process, which uses its memory again and again.

By default glibc learns from the first large block that is freed to keep such blocks in its heap, and gives back only the end of
the heap: one small block above them holds them all, and a server that was once sent much would stay large.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path
from typing import Any

LARGE_BYTES = 256 * 1024  # blocks of at least this size are returned when they are freed
TRIM_BYTES = 4 * 1024**2  # at the end of the heap that may stay unused
NUM_HEAPS = 2
GROWTH, GROWTH_BYTES = 1.05, 4 * 1024**2  # more than this above the last time is worth a look for free pages
MAX_PAUSE = 31  # looks

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's malloc.h


def return_large_blocks() -> None:
    """Call once, at the start of a process. Nothing happens where the C library is another one."""
    if (mallopt := _glibc("mallopt")) is not None:
        for option, value in ((_MMAP_THRESHOLD, LARGE_BYTES), (_TRIM_THRESHOLD, TRIM_BYTES), (_ARENA_MAX, NUM_HEAPS)):
            mallopt(option, value)


class HeapTrimmer:
    """Look now and then: after a peak, what is free goes back. Where little is free, it looks less and less often."""

    def __init__(self) -> None:
        self._trim = _glibc("malloc_trim")
        self._least = resident_bytes()  # it ever had
        self._num_skipped = 0  # looks until the next one that counts
        self._pause = 0

    def look(self) -> bool:
        """True if it was trimmed: milliseconds, during which other threads may run."""
        if self._num_skipped:
            self._num_skipped -= 1
            return False
        before = resident_bytes()
        if self._trim is None or before < GROWTH * self._least + GROWTH_BYTES:
            return False
        self._trim(0)
        after = resident_bytes()
        self._least = min(self._least, after)
        self._pause = 0 if before > GROWTH * after else min(2 * self._pause + 1, MAX_PAUSE)
        self._num_skipped = self._pause
        return True


def _glibc(name: str) -> Any:
    """A function of glibc; None where the C library is another one."""
    if sys.platform != "linux":
        return None
    with contextlib.suppress(OSError, AttributeError):
        return getattr(ctypes.CDLL(None), name)
    return None


def resident_bytes() -> int:
    """Memory that this process has; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
