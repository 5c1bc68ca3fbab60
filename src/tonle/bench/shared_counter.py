"""`SharedCounter`: a number that processes of one machine count up together, in a small file.

The clients of a closed loop take their next job with it: jobs are sent in order, by whichever process has a free user.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

_SIZE = 8


class SharedCounter:
    """Owns the file's descriptor; `create` also the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR)

    @classmethod
    def create(cls) -> SharedCounter:
        number, name = tempfile.mkstemp(prefix="tonle-bench-")
        os.close(number)
        counter = cls(Path(name))
        counter.reset()
        return counter

    def reset(self) -> None:
        os.pwrite(self._file, bytes(_SIZE), 0)

    def take(self) -> int:
        """How many have been taken before. Takes a few microseconds."""
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            value = int.from_bytes(os.pread(self._file, _SIZE, 0), "little")
            os.pwrite(self._file, (value + 1).to_bytes(_SIZE, "little"), 0)
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)
        return value

    def remove(self) -> None:
        os.close(self._file)
        self.path.unlink(missing_ok=True)
