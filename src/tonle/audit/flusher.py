"""`Flusher`: asks the kernel to bring files to the disk, on a thread of its own, so that writing goes on meanwhile.

Does: one flush at a time, when asked. Does not: decide when.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from tonle.audit.disk import Disk


class Flusher:
    def __init__(self, disk: Disk, directory: Path, on_failure: Callable[[OSError], None]) -> None:
        """`on_failure` is called on the flusher's thread."""
        self._disk = disk
        self._directory = directory
        self._on_failure = on_failure
        self._is_due = threading.Event()
        self._closed = False
        threading.Thread(target=self._run, name="tonle-audit-flush", daemon=True).start()

    def ask(self) -> None:
        """Returns at once; what was asked while a flush runs is one more after it."""
        self._is_due.set()

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
                self._on_failure(error)
