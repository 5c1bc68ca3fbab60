"""The programs that are measured: the stub, Tonle's gateway in front of it, LiteLLM's proxy in front of it.

Does: start, pin to cores, count CPU and memory of a process and its children, stop. Does not: send load.

Where there are two cores or more, what is measured has the first for itself: the event loop of a gateway, or all of a
proxy. The callers, the stub, and the process that writes Tonle's records share the second. Direct calls are measured
with callers and stub on the second as well: exactly as when a gateway stands between them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.gateway_load import KEY
from benchmarks.needs import development_tool
from benchmarks.peers.process import free_port

httpx = development_tool("httpx")
psutil = development_tool("psutil")

READY_S = 120.0
MAX_CONCURRENT = (
    256  # what the gateway sends its backend at once: more than there are callers, so that no request queues
)
CORES = sorted(os.sched_getaffinity(0))[:2]


def pin_self() -> None:
    """Callers, and whatever they start, on the second core."""
    if len(CORES) > 1:
        os.sched_setaffinity(0, {CORES[1]})


class Running:
    """A server process and its children."""

    def __init__(self, command: list[str], url: str, log: Path, *, core: int | None = None, **env: str) -> None:
        """`core`: of the process itself, an index into CORES; its children stay with the callers."""
        self.url = url
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | env)
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200:
                    self._pin(core)
                    return
            time.sleep(0.1)
        self.stop()
        raise SystemExit(f"{command[0]} did not start:\n{log.read_text()[-2000:]}")

    def _pin(self, core: int | None) -> None:
        if core is not None and len(CORES) > 1:
            for thread in psutil.Process(self.process.pid).threads():
                os.sched_setaffinity(thread.id, {CORES[core]})

    def processes(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    @property
    def cpu_s(self) -> tuple[float, float]:
        """Of all its processes, and of the first alone."""
        each = [sum(process.cpu_times()[:2]) for process in self.processes()]
        return sum(each), each[0]

    @property
    def memory_mb(self) -> list[float]:
        """Resident, of each process."""
        return [process.memory_info().rss / 1e6 for process in self.processes()]

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def _until_left(server: Running) -> Iterator[Running]:
    try:
        yield server
    finally:
        server.stop()


def stub(folder: Path, gap_ms: float = 0.0) -> contextlib.AbstractContextManager[Running]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.gateway_stub", str(port), str(gap_ms)]
    return _until_left(Running(command, f"http://127.0.0.1:{port}", folder / f"stub-{gap_ms}.log"))


def collector(folder: Path) -> contextlib.AbstractContextManager[Running]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.otlp_stub", str(port)]
    return _until_left(Running(command, f"http://127.0.0.1:{port}", folder / "collector.log"))


def tonle(folder: Path, upstream: str, *flags: str, audit: bool) -> contextlib.AbstractContextManager[Running]:
    """With a key, limits that are counted and never reached, and metrics; records in `folder`/audit."""
    port = free_port()
    command = [
        sys.executable, "-m", "tonle", "gateway", "--backend", upstream, "--port", str(port), "--api-key", KEY,
        "--state-db", str(folder / f"state-{port}.db"), "--requests-per-minute", "100000000", "--tokens-per-minute",
        "10000000000", "--max-concurrent", str(MAX_CONCURRENT), "--log-level", "WARNING",
        "--history-db", str(folder / f"history-{port}.db"),
        *(["--audit-dir", str(folder / "audit")] if audit else []), *flags,
    ]  # fmt: skip
    return _until_left(Running(command, f"http://127.0.0.1:{port}", folder / f"tonle-{port}.log", core=0))


def litellm(folder: Path, upstream: str, program: str) -> contextlib.AbstractContextManager[Running]:
    """One worker, a master key, nothing else switched on."""
    port = free_port()
    settings = {
        "model_list": [{"model_name": "stub", "litellm_params": {
            "model": "openai/stub", "api_base": f"{upstream}/v1", "api_key": "none"}}],
        "general_settings": {"master_key": KEY},
    }  # fmt: skip
    file = folder / "litellm.json"
    file.write_text(json.dumps(settings))
    command = [program, "--config", str(file), "--port", str(port), "--host", "127.0.0.1", "--num_workers", "1"]
    return _until_left(
        Running(command, f"http://127.0.0.1:{port}", folder / "litellm.log", core=0, LITELLM_LOG="ERROR")
    )
