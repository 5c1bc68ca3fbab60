"""A real `tonle serve` or `tonle gateway` in a process of its own, on a free loopback port."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx


@dataclass
class Server:
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def engine_pid(self) -> int:
        (pid,) = self.children("tonle.engine.process")
        return pid

    def frontend_pids(self) -> list[int]:
        return self.children("tonle.replica.frontend")

    def children(self, module: str) -> list[int]:
        """Processes it started to run this module."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        pids = [int(pid) for task in tasks.iterdir() for pid in _read_if_there(task / "children").split()]
        return [pid for pid in pids if module in _read_if_there(Path(f"/proc/{pid}/cmdline")).split("\0")]

    def wait_ready(self, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended:\n{self.log.read_text()}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health/ready", timeout=60).status_code == 200:
                    return
            time.sleep(0.05)
        raise AssertionError(f"the server did not become ready:\n{self.log.read_text()}")


def _read_if_there(path: Path) -> str:
    """Threads and processes may end between the look that found them and this one."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def tonle_serve(model: str | Path | None = None, *flags: str) -> contextlib.AbstractContextManager[Server]:
    """Ready when entered; stopped by SIGTERM when left."""
    return _tonle("serve", *([str(model)] if model else []), *flags)


def tonle_gateway(*flags: str) -> contextlib.AbstractContextManager[Server]:
    """The same of a gateway."""
    return _tonle("gateway", *flags)


@contextlib.contextmanager
def _tonle(*arguments: str) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        command = [sys.executable, "-m", "tonle", *arguments, "--port", "0"]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT,
                                       env={**os.environ, "OMP_NUM_THREADS": "2"})  # fmt: skip
        try:
            server = Server(_url(process, log), process, log)
            server.wait_ready()
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(120)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    for _ in range(1200):
        if found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text()):
            return found.group()
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise AssertionError(f"the server did not say where it listens:\n{log.read_text()}")
