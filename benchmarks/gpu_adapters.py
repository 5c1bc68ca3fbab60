"""What adapters cost on one GPU: steps with and without them, and users with eight of them mixed.

    python -m benchmarks.gpu_adapters steps --rows 1,8,16,32,100,256 --profile 1,100   # a minute
    python -m benchmarks.gpu_adapters serving                                          # two minutes
    python -m benchmarks.gpu_adapters serving --device cpu --model tiny --users 4      # the benchmark itself, anywhere

Weights and adapters are random, adapters change all seven matrices. Three cases: an engine without slots for adapters; one with
slots, whose requests name none; and the same with a different adapter for each of eight requests in turn. Ends with the ratios we
aim for. Repeats run in turns, with other prompts each time, for prompts that were seen before are found in the prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.closed_loop import drive
from benchmarks.gpu import Engine, engine_config
from benchmarks.gpu_targets import machine as machine_words
from benchmarks.workload import SHAPES, decode_one, serving, write_config
from tonle.engine.plan import Join, Plan
from tonle.engine.request import GenerationConfig
from tonle.models.adapters import Adapter, AdapterPart
from tonle.models.adapters.adapter import MODULE_PATHS
from tonle.models.adapters.read_adapter import matrix_shapes
from tonle.models.read_spec import read_spec
from tonle.models.source import ModelSource
from tonle.models.spec import ModelSpec

TARGETS = {"serving, adapters / none": 0.90, "serving, base requests / none": 0.98, "one user, ms/token": 1.12}


def spec_of(name: str) -> ModelSpec:
    with tempfile.TemporaryDirectory() as root:
        return read_spec(ModelSource("folder", write_config(name, Path(root)), name))


def parts_of(spec: ModelSpec, rank: int, seed: int) -> dict[tuple[int, str], AdapterPart]:
    """Random, of every matrix."""
    generator = torch.Generator().manual_seed(seed)
    return {
        place: AdapterPart(torch.randn(rank, inputs, generator=generator) * inputs**-0.5,
                           torch.randn(outputs, rank, generator=generator) * 0.1)
        for place, (outputs, inputs) in matrix_shapes(spec).items()
    }  # fmt: skip


def write_adapter(folder: Path, spec: ModelSpec, rank: int, seed: int) -> Path:
    """A PEFT folder."""
    tensors = {}
    for (layer, module), part in parts_of(spec, rank, seed).items():
        stem = f"base_model.model.model.layers.{layer}.{MODULE_PATHS[module]}"
        tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"] = part.a.bfloat16(), part.b.bfloat16()
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    names = [path.rsplit(".", 1)[1] for path in MODULE_PATHS.values()]
    content = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


# -- steps


def with_adapters(plan: Plan, num_adapters: int) -> Plan:
    """Its rows take the adapters in turn; none of them if there are none."""
    config = GenerationConfig(do_sample=False).resolved()
    plan.joins = [
        Join(row, [7], [], config, seed=0, adapter_slot=row % num_adapters if num_adapters else -1) for row in plan.rows
    ]
    return plan


def step_times(options: argparse.Namespace) -> None:
    from benchmarks.gpu_step import kernel_shares, machine, median_ms, plan_of, step_work

    sizes: list[tuple[str, int, int]] = [(f"{rows} rows", rows, 0) for rows in options.rows]
    sizes += [(f"{max(options.rows)} rows, prompt {tokens}", max(options.rows), tokens) for tokens in options.beside]
    sizes += [(f"prompt {tokens}", 0, tokens) for tokens in options.prompts]
    found: dict[str, list[float]] = {label: [] for label, _, _ in sizes}

    def measure(title: str, runner: Any, num_adapters: int) -> None:
        for label, rows, prompt in sizes:
            work = step_work(runner, with_adapters(plan_of(rows, options.context, prompt), num_adapters))
            found[label].append(median_ms(work))
            if (prompt or rows) in options.profile:
                print(f"  {title}, {label}: {found[label][-1]:.3f} ms", flush=True)
                for name, part, launches in kernel_shares(work)[: options.kernels]:
                    print(f"      {part:7.3f} ms {launches:4d} x {part / max(1, launches) * 1e3:6.2f} us {name[:80]}")

    with torch.inference_mode():
        for slots in (0, options.adapters):
            began = time.perf_counter()
            runner = machine(options.model, max(options.rows) + 1, 4096, adapter_slots=slots)
            print(f"{slots} slots: ready after {time.perf_counter() - began:.1f} s, {runner._graphs.num_graphs} graphs in "
                  f"{runner._graphs.capture_s:.1f} s", flush=True)  # fmt: skip
            if slots == 0:
                measure("no slots", runner, 0)
            else:
                load_slots(runner, options)
                measure("base", runner, 0)
                measure("adapted", runner, slots)
            del runner
            gc.collect()
            torch.cuda.empty_cache()
    print(f"\n{options.model}, rank {options.rank}, {options.context} tokens of context, ms:")
    print(f"{'':28}{'no slots':>10}{'slots, base':>12}{'ratio':>8}{f'{options.adapters} adapters':>12}{'ratio':>8}")
    for label, (plain, base, adapted) in found.items():
        print(
            f"{label:28}{plain:10.3f}{base:12.3f}{base / plain:8.3f}{adapted:12.3f}{adapted / plain:8.3f}", flush=True
        )


def load_slots(runner: Any, options: argparse.Namespace) -> None:
    """A random adapter in each slot, and how long one takes."""
    spec = spec_of(options.model)
    adapter = Adapter("", parts_of(spec, options.rank, 0))
    times = []
    for slot in range(options.adapters):
        torch.cuda.synchronize()
        began = time.perf_counter()
        runner._net.set_adapter(slot, adapter)
        launched = time.perf_counter() - began
        torch.cuda.synchronize()
        times.append((launched * 1e3, (time.perf_counter() - began) * 1e3))
    print(f"  an adapter of {adapter.num_bytes / 1e6:.0f} MB into its slot: {median(t for t, _ in times):.1f} ms on the host, "
          f"{median(t for _, t in times):.1f} ms until it is there (the first: {times[0][1]:.1f})", flush=True)  # fmt: skip


# -- serving


class Case:
    """One way to ask an engine, and what came of it."""

    def __init__(self, title: str, names: list[str]) -> None:
        self.title = title
        self._names = names
        self._turn = count()
        self.tokens_per_s: list[float] = []
        self.one_user_ms: list[float] = []

    async def measure(self, engine: Engine, options: argparse.Namespace, seed: int) -> None:
        async def generate(prompt: list[int], length: int) -> AsyncIterator[list[int]]:
            config = GenerationConfig(max_length=length, do_sample=False, early_stopping=False)
            name = self._names[next(self._turn) % len(self._names)] if self._names else None
            async for delta in engine.front.submit(prompt, config, adapter=name):
                yield delta.tokens

        row = await drive(generate, serving(options.requests * options.users, seed=seed), options.users)
        one = await drive(generate, decode_one(2, seed=seed), 1)
        self.tokens_per_s.append(row["out_tok_s"])
        self.one_user_ms.append(one["tpot_mean"])
        print(f"  {self.title:28}{row['out_tok_s']:10.0f} tok/s, TTFT p50 {row['ttft_p50']:6.1f} p99 {row['ttft_p99']:6.1f}, "
              f"TPOT {row['tpot_mean']:6.2f}; one user {one['tpot_mean']:6.3f} ms/token", flush=True)  # fmt: skip


async def serve(options: argparse.Namespace) -> None:
    spec = spec_of(options.model)
    none, base, mixed = Case("no slots", []), Case("slots, base requests", []), Case("adapters", [])
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        names = [f"adapter-{i}" for i in range(options.adapters)]
        paths = {name: str(write_adapter(folder / name, spec, options.rank, i)) for i, name in enumerate(names)}
        mixed._names = names
        config = engine_config(options)
        for cases, own in (([none], config), ([base, mixed], replace(config, lora=paths, max_loras=options.adapters))):
            engine = Engine(options.model, folder / f"model-{len(cases)}", own)
            ready = await engine.start()
            print(f"ready after {ready:.1f} s", flush=True)
            try:
                await drive(engine.generate, serving(64, seed=77), 32)  # warm
                for repeat in range(options.repeats):
                    for case in cases:
                        await case.measure(engine, options, seed=100 + repeat)
            finally:
                await engine.process.stop()
    ratios = {
        "serving, adapters / none": median(mixed.tokens_per_s) / median(none.tokens_per_s),
        "serving, base requests / none": median(base.tokens_per_s) / median(none.tokens_per_s),
        "one user, ms/token": median(mixed.one_user_ms) / median(none.one_user_ms),
    }
    print(f"\n{options.model}, {options.users} users, {options.adapters} adapters of rank {options.rank}")
    for title, target in TARGETS.items():
        most = title.startswith("one user")
        holds = ratios[title] <= target if most else ratios[title] >= target
        print(
            f"{title:32}{ratios[title]:8.3f}  target {'≤' if most else '≥'} {target}  {'holds' if holds else 'missed'}"
        )


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=["steps", "serving"])
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=numbers, default=[1, 8, 16, 32, 100, 256])
    parser.add_argument("--beside", type=numbers, default=[256], help="prompt tokens beside the most rows")
    parser.add_argument("--prompts", type=numbers, default=[512, 2048], help="prompts alone")
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--profile", type=numbers, default=[], help="rows or prompts whose kernels are listed")
    parser.add_argument("--kernels", type=int, default=14, help="so many of them")
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--requests", type=int, default=8, help="of each user")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu (serving)")
    options = parser.parse_args()
    options.dtype = "bfloat16" if options.device.startswith("cuda") else "float32"
    options.max_batch_size, options.max_num_batched_tokens, options.kv_cache_dtype = 256, 4096, "auto"
    print(machine_words())
    if options.what == "steps":
        step_times(options)
    else:
        options.profile = False  # of the engine's loop
        asyncio.run(serve(options))


if __name__ == "__main__":
    main()
