"""`MaskFiller`: masks beside the loop, and no longer than the caller can wait.

Does: fill masks on threads of its own; keep those that come late until they are asked for again. Does not: know grammars.
Most masks take ten to thirty microseconds, a few take milliseconds (a text near its `maxLength`: every token of the vocabulary
has to be looked at). Other rows of a batch must not wait for those. All masks of a step are one job, for a job costs more than
most masks; but a constraint that was among late ones is a job of its own for a while.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tonle.engine.constraint import Constraint

Fill = Callable[[list[Constraint], np.ndarray], list[bool]]  # each into its row of masks

_ALONE = 8  # masks of a constraint that are jobs of their own after one was late


@dataclass(slots=True, eq=False)
class _Job:
    constraints: list[Constraint]
    masks: np.ndarray
    is_done: threading.Lock = field(default_factory=threading.Lock)  # held until it is
    filled: list[bool] = field(default_factory=list)
    error: Exception | None = None


@dataclass(slots=True)
class MaskPlace:
    """Where the mask of a constraint comes from."""

    job: _Job
    row: int


class MaskFiller:
    """Used by the loop's thread alone. While a mask is being filled, nothing else may use its constraint."""

    def __init__(self, words: int, num_threads: int, fill: Fill) -> None:
        self._words = words
        self._num_threads = num_threads
        self._fill = fill
        self._threads: list[threading.Thread] = []  # started with the first job
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._late: dict[int, MaskPlace] = {}  # by the id of a constraint, which the job holds
        self._alone: dict[int, int] = {}  # by the id of a constraint: its next so many masks are jobs of their own

    def start(self, constraints: list[Constraint]) -> list[MaskPlace]:
        """Begin to fill the masks of those whose masks are not there or under way."""
        new = [each for each in constraints if id(each) not in self._late]
        together = [each for each in new if id(each) not in self._alone]
        groups = [[each] for each in new if id(each) in self._alone]
        if together:
            groups.append(together)
        places = {id(each): self._late[id(each)] for each in constraints if id(each) in self._late}
        for group in groups:
            job = _Job(group, np.empty((len(group), self._words), np.int32))
            job.is_done.acquire()
            places |= {id(each): MaskPlace(job, row) for row, each in enumerate(group)}
            self._jobs.put(job)
        while len(self._threads) < min(self._num_threads, len(groups)):
            thread = threading.Thread(target=self._run, name="tonle-masks", daemon=True)
            self._threads.append(thread)
            thread.start()
        return [places[id(each)] for each in constraints]

    def take(self, places: list[MaskPlace], masks: Sequence[np.ndarray], wait_s: float | None) -> list[bool | None]:
        """Each into its mask (words,). None: it is not done after `wait_s` (None: however long it takes); ask again later."""
        until_s = None if wait_s is None else time.monotonic() + wait_s
        return [self._taken(place, mask, until_s) for place, mask in zip(places, masks, strict=True)]

    def holds(self, constraint: Constraint) -> bool:
        """Its mask was late, and has not been asked for since."""
        return id(constraint) in self._late

    def is_late(self, constraint: Constraint) -> bool:
        """Its mask is still being filled."""
        place = self._late.get(id(constraint))
        return place is not None and place.job.is_done.locked()

    def drop(self, constraint: Constraint) -> None:
        """Its mask is not wanted any more."""
        self._late.pop(id(constraint), None)
        self._alone.pop(id(constraint), None)

    def close(self) -> None:
        """Waits for the masks that are being filled."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _taken(self, place: MaskPlace, mask: np.ndarray, until_s: float | None) -> bool | None:
        job, key = place.job, id(place.job.constraints[place.row])
        if job.is_done.locked():
            if not job.is_done.acquire(timeout=-1 if until_s is None else max(0.0, until_s - time.monotonic())):
                self._late[key] = place
                self._alone[key] = _ALONE
                return None
            job.is_done.release()
        self._late.pop(key, None)
        if (left := self._alone.get(key, 0)) > 1:
            self._alone[key] = left - 1
        else:
            self._alone.pop(key, None)
        if job.error is not None:
            raise job.error
        if job.filled[place.row]:
            mask[:] = job.masks[place.row]
        return job.filled[place.row]

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.filled = self._fill(job.constraints, job.masks)
            except Exception as error:
                job.error = error
            job.is_done.release()
