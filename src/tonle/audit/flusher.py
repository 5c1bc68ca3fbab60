"""`Flusher`: asks the kernel to bring files to the disk, on a thread of its own, so that writing goes on meanwhile.

Does: one flush at a time, no more often than it was told. Does not: know what was written.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

from tonle.audit.disk import Disk


class Flusher:
    def __init__(self, disk: Disk, directory: Path, every_s: float) -> None:
        self._disk = disk
        self._directory = directory
        self._every_s = every_s
        self._asked_s = 0.0
        self._failure: OSError | None = None
        self._is_due = threading.Event()
        self._closed = False
        threading.Thread(target=self._run, name="tonle-audit-flush", daemon=True).start()

    def ask(self) -> None:
        """Something was written. Returns at once; raises `OSError` if the flush before this one failed."""
        failure, self._failure = self._failure, None
        now_s = time.monotonic()
        if now_s - self._asked_s >= self._every_s:
            self._asked_s = now_s
            self._is_due.set()
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Does not wait: a disk may take its time, and what was written is the kernel's."""
        self._closed = True
        self._is_due.set()

    def _run(self) -> None:
        while True:
            self._is_due.wait()
            self._is_due.clear()
            if self._closed:
                return
            try:
                self._disk.sync_all(self._directory)
            except OSError as error:
                self._failure = error
