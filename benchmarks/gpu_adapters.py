"""What adapters cost on one GPU: steps with and without them, and users with eight of them mixed.

    python -m benchmarks.gpu_adapters steps --rows 1,8,16,32,100,256 --profile 1,100,100+256   # a minute
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
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Size:
    """Of a step: rows that go on, and tokens of a prompt beside them. Written 100, 100+256 or +512."""

    rows: int
    prompt: int

    @classmethod
    def of(cls, text: str) -> Size:
        rows, _, prompt = text.partition("+")
        return cls(int(rows or 0), int(prompt or 0))

    def __str__(self) -> str:
        rows = f"{self.rows} rows" if self.rows else ""
        return ", ".join(filter(None, (rows, f"prompt {self.prompt}" if self.prompt else "")))


def set_variant(words: str) -> dict[Any, dict[str, Any]]:
    """ "GATE_BLOCK=32 GATE_WARPS=1": constants of the modules that adapters use. Returns what to set back."""
    from tonle.engine.run import packing
    from tonle.models.cuda import batch, lora, model, slot_tiling

    before: dict[Any, dict[str, Any]] = {}
    for word in words.split():
        name, value = word.split("=")
        holders = [module for module in (lora, slot_tiling, batch, model, packing) if hasattr(module, name)]
        if not holders:
            raise SystemExit(f"no constant {name}: see the first lines of models/cuda/lora.py and slot_tiling.py")
        for module in holders:
            before.setdefault(module, {})[name] = getattr(module, name)
            setattr(module, name, int(value))
    return before


def narrow_ladders(sizes: list[Size], most: int) -> None:
    """Capture only the graphs that these steps use: a variant is ready in seconds."""
    from tonle.engine.run import graphs

    def used(ladder: tuple[int, ...], wanted: list[int]) -> tuple[int, ...]:
        return tuple(sorted({min((rung for rung in ladder if rung >= count), default=ladder[-1]) for count in wanted}))

    graphs._DECODE = (*used(graphs._DECODE, [size.rows for size in sizes if not size.prompt]), most)
    mixed = [size for size in sizes if size.prompt]
    graphs._MIXED = used(graphs._MIXED, [size.rows + size.prompt for size in mixed])
    graphs._HEAD = (*used(graphs._HEAD, [size.rows + 1 for size in mixed]), most)


class StepTimes:
    """Steps of all sizes, with and without adapters, in a machine that is made for them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.sizes = [Size(rows, 0) for rows in options.rows]
        self.sizes += [Size(options.mixed_rows, tokens) for tokens in options.beside]
        self.sizes += [Size(0, tokens) for tokens in options.prompts]
        self._max_rows = max(options.rows) + 1
        if options.variants:
            narrow_ladders(self.sizes, self._max_rows)

    def measure(self, title: str, slots: int, cases: list[int]) -> list[list[float]]:
        """Milliseconds of all sizes, for each number of adapters in `cases`."""
        from benchmarks.gpu_step import machine

        began = time.perf_counter()
        with torch.inference_mode():
            runner = machine(self._options.model, self._max_rows, 4096, adapter_slots=slots)
            print(f"{title}: ready after {time.perf_counter() - began:.1f} s, {runner._graphs.num_graphs} graphs in "
                  f"{runner._graphs.capture_s:.1f} s", flush=True)  # fmt: skip
            if slots:
                load_slots(runner, self._options)
            found = [[self._time(title, runner, size, num) for size in self.sizes] for num in cases]
        del runner
        gc.collect()
        torch.cuda.empty_cache()
        return found

    def _time(self, title: str, runner: Any, size: Size, num_adapters: int) -> float:
        from benchmarks.gpu_step import kernel_shares, median_ms, plan_of, step_work

        work = step_work(runner, with_adapters(plan_of(size.rows, self._options.context, size.prompt), num_adapters))
        ms = median_ms(work)
        if size in self._options.profile and bool(num_adapters) == bool(runner._net.adapters):
            print(f"  {title}, {num_adapters} adapters, {size}: {ms:.3f} ms", flush=True)
            for name, part, launches in kernel_shares(work)[: self._options.kernels]:
                print(f"      {part:7.3f} ms {launches:4d} x {part / max(1, launches) * 1e3:6.2f} us {name[:60]}")
        return ms


def step_times(options: argparse.Namespace) -> None:
    steps = StepTimes(options)
    plain = steps.measure("no slots", 0, [0])[0]
    base, adapted = steps.measure(f"{options.adapters} slots", options.adapters, [0, options.adapters])
    print(f"\n{options.model}, rank {options.rank}, {options.context} tokens of context, ms:")
    print(f"{'':28}{'no slots':>10}{'slots, base':>12}{'ratio':>8}{f'{options.adapters} adapters':>12}{'ratio':>8}")
    for size, none, with_slots, ours in zip(steps.sizes, plain, base, adapted, strict=True):
        print(
            f"{size!s:28}{none:10.3f}{with_slots:12.3f}{with_slots / none:8.3f}{ours:12.3f}{ours / none:8.3f}",
            flush=True,
        )
    for words in filter(None, map(str.strip, options.variants.split(";"))):
        before = set_variant(words)
        found = steps.measure(words, options.adapters, [options.adapters])[0]
        print(f"{words}:\n  " + "; ".join(
            f"{size} {ms:.3f} ({ms / none:.3f})" for size, ms, none in zip(steps.sizes, found, plain, strict=True)
        ), flush=True)  # fmt: skip
        for module, values in before.items():
            for name, value in values.items():
                setattr(module, name, value)


def load_slots(runner: Any, options: argparse.Namespace) -> None:
    """A random adapter in each slot, and how long one takes."""
    began = time.perf_counter()
    adapter = runner.prepare_adapter(Adapter("", parts_of(spec_of(options.model), options.rank, 0)))
    prepared = time.perf_counter() - began
    times = []
    for slot in range(options.adapters):
        torch.cuda.synchronize()
        began = time.perf_counter()
        runner._net.set_adapter(slot, adapter)
        launched = time.perf_counter() - began
        torch.cuda.synchronize()
        times.append((launched * 1e3, (time.perf_counter() - began) * 1e3))
    print(f"  an adapter of {adapter.num_bytes / 1e6:.0f} MB: made and pinned in {prepared * 1e3:.1f} ms; into its slot: "
          f"{median(t for t, _ in times):.2f} ms on the host, {median(t for _, t in times):.2f} ms until it is there (the "
          f"first: {times[0][1]:.1f})", flush=True)  # fmt: skip


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


def sizes(text: str) -> list[Size]:
    return [Size.of(size) for size in text.split(",") if size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=["steps", "serving"])
    parser.add_argument("--model", choices=SHAPES, default="qwen2.5-1.5b")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rows", type=numbers, default=[1, 8, 16, 32, 100, 256])
    parser.add_argument("--beside", type=numbers, default=[256], help="tokens of prompts beside rows")
    parser.add_argument("--prompts", type=numbers, default=[512, 2048], help="prompts alone")
    parser.add_argument("--context", type=int, default=400)
    parser.add_argument("--mixed-rows", type=int, default=100, help="rows beside those prompts")
    parser.add_argument("--profile", type=sizes, default=[], help="steps whose kernels are listed: 100,100+256,+512")
    parser.add_argument(
        "--variants", default="", help='also with other constants: "GATE_BLOCK=32 GATE_WARPS=1; NORM_WARPS=16"'
    )
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
