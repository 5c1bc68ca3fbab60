"""The gateway in front of real replicas that tell which KV blocks they have."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx

from tests.fakes.checkpoints import save_folder
from tests.fakes.server import tonle_serve
from tests.gateway.running_gateway import run, running_gateway, until
from tonle.config.routing import BackendConfig

PROMPT = "the quick brown fox jumps over the lazy dog " * 12  # two pieces of the gateway's, some thirty blocks


def test_a_gateway_learns_where_a_prompts_blocks_are_and_when_they_are_gone(tmp_path: Path) -> None:
    save_folder("llama", tmp_path / "tiny")
    endpoint = f"ipc://{tmp_path}/events"
    events = json.dumps({"enable_kv_cache_events": True, "endpoint": endpoint})
    flags = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory", "512KiB", "--trust-salt", "--served-model-name", "m",
             "--kv-events-config", events)  # fmt: skip

    async def main(url: str) -> None:
        def rows() -> tuple[BackendConfig, ...]:
            return (BackendConfig(url=url, name="r", kv_events=endpoint),)

        async with running_gateway(tmp_path, backends=rows, cache=None) as place:
            gateway = place.gateway
            held, policy = gateway._held, gateway._pipeline._stages.router._by_prefix
            assert held.is_on
            for _ in range(100):  # a subscription takes a moment to arrive
                reply = await place.ask(path="/v1/completions", prompt=PROMPT, messages=None, max_tokens=1)
                assert reply.status_code == 200 and "x-tonle-kv-blocks" not in reply.headers
                if held.tells("r"):
                    break
                await asyncio.to_thread(httpx.post, f"{url}/v1/completions", json={"prompt": "x" * 40, "max_tokens": 1})
            known = [key for key in policy._blocks._blocks if policy._has(key[1], key[0])]
            if not known:  # they were stored before the subscription had arrived: once more, from the beginning
                await asyncio.to_thread(fill, url)
                await place.ask(path="/v1/completions", prompt=PROMPT, messages=None, max_tokens=1)
                await until(lambda: any(policy._has(key[1], key[0]) for key in policy._blocks._blocks), "learnt")
            await asyncio.to_thread(fill, url)
            await until(lambda: not any(policy._has(key[1], key[0]) for key in policy._blocks._blocks), "evicted")

    with tonle_serve(tmp_path / "tiny", *flags) as server:
        run(main(server.url))


def fill(url: str) -> None:
    """Prompts of others, which evict what is there."""
    for number in range(6):
        body = {"prompt": [5 + number, *range(3, 200), *range(3, 200), *range(3, 200)], "max_tokens": 1}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
