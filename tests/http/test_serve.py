"""Binding, draining and stopping, with real signals to a real process."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.http.serving import events
from tonle.edge.listening import bind, url_of
from tonle.errors import ConfigError

ROOT = Path(__file__).parents[2]

# A process that serves a slow scripted front, prints its address, and prints `returned` only if `serve` did.
PROGRAM = """
import sys
from tests.fakes.front import FakeFront
from tonle.config.serve import ServeConfig
from tonle.edge.listening import bind, run, url_of
from tonle.telemetry import shutdown_messages
from tonle.replica.serve import serve
from tonle.telemetry import logs

logs.configure("INFO")
shutdown_messages.REMIND_S = 0.3
front = FakeFront(lambda prompt, index: "x" * 40)
front.delay_s = float(sys.argv[1])
listener = bind("127.0.0.1", 0)
url = url_of(*listener.getsockname()[:2])
settings = ServeConfig(drain_s=float(sys.argv[2]))
shutdown_messages.say_stopped(run(serve(front, settings, listener=listener, on_ready=lambda: print(url, flush=True))))
print("returned", flush=True)
"""


@contextmanager
def process(delay_s: float, drain_s: float) -> Iterator[tuple[subprocess.Popen[str], str]]:
    search_path = os.pathsep.join([str(ROOT), *sys.path])
    server = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(delay_s), str(drain_s)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": search_path},
    )  # fmt: skip
    assert server.stdout is not None and server.stderr is not None
    try:
        yield server, server.stdout.readline().strip()
    finally:
        server.kill()
        server.wait()
        server.stdout.close()
        server.stderr.close()


def said(server: subprocess.Popen[str]) -> list[str]:
    """What it logged until its end: severity and message."""
    assert server.stderr is not None
    return list(map(bare, server.stderr.read().splitlines()))


def bare(line: str) -> str:
    """Of a line of the log: severity and message."""
    return re.sub(r"^\S+ \S+ (\w+) +\w+ +", r"\1 ", line.rstrip())


def read_stream(url: str, server: subprocess.Popen[str], signals: list[int], heard: list[str]) -> list[object]:
    """Send one signal with each of the first chunks, and read what comes. `heard`: what was logged upon the first of several:
    of two equal signals that a process is not awake to take, the kernel keeps one."""
    text = ""
    assert server.stderr is not None
    with httpx.stream(
        "POST", f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 60, "stream": True}, timeout=60
    ) as reply:
        for piece in reply.iter_text():
            text += piece
            if signals:
                server.send_signal(signals.pop(0))
                if signals:
                    heard.append(bare(server.stderr.readline()))
    return events(text)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_drain(number: signal.Signals) -> None:
    with process(delay_s=0.02, drain_s=20) as (server, url):
        chunks = read_stream(url, server, [number], [])
        assert chunks[-1] == "[DONE]" and len(chunks) > 40, "what runs may finish"
        assert server.stdout is not None and server.stdout.read() == "returned\n", "and the caller gets to clean up"
        assert server.wait(timeout=60) == 0
        assert said(server)[-1] == "INFO stopped"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


@pytest.mark.parametrize(("drain_s", "signals"), [(600, [signal.SIGINT, signal.SIGINT]), (1, [signal.SIGTERM])])
def test_drain_has_an_end(drain_s: float, signals: list[int]) -> None:
    """After `drain_s`, or at the second signal, streams are told why they end, and the operator how many did."""
    with process(delay_s=0.3, drain_s=drain_s) as (server, url):
        lines: list[str] = []
        *chunks, last = read_stream(url, server, list(signals), lines)
        assert len(chunks) < 20
        assert last["error"]["message"] == "the server is shutting down"  # type: ignore[index]
        assert last["error"]["code"] == "shutting_down"  # type: ignore[index]
        assert server.wait(timeout=60) == 0
        lines += said(server)
    assert lines[0] == f"INFO stopping: 1 request to finish, at most {drain_s} s; press Ctrl-C again to stop at once"
    assert lines[-1] == "WARNING stopped; 1 request cut off"
    assert ("WARNING stopping at once" in lines) == (len(signals) == 2)
    if drain_s == 1:
        assert any(line.startswith("INFO still stopping: 1 request to finish") for line in lines)
    assert not any("uvicorn" in line or "ERROR" in line for line in lines), lines


def test_port_in_use() -> None:
    with closing(bind("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port}: another program is using it.*--port"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(("host", "port"), [("x" * 300, 0), ("203.0.113.7", 0), ("127.0.0.1", 70_000)])
def test_address_that_cannot_be(host: str, port: int) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on .* --(host|port)"):
        bind(host, port)


def test_ipv6_url() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        listener = bind("::1", 0)
    except ConfigError:
        pytest.skip("no IPv6 here")
    with closing(listener):
        assert url_of(*listener.getsockname()[:2]).startswith("http://[::1]:")
