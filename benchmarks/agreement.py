"""Does `tonle bench` tell the truth? Hold it against a second client that shares no code with it.

    python -m benchmarks.agreement                         # starts `tonle serve`
    python -m benchmarks.agreement --url http://…:8000     # a server that already runs

Does: let `tonle.bench` and a few lines of httpx take turns on one server, and compare TTFT, TPOT and output tok/s.
Does not: share timing, parsing or prompts between the two: only the lengths are the same.

Turns are short and many, and who goes first changes, so that a machine that others use too slows down both alike. The
server we start and the clients run on different cores: httpx takes several times the CPU per chunk, and on shared cores the
server would be slower for it, which is no disagreement about time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.needs import development_tool
from benchmarks.peers.process import RunningServer, end_cleanly_when_terminated, free_port
from benchmarks.peers.servers import ours
from tonle.bench import BenchOptions, Span, run_bench

httpx = development_tool("httpx")

INPUT_TOKENS = 128
OUTPUT_TOKENS = 32
REQUESTS_PER_USER = 2  # in one turn
TOLERANCE = 0.05
PLAIN_IDS = range(1000, 9000)  # inside every usual vocabulary, past its special tokens


@dataclass(frozen=True, slots=True)
class Turn:
    """What one client measured in one turn: medians over its requests, and the rate over all of them."""

    ttft_ms: float
    tpot_ms: float
    output_tokens_per_s: float


Client = Callable[[int, int], Turn]  # from the number of users and a seed


class BenchClient:
    """`tonle.bench`."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __call__(self, users: int, seed: int) -> Turn:
        options = BenchOptions(
            url=self._url,
            prompt_kind="ids",
            concurrency=(users,),
            requests=users * REQUESTS_PER_USER,
            warmup=0,
            input_tokens=Span(INPUT_TOKENS, INPUT_TOKENS),
            output_tokens=Span(OUTPUT_TOKENS, OUTPUT_TOKENS),
            seed=seed,
        )
        report = run_bench(options)
        if report.interrupted:
            raise KeyboardInterrupt
        level = report.levels[0]
        if level.failed or level.ttft_ms is None or level.tpot_ms is None:
            raise RuntimeError(f"tonle bench: {level.failures}")
        return Turn(level.ttft_ms.p50, level.tpot_ms.p50, level.output_tokens_per_s)


@dataclass(frozen=True, slots=True)
class Timing:
    """Moments of one streamed answer, in seconds of one clock."""

    sent_s: float
    first_s: float  # first chunk with text
    last_s: float  # last chunk with a choice
    output_tokens: int


class HttpxClient:
    """The second opinion: httpx, its own clock readings, `json`."""

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(base_url=url, timeout=600.0, trust_env=False)
        models = self._runner.run(self._client.get("/v1/models")).json()
        self._model: str = models["data"][0]["id"]

    def __call__(self, users: int, seed: int) -> Turn:
        return self._runner.run(self._turn(users, random.Random(f"second/{seed}")))

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    async def _turn(self, users: int, rng: random.Random) -> Turn:
        prompts = [rng.choices(PLAIN_IDS, k=INPUT_TOKENS) for _ in range(users * REQUESTS_PER_USER)]
        requests = [self._request(prompt) for prompt in prompts]  # ready-made, so that users start together
        begin_s = perf_counter()
        of_users = await asyncio.gather(*(self._ask_all(requests[user::users]) for user in range(users)))
        wall_s = perf_counter() - begin_s
        timings = [timing for user in of_users for timing in user]
        return Turn(
            ttft_ms=median((t.first_s - t.sent_s) * 1e3 for t in timings),
            tpot_ms=median((t.last_s - t.first_s) / (t.output_tokens - 1) * 1e3 for t in timings),
            output_tokens_per_s=sum(t.output_tokens for t in timings) / wall_s,
        )

    def _request(self, prompt: list[int]) -> httpx.Request:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": OUTPUT_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return self._client.build_request("POST", "/v1/completions", json=body)

    async def _ask_all(self, requests: list[httpx.Request]) -> list[Timing]:
        return [await self._ask(request) for request in requests]

    async def _ask(self, request: httpx.Request) -> Timing:
        first_s: float | None = None
        last_s = 0.0
        usage: dict[str, Any] = {}
        sent_s = perf_counter()
        async with aclosing(await self._client.send(request, stream=True)) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                now_s = perf_counter()
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[len("data: ") :])
                if chunk["choices"]:
                    last_s = now_s
                    if first_s is None and chunk["choices"][0]["text"]:
                        first_s = now_s
                usage = chunk.get("usage") or usage
        if first_s is None or usage.get("completion_tokens") != OUTPUT_TOKENS:
            raise RuntimeError(f"httpx: expected {OUTPUT_TOKENS} tokens of text, got usage {usage}")
        return Timing(sent_s, first_s, last_s, OUTPUT_TOKENS)


