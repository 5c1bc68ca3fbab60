"""The engine on one GPU, measured as its callers see it: one command prints the table.

    python -m benchmarks.gpu --http --gateway --json out.json                      # all of docs/performance.md's targets
    python -m benchmarks.gpu --models llama-2-7b --users 1,10,100                  # another model
    python -m benchmarks.gpu --device cpu --models tiny --users 8 --http --gateway # the benchmark itself, anywhere

The engine runs in a process of its own, as in `tonle serve`; the closed loop of users shares this process with the
engine's front. No HTTP and no tokenizer. Weights are random and built on the device; sampling is greedy. With --http the
first model's users (--http-users) then call `tonle serve` as streams over loopback, and with --gateway `tonle gateway` with a
key, limits and audit in front of it (`gpu_http.py`). Ends with our targets and what came of them (`gpu_targets.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, cast

from benchmarks.closed_loop import drive
from benchmarks.gpu_http import http_rows, jobs_for
from benchmarks.gpu_targets import machine, table
from benchmarks.workload import (
    READ_BYTES_PER_S,
    SHAPES,
    Job,
    decode_one,
    offline,
    serving,
    weight_bytes,
    write_config,
)
from tonle.config.engine import EngineConfig
from tonle.engine.front import Front
from tonle.engine.process import EngineProcess
from tonle.engine.request import GenerationConfig
from tonle.engine.text import Text
from tonle.models.source import ModelSource

FRONTENDS, CLIENTS = 6, 4  # for 16 cores; what a token costs each is in docs/gpu.md
COLUMNS = ("users", "requests", "out_tok_s", "requests_per_s", "ttft_mean", "ttft_p50", "ttft_p99", "tpot_mean",
           "tpot_p99", "itl_p50", "itl_p99", "e2e_mean", "e2e_p99")  # fmt: skip


class _Mute:
    """A text stream without text."""

    stopped = None

    def push(self, tokens: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class NoText:
    """Stands in for a tokenizer: tokens are all we measure."""

    def stream(self, *_: Any, **__: Any) -> _Mute:
        return _Mute()


class Engine:
    """An engine process and its front."""

    def __init__(self, name: str, folder: Path, config: EngineConfig) -> None:
        self.process = EngineProcess(ModelSource("folder", write_config(name, folder), name), config)
        self.front = Front(cast(Text, NoText()), name, self.process.send)

    async def start(self) -> float:
        """Seconds from nothing to ready."""
        began = time.perf_counter()
        await self.process.start(self.front)
        await self.process.wait_ready()
        return time.perf_counter() - began

    async def generate(self, prompt: list[int], count: int) -> AsyncIterator[list[int]]:
        config = GenerationConfig(max_length=count, do_sample=False, early_stopping=False)
        async for delta in self.front.submit(prompt, config):
            yield delta.tokens


def workloads(names: list[str], users: list[int]) -> list[tuple[str, list[Job], int]]:
    chosen: list[tuple[str, list[Job], int]] = []
    if "decode1" in names:
        chosen.append(("decode1", decode_one(6), 1))
    if "serving" in names:
        chosen += [("serving", jobs_for(count), count) for count in users]
    if "offline" in names:
        chosen.append(("offline", offline(256), 256))
    return chosen


async def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    floor_ms = weight_bytes(name) / READ_BYTES_PER_S * 1e3
    with tempfile.TemporaryDirectory() as folder:
        first = Engine(name, Path(folder), engine_config(options))
        first_s = await first.start()  # compiles kernels, where none are kept from earlier
        await first.process.stop()
        engine = Engine(name, Path(folder), engine_config(options))
        ready_s = await engine.start()
    print(
        f"\n{name}: start to ready {first_s:.1f} s, again {ready_s:.1f} s; weights {floor_ms:.2f} ms; {engine.front.card}"
    )
    print(f"{'':10}" + "".join(f"{column:>14}" for column in COLUMNS) + f"{'floor':>8}")
    rows = []
    try:
        await drive(engine.generate, serving(64, seed=77), 32)  # warm
        for label, jobs, users in workloads(options.workloads.split(","), options.users):
            before = engine.front.stats
            row: dict[str, Any] = {
                "model": name,
                "workload": label,
                "first_ready_s": first_s,
                "ready_s": ready_s,
                **await drive(engine.generate, jobs, users),
            }
            after = engine.front.stats
            row["steps"] = after.num_steps - before.num_steps
            row["busy_share"] = (after.busy_s - before.busy_s) / row["seconds"]
            row["floor_share"] = weight_bytes(name, users) / READ_BYTES_PER_S * 1e3 / row["tpot_mean"]
            row["parts_ms"] = {part: (spent - before.profile.get(part, 0.0)) / max(1, row["steps"]) * 1e3
                               for part, spent in after.profile.items()}  # fmt: skip
            rows.append(row)
            print(
                f"{label:10}" + "".join(f"{row[column]:14.2f}" for column in COLUMNS) + f"{row['floor_share']:8.1%}",
                flush=True,
            )
            if options.profile:
                parts = ", ".join(f"{part} {ms:.3f}" for part, ms in row["parts_ms"].items())
                print(
                    f"{'':10}{row['steps']} steps, {row['seconds'] / row['steps'] * 1e3:.3f} ms each; host ms per step: {parts}"
                )
    finally:
        await engine.process.stop()
    return rows


def offline_api(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The batch job through `LLM`: engine, front and a tokenizer in one process, nothing streamed."""
    from tokenizers import Tokenizer, decoders, models

    from tonle.engine.llm import LLM

    vocab = {f"▁w{token}": token for token in range(SHAPES[name]["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="▁w0"))
    tokenizer.decoder = decoders.Metaspace()
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(str(write_config(name, Path(folder))), tokenizer, engine_config(options))
    with llm:
        rates = []
        for seed in (1, 2, 3):
            jobs = offline(256, seed)
            began = time.perf_counter()
            ids = [
                llm.engine.submit_request(
                    prompt, GenerationConfig(max_length=count, do_sample=False, early_stopping=False)
                )
                for prompt, count in jobs
            ]
            results = [llm.engine.result(request_id) for request_id in ids]
            rates.append(sum(r.usage.completion_tokens for r in results) / (time.perf_counter() - began))
    print(f"{name}: offline 256 through LLM, out tok/s: {', '.join(f'{rate:.0f}' for rate in rates)}", flush=True)
    return {"model": name, "workload": "offline_api", "out_tok_s": rates[1:]}


def over_http(name: str, options: argparse.Namespace, engine_rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The servers' rows, printed with their share of the engine's tokens per second."""
    alone = {row["users"]: row["out_tok_s"] for row in engine_rows if row["workload"] == "serving"}
    print(f"\n{name} over loopback: {options.frontends} front ends, {options.clients} client processes")
    print(f"{'':10}" + "".join(f"{column:>14}" for column in COLUMNS) + f"{'share':>8}  CPU us per token")
    with tempfile.TemporaryDirectory() as folder:
        rows = http_rows(name, Path(folder), options)
    for row in rows:
        row["engine_share"] = row["out_tok_s"] / alone[row["users"]] if row["users"] in alone else float("nan")
        costs = ", ".join(f"{part} {cost:.1f}" for part, cost in row["cpu_us_per_token"].items())
        cells = "".join(f"{row[column]:14.2f}" for column in COLUMNS)
        print(f"{row['workload']:10}{cells}{row['engine_share']:8.1%}  {costs}", flush=True)
    return rows


def engine_config(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        max_batch_size=options.max_batch_size, max_num_batched_tokens=options.max_num_batched_tokens,
        max_sequence_length=4096, device=options.device, dtype=options.dtype, load_format="random",
        long_prefill_token_threshold=options.max_num_batched_tokens, profile_performance=options.profile,
        kv_cache_dtype=options.kv_cache_dtype, memory_pool_size=None, quantization=options.quantization,
    )  # fmt: skip


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--models", default="qwen2.5-1.5b,llama-3.2-3b", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--workloads", default="decode1,serving,offline")
    parser.add_argument("--users", type=numbers, default=[1, 10, 40, 100, 256])
    parser.add_argument("--max-batch-size", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=4096)
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto, or fp8")
    parser.add_argument("--quantization", default="auto", help="of the weights: int8, int4 or fp8; default: bf16")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu")
    parser.add_argument("--http", action="store_true", help="also the first model by `tonle serve` over loopback")
    parser.add_argument("--http-users", type=numbers, help="default: 100 if among --users, else all of them")
    parser.add_argument("--gateway", action="store_true", help="with --http: also behind `tonle gateway`")
    parser.add_argument("--frontends", type=int, default=FRONTENDS, help=f"of `tonle serve` (default {FRONTENDS})")
    parser.add_argument("--clients", type=int, default=CLIENTS, help=f"processes of users (default {CLIENTS})")
    parser.add_argument("--profile", action="store_true", help="time the parts of a step on the host")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.http_users is None:
        options.http_users = [100] if 100 in options.users else options.users
    options.dtype = "bfloat16" if options.device.startswith("cuda") else "float32"
    try:
        import uvloop

        run: Any = uvloop.run
    except ImportError:
        run = asyncio.run
    host = machine()
    print(host)
    rows: list[dict[str, Any]] = []

    def keep(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Saved as it comes: a run takes minutes."""
        rows.extend(found)
        if options.json:
            options.json.write_text(json.dumps({"machine": host, "rows": rows}, indent=1))
        return found

    for place, name in enumerate(options.models.split(",")):
        found = keep(run(measure(name, options)))
        if options.http and place == 0:
            keep(over_http(name, options, found))
        if "offline" in options.workloads:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:  # its memory goes with it
                keep([apart.submit(offline_api, name, options).result()])
    if lines := list(table(rows)):
        print("", *lines, sep="\n")


if __name__ == "__main__":
    main()
