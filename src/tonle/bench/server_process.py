"""`ServerProcess`: a server started for a measurement, from its first line of output to its end.

Does: run `tonle serve` or any other command on a free port, write its output to a file, wait until it answers, stop it with all
its children. Does not: know what is measured, or which flags make sense.

The server has a process group of its own. If this process dies without stopping it, a watching shell stops the group: no server
outlives the measurement that started it.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import tonle
from tonle.child.spawn import code_reason
from tonle.errors import ConfigError

READY_S = 600.0  # weights are read, kernels compiled, graphs captured
STOP_S = 30.0  # between the request to stop and the kill
_PORTS = range(10_000, 30_000)  # below those of outgoing connections: from 32,768 on Linux, 49,152 elsewhere
_POLL_S = 0.05
_ASK_S = 5.0
_LOG_LINES = 15
_LOG_TAIL = 16_384  # bytes

# Ends when the pipe on its standard input closes: with the process that holds the other end. $0 is the server.
_WATCH = """
read -r line
kill -TERM "$0" 2>/dev/null
for i in $(seq 100); do kill -0 "$0" 2>/dev/null || break; sleep 0.1; done
kill -KILL "-$0" 2>/dev/null
"""

Progress = Callable[[float, str], None]  # seconds so far, last line of the log


def free_port() -> int:
    """A port of the loopback interface that no process uses now. The kernel gives none of these to outgoing connections, one of
    which could otherwise have it before the server that it is for has started, or while that is restarted."""
    for port in random.Random().sample(_PORTS, 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """One server and its children. A context manager: entering waits until it is ready, leaving stops it."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        port: int,
        log: Path,
        env: Mapping[str, str] | None = None,
        ready_path: str = "/v1/models",
        api_key: str | None = None,
        ready_s: float = READY_S,
        on_progress: Progress | None = None,
    ) -> None:
        """Starts it. `env` comes on top of this process's own. Raises `ConfigError` if the command cannot be run."""
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self.command = list(command)
        self._ready_path = ready_path
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._ready_s = ready_s
        self._on_progress = on_progress
        self._started_s = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as output:
            try:
                self._process = subprocess.Popen(
                    self.command,
                    env={**os.environ, **(env or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(f"cannot run {self.command[0]}: {error.strerror}") from None
        self._is_stopped = False
        try:
            self._watch = subprocess.Popen(
                ["/bin/sh", "-c", _WATCH, str(self._process.pid)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    @classmethod
    def tonle(
        cls,
        model: str | None,
        flags: Sequence[str] = (),
        *,
        log: Path,
        ready_s: float = READY_S,
        on_progress: Progress | None = None,
    ) -> Self:
        """`tonle serve MODEL FLAGS` of this very package, on the loopback interface. `model` None: the default model."""
        port = free_port()
        command = [sys.executable, "-m", "tonle", "serve", *([] if model is None else [model])]
        command += [
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--history-db",
            "memory",
            *flags,
        ]  # leaves no file behind
        package = str(Path(tonle.__file__).parents[1])
        paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        env = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}
        return cls(command, port=port, log=log, env=env, ready_s=ready_s, on_progress=on_progress)

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, within_s: float | None = None) -> float:
        """Seconds from the start of the process to its first answer. Raises `ConfigError` with the end of its log.

        `within_s`: how long it may take, if less than was said when it was started.
        """
        ready_s = self._ready_s if within_s is None else min(within_s, self._ready_s)
        while (waited_s := time.monotonic() - self._started_s) < ready_s:
            if self._process.poll() is not None:
                raise self._failure(f"ended ({code_reason(self._process.returncode)}) before it was ready")
            if self._answers():
                return time.monotonic() - self._started_s
            if self._on_progress is not None:
                lines = self.last_lines(1)
                self._on_progress(waited_s, lines[0] if lines else "")
            time.sleep(_POLL_S)
        raise self._failure(f"was not ready after {ready_s:g} s")

    def last_lines(self, count: int = _LOG_LINES) -> list[str]:
        """The end of its output so far."""
        with self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _LOG_TAIL))
            text = file.read().decode("utf-8", errors="replace")
        return [line for line in text.splitlines() if line.strip()][-count:]

    def stop(self) -> None:
        """Ask it to stop, and kill what is left of its group after `STOP_S`. Does nothing the second time."""
        if self._is_stopped:  # its process id may be another's by now
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: EPERM for a group of zombies
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._is_stopped = True
        self._watch.kill()
        self._watch.wait()
        if self._watch.stdin is not None:
            self._watch.stdin.close()

    def _answers(self) -> bool:
        """Whether it is ready."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_ASK_S)
        try:
            connection.request("GET", self._ready_path, headers=self._headers)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False  # not listening yet
        finally:
            connection.close()

    def _failure(self, what: str) -> ConfigError:
        lines = self.last_lines()
        said = "\n    ".join(["its last lines of output:", *lines]) if lines else "it printed nothing"
        return ConfigError(f"{' '.join(self.command)}\n{what}; {said}\n(the whole log: {self.log})")
