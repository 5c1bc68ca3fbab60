"""`Ranks`: rank 0's hold on the processes of the other ranks.

Does: start them, wait until they have loaded, send them messages, notice that one is gone, end them. Does not: compute.
A rank that dies, or does not take part in a step in time, ends all of them: a model of which a part is missing computes nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from tonle.child.frames import FrameError, read_frame, write_frame
from tonle.child.hang_up import Watch, when_gone
from tonle.child.spawn import code_reason, spawn
from tonle.config.engine import EngineConfig
from tonle.engine.messages import Failed
from tonle.engine.ranks.rank_messages import AdapterParts, Begin, FromRank, Loaded, RankSettings, ToRank
from tonle.errors import InternalError
from tonle.models.source import ModelSource
from tonle.telemetry import logs

log = logging.getLogger("tonle.engine")

STEP_TIMEOUT_S = 60.0  # a rank that does not take part in a sum for so long hangs
LOAD_TIMEOUT_S = 3600.0
_EXIT_S = 2.0  # for ranks whose sockets are closed; those that are left then are killed

OnLost = Callable[[str], object]  # gets the reason, on a thread of its own


class Ranks:
    """Ranks 1 to N - 1. `close` ends them; so does the end of this process."""

    def __init__(self, source: ModelSource, config: EngineConfig, num_threads: int, *, timeout_s: float) -> None:
        """Starts them. Raises `OSError`."""
        self.timeout_s = timeout_s
        self._folder = Path(tempfile.mkdtemp(prefix="tonle-ranks-"))  # nobody else can enter it
        self._processes: list[subprocess.Popen[bytes]] = []
        self._controls: list[socket.socket] = []
        self._watch: Watch | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        try:
            for rank in range(1, config.tensor_parallel_size):
                settings = RankSettings(
                    source, config, rank, str(self.store), timeout_s, num_threads, logs.level(), logs.is_json()
                )
                # torch's threads would spin between its operations, on cores that other ranks need.
                environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
                process, control = spawn("tonle.engine.ranks.rank_process", settings, env=environment)
                self._processes.append(process)
                self._controls.append(control)
        except BaseException:
            self.close()
            raise

    @property
    def store(self) -> Path:
        """The file where all ranks meet (`Group.connect`)."""
        return self._folder / "store"

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def wait_loaded(self) -> int:
        """Until each has its weights. The fewest bytes that one of them can have for keys and values. Raises what kept one from
        loading."""
        found = self._read_each(LOAD_TIMEOUT_S)
        return min(message.pool_bytes for message in found if isinstance(message, Loaded))

    def begin(self, begin: Begin) -> None:
        """They make their caches, and are about to meet at `store` when this returns. Raises what kept one from it."""
        for control in self._controls:
            control.settimeout(self.timeout_s)
        self.send(begin)
        self._read_each(LOAD_TIMEOUT_S)

    def watch(self, on_lost: OnLost) -> None:
        """From now on `on_lost` is called, once, if one of them is gone, after the others were ended."""
        self._watch = when_gone(self._controls, lambda place: self._lose(place + 1, on_lost))

    def await_loss(self) -> None:
        """After a step that failed. The sums with a rank that died may fail before its control socket is closed: this gives the
        watch a moment to tell who was lost."""
        if self._watch is not None:
            self._watch.wait(_EXIT_S)

    def _read_each(self, timeout_s: float) -> list[FromRank]:
        """One message of each rank, as they come. Raises what kept one from sending it."""
        until_s = time.monotonic() + timeout_s
        found: list[FromRank] = []
        with selectors.DefaultSelector() as selector:
            for rank, control in enumerate(self._controls, start=1):
                selector.register(control, selectors.EVENT_READ, rank)
            while waiting := selector.get_map():
                ready = selector.select(max(0.0, until_s - time.monotonic()))
                if not ready:
                    late = min(key.data for key in waiting.values())
                    raise InternalError(f"rank {late} was not ready within {timeout_s:g} s")
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    found.append(self._read(key.data))
        return found

    def _read(self, rank: int) -> FromRank:
        body = None
        with contextlib.suppress(ConnectionError, FrameError):
            body = read_frame(self._controls[rank - 1])
        if body is None:
            raise InternalError(f"rank {rank} ended before it was ready ({self._exit_reason(rank)})")
        message: FromRank = msgspec.msgpack.decode(body, type=FromRank)
        if isinstance(message, Failed):
            raise message.error
        return message

    def send(self, message: ToRank) -> None:
        """To all ranks. Raises `OSError`, or `TimeoutError` if one does not read."""
        body = self._encode(message)
        for control in self._controls:
            write_frame(control, body)

    def send_to(self, rank: int, messages: Sequence[AdapterParts]) -> None:
        """To one rank. Raises as `send`."""
        for message in messages:
            write_frame(self._controls[rank - 1], self._encode(message))

    def close(self) -> None:
        """End them all; harmless if repeated."""
        if self._watch is not None:
            self._watch.stop()
        for control in self._controls:
            control.close()
        until_s = time.monotonic() + _EXIT_S
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until_s - time.monotonic()))
        self._end()

    def _lose(self, rank: int, on_lost: OnLost) -> None:
        reason = f"rank {rank} of the model is gone ({self._exit_reason(rank)})"
        self._end()  # now: what is told may end this process
        on_lost(reason)

    def _exit_reason(self, rank: int) -> str:
        process = self._processes[rank - 1]
        with contextlib.suppress(subprocess.TimeoutExpired):
            return code_reason(process.wait(_EXIT_S))
        return "it closed its connection"

    def _end(self) -> None:
        """Leave nothing behind: no process, be it one that hangs, and no file."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
                    process.wait(_EXIT_S)
        shutil.rmtree(self._folder, ignore_errors=True)
