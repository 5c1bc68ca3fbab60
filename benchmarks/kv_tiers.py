"""What a prompt costs whose keys and values are computed, found on the device, or copied back from a tier.

    python benchmarks/kv_tiers.py [--model PATH] [--tokens 1024] [--device cpu] [--redis redis://127.0.0.1:6379/0]

For each tier: time to the first token of a prompt (the best of a few), and the bandwidths at which blocks left and came back.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from typing import Any

from tonle.engine import EngineConfig, GenerationConfig, InferenceEngine

ONE = GenerationConfig(max_length=1, do_sample=False, early_stopping=False)
TRIES = 3


def first_token_s(engine: Any, prompt: list[int]) -> tuple[float, int]:
    began = time.perf_counter()
    result = engine.result(engine.submit_request(prompt, ONE), timeout=600)
    return time.perf_counter() - began, result.usage.cached_tokens


def wait_for_saves(engine: Any, tier: str) -> None:
    """Until no more blocks are being kept."""
    saved = -1
    for _ in range(60):
        engine.result(engine.submit_request([1, 2, 3], ONE), timeout=600)  # statistics come with steps
        if (now := engine.get_stats()["kv_tiers"][tier]["save_bytes"]) == saved:
            return
        saved = now
        time.sleep(0.5)


def prompts(count: int, tokens: int) -> list[list[int]]:
    rng = random.Random(tokens)
    return [[rng.randrange(300, 30_000) for _ in range(tokens)] for _ in range(count)]


def measure(name: str, model: str | None, tokens: int, device: str, tier: dict[str, Any]) -> None:
    config = EngineConfig(
        device=device, max_sequence_length=tokens + 16, memory_pool_size=None, max_num_batched_tokens=None, **tier
    )
    config.kv_cache_max_size = (
        tokens // config.block_size
    ) + 2  # of idle blocks: one prompt, so that the next evicts it
    with InferenceEngine(model, None, config) as engine:
        wanted = prompts(TRIES + 1, tokens)
        first_token_s(engine, wanted[0])
        cold = min(first_token_s(engine, prompt)[0] for prompt in wanted[1:])
        device_hit = min(first_token_s(engine, wanted[-1]) for _ in range(TRIES))
        print(f"{name:8} computed {cold * 1e3:8.1f} ms   on the device {device_hit[0] * 1e3:8.1f} ms", end="")
        if not tier:
            print()
            return
        wait_for_saves(engine, name)
        found = [first_token_s(engine, prompt) for prompt in wanted[1:-1]]
        counts = engine.get_stats()["kv_tiers"][name]
        best, cached = min(found)
        out = counts["save_bytes"] / counts["save_s"] / 1e9 if counts["save_s"] else 0.0
        back = counts["load_bytes"] / counts["load_s"] / 1e9 if counts["load_s"] else 0.0
        print(f"   from {name} {best * 1e3:8.1f} ms ({cached} tokens; out {out:.2f} GB/s, back {back:.2f} GB/s)")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default=None)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--redis", default=None)
    parser.add_argument("--dir", default=None)
    args = parser.parse_args()
    measure("none", args.model, args.tokens, args.device, {})
    measure("memory", args.model, args.tokens, args.device, {"kv_offload_memory": 4 * 2**30})
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        measure("disk", args.model, args.tokens, args.device, {"kv_offload_dir": folder})
    if args.redis:
        measure("redis", args.model, args.tokens, args.device, {"kv_offload_redis": args.redis})


if __name__ == "__main__":
    main()
