"""What a gateway costs: a stub that answers at once, called directly, through Tonle's gateway, and through LiteLLM's proxy.

    python -m benchmarks.gateway                                     # ours; keys, limits and audit on
    python -m benchmarks.gateway --litellm /path/to/venv/bin/litellm # and LiteLLM, in the same run
    python -m benchmarks.gateway --no-audit --quick

All on one machine: the caller, the gateway and the stub share its cores. Compare within a run, not between machines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.gateway_stub import NUM_TOKENS
from benchmarks.peers.process import free_port
from tonle.gateway.http.client import Address, HttpClient
from tonle.gateway.listening import run

KEY = "sk-benchmark"
LEVELS = (1, 50, 200)
GAP_MS = 20.0  # between chunks of the paced stream
PACED_STREAMS = 50
READY_S = 120.0

# What LiteLLM's proxy is compared by, and what one caller must not notice.
MIN_WHOLE, MIN_STREAMED = 12.0, 30.0
MAX_ADDED_FIRST_MS, MAX_P99_RATIO, MAX_CHUNK_US, MAX_MB = 2.0, 3.0, 25.0, 150.0


@dataclass
class Level:
    per_s: float
    first_p50_ms: float
    first_p99_ms: float
    num_failed: int
    cpu_us: float = 0.0  # of the server's processes, per request

    def __str__(self) -> str:
        failed = f" ({self.num_failed} failed)" if self.num_failed else ""
        return f"{self.per_s:8.0f} · {self.first_p50_ms:.1f} / {self.first_p99_ms:.1f}{failed}"


class Arrival:
    """When the first byte of an answer came, and whether it was one."""

    def __init__(self) -> None:
        self.status = 0
        self.first_s = 0.0
        self.tail = b""

    def attach(self, press: Callable[[bool], None]) -> None:
        pass

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status

    def data(self, piece: bytes) -> None:
        self.first_s = self.first_s or time.perf_counter()
        self.tail = piece[-64:]


async def drive(url: str, concurrency: int, total: int, *, stream: bool) -> Level:
    """`concurrency` callers who each wait for their answer, `total` requests."""
    client = HttpClient(Address.parse(url), api_key=KEY)
    messages = [{"role": "user", "content": "What is the capital of Cambodia?"}]
    body = json.dumps({"model": "stub", "messages": messages, "stream": stream}).encode()
    request = client.request("POST", "/v1/chat/completions", body, {})
    waits_ms: list[float] = []
    left, failed = total, 0

    async def caller() -> None:
        nonlocal left, failed
        while left > 0:
            left -= 1
            connection, arrival, began_s = await client.take(), Arrival(), time.perf_counter()
            try:
                await connection.exchange(request, arrival, first_s=120, silence_s=120)
            except Exception:
                arrival.status = 0
            client.put(connection)
            good = arrival.status == 200 and (not stream or b"[DONE]" in arrival.tail)
            failed += not good
            waits_ms.append((arrival.first_s - began_s) * 1000 if good else 0.0)

    began_s = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    took_s = time.perf_counter() - began_s
    client.close()
    waits_ms.sort()
    return Level(total / took_s, statistics.median(waits_ms), waits_ms[int(len(waits_ms) * 0.99)], failed)


class Running:
    """A server process and its children."""

    def __init__(self, command: list[str], url: str, log: Path, **env: str) -> None:
        self.url = url
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | env)
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {KEY}"}).status_code == 200:
                    return
            time.sleep(0.1)
        self.stop()
        raise SystemExit(f"{command[0]} did not start:\n{log.read_text()[-2000:]}")

    def _all(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    @property
    def cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._all())

    @property
    def memory_mb(self) -> float:
        return sum(process.memory_info().rss for process in self._all()) / 1e6

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def stub(folder: Path, gap_ms: float = 0.0) -> Iterator[Running]:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.gateway_stub", str(port), str(gap_ms)]
    server = Running(command, f"http://127.0.0.1:{port}", folder / f"stub-{gap_ms}.log")
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def tonle(folder: Path, upstream: str, *, audit: bool) -> Iterator[Running]:
    port = free_port()
    command = [
        sys.executable, "-m", "tonle", "gateway", "--backend", upstream, "--port", str(port), "--api-key", KEY,
        "--state-db", str(folder / "state.db"), "--requests-per-minute", "100000000", "--tokens-per-minute",
        "10000000000", "--max-concurrent", "256", "--log-level", "WARNING",
        *(["--audit-dir", str(folder / "audit")] if audit else []),
    ]  # fmt: skip
    server = Running(command, f"http://127.0.0.1:{port}", folder / f"tonle-{audit}.log")
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def litellm(folder: Path, upstream: str, program: str) -> Iterator[Running]:
    port = free_port()
    settings = {
        "model_list": [{"model_name": "stub", "litellm_params": {
            "model": "openai/stub", "api_base": f"{upstream}/v1", "api_key": "none"}}],
        "general_settings": {"master_key": KEY},
    }  # fmt: skip
    file = folder / "litellm.json"
    file.write_text(json.dumps(settings))
    command = [program, "--config", str(file), "--port", str(port), "--host", "127.0.0.1", "--num_workers", "1"]
    server = Running(command, f"http://127.0.0.1:{port}", folder / "litellm.log", LITELLM_LOG="ERROR")
    try:
        yield server
    finally:
        server.stop()


def measure(server: Running, sizes: dict[tuple[int, bool], int]) -> dict[tuple[int, bool], Level]:
    levels = {}
    for (users, stream), size in sizes.items():
        run(drive(server.url, users, min(size, 2 * users), stream=stream))  # opens connections behind it, fills caches
        before_s = server.cpu_s
        levels[users, stream] = run(drive(server.url, users, size, stream=stream))
        levels[users, stream].cpu_us = (server.cpu_s - before_s) * 1e6 / size
    return levels


def sizes(scale: float, *, slow: bool) -> dict[tuple[int, bool], int]:
    """Requests per level; a slow server gets fewer."""
    base = {(1, False): 400, (50, False): 4000, (200, False): 4000, (1, True): 200, (50, True): 2000, (200, True): 2000}
    divisor = {False: 10, True: 20} if slow else {False: 1, True: 1}
    return {level: max(level[0], int(size * scale / divisor[level[1]])) for level, size in base.items()}


def show(tables: dict[str, dict[tuple[int, bool], Level]]) -> None:
    print("requests/s · first byte p50 / p99 ms")
    print(f"{'callers':>8} {'':9}" + "".join(f"{name:>34}" for name in tables))
    for level in next(iter(tables.values())):
        words = f"{level[0]:8} {'streamed' if level[1] else 'whole':9}"
        print(words + "".join(f"{table[level]!s:>34}" for table in tables.values()))


def verdicts(tables: dict[str, dict[tuple[int, bool], Level]], paced_us: float, memory_mb: float) -> None:
    ours, direct, theirs = tables["tonle"], tables["direct"], tables.get("litellm")
    checks: list[tuple[str, float, str, float]] = []
    for users in LEVELS[1:]:
        for stream, least in ((False, MIN_WHOLE), (True, MIN_STREAMED)):
            if theirs is not None:
                word = "streamed" if stream else "whole"
                ratio = ours[users, stream].per_s / theirs[users, stream].per_s
                checks.append((f"{word}, {users} callers: times LiteLLM", ratio, ">=", least))
    for stream in (False, True):
        added = ours[1, stream].first_p50_ms - direct[1, stream].first_p50_ms
        checks.append(
            (f"added first byte, one caller{', streamed' if stream else ''}, ms", added, "<=", MAX_ADDED_FIRST_MS)
        )
        ratio = ours[200, stream].first_p99_ms / direct[200, stream].first_p99_ms
        checks.append(
            (f"p99 first byte, 200 callers{', streamed' if stream else ''}: times direct", ratio, "<=", MAX_P99_RATIO)
        )
    checks.append(("CPU per streamed chunk, 50 callers, µs", ours[50, True].cpu_us / NUM_TOKENS, "<=", MAX_CHUNK_US))
    checks.append(("memory, MB", memory_mb, "<=", MAX_MB))
    print("\ntargets")
    for what, value, sign, limit in checks:
        good = value >= limit if sign == ">=" else value <= limit
        print(f"  {'ok  ' if good else 'MISS'} {what:52} {value:8.1f} {sign} {limit:g}")
    print(f"       CPU per chunk when every one comes alone, µs         {paced_us:8.1f}")


def paced_chunk_us(folder: Path, *, audit: bool) -> float:
    """CPU of the gateway per chunk, when chunks come one at a time."""
    with stub(folder, GAP_MS) as upstream, tonle(folder, upstream.url, audit=audit) as door:
        run(drive(door.url, PACED_STREAMS, PACED_STREAMS, stream=True))
        before_s, total = door.cpu_s, PACED_STREAMS * 4
        level = run(drive(door.url, PACED_STREAMS, total, stream=True))
        assert not level.num_failed
        return (door.cpu_s - before_s) * 1e6 / (total * NUM_TOKENS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litellm", help="the program `litellm` of an environment that has its proxy")
    parser.add_argument("--no-audit", action="store_true")
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests")
    arguments = parser.parse_args()
    scale, audit = (0.25 if arguments.quick else 1.0), not arguments.no_audit
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tables: dict[str, dict[tuple[int, bool], Level]] = {}
        with stub(folder) as upstream:
            tables["direct"] = measure(upstream, sizes(scale, slow=False))
            with tonle(folder, upstream.url, audit=audit) as door:
                tables["tonle"] = measure(door, sizes(scale, slow=False))
                memory_mb = door.memory_mb
            costs = [tables["tonle"][50, stream].cpu_us for stream in (False, True)]
            print(f"tonle: {costs[0]:.0f} µs of CPU per whole answer, {costs[1]:.0f} per streamed one, audit {audit}")
            if arguments.litellm:
                with litellm(folder, upstream.url, arguments.litellm) as proxy:
                    tables["litellm"] = measure(proxy, sizes(scale, slow=True))
                    print(f"litellm: {proxy.memory_mb:.0f} MB")
        paced_us = paced_chunk_us(folder, audit=audit)
    show(tables)
    verdicts(tables, paced_us, memory_mb)


if __name__ == "__main__":
    main()
