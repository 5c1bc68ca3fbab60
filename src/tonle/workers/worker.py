"""A worker's process: load a kind, warm it up, then run what the pool sends, one batch at a time.

Run as `python -m tonle.workers.worker CONTROL_FD MEDIA_FD`. Ends when the pool closes the control socket; at once, whatever
the kind does, when the pool's process is gone. Does not: queue, retry or time anything (`pool.py`).
"""

from __future__ import annotations

import gc
import logging
import os
import select
import socket
import sys
import time
from collections.abc import Generator
from typing import Any

import msgspec

from tonle.child.frames import read_frame, write_frame
from tonle.child.hang_up import when_gone
from tonle.child.heap import resident_bytes
from tonle.child.spawn import ignore_signals, inherited_sockets, read_settings
from tonle.errors import ConfigError, InternalError, TonleError
from tonle.telemetry import logs
from tonle.workers.import_path import load_object
from tonle.workers.kind import Job, Kind, Result
from tonle.workers.shared_media import Packer, Segment
from tonle.workers.worker_messages import (
    CannotLoad,
    Done,
    End,
    ErrorMessage,
    FromWorker,
    Piece,
    Ready,
    ResultMessage,
    ToWorker,
    Work,
    WorkerSettings,
    error_message,
)

log = logging.getLogger("tonle.workers")

_MIB = 1024**2
_BROKEN_DEVICE = "CUDA error"  # after one, every later call in the same process fails


class Worker:
    """One kind, and the sockets to its pool."""

    def __init__(self, kind: Kind, control: socket.socket, media: socket.socket) -> None:
        self._kind = kind
        self._control = control
        self._media = media
        self._decoder = msgspec.msgpack.Decoder(ToWorker)
        self._is_broken = False

    def serve(self) -> None:
        """Until the pool closes the control socket."""
        while not self._is_broken and (body := read_frame(self._control)) is not None:
            message = self._decoder.decode(body)
            if not isinstance(message, Work):
                continue  # the stream that it cancels has just ended
            if message.is_stream:
                self._stream(message)
            else:
                self._run(message)

    def _run(self, work: Work) -> None:
        results = self._results(self._jobs(work))
        packer = Packer()
        messages = [self._message(result, packer) for result in results]
        packer.send(self._media)
        del results
        send(self._control, Done(work.id, messages, packer.num_bytes, resident_mb()))

    def _results(self, jobs: list[Job]) -> list[Result | TonleError]:
        """One for each job, whatever the kind does."""
        try:
            results = list(self._kind.run(jobs))
        except TonleError as error:
            return [error] * len(jobs)
        except Exception as error:
            return [self._unexpected(error)] * len(jobs)
        if len(results) != len(jobs):
            log.error("%s.run returned %d results for %d jobs", type(self._kind).__name__, len(results), len(jobs))
            return [InternalError("the worker returned a wrong number of results")] * len(jobs)
        return results

    def _stream(self, work: Work) -> None:
        pieces = self._pieces(self._jobs(work)[0])
        while True:
            packer = Packer()
            message = self._next(pieces, packer)
            if not isinstance(message, ResultMessage):
                break
            packer.send(self._media)
            send(self._control, Piece(work.id, message, packer.num_bytes))
            if self._is_cancelled():
                message = self._close(pieces)
                break
        send(self._control, End(work.id, message, resident_mb()))

    def _next(self, pieces: Generator[Result, None, None], packer: Packer) -> ResultMessage | ErrorMessage | None:
        """None after the last one."""
        try:
            result = next(pieces, None)
        except TonleError as error:
            return error_message(error)
        except Exception as error:
            return error_message(self._unexpected(error))
        return None if result is None else self._message(result, packer)

    def _close(self, pieces: Generator[Result, None, None]) -> ErrorMessage | None:
        try:
            pieces.close()
        except Exception as error:
            return error_message(self._unexpected(error))
        return None

    def _pieces(self, job: Job) -> Generator[Result, None, None]:
        if self._kind.streams:
            yield from self._kind.stream(job)
            return
        (result,) = self._results([job])  # all of it is one piece
        if isinstance(result, TonleError):
            raise result
        yield result

    def _is_cancelled(self) -> bool:
        """During a stream nothing comes but its end, or the pool's."""
        if not select.select([self._control], [], [], 0)[0]:
            return False
        if read_frame(self._control) is None:
            raise SystemExit(0)
        return True

    def _jobs(self, work: Work) -> list[Job]:
        segment = Segment(self._media, work.segment_bytes)
        return [Job(msgspec.msgpack.decode(job.fields), segment.unpack(job.media), job.size) for job in work.jobs]

    def _message(self, result: Any, packer: Packer) -> ResultMessage | ErrorMessage:
        if isinstance(result, TonleError):
            return error_message(result)
        try:
            if not isinstance(result, Result):
                raise TypeError(f"a result must be a Result or a TonleError, not {type(result).__name__}")
            return ResultMessage(msgspec.Raw(msgspec.msgpack.encode(result.fields)), packer.pack(result.media))
        except Exception as error:
            return error_message(self._unexpected(error))

    def _unexpected(self, error: Exception) -> InternalError:
        log.error("the worker failed on a job", exc_info=error)
        self._is_broken = self._is_broken or _BROKEN_DEVICE in str(error)
        return InternalError("the worker failed on this job; its log has the details")


def send(control: socket.socket, message: FromWorker) -> None:
    write_frame(control, msgspec.msgpack.encode(message, enc_hook=str))


def resident_mb() -> float:
    return resident_bytes() / _MIB


def load(settings: WorkerSettings) -> Kind:
    """The kind, loaded and warm. Raises `TonleError`, or whatever the kind raises."""
    found = load_object(settings.kind)
    if not (isinstance(found, type) and issubclass(found, Kind)):
        raise ConfigError(f"{settings.kind} is not a subclass of tonle.workers.kind.Kind", param="kind")
    kind = found()
    kind.load(settings.model, settings.device, settings.options)
    jobs = kind.warm_up()
    for batch in [jobs] if kind.batches else [[job] for job in jobs]:
        for result in kind.run(batch) if batch else []:
            if isinstance(result, TonleError):
                log.warning("a warm-up job failed: %s", result.message)
    return kind


def main(control: socket.socket, media: socket.socket) -> int:
    ignore_signals()
    # torch's threads would spin between its operations, on cores that other processes need.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.stdout = sys.stderr  # the output of a server is not the place for what a kind prints
    settings = read_settings(control, WorkerSettings)
    logs.configure(settings.log_level, json=settings.log_json)
    when_gone([control], lambda _: os._exit(1))
    began_s = time.monotonic()
    try:
        kind = load(settings)
        gc.freeze()  # what loading made stays: later collections need not look at it
        facts = kind.describe()
        ready = Ready(facts, kind.batches, resident_mb(), time.monotonic() - began_s)
        send(control, ready)
    except TonleError as error:
        send(control, CannotLoad(error_message(error)))
        return 1
    except Exception as error:
        log.exception("a worker of %s could not start", settings.pool)
        send(control, CannotLoad(error_message(InternalError(f"{type(error).__name__}: {error}"))))
        return 1
    Worker(kind, control, media).serve()
    return 0


if __name__ == "__main__":
    sys.exit(main(*inherited_sockets()))
