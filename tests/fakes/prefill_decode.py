"""Prefill servers and decode servers: real `tonle serve` processes, a load for them, and what can be seen of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.fakes.server import Server, tonle_serve

COMPLETIONS = "/v1/completions"
KINDS = ("prefill", "decode")  # of servers
FLAGS = ("--kv-cache-memory", "16MiB", "--max-num-seqs", "8", "--trust-salt", "--served-model-name", "m",
         "--kv-lease", "3s", "--kv-transfer-timeout", "3s", "--dtype", "float32")  # fmt: skip
_WORDS = (
    "the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "then", "other", "one", "what", "is", "capital",
)  # fmt: skip


@dataclass
class Fleet:
    """Servers by role; those that were killed are in `dead`."""

    servers: dict[str, list[Server]]
    dead: list[Server] = field(default_factory=list)

    def kill(self, role: str, *, engine_only: bool = False) -> None:
        """SIGKILL: the first of its kind, or its engine's process alone, which the server starts again."""
        victim = self.servers[role][0]
        pids = [victim.engine_pid()] if engine_only else [victim.engine_pid(), victim.process.pid]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        if not engine_only:
            self.dead.append(victim)

    @property
    def alive(self) -> list[Server]:
        return [server for role in KINDS for server in self.servers[role] if server not in self.dead]


@contextlib.contextmanager
def fleet(folder: Path, *flags: str, each: int = 2) -> Iterator[Fleet]:
    roles = [role for role in KINDS for _ in range(each)]
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(len(roles)) as threads:  # they start at the same time
            opened = [tonle_serve(folder, *FLAGS, "--role", role, *flags) for role in roles]
            servers = list(threads.map(lambda each: stack.enter_context(each), opened))
        yield Fleet({role: [s for s, its in zip(servers, roles, strict=True) if its == role] for role in KINDS})


def requests(count: int, seed: int) -> list[dict[str, Any]]:
    """Of different lengths, some of which begin alike; streamed and not; greedy, or sampled with a seed."""
    rng = random.Random(seed)
    shared = [" ".join(rng.choices(_WORDS, k=60)) for _ in range(3)]
    found = []
    for _ in range(count):
        prompt = rng.choice([*shared, "", ""]) + " ".join(rng.choices(_WORDS, k=rng.choice([3, 20, 80])))
        body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": rng.choice([1, 8, 24]), "temperature": 0}
        body["ignore_eos"] = True
        if rng.random() < 0.3:
            body |= {"temperature": 0.8, "seed": rng.randint(0, 2**31)}
        if rng.random() < 0.5:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        found.append(body)
    return found


@dataclass
class Outcome:
    """Of one request."""

    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    begun: bool = False  # a part of a stream has come
    problem: str = ""


async def ask(client: httpx.AsyncClient, body: dict[str, Any], headers: dict[str, str]) -> Outcome:
    outcome = Outcome()
    try:
        if not body.get("stream"):
            reply = await client.post(COMPLETIONS, json=body, headers=headers)
            if reply.status_code == 200:
                outcome.text, outcome.usage = reply.json()["choices"][0]["text"], reply.json()["usage"]
            else:
                outcome.problem = f"{reply.status_code} {reply.text[:300]}"
            return outcome
        async with client.stream("POST", COMPLETIONS, json=body, headers=headers) as stream:
            if stream.status_code != 200:
                outcome.problem = f"{stream.status_code} {(await stream.aread())[:300]!r}"
                return outcome
            async for line in stream.aiter_lines():
                _take_line(line, outcome)
    except httpx.HTTPError as error:
        outcome.problem = repr(error)
    return outcome


def _take_line(line: str, outcome: Outcome) -> None:
    if not line.startswith("data: {"):
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        outcome.problem = str(event["error"])
        return
    outcome.begun = True
    outcome.usage = event.get("usage") or outcome.usage
    for choice in event["choices"]:
        outcome.text += choice["text"]


async def ask_all(
    url: str, bodies: list[dict[str, Any]], *, headers: dict[str, str], at_once: int
) -> tuple[list[Outcome], asyncio.Task[None]]:
    """Outcomes that fill up, and the task that ends with the last of them."""
    outcomes = [Outcome() for _ in bodies]
    places = asyncio.Semaphore(at_once)

    async def one(client: httpx.AsyncClient, index: int) -> None:
        async with places:
            outcomes[index] = await ask(client, bodies[index], headers)

    async def run() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            await asyncio.gather(*(one(client, index) for index in range(len(bodies))))

    return outcomes, asyncio.create_task(run())


async def metric(server: Server, name: str, **labels: str) -> float:
    """The sum over all lines that have these labels."""
    async with httpx.AsyncClient(timeout=60) as client:
        text = (await client.get(f"{server.url}/metrics")).text
    total = 0.0
    for line in re.findall(rf"^{re.escape(name)}(?:_total)?\{{.*$", text, re.MULTILINE):
        if all(f'{label}="{value}"' in line for label, value in labels.items()):
            total += float(line.rsplit(" ", 1)[1])
    return total


async def wait_until_nothing_is_held(server: Server) -> None:
    """Neither leases, nor loads, nor blocks of any kind."""
    names = ("tonle:kv_leases", "tonle:kv_leased_blocks", "tonle:kv_loading_requests", "vllm:kv_cache_usage_perc",
             "vllm:num_requests_running", "vllm:num_requests_waiting")  # fmt: skip
    held: dict[str, float] = {}
    for _ in range(2400):
        held = {name: await metric(server, name) for name in names}
        if not any(held.values()):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"after all requests: {held}\n{server.log.read_text()[-3000:]}")
