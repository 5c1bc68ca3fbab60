"""`ReaderThread`: reads adapters one after another, so that the engine's loop never waits for a disk."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tonle.engine.messages import LoadAdapter
from tonle.errors import CallerError, InternalError, TonleError
from tonle.models.adapters.adapter import HeldAdapter

log = logging.getLogger("tonle.engine")

Read = Callable[[str], HeldAdapter]  # the adapter at a path; raises `ModelError`


@dataclass(frozen=True, slots=True)
class Finished:
    """`wanted_by`: the message that asked for it, or the number of an adapter that is read again."""

    wanted_by: LoadAdapter | int
    adapter: HeldAdapter | None
    error: TonleError | None = None


class ReaderThread:
    """Used by the loop's thread alone. The thread starts with the first file and ends with `close`."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._jobs: queue.SimpleQueue[tuple[LoadAdapter | int, str] | None] = queue.SimpleQueue()
        self._finished: deque[Finished] = deque()
        self._num_begun = 0
        self._num_taken = 0
        self._thread: threading.Thread | None = None
        self.is_closed = False

    @property
    def is_busy(self) -> bool:
        """Whether something was begun that `take` has not returned yet."""
        return self._num_begun > self._num_taken

    def begin(self, wanted_by: LoadAdapter | int, path: str) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="tonle-adapters", daemon=True)
            self._thread.start()
        self._num_begun += 1
        self._jobs.put((wanted_by, path))

    def take(self) -> Finished | None:
        """The next that is finished, if there is one."""
        if not self._finished:
            return None
        self._num_taken += 1
        return self._finished.popleft()

    def close(self) -> None:
        """Waits for the adapter that is being read, not for those after it: torch must not be at work while the program
        ends."""
        self.is_closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None and not self.is_closed:
            wanted_by, path = job
            self._finished.append(self._finish(wanted_by, path))

    def _finish(self, wanted_by: LoadAdapter | int, path: str) -> Finished:
        try:
            return Finished(wanted_by, self._read(path))
        except CallerError as error:
            return Finished(wanted_by, None, error)
        except Exception as error:
            log.exception("the adapter at %s could not be read", path)
            return Finished(
                wanted_by, None, InternalError(f"{path} could not be read: {type(error).__name__}: {error}")
            )
