"""`Instance`: one place for a worker in a pool, and its workers one after the other.

Does: start a worker when it is wanted, hand it a batch, tell the pool what came back; end a worker that hangs, is too large, or
has been idle; start the next. Does not: decide which jobs it gets, or what becomes of those a worker took with it (`pool.py`).
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import time
from typing import Any, Protocol

import msgspec

from tonle.child.open_files import describe
from tonle.child.supervisor import Backoff
from tonle.errors import ConfigError, InternalError, TonleError
from tonle.workers.kind import Result
from tonle.workers.pending_job import PendingJob, PendingStream
from tonle.workers.pool_config import PoolConfig
from tonle.workers.shared_media import Packer, Segment
from tonle.workers.worker_messages import (
    Cancel,
    CannotLoad,
    Done,
    End,
    FromWorker,
    JobMessage,
    Piece,
    Ready,
    ResultMessage,
    Work,
    error_of,
)
from tonle.workers.worker_process import WorkerProcess

log = logging.getLogger("tonle.workers")


class State(enum.Enum):
    OFF = "off"  # nobody needs it
    PAUSED = "paused"  # its worker died or could not start; the next one starts in a moment
    STARTING = "starting"
    IDLE = "idle"
    BUSY = "busy"
    LEAVING = "leaving"  # its worker was asked to end


class Why(enum.Enum):
    """A worker ended."""

    DIED = "died"  # by itself
    HUNG = "hung"
    MEMORY = "memory"  # it had grown too large
    FAILED = "failed"  # before it was ready
    IDLE = "idle"
    STOPPED = "stopped"


class Owner(Protocol):
    """The pool, as its instances see it."""

    def on_ready(self, instance: Instance, ready: Ready) -> None: ...
    def on_idle(self, instance: Instance, num_jobs: int, run_s: float) -> None:
        """It has finished with its jobs, each of which has its outcome."""

    def on_end(self, instance: Instance, why: Why, reason: str, jobs: list[PendingJob]) -> None:
        """`jobs` are those it was working on; they have no outcome."""

    def on_failed_start(self, instance: Instance, error: TonleError) -> None: ...


class Instance:
    def __init__(self, number: int, device: str, config: PoolConfig, owner: Owner, backoff: Backoff) -> None:
        self.number = number  # from 0
        self.state = State.OFF
        self.jobs: list[PendingJob] = []  # in the worker now
        self._device = device
        self._config = config
        self._owner = owner
        self._backoff = backoff
        self._wanted = asyncio.Event()
        self._stopping = False
        self._process: WorkerProcess | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._why: Why | None = None  # we ended it, or asked it to end
        self._work_id = 0
        self._began_s = 0.0  # the work, monotonic
        self._timer: asyncio.TimerHandle | None = None  # of a hang while busy, of unloading while idle
        self._task: asyncio.Task[None] | None = None

    @property
    def is_wanted(self) -> bool:
        return self._wanted.is_set()

    @property
    def is_ready(self) -> bool:
        return self.state in (State.IDLE, State.BUSY)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def want(self) -> None:
        """Start a worker, and another whenever it ends."""
        self._wanted.set()
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        if self.state is State.OFF:
            self.state = State.STARTING

    def unload(self) -> None:
        """End the idle worker; none is started until one is wanted."""
        self._wanted.clear()
        self._end(Why.IDLE)

    def leave_off(self) -> None:
        """Its worker could not start; none is tried until one is wanted."""
        self._wanted.clear()

    async def stop(self) -> None:
        """For good. What it works on is finished if that takes no longer than a few seconds."""
        self._stopping = True
        self._wanted.clear()
        if self._task is None:
            return
        if self.is_ready:
            self._end(Why.STOPPED)
            if self._process is not None and self.jobs and all(job.is_over for job in self.jobs):
                self._process.kill()  # nobody waits for what it works on
        elif self.state is not State.LEAVING:
            self._task.cancel()
        await asyncio.wait([self._task])
        self.state = State.OFF

    # -- work

    def work(self, jobs: list[PendingJob]) -> None:
        """A batch, or one stream. Raises `OSError` if their media cannot be sent."""
        assert self._process is not None and self.state is State.IDLE
        packer = Packer()
        messages = [JobMessage(job.fields, packer.pack(job.job.media), job.job.size) for job in jobs]
        self._work_id += 1
        self._process.send(Work(self._work_id, messages, jobs[0].is_stream, packer.num_bytes), packer)
        for job in jobs:
            job.num_runs += 1
        self.jobs, self.state, self._began_s = jobs, State.BUSY, time.monotonic()
        self._set_timer(min(job.timeout_s for job in jobs), self._on_hang)

    def cancel(self, job: PendingJob) -> None:
        """The caller is gone. A stream is ended; a batch is finished, and the result dropped."""
        if job.is_stream and job in self.jobs and self._process is not None:
            self._process.send(Cancel(self._work_id))

    def _on_hang(self) -> None:
        assert self._process is not None
        log.error("%s: no result for %.3g s; it is ended", self, time.monotonic() - self._began_s)
        self._why = Why.HUNG
        self._process.kill()

    # -- messages of the worker

    def _receive(self, message: FromWorker) -> None:
        if isinstance(message, Ready):
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, CannotLoad):
            if self._ready is not None and not self._ready.done():
                self._ready.set_exception(error_of(message.error))
        elif isinstance(message, Piece):
            self._on_piece(message)
        else:
            self._on_answer(message)

    def _on_piece(self, message: Piece) -> None:
        assert self._process is not None
        segment = self._process.segment(message.segment_bytes)
        (job,) = self.jobs
        assert isinstance(job, PendingStream)
        was_over = job.is_over
        job.add(_result(message.result, segment))
        if job.is_over and not was_over:  # the caller does not keep up
            self.cancel(job)
        self._set_timer(job.timeout_s, self._on_hang)

    def _on_answer(self, message: Done | End) -> None:
        assert self._process is not None
        segment = self._process.segment(0 if isinstance(message, End) else message.segment_bytes)
        jobs, self.jobs = self.jobs, []
        if isinstance(message, End):
            error = message.error
            jobs[0].finish(None) if error is None else jobs[0].fail(error_of(error))
        else:
            for job, result in zip(jobs, message.results, strict=True):
                if isinstance(result, ResultMessage):
                    job.finish(_result(result, segment))
                else:
                    job.fail(error_of(result))
        self._set_timer(None)
        run_s = time.monotonic() - self._began_s
        if self.state is State.BUSY:
            self._become_idle(message.memory_mb)
        self._owner.on_idle(self, len(jobs), run_s)

    def _become_idle(self, memory_mb: float) -> None:
        self.state = State.IDLE
        limit = self._config.max_memory_mb
        if limit is not None and memory_mb > limit:
            log.warning("%s has %.0f MB, more than max_memory_mb (%d); it is replaced", self, memory_mb, limit)
            self._end(Why.MEMORY)
        elif self._config.idle_unload_s is not None and self.number >= self._config.least:
            self._set_timer(self._config.idle_unload_s, self.unload)

    # -- the life of workers

    async def _run(self) -> None:
        while True:
            if not self.is_wanted:
                self.state = State.OFF
            await self._wanted.wait()
            self.state, self._why = State.STARTING, None
            self._backoff.started()
            why = await self._one_worker()
            if self._stopping:
                return
            if why in (Why.DIED, Why.FAILED):
                self.state = State.PAUSED
                await asyncio.sleep(self._backoff.next_s())

    async def _one_worker(self) -> Why:
        """From its start to its end."""
        self._ready = asyncio.get_running_loop().create_future()
        process = self._process = WorkerProcess(self._config, self._device, self._receive)
        try:
            try:
                ready = await self._start(process)
            except TonleError as error:
                self._owner.on_failed_start(self, error)
                return Why.FAILED
            self.state = State.IDLE
            self._become_idle(0.0)
            self._owner.on_ready(self, ready)
            reason = await process.wait()
            self._set_timer(None)
            self.state = State.LEAVING
            why, jobs, self.jobs = self._why or Why.DIED, self.jobs, []
            self._owner.on_end(self, why, reason, jobs)
            return why
        finally:
            await process.end()

    async def _start(self, process: WorkerProcess) -> Ready:
        """Raises `TonleError`."""
        assert self._ready is not None
        try:
            await process.open()
        except OSError as error:
            raise InternalError(f"it could not be started: {describe(error)}") from None
        ended = asyncio.create_task(process.wait())
        try:
            either: list[asyncio.Future[Any]] = [self._ready, ended]
            await asyncio.wait(either, timeout=self._config.load_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._ready.done():
                ready = self._ready.result()
            elif ended.done():
                raise InternalError(f"it died while it loaded its model ({ended.result()})")
            else:
                raise InternalError(f"it was not ready within load_timeout_s ({self._config.load_timeout_s:g} s)")
        finally:
            ended.cancel()
        limit = self._config.max_memory_mb
        if ready.memory_mb > (math.inf if limit is None else limit):
            raise ConfigError(
                f"a worker has {ready.memory_mb:.0f} MB once its model is loaded, and max_memory_mb is {limit}: raise it",
                param="max_memory_mb",
            )
        return ready

    def _end(self, why: Why) -> None:
        """Ask the worker to end after what it works on."""
        if self._process is not None and self.is_ready:
            self._set_timer(None)
            self._why, self.state = why, State.LEAVING
            self._process.request_stop()

    def _set_timer(self, after_s: float | None, call: object = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if after_s is not None:
            assert callable(call)
            self._timer = asyncio.get_running_loop().call_later(after_s, call)

    def __str__(self) -> str:
        """For the log."""
        return f"worker {self.number} of {self._config.pool_name} (process {self.pid})"


def _result(message: ResultMessage, segment: Segment) -> Result:
    return Result(msgspec.msgpack.decode(message.fields), segment.unpack(message.media))
