"""Ranks as threads of this process: all of a rank's code but its process, without the seconds that one takes to start."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from tests.fakes.driver import Driver
from tonle.config.engine import EngineConfig
from tonle.engine.ranks import ranks
from tonle.engine.ranks.rank_messages import RankSettings
from tonle.engine.ranks.rank_process import serve_rank
from tonle.models.source import ModelSource


class RankThread:
    """In place of a process."""

    pid = 0

    def __init__(self, control: socket.socket, settings: RankSettings) -> None:
        self.returncode: int | None = None
        self._control = control
        self._settings = settings
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with self._control:
            self.returncode = serve_rank(self._control, self._settings)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        self._thread.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a rank", timeout)
        return self.returncode

    def kill(self) -> None:
        raise AssertionError("a rank did not end when its control socket was closed")


def spawn_thread(module: str, settings: RankSettings, **_: Any) -> tuple[RankThread, socket.socket]:
    """As `child.spawn.spawn`; the settings travel as they would."""
    ours, theirs = socket.socketpair()
    body = msgspec.msgpack.encode(settings, enc_hook=str)
    read: Any = msgspec.msgpack.decode(body, type=RankSettings, dec_hook=lambda custom, text: custom(text))
    return RankThread(theirs, read), ours


@contextlib.contextmanager
def parallel(source: ModelSource, size: int, **settings: Any) -> Iterator[Driver]:
    """An engine of `size` ranks in float32."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "spawn", spawn_thread)
        driver = Driver(source, EngineConfig(tensor_parallel_size=size, device="cpu", dtype="float32", **settings))
    try:
        yield driver
    finally:
        driver.loop._ranks.close()
        assert torch.get_num_threads() == threads, "as many as before"
