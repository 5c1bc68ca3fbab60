"""Throughput of a server with the dashboard off, on and closed, and open in one page.

Does: measure a gateway with a stub behind it, and `tonle serve` with the default model, each as two processes (`--no-dashboard`
and the default). In each round every state has a turn, in an order that rotates, and "off" has two: what the second differs by
from the first is how well such a ratio can be measured here. Does not: open a browser, which would take CPU from the server;
one reader of the event stream is what a page is to a server.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import math
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median, stdev
from urllib.parse import urlsplit

from rich.console import Console

from benchmarks.gateway_load import Level, drive
from benchmarks.gateway_servers import Running, httpx, pin_self, stub, tonle
from benchmarks.peers.process import free_port
from benchmarks.tables import markdown_table, print_wide
from tonle.edge.listening import run

ADMIN_KEY = "tonle-dashboard-benchmark"
OFF, AGAIN, CLOSED, OPEN = "off", "off, again", "closed", "open"
STATES = (OFF, CLOSED, AGAIN, OPEN)
MAX_OPEN = 0.01  # of throughput
USERS, STUB_REQUESTS = 50, 8000
MODEL_USERS, MODEL_REQUESTS, MODEL_TOKENS = 4, 12, 64

Turns = dict[str, list[Level]]


class Reader:
    """One open page: reads the stream of events, and counts them."""

    def __init__(self, url: str) -> None:
        where = urlsplit(url)
        self._connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
        self._connection.connect()
        self._socket = self._connection.sock
        self._connection.request("GET", "/dashboard/api/live", headers={"authorization": f"Bearer {ADMIN_KEY}"})
        self._stream = self._connection.getresponse()
        if self._stream.status != 200:
            raise SystemExit(f"/dashboard/api/live answered {self._stream.status}: {self._stream.read()[:300]!r}")
        self.events = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            while line := self._stream.readline():
                self.events += line.startswith(b"event: second")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # the read that waits for the next event ends
        self._thread.join()


def take_turns(servers: dict[bool, Running], measure: Callable[[Running], Level], num_rounds: int) -> tuple[Turns, int]:
    """`servers`: without and with the dashboard. Returns also how many events the open page got."""
    found: Turns = {name: [] for name in STATES}
    num_events = 0
    for server in servers.values():
        measure(server)  # connections, caches, compiled code
    for number in range(num_rounds):
        order = STATES[number % len(STATES) :] + STATES[: number % len(STATES)]
        for name in order:
            server = servers[name in (CLOSED, OPEN)]
            reader = Reader(server.url) if name == OPEN else None
            found[name].append(measure(server))
            if reader is not None:
                reader.close()
                num_events += reader.events
    return found, num_events


def measured(server: Running, users: int, size: int, *, stream: bool, **fields: object) -> Level:
    before_s = server.cpu_s
    level = run(drive(server.url, users, size, stream=stream, **fields))
    level.cpu_us, level.main_us = (
        (after - before) * 1e6 / size for after, before in zip(server.cpu_s, before_s, strict=True)
    )
    if level.num_failed:
        raise SystemExit(f"{level.num_failed} requests failed")
    return level


def of_stub(folder: Path, scale: float, num_rounds: int) -> tuple[Turns, int]:
    pin_self()
    size = int(STUB_REQUESTS * scale)
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(stub(folder))
        flags = {False: ("--no-dashboard",), True: ()}
        servers = {
            has: stack.enter_context(tonle(folder, upstream.url, "--admin-key", ADMIN_KEY, *own, audit=False))
            for has, own in flags.items()
        }
        return take_turns(servers, lambda server: measured(server, USERS, size, stream=False), num_rounds)


def of_model(folder: Path, scale: float, num_rounds: int) -> tuple[Turns, int]:
    size = max(MODEL_USERS, int(MODEL_REQUESTS * scale))
    with contextlib.ExitStack() as stack:
        servers = {has: stack.enter_context(_serve(folder, has=has)) for has in (False, True)}
        model = httpx.get(f"{servers[True].url}/v1/models").json()["data"][0]["id"]
        fields = {"model": model, "max_tokens": MODEL_TOKENS, "ignore_eos": True, "temperature": 0}
        ask = lambda server: measured(server, MODEL_USERS, size, stream=True, **fields)  # noqa: E731
        return take_turns(servers, ask, num_rounds)


@contextlib.contextmanager
def _serve(folder: Path, *, has: bool) -> Iterator[Running]:
    port = free_port()
    own = [] if has else ["--no-dashboard"]
    command = [sys.executable, "-m", "tonle", "serve", "--port", str(port), "--log-level", "WARNING",
               "--history-db", str(folder / f"history-{port}.db"), *own]  # fmt: skip
    server = Running(command, f"http://127.0.0.1:{port}", folder / f"serve-{port}.log")
    try:
        yield server
    finally:
        server.stop()


def show(title: str, turns: Turns, num_events: int, console: Console) -> bool:
    """Whether the targets hold. A ratio is to the mean of the two turns without it in the same round."""
    rows, middles, held = [], {}, True
    base = [(one.per_s + two.per_s) / 2 for one, two in zip(turns[OFF], turns[AGAIN], strict=True)]
    base_us = [(one.cpu_us + two.cpu_us) / 2 for one, two in zip(turns[OFF], turns[AGAIN], strict=True)]
    for name, levels in turns.items():
        rates = [level.per_s / other for level, other in zip(levels, base, strict=True)]
        cpu = [level.cpu_us / other for level, other in zip(levels, base_us, strict=True)]
        middles[name] = median(rates)
        rows.append([name, f"{median(level.per_s for level in levels):.1f}", _spread(rates), _spread(cpu)])
    print_wide(markdown_table([title, "requests/s", "of off", "CPU per request, of off"], rows), console)
    same = [two.per_s / one.per_s for one, two in zip(turns[OFF], turns[AGAIN], strict=True)]
    noise = 2 * stdev(same) / math.sqrt(len(same))  # of a ratio between two equal servers
    for name, allowed in ((CLOSED, 0.0), (OPEN, MAX_OPEN)):
        holds = 1 - middles[name] <= allowed + noise
        held = held and holds
        text = f"{name}: {1 - middles[name]:+.1%} of throughput lost, at most {allowed:.0%} (measured to ±{noise:.1%})"
        console.print(f"{text}: {'PASS' if holds else 'MISS'}", highlight=False)
    console.print(f"the open page got {num_events} events", highlight=False)
    return held and num_events > 0


def _spread(ratios: list[float]) -> str:
    ordered = sorted(ratios)
    quarter = len(ordered) // 4
    return f"{median(ordered):.3f} ({ordered[quarter]:.3f} to {ordered[-1 - quarter]:.3f})"


def main(folder: Path, arguments: argparse.Namespace) -> int:
    scale, num_rounds = (0.25, 2) if arguments.quick else (1.0, arguments.rounds)
    console, held = Console(), True
    if arguments.only != "stub":  # first: pinning is for good
        title = f"tonle serve, the default model, {MODEL_USERS} users"
        held &= show(title, *of_model(folder, scale, num_rounds), console)
    if arguments.only != "model":
        held &= show(f"tonle gateway, a stub, {USERS} users", *of_stub(folder, scale, num_rounds), console)
    return 0 if held else 1
