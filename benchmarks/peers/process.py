"""`RunningServer`: one server process and its children, from start to stop.

Does: start it on a free port, time it until it is ready, sample its memory, ask it one question, stop it.
Does not: know which server it is; `servers.py` says how each is started.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter, sleep
from types import FrameType, TracebackType

from benchmarks.needs import development_tool

httpx = development_tool("httpx")
psutil = development_tool("psutil")

READY_POLL_S = 0.02
READY_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 40.0
MEMORY_INTERVAL_S = 0.25
ANSWER_TIMEOUT_S = 120.0
NUM_LOG_LINES = 15

# Greedy, so that every server which runs the model correctly says the same at the start.
QUESTION = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
EXPECTED_IN_ANSWER = "Paris"


class ServerFailedError(Exception):
    """The server did not start, or gave a wrong answer. The message ends with its last lines of output."""


def end_cleanly_when_terminated() -> None:
    """Make SIGTERM the same as Ctrl-C: no server outlives the script that started it, and results so far are shown."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Ours and `extra`."""
    return {**os.environ, **extra}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class MemoryWatch:
    """Samples the resident memory of a process and all its descendants, in a thread of its own.

    A sum of RSS: pages that two processes share (libraries, mapped weights) count twice.
    """

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._peak_bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memory-watch", daemon=True)
        self._thread.start()

    def mark(self) -> None:
        """Forget the peak so far."""
        self._peak_bytes = 0

    def peak_bytes(self) -> int:
        """The largest sum seen since `mark`."""
        return max(self._peak_bytes, self._sample_bytes())

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(MEMORY_INTERVAL_S):
            self._peak_bytes = max(self._peak_bytes, self._sample_bytes())

    def _sample_bytes(self) -> int:
        total = 0
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return 0
        for process in processes:
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total


class RunningServer:
    """Owns one server. A context manager: leaving it ends the process and its children. `env` comes on top of ours."""

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str], port: int, health: str, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._health_url = self.url + health
        self._log = log
        with log.open("wb") as output:
            self._started_s = perf_counter()
            self._process = subprocess.Popen(
                command, env=_environment(env), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        self.pid = self._process.pid
        self.memory = MemoryWatch(self.pid)

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def wait_ready(self) -> float:
        """Seconds from the start of the process to the first 200 of its health endpoint."""
        with httpx.Client(timeout=5.0, trust_env=False) as client:
            while perf_counter() - self._started_s < READY_TIMEOUT_S:
                if self._process.poll() is not None:
                    raise self._failure(f"ended with status {self._process.returncode} before it was ready")
                try:
                    if client.get(self._health_url).status_code == 200:
                        return perf_counter() - self._started_s
                except httpx.TransportError:
                    pass  # not listening yet
                sleep(READY_POLL_S)
        raise self._failure(f"was not ready after {READY_TIMEOUT_S:.0f} s")

    def ask(self) -> tuple[str, float]:
        """A short answer, checked to be a sensible one, and the seconds from the start of the process until it came."""
        try:
            with httpx.Client(timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
                model = client.get(f"{self.url}/v1/models").json()["data"][0]["id"]
                reply = client.post(f"{self.url}/v1/completions", json={"model": model, **QUESTION})
                seconds = perf_counter() - self._started_s
                text = str(reply.raise_for_status().json()["choices"][0]["text"])
        except (httpx.HTTPError, ValueError, LookupError) as error:
            raise self._failure(f"does not answer a simple request ({type(error).__name__}: {error})") from None
        if EXPECTED_IN_ANSWER not in text:
            raise self._failure(f"says {QUESTION['prompt']!r} → {text!r}: the model runs wrong")
        return text, seconds

    def stop(self) -> None:
        self.memory.stop()
        family = self._family()
        self._process.terminate()
        _, left = psutil.wait_procs(family, timeout=STOP_TIMEOUT_S)
        for process in left:
            process.kill()
        self._process.wait()

    def kill(self) -> None:
        """At once and without a word, children included: what a crash looks like from outside."""
        for process in self._family():
            process.kill()

    def _family(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _failure(self, what: str) -> ServerFailedError:
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-NUM_LOG_LINES:]
        return ServerFailedError("\n    ".join([what, *lines]))
