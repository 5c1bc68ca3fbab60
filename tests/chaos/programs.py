"""`Program`: one server as users start it, with its children: started, hurt, started again, measured.

Does: run it on a port of its own that stays the same, find its children, send signals, add up memory. Does not: know
what it serves.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.chaos.load import wait_until
from tonle.bench.server_process import free_port

START_S, STOP_S = 180.0, 60.0
TONLE = [sys.executable, "-m", "tonle"]


class Skip(Exception):  # noqa: N818
    """A fault that cannot be made on this machine, and why."""


class Program:
    """`command` gets `--port`. `log` grows over all starts."""

    def __init__(
        self, name: str, command: list[str], folder: Path, *, ready: str = "/health/ready", **env: str
    ) -> None:
        self.name = name
        self.port = free_port()
        self.log = folder / f"{name}.log"
        self._command = [*command, "--port", str(self.port)]
        self._ready = ready
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", **env}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Returns when it is ready. Raises `RuntimeError` with its log if it never is."""
        self.launch()
        self.wait_ready()

    def launch(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(self._command, stdout=output, stderr=subprocess.STDOUT, env=self._env)

    def wait_ready(self) -> None:
        if not wait_until(lambda: self.is_ready() or not self.is_running, START_S) or not self.is_running:
            raise RuntimeError(f"{self.name} did not become ready:\n{self.log.read_text()[-3000:]}")

    def is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", self._ready)
            return connection.getresponse().status == 200
        return False

    def child(self, module: str, number: int = 0) -> int | None:
        """The process id of its child that runs this module of ours; None while there is none."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in sorted(psutil.Process(self.pid).children(), key=lambda process: process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if module in each.cmdline():
                        if not number:
                            return int(each.pid)
                        number -= 1
        return None

    def kill(self) -> None:
        """kill -9, of the process itself alone."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def wait(self, timeout_s: float = STOP_S) -> int:
        assert self._process is not None
        return self._process.wait(timeout_s)

    def stop(self) -> None:
        """At the end of a run: SIGTERM, then insist."""
        if not self.is_running:
            return
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
        self.terminate()
        try:
            self.wait()
        except subprocess.TimeoutExpired:
            for process in self._tree():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self.wait()

    def memory_mb(self) -> float:
        """Memory of its own, of it and all its children: anonymous and shared pages, not those of files, which the
        kernel can take back."""
        return sum(map(own_memory_mb, (process.pid for process in self._tree())))

    def memory_of_each(self) -> str:
        """`gateway 51, writer_process 30`, MB."""
        parts = []
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                words = [word for word in process.cmdline() if word.startswith("tonle.")]
                name = words[0].rpartition(".")[2] if words else self.name
                parts.append(f"{name} {own_memory_mb(process.pid):.0f}")
        return ", ".join(parts)

    def _tree(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(self.pid)
            return [parent, *parent.children(recursive=True)]
        return []


def own_memory_mb(pid: int) -> float:
    total_kb = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total_kb += int(line.split()[1])
    return total_kb / 1024


class Peak:
    """The most memory a program had while this runs; asked from time to time by `sample`."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._next_s = 0.0
        self.before_mb = self.most_mb = program.memory_mb()

    def sample(self) -> float:
        """At most twice a second. Returns by how much the memory has grown at most, MB."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + 0.5
            self.most_mb = max(self.most_mb, self._program.memory_mb())
        return self.most_mb - self.before_mb
