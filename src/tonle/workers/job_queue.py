"""`JobQueue`: the jobs of a pool that wait, and which of them go to a worker together.

Does: make batches with the `DynamicBatcher`; hand out alone what cannot be batched: streams, and jobs that are run once more, so
that one of them cannot take the others with it again. Does not: bound itself (`pool.py`), or know workers.
"""

from __future__ import annotations

from collections import deque

from tonle.dynamic_batching import BatchingConfig, BatchingStrategy, DynamicBatcher
from tonle.workers.pending_job import PendingJob
from tonle.workers.pool_config import PoolConfig

_NO_BOUND = 2**62  # units


class _NoMemory:
    """An estimator: units bound a batch (`max_batch_units`), megabytes do not."""

    def sequence_mb(self, length: int) -> float:
        return 0.0


class JobQueue:
    def __init__(self, config: PoolConfig) -> None:
        self._config = config
        self._alone: deque[PendingJob] = deque()
        self._batched: dict[PendingJob, None] = {}  # in the batcher, oldest first
        self._batches = True
        self._batcher = self._new_batcher()

    def __len__(self) -> int:
        return len(self._alone) + len(self._batched)

    def set_batches(self, batches: bool) -> None:
        """Whether the kind takes several jobs at once; known when the first worker is ready."""
        if batches == self._batches:
            return
        self._batches = batches
        waiting, self._batched, self._batcher = list(self._batched), {}, self._new_batcher()
        for job in waiting:
            self.add(job)

    def add(self, job: PendingJob) -> None:
        if job.is_stream:
            self._alone.append(job)
            return
        units = min(
            max(1, job.job.size), self._config.max_batch_units or _NO_BOUND
        )  # a larger one is a batch by itself
        job.item_id = self._batcher.add_item(job, units)
        self._batched[job] = None

    def add_again(self, job: PendingJob) -> None:
        """One that has been in a worker: next, and by itself."""
        self._alone.appendleft(job)

    def remove(self, job: PendingJob) -> bool:
        """False if it does not wait."""
        if job in self._batched:
            del self._batched[job]
            assert job.item_id is not None
            return self._batcher.cancel(job.item_id)
        try:
            self._alone.remove(job)
        except ValueError:
            return False
        return True

    def clear(self) -> list[PendingJob]:
        """All that waited."""
        jobs = [*self._alone, *self._batched]
        self._alone.clear()
        self._batched, self._batcher = {}, self._new_batcher()
        return jobs

    def next_batch(self) -> list[PendingJob]:
        """Empty if none is ready: see `ready_in_s`."""
        oldest = next(iter(self._batched), None)
        if self._alone and (oldest is None or self._alone[0].submitted_s <= oldest.submitted_s):
            return [self._alone.popleft()]
        batch = list(self._batcher.get_next_batch()[0])
        for job in batch:
            del self._batched[job]
        return batch or ([self._alone.popleft()] if self._alone else [])

    def ready_in_s(self) -> float | None:
        """Until there is a batch; None if nothing waits."""
        return 0.0 if self._alone else self._batcher.ready_in_s()

    def _new_batcher(self) -> DynamicBatcher:
        config = self._config
        return DynamicBatcher(
            BatchingConfig(
                strategy=BatchingStrategy(config.strategy),
                max_batch_size=config.max_batch if self._batches else 1,
                max_total_tokens=config.max_batch_units or _NO_BOUND,
                bucket_size=config.bucket_size,
                batch_timeout_ms=config.max_wait_ms if self._batches else 0.0,
                enable_continuous_batching=False,
            ),
            _NoMemory() if config.strategy == "memory_aware" else None,
        )