def take_turns(clients: dict[str, Client], users: int, rounds: int, console: Console) -> dict[str, list[Turn]]:
    """Every client once per round, in an order that turns around. Seeds never repeat: no prompt is sent twice.

    Ctrl-C ends it with the rounds that are complete.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in clients}
    try:
        for client in clients.values():
            client(users, users * 10_000 + 9_999)  # a turn that is not counted
        for number in range(rounds):
            order = list(clients) if number % 2 == 0 else list(reversed(clients))
            done = {name: clients[name](users, users * 10_000 + number) for name in order}
            for name in clients:
                turns[name].append(done[name])
            text = "; ".join(f"{name} {describe(done[name])}" for name in clients)
            console.print(f"{users} users, round {number + 1}: {text}", highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        console.print(f"interrupted after {len(turns['httpx'])} rounds", style="yellow", highlight=False)
    return turns


def describe(turn: Turn) -> str:
    return f"TTFT {turn.ttft_ms:.1f} ms, TPOT {turn.tpot_ms:.2f} ms, {turn.output_tokens_per_s:.1f} tok/s"


def compare(turns: dict[str, list[Turn]]) -> list[tuple[str, float, float, float]]:
    """Per quantity: its name, the median of each client, and of the second's ratios to the first's in the same round.

    Turns of one round are seconds apart: what the machine does from minute to minute is in both.
    """
    if not all(turns.values()):
        return []
    rows = []
    for quantity in fields(Turn):
        first, second = ([getattr(turn, quantity.name) for turn in series] for series in turns.values())
        ratio = median(theirs / ours for ours, theirs in zip(first, second, strict=True))
        rows.append((quantity.name, median(first), median(second), ratio))
    return rows


@contextmanager
def server_url(url: str | None) -> Iterator[str]:
    """The given server, or one of our own for as long as it is needed."""
    if url is not None:
        yield url
        return
    server, port = ours()[0], free_port()
    *servers, last = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, servers or [last])  # what is started now inherits it
    with tempfile.TemporaryDirectory(prefix="tonle-agreement-") as folder:
        log = Path(folder) / "server.log"
        with RunningServer(server.command(port), env=server.env, port=port, health=server.health, log=log) as running:
            os.sched_setaffinity(0, [last])
            running.wait_ready()
            running.ask()
            yield running.url


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="a running server; by default `tonle serve` is started")
    parser.add_argument("--users", default="1,4", help="numbers of users, with commas (default 1,4)")
    parser.add_argument("--rounds", type=int, default=12, help="turns of each client (default 12)")
    arguments = parser.parse_args()
    end_cleanly_when_terminated()
    console = Console()
    table = Table(box=box.MARKDOWN)
    for title in ("users", "quantity", "tonle bench", "httpx", "ratio", ""):
        table.add_column(title)
    agreed = True
    with server_url(arguments.url) as url:
        second = HttpxClient(url)
        for users in map(int, arguments.users.split(",")):
            turns = take_turns({"tonle bench": BenchClient(url), "httpx": second}, users, arguments.rounds, console)
            for name, ours, theirs, ratio in compare(turns):
                close = abs(ratio - 1) <= TOLERANCE
                agreed &= close
                verdict = "[green]agree[/]" if close else f"[red]differ by more than {TOLERANCE:.0%}[/]"
                table.add_row(str(users), name, f"{ours:.2f}", f"{theirs:.2f}", f"{ratio:.3f}", verdict)
        second.close()
    console.print(table)
    return 0 if agreed else 1


if __name__ == "__main__":
    sys.exit(main())
