"""Two prefill servers, two decode servers and a gateway, all processes; some are killed while they work.

    python -m benchmarks.prefill_decode                                 # 500 requests for each kind of kill, and without one
    python -m benchmarks.prefill_decode --requests 100 --kill decode --model FOLDER

Sends the same requests (streamed and not, of different lengths, some with prefixes in common, some sampled with a seed) to one
server alone and through the gateway, and compares the answers. Exit status 1 if an answer differs, if a request was lost that had
not begun to stream, or if a server holds blocks when all is over. A server is killed with SIGKILL at a random moment: as a whole
(`prefill`, `decode`), or its engine's process alone (`prefill-engine`, `decode-engine`), which the server starts again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import yaml
from tests.fakes.checkpoints import save_folder
from tests.fakes.prefill_decode import (
    KINDS,
    Fleet,
    Outcome,
    ask_all,
    fleet,
    metric,
    requests,
    wait_until_nothing_is_held,
)
from tests.fakes.server import tonle_gateway

KILLS = ("none", "prefill", "decode", "prefill-engine", "decode-engine")
AT_ONCE = 16


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--kill", choices=[*KILLS, "each"], default="each")
    parser.add_argument("--model", help="a folder; a tiny model with random weights by default")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kills = KILLS if options.kill == "each" else (options.kill,)
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(options.model) if options.model else Path(folder) / "tiny"
        if not options.model:
            save_folder("llama", model)
        for kill in kills:
            problems += asyncio.run(trial(model, kill, options.requests, options.seed))
    for problem in problems:
        print("WRONG:", problem)
    return 1 if problems else 0


async def trial(model: Path, kill: str, count: int, seed: int) -> list[str]:
    bodies = requests(count, seed)
    with fleet(model) as servers, tempfile.TemporaryDirectory() as folder:
        one = servers.servers["decode"][1]  # under a salt of its own, so that it shares nothing with what follows
        expected, alone = await ask_all(one.url, bodies, headers={"x-tonle-salt": "alone"}, at_once=AT_ONCE)
        await alone
        rows = [
            {"url": server.url, "name": f"{role}{index}", "role": role}
            for role in KINDS
            for index, server in enumerate(servers.servers[role])
        ]
        config = Path(folder) / "gateway.yaml"
        config.write_text(yaml.safe_dump({"backends": rows, "prefill_threshold": 20, "retries": 3, "cache": "off"}))
        with tonle_gateway("--config", str(config), "--state-db", str(Path(folder) / "state.db")) as gateway:
            began = time.monotonic()
            outcomes, task = await ask_all(gateway.url, bodies, headers={}, at_once=AT_ONCE)
            if kill != "none":
                await kill_at_random(servers, kill, outcomes, random.Random(seed))
            await task
            took = time.monotonic() - began
        problems = [f"{kill}: {problem}" for problem in compare(expected, outcomes)]
        for server in servers.alive:
            try:
                await wait_until_nothing_is_held(server)
            except AssertionError as error:
                problems.append(f"{kill}: {str(error)[:400]}")
        await show(servers, kill, outcomes, took)
    return problems


async def kill_at_random(servers: Fleet, kill: str, outcomes: list[Outcome], rng: random.Random) -> None:
    """When a random share of the requests has been answered."""
    wanted = rng.uniform(0.1, 0.7) * len(outcomes)
    for _ in range(60_000):
        if sum(bool(outcome.text) for outcome in outcomes) >= wanted:
            break
        await asyncio.sleep(0.01)
    role, _, part = kill.partition("-")
    servers.kill(role, engine_only=bool(part))


def compare(expected: list[Outcome], outcomes: list[Outcome]) -> list[str]:
    problems = []
    for index, (one, other) in enumerate(zip(expected, outcomes, strict=True)):
        if other.problem and not other.begun:
            problems.append(f"request {index} was lost: {other.problem}")
        elif other.problem and not one.text.startswith(other.text):
            problems.append(f"request {index} began with {other.text!r}, not as {one.text!r}")
        elif not other.problem and (one.text, one.usage["completion_tokens"]) != (
            other.text, other.usage["completion_tokens"]
        ):  # fmt: skip
            problems.append(f"request {index} got {other.text!r}, one engine {one.text!r}")
    return problems


async def show(servers: Fleet, kill: str, outcomes: list[Outcome], took: float) -> None:
    ends = Counter("cut off after it had begun" if outcome.problem else "whole" for outcome in outcomes)
    counts = {
        name: sum([await metric(server, family, **labels) for server in servers.alive])
        for name, family, labels in (
            ("fetched", "tonle:kv_loads", {"result": "loaded"}),
            ("computed instead", "tonle:kv_loads", {"result": "failed"}),
            ("leases", "tonle:kv_leases_granted", {}),
            ("expired", "tonle:kv_leases_ended", {"how": "expired"}),
        )
    }
    told = ", ".join(f"{name} {count:g}" for name, count in counts.items())
    print(f"killed {kill}: {len(outcomes)} requests in {took:.1f} s; {dict(ends)}; of the living: {told}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
