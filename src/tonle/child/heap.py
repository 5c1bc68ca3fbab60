"""Memory goes back to the system once it is free.

Does: tell the C library to take large blocks from the system one by one, and few heaps for all threads. Does not: apply to the
engine's process, which uses its large blocks again and again.

By default glibc learns from the first large block that is freed to keep such blocks in its heap, where one small block above
them holds them all: a server that was sent some large bodies would stay large.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

LARGE_BYTES = 256 * 1024  # blocks of at least this size are returned when they are freed
TRIM_BYTES = 4 * 1024**2  # at the end of the heap that may stay unused
NUM_HEAPS = 2

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # glibc's malloc.h


def return_large_blocks() -> None:
    """Call once, at the start of a process. Nothing happens where the C library is another one."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((_MMAP_THRESHOLD, LARGE_BYTES), (_TRIM_THRESHOLD, TRIM_BYTES), (_ARENA_MAX, NUM_HEAPS)):
            mallopt(option, value)
