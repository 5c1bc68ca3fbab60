"""A clock that jumps, for one gateway and its writer.

Does: compile `shift_clock.c` and load it into those processes (LD_PRELOAD): time(), gettimeofday() and
clock_gettime(CLOCK_REALTIME) then say what the real clock says plus a number of seconds that we can change at any
time. The monotonic clock is left alone, as it is when a real clock is set. Does not: change the machine's clock.
"""

from __future__ import annotations

import contextlib
import mmap
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.programs import Skip

SOURCE = Path(__file__).with_name("shift_clock.c")


class Clock:
    """`env` is for the processes whose clock it is."""

    def __init__(self, library: Path, file: Path, seconds: mmap.mmap) -> None:
        self.env = {"LD_PRELOAD": str(library), "CHAOS_CLOCK_FILE": str(file)}
        self._seconds = seconds

    def shift(self, seconds: int) -> None:
        """Against the real time, not against the last shift."""
        self._seconds[:8] = struct.pack("=q", seconds)


@contextlib.contextmanager
def shifted_clock(folder: Path) -> Iterator[Clock]:
    compiler = shutil.which("cc")
    if compiler is None:
        raise Skip("there is no C compiler (cc), which the clock that jumps is made with")
    library, file = folder / "shift_clock.so", folder / "clock"
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    file.write_bytes(bytes(8))
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 8) as seconds:
        yield Clock(library, file, seconds)
