"""`MaskFiller`: masks of many sequences side by side, and no longer than the caller can wait.

Does: fill masks on threads of its own; keep those that come late until they are asked for again. Does not: know grammars.
Most masks take ten to thirty microseconds, a few take milliseconds (a text near its `maxLength`: every token of the vocabulary
has to be looked at). Other rows of a batch must not wait for those.
"""

from __future__ import annotations

import threading
from collections import deque

import numpy as np

from tonle.engine.constraint import Constraint


class _Job:
    __slots__ = ("constraint", "error", "is_done", "is_filled", "mask")

    def __init__(self, constraint: Constraint, words: int) -> None:
        self.constraint = constraint
        self.mask = np.empty(words, np.int32)
        self.is_filled = False
        self.is_done = False
        self.error: Exception | None = None


class MaskFiller:
    """Used by the loop's thread alone. While a mask is being filled, nothing else may use its constraint."""

    def __init__(self, words: int, num_threads: int) -> None:
        self._words = words
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []  # started with the first job
        self._jobs: deque[_Job | None] = deque()
        self._changed = threading.Condition()
        self._late: dict[int, _Job] = {}  # by the id of their constraints, which they hold

    def fill(self, constraints: list[Constraint], masks: np.ndarray, wait_s: float | None) -> list[bool | None]:
        """Each into its row of masks (n, words). None: it is not done after `wait_s` (None: however long it takes); ask again
        later."""
        known = [self._late.get(id(constraint)) for constraint in constraints]
        jobs = [job or _Job(constraint, self._words) for job, constraint in zip(known, constraints, strict=True)]
        self._start([job for job, old in zip(jobs, known, strict=True) if old is None])
        with self._changed:
            self._changed.wait_for(lambda: all(job.is_done for job in jobs), wait_s)
        return [self._taken(job, mask) for job, mask in zip(jobs, masks, strict=True)]

    def holds(self, constraint: Constraint) -> bool:
        """Its mask was late, and has not been asked for since."""
        return id(constraint) in self._late

    def is_late(self, constraint: Constraint) -> bool:
        """Its mask is still being filled."""
        job = self._late.get(id(constraint))
        return job is not None and not job.is_done

    def drop(self, constraint: Constraint) -> None:
        """Its mask is not wanted any more."""
        self._late.pop(id(constraint), None)

    def close(self) -> None:
        with self._changed:
            self._jobs.clear()
            self._jobs.extend([None] * len(self._threads))
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _taken(self, job: _Job, mask: np.ndarray) -> bool | None:
        if not job.is_done:
            self._late[id(job.constraint)] = job
            return None
        self._late.pop(id(job.constraint), None)
        if job.error is not None:
            raise job.error
        if job.is_filled:
            mask[:] = job.mask
        return job.is_filled

    def _start(self, jobs: list[_Job]) -> None:
        while len(self._threads) < min(self._num_threads, len(jobs)):
            thread = threading.Thread(target=self._run, name="tonle-masks", daemon=True)
            self._threads.append(thread)
            thread.start()
        with self._changed:
            self._jobs.extend(jobs)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs))
                job = self._jobs.popleft()
            if job is None:
                return
            try:
                job.is_filled = job.constraint.fill(job.mask)
            except Exception as error:
                job.error = error
            with self._changed:
                job.is_done = True
                if not self._jobs:
                    self._changed.notify_all()
