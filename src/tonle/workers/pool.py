"""`WorkerPool`: jobs in, results out; the model runs in processes of its own (`worker.py`).

Does: queue and refuse, hand batches to instances that are idle, start more of them on demand, run once more what a worker took
with it when it died. Every job that was taken has exactly one outcome. Does not: know HTTP, or what is in a job. Runs: on the
event loop, without threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from tonle.child.supervisor import Backoff
from tonle.errors import CapacityError, InternalError, ShuttingDown, TonleError, WorkerDied, WorkerTimedOut
from tonle.workers.instance import Instance, State, Why
from tonle.workers.job_queue import JobQueue
from tonle.workers.kind import Job, Result
from tonle.workers.pending_job import PendingJob, PendingStream
from tonle.workers.pool_config import PoolConfig
from tonle.workers.pool_metrics import PoolMetrics
from tonle.workers.worker_messages import Ready

log = logging.getLogger("tonle.workers")

MAX_RUNS = 2  # of a job whose worker dies
RETRY_AFTER_S = 5.0  # a guess at how long loading takes
_MAX_RETRY_AFTER_S = 60.0
_NEWEST = 0.2  # weight of the latest batch in the pace


def _backoff() -> Backoff:
    return Backoff(0.1, steady_s=10.0)


class WorkerPool:
    """`start`, then jobs; at the end `stop`. Also the `Owner` of its instances."""

    def __init__(
        self,
        config: PoolConfig,
        *,
        metrics: PoolMetrics | None = None,
        backoff: Callable[[], Backoff] = _backoff,
    ) -> None:
        """Raises `ConfigError`. `metrics`: those of the server, shared by its pools. `backoff`: pauses after deaths."""
        config.validate()
        self.config = config
        self.name = config.pool_name  # for logs and metrics
        self.model = config.model_name  # the name under which it is served
        self.facts: dict[str, Any] = {}  # Kind.describe() of its workers; empty until one was ready
        self.failure: TonleError | None = None  # why the latest worker could not start; None once one was ready
        self._new_backoff = backoff
        self._queue = JobQueue(config)
        self._instances: list[Instance] = []
        self._stopping = False
        self._first: asyncio.Future[None] | None = None  # settled once: `min_instances` are ready, or one failed
        self._timer: asyncio.TimerHandle | None = None  # when the next batch is ready though it is not full
        self._job_s = 0.0  # of an instance for one job, a moving mean; 0: not known yet
        self.metrics = metrics or PoolMetrics()
        self._measured = self.metrics.add_pool(self)

    # -- state

    @property
    def num_waiting(self) -> int:
        """Jobs."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Jobs."""
        return sum(len(instance.jobs) for instance in self._instances)

    @property
    def num_ready(self) -> int:
        """Instances."""
        return sum(instance.is_ready for instance in self._instances)

    @property
    def pids(self) -> list[int]:
        """Of the workers that are ready."""
        return [instance.pid for instance in self._instances if instance.is_ready and instance.pid is not None]

    def why_not_ready(self) -> str | None:
        """None if jobs are welcome; a pool without a worker that would start one is ready."""
        if self._stopping:
            return "the pool is shutting down"
        if self.failure is not None and not self.num_ready:
            return f"its worker could not start: {self.failure.message}"
        if self.config.least and not self.num_ready:
            return "its model is still being loaded"
        return None

    # -- begin and end

    async def start(self) -> None:
        """Begin to start `min_instances` workers. Returns at once; jobs that come before one is ready wait."""
        self._first = asyncio.get_running_loop().create_future()
        self._instances = [
            Instance(number, device, self.config, self, self._new_backoff())
            for number, device in enumerate(self.config.devices)
        ]
        for instance in self._instances[: self.config.least]:
            instance.want()
        if not self.config.least:
            self._first.set_result(None)

    async def wait_ready(self) -> None:
        """Until `min_instances` workers are ready; raises what kept one of the first from starting."""
        assert self._first is not None, "start it first"
        await asyncio.shield(self._first)

    async def stop(self) -> None:
        """Jobs that wait fail at once; those in workers have a few seconds."""
        self._stopping = True
        error = ShuttingDown("the server was told to stop", retry_after_s=RETRY_AFTER_S)
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)
            self._first.exception()  # it may be that nothing waits for it
        if self._timer is not None:
            self._timer.cancel()
        self._fail_waiting(error)
        await asyncio.gather(*(instance.stop() for instance in self._instances))

    # -- jobs in

    async def run(self, job: Job, *, timeout_s: float | None = None) -> Result:
        """`timeout_s`: of its run in a worker; None: the pool's. Raises `TonleError`."""
        return (await self.run_all([job], timeout_s=timeout_s))[0]

    async def run_all(self, jobs: Sequence[Job], *, timeout_s: float | None = None) -> list[Result]:
        """The jobs of one request, in order. Raises the first `TonleError`; the others are cancelled then."""
        if not jobs:
            return []
        pending = [PendingJob(job, timeout_s or self.config.timeout_s) for job in jobs]
        self._submit(pending)
        results: list[Result] = []
        try:
            for one in pending:
                result = await one.future
                assert result is not None  # only streams end with nothing
                results.append(result)
        except BaseException:
            self._drop(pending)
            raise
        return results

    async def stream(self, job: Job, *, timeout_s: float | None = None) -> AsyncGenerator[Result, None]:
        """The pieces of one job as they are made; all of it as one piece if the kind does not stream. `timeout_s`: before each
        piece. `aclose()` cancels it in the worker (contextlib.aclosing). Raises `TonleError`."""
        pending = PendingStream(job, timeout_s or self.config.timeout_s)
        self._submit([pending])
        try:
            while (piece := await pending.next()) is not None:
                yield piece
        finally:
            self._drop([pending])

    def _submit(self, jobs: Sequence[PendingJob]) -> None:
        """All or none. Raises `CapacityError`."""
        self._check_welcome(len(jobs))
        for job in jobs:
            job.future.add_done_callback(self._count)
            self._queue.add(job)
        self._dispatch()

    def _check_welcome(self, num_jobs: int) -> None:
        if self._stopping or not self._instances:
            reason = "is shutting down" if self._stopping else "was not started"
            raise ShuttingDown(f"the pool {self.name} {reason}", retry_after_s=RETRY_AFTER_S)
        states = {instance.state for instance in self._instances}
        if self.failure is not None and State.PAUSED in states and states <= {State.OFF, State.PAUSED}:
            raise self._no_worker(self.failure)
        if len(self._queue) >= self.config.max_queue:
            self._measured.refused.inc(num_jobs)
            retry_after_s = self._drain_s()
            raise CapacityError(
                f"{len(self._queue)} jobs wait for {self.model} already; try again in {max(1, round(retry_after_s))} s",
                retry_after_s=retry_after_s,
            )

    def _drain_s(self) -> float:
        """Seconds until the queue is empty, at the pace of the latest batches."""
        num_instances = max(1, self.num_ready)
        return min(max(1.0, len(self._queue) * self._job_s / num_instances), _MAX_RETRY_AFTER_S)

    def _drop(self, jobs: Sequence[PendingJob]) -> None:
        """Their caller is gone, or has what it wants."""
        for job in jobs:
            if job.is_over and not job.future.cancelled():
                continue
            job.drop()
            if not self._queue.remove(job):
                for instance in self._instances:
                    instance.cancel(job)

    def _fail_waiting(self, error: TonleError) -> None:
        for job in self._queue.clear():
            job.fail(error)

    def _count(self, future: asyncio.Future[Result | None]) -> None:
        """One job has its outcome."""
        if future.cancelled():
            self._measured.count_job("abort")
        elif (error := future.exception()) is None:
            self._measured.count_job("success")
        else:
            self._measured.count_job("timeout" if isinstance(error, WorkerTimedOut) else "error")

    # -- jobs to workers

    def _dispatch(self) -> None:
        """Batches that are ready to workers that are idle. Called whenever one of the two may have changed."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._stopping:
            return
        while (instance := self._idle()) is not None and (jobs := self._queue.next_batch()):
            if wanted := [job for job in jobs if not job.is_over]:
                self._hand_over(wanted, instance)
        ready_in_s = self._queue.ready_in_s()
        if ready_in_s is None:
            return
        if self._idle() is None:
            self._want_more()
        else:
            self._timer = asyncio.get_running_loop().call_later(ready_in_s, self._dispatch)

    def _idle(self) -> Instance | None:
        """The first: the last ones are those that can be unloaded."""
        return next((instance for instance in self._instances if instance.state is State.IDLE), None)

    def _hand_over(self, jobs: list[PendingJob], instance: Instance) -> None:
        now_s = time.monotonic()
        for job in jobs:
            if not job.num_runs:
                self._measured.wait_s.observe(now_s - job.submitted_s)
        self._measured.batch_size.observe(len(jobs))
        try:
            instance.work(jobs)
        except (
            OSError,
            TypeError,
            ValueError,
        ) as error:  # no memory or descriptors for their media; media that are not bytes
            log.exception("%s: jobs could not be sent", instance)
            for job in jobs:
                job.fail(InternalError(f"the job could not be sent to its worker: {error}"))

    def _want_more(self) -> None:
        """All are busy, and jobs wait: one more, unless one is on its way."""
        if any(instance.state is State.STARTING for instance in self._instances):
            return
        for instance in self._instances:
            if not instance.is_wanted:
                instance.want()
                return

    # -- what instances tell

    def on_ready(self, instance: Instance, ready: Ready) -> None:
        log.info("%s is ready after %.1f s", instance, ready.load_s)
        self.failure, self.facts = None, ready.facts
        self._queue.set_batches(ready.batches)
        if self._first is not None and not self._first.done() and self.num_ready >= self.config.least:
            self._first.set_result(None)
        self._dispatch()

    def on_idle(self, instance: Instance, num_jobs: int, run_s: float) -> None:
        self._measured.run_s.observe(run_s)
        job_s = run_s / max(1, num_jobs)
        self._job_s += (job_s - self._job_s) * (_NEWEST if self._job_s else 1.0)
        self._dispatch()

    def on_end(self, instance: Instance, why: Why, reason: str, jobs: list[PendingJob]) -> None:
        if why is Why.DIED:
            log.error("%s died (%s) with %d jobs", instance, reason, len(jobs))
        if why in (Why.DIED, Why.HUNG, Why.MEMORY):
            self._measured.count_restart(why.value)
        was_alone = len(jobs) == 1
        for job in reversed(jobs):  # the first of them is the first again
            if job.is_over:
                continue
            if (error := self._why_no_more(job, why, reason, was_alone)) is None:
                self._queue.add_again(job)
            else:
                job.fail(error)
        self._dispatch()

    def _why_no_more(self, job: PendingJob, why: Why, reason: str, was_alone: bool) -> TonleError | None:
        """None if it may be run once more, by itself: one that hung or crashed with others is found out that way."""
        if self._stopping:
            return ShuttingDown("the server was told to stop", retry_after_s=RETRY_AFTER_S)
        if why is Why.HUNG and (was_alone or job.num_runs >= MAX_RUNS):
            return WorkerTimedOut(f"the worker gave no result within {job.timeout_s:g} s and was ended")
        if job.has_begun:
            return WorkerDied(f"the worker died ({reason}) in the middle of its answer; try again")
        if job.num_runs >= MAX_RUNS:
            return WorkerDied(
                f"{job.num_runs} workers died on this job, the last with {reason}; the server's log has more"
            )
        return None

    def on_failed_start(self, instance: Instance, error: TonleError) -> None:
        log.error("%s could not start: %s", instance, error.message)
        if self._stopping:
            return
        self._measured.count_restart(Why.FAILED.value)
        if instance.number >= self.config.least:
            instance.leave_off()
        if self._first is not None and not self._first.done():
            self._first.set_exception(error)
            self._first.exception()  # it may be that nothing waits for it
        if any(other.is_ready or other.state is State.STARTING for other in self._instances if other is not instance):
            return  # they go on
        self.failure = error
        self._fail_waiting(self._no_worker(error))

    def _no_worker(self, error: TonleError) -> CapacityError:
        return CapacityError(
            f"{self.model} is not available: its worker could not start: {error.message}", retry_after_s=RETRY_AFTER_S
        )

    async def __aenter__(self) -> WorkerPool:
        """Started and ready."""
        await self.start()
        try:
            await self.wait_ready()
        except BaseException:
            with contextlib.suppress(TonleError):
                await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
