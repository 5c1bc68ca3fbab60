"""The naive way against ours: plain `transformers` `generate` and Tonle, same weights, same requests, in turns.

    python -m benchmarks.baseline                                    # the default model, on this machine
    python -m benchmarks.baseline --model FOLDER --requests 32 --repeats 5 --json baseline.json
    python -m benchmarks.baseline --shape qwen2.5-1.5b --prompt 32-400 --output 32-256 --requests 64   # random weights, a GPU

Two parts, each with tables. First: requests of mixed lengths that all arrive at once, answered one by one, in padded static
batches, and by Tonle: first token, throughput, use of the device, memory of keys and values. Then: chat questions, of which a
stated share was asked before, through `transformers`, through the same with a response cache, and through
`create_optimized_engine`. Every answer has its full length on each side (no end of text), so the work is equal; tokens are
greedy, and compared. New prompts in each repeat: no prefix cache helps. `baseline_sides.py` has the two sides.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.baseline_chat import chat_tables
from benchmarks.baseline_sides import (
    Naive,
    Ours,
    Outcome,
    engine_config,
    save_random,
    transformers_model,
    wait_for_kernels,
    word_tokenizer,
)
from benchmarks.baseline_tables import improvement, mib, percent, ratio, seconds, waste
from benchmarks.closed_loop import percentile
from benchmarks.gpu_targets import machine
from benchmarks.needs import development_tool
from benchmarks.tables import markdown_table, print_wide
from benchmarks.workload import SHAPES, Job
from tonle import InferenceEngine
from tonle.engine.device import choose_device
from tonle.models.source import ModelSource, resolve

ONE, STATIC, LIVE, TONLE = "one by one", "static batches", "Tonle, live model", "Tonle"
Runs = dict[str, list[Outcome]]


def jobs_of(count: int, prompt: tuple[int, int], output: tuple[int, int], seed: int) -> list[Job]:
    """Lengths are uniform between their bounds."""
    draw = random.Random(seed)
    return [
        ([draw.randrange(10, 30000) for _ in range(draw.randint(*prompt))], draw.randint(*output)) for _ in range(count)
    ]


class Sides:
    """All that is compared, loaded."""

    def __init__(self, source: ModelSource, options: argparse.Namespace) -> None:
        self.device = str(choose_device(options.device))
        self.on_cpu = self.device == "cpu"
        self.dtype = torch.float32 if self.on_cpu else torch.bfloat16
        self.pool_bytes = options.pool_mb * 2**20
        self.naive = Naive(transformers_model(source, self.device, self.dtype))
        context = options.prompt[1] + options.output[1] + 64
        # On a CPU `auto` is float32 arithmetic on weights that stay as they are stored.
        config = engine_config(self.device, "auto" if self.on_cpu else "bfloat16", self.pool_bytes, context)
        tokenizer = word_tokenizer(self.naive.model.config.vocab_size)
        self.ours = Ours(InferenceEngine(source.path, tokenizer, config).start(), self.pool_bytes)
        self.live = None
        if self.on_cpu:  # on a GPU both run the same kernels
            self.live = Ours(InferenceEngine(self.naive.model, tokenizer, config).start(), self.pool_bytes)
        wait_for_kernels()

    def contenders(self, batch_size: int) -> dict[str, Callable[[list[Job]], Outcome]]:
        found: dict[str, Callable[[list[Job]], Outcome]] = {
            ONE: lambda jobs: self.naive.run(jobs, 1),
            STATIC: lambda jobs: self.naive.run(jobs, batch_size),
        }
        if (live := self.live) is not None:
            found[LIVE] = lambda jobs: live.run(jobs, self.device)
        return found | {TONLE: lambda jobs: self.ours.run(jobs, self.device)}

    def stop(self) -> None:
        for side in (self.ours, self.live):
            if side is not None:
                side.engine.stop()


def run_all(
    sides: Sides, options: argparse.Namespace, console: Console
) -> tuple[Runs, dict[str, list[float]], list[Job]]:
    """Outcomes of all jobs at once, first tokens of single requests (s), and the jobs of the last repeat."""
    contenders = sides.contenders(options.batch)
    runs: Runs = {name: [] for name in contenders}
    alone: dict[str, list[float]] = {name: [] for name in contenders}
    jobs = jobs_of(2, (8, 8), (2, 2), seed=-1)
    for run in contenders.values():
        run(jobs)  # warm up
    for repeat in range(options.repeats):
        jobs = jobs_of(options.requests, options.prompt, options.output, seed=2 * repeat)
        single = jobs_of(1, (128, 128), (1, 1), seed=2 * repeat + 1)
        for name in list(contenders) if repeat % 2 == 0 else reversed(list(contenders)):
            if name != STATIC:  # one request is no batch
                alone[name].append(contenders[name](single).first_token_s[0])
            runs[name].append(contenders[name](jobs))
            console.print(
                f"  repeat {repeat + 1} of {options.repeats}: {name} took {runs[name][-1].seconds:.1f} s", style="dim"
            )
    alone[STATIC] = alone[ONE]
    return runs, alone, jobs


def figures(
    runs: Runs, alone: dict[str, list[float]]
) -> list[tuple[str, dict[str, list[float]], Callable[[float], str], bool]]:
    """Title, one number per contender and repeat, how to write it, and whether more is better."""
    first = {name: [percentile(run.first_token_s, 50) for run in each] for name, each in runs.items()}
    late = {name: [percentile(run.first_token_s, 95) for run in each] for name, each in runs.items()}
    rate = {name: [run.tokens_per_s for run in each] for name, each in runs.items()}
    count = len(next(iter(runs.values()))[0].outputs)
    return [
        ("First token, one request of 128 tokens", alone, seconds, False),
        (f"First token, {count} requests at once, p50", first, seconds, False),
        (f"First token, {count} requests at once, p95", late, seconds, False),
        ("Throughput, output tok/s", rate, lambda value: f"{value:.1f}", True),
    ]


def kv_rows(sides: Sides, jobs: list[Job], batch_size: int) -> dict[str, Any]:
    """What the requests of each static batch take for keys and values, here and there: bytes, at the peak."""
    needed = static = paged = most_static = most_paged = 0
    per_token = 0.0
    for start in range(0, len(jobs), batch_size):
        batch = jobs[start : start + batch_size]
        _, _, kv_bytes = sides.naive.generate(batch)
        width = (
            max(len(prompt) for prompt, _ in batch) + max(count for _, count in batch) - 1
        )  # the last is not computed
        per_token = kv_bytes / len(batch) / width
        needed += sum(len(prompt) + count - 1 for prompt, count in batch)
        static, most_static = static + kv_bytes, max(most_static, kv_bytes)
        held = sides.ours.kv_peak_bytes(batch)
        paged, most_paged = paged + held, max(most_paged, held)
    return {
        "static_bytes": static / len(jobs), "paged_bytes": paged / len(jobs), "static_peak_bytes": most_static,
        "paged_peak_bytes": most_paged, "static_waste": waste(needed, static / per_token), "bytes_per_token": per_token,
    }  # fmt: skip


def print_load_tables(
    runs: Runs, alone: dict[str, list[float]], kv: dict[str, Any], sides: Sides, console: Console
) -> None:
    names = list(runs)
    rows = []
    for title, values, write, more in figures(runs, alone):
        rows.append((title, *(write(statistics.median(values[name])) for name in names),
                     *(f"{ratio(values[name], values[TONLE], more_is_better=more):.1f}×" for name in (ONE, STATIC))))  # fmt: skip
    use_title = "CPU use of the process (no GPU here)" if sides.on_cpu else "GPU use"
    uses = {name: _median_or_none([run.use for run in each]) for name, each in runs.items()}
    rows.append((use_title, *(percent(uses[name]) for name in names), "", ""))
    print_wide(markdown_table(("", *names, f"{TONLE} vs {ONE}", f"vs {STATIC}"), rows), console)

    console.print(f"\nBaseline: {STATIC}, the naive way to serve several requests at once. Optimized: {TONLE}.",
                  soft_wrap=True)  # fmt: skip
    shown = figures(runs, alone)
    first, rate = shown[1], shown[3]

    def line(title: str, figure: Any, better: str, worse: str) -> tuple[str, ...]:
        _, values, write, more = figure
        gain = ratio(values[STATIC], values[TONLE], more_is_better=more)
        medians = (write(statistics.median(values[name])) for name in (STATIC, TONLE))
        return (title, *medians, improvement(gain, better, worse))

    saved = kv["paged_bytes"] / kv["static_bytes"]
    base_use, own_use = uses[STATIC], uses[TONLE]
    used_better = improvement(own_use / base_use, "higher", "lower") if base_use and own_use else "–"
    table = [
        line("First Token Latency", first, "faster", "slower"),
        line("Throughput, tok/s", rate, "higher", "lower"),
        (f"{'CPU' if sides.on_cpu else 'GPU'} Utilization", percent(base_use), percent(own_use), used_better),
        ("Memory Efficiency: KV per request", f"{mib(kv['static_bytes'])} (100%)", f"{mib(kv['paged_bytes'])} ({saved:.0%})",
         improvement(1 / saved, "reduction", "increase")),
    ]  # fmt: skip
    print_wide(markdown_table(("Metric", "Baseline", "Optimized", "Improvement"), table), console)
    console.print(
        "Ratios are medians of the ratios within a repeat. "
        f"Keys and values of the same requests, at the peak: static batches up to {mib(kv['static_peak_bytes'])}, of which "
        f"{kv['static_waste']:.0%} is padding; blocks up to {mib(kv['paged_peak_bytes'])}. Blocks are taken from a pool of "
        f"{mib(sides.pool_bytes)} that is reserved at the start (memory_pool_size).", soft_wrap=True
    )  # fmt: skip


def print_agreement(sides: Sides, runs: Runs, jobs: list[Job], console: Console) -> dict[str, Any]:
    outputs, theirs = runs[TONLE][-1].outputs, runs[ONE][-1].outputs
    tokens = sum(map(len, outputs))
    same = sum(a == b for ours, other in zip(outputs, theirs, strict=True) for a, b in zip(ours, other, strict=True))
    best, ties, worst = sides.naive.agreement(jobs, outputs)
    console.print(
        f"Greedy tokens of Tonle and transformers, one by one: {same} of {tokens} are the same. Given the same text before it, "
        f"{best} of {tokens} are transformers' best token and {ties} are that or a tie (the worst is {worst:.2%} below).",
        soft_wrap=True,
    )
    return {"tokens": tokens, "same": same, "best_given_text": best, "best_or_tie": ties, "worst_gap": worst}


def _median_or_none(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def span(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder of safetensors or a .gguf file (default: the default model)")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), help="instead of --model: random bfloat16 weights of this shape"
    )
    parser.add_argument("--requests", type=int, default=12, help="of the first part (default: 12)")
    parser.add_argument("--repeats", type=int, default=3, help="of the first part, in turns (default: 3)")
    parser.add_argument("--prompt", type=span, default=(16, 128), metavar="MIN-MAX", help="tokens (default: 16-128)")
    parser.add_argument("--output", type=span, default=(8, 32), metavar="MIN-MAX", help="tokens (default: 8-32)")
    parser.add_argument("--batch", type=int, default=8, help="size of a static batch (default: 8)")
    parser.add_argument("--questions", type=int, default=20, help="of the second part; 0 leaves it out (default: 20)")
    parser.add_argument("--asked-before", type=float, default=0.4, help="share of the questions (default: 0.4)")
    parser.add_argument("--pool-mb", type=int, default=512, help="Tonle's pool of keys and values, MiB (default: 512)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--json", type=Path, help="save all numbers here")
    return parser.parse_args()


def print_header(source: ModelSource, sides: Sides, options: argparse.Namespace, console: Console) -> None:
    from transformers import __version__

    arithmetic = f"both compute in {str(sides.dtype).removeprefix('torch.')}"
    if sides.on_cpu:
        arithmetic += f" ({TONLE} on weights as the file stores them, {LIVE} on the very tensors of transformers)"
    lengths = "prompts of {} to {} tokens, answers of {} to {}".format(*options.prompt, *options.output)
    for line in (
        f"{machine()}, transformers {__version__}; {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f} before",
        f"{source.name} on {sides.device}; {arithmetic}",
        f"{options.requests} requests at once, {lengths}; static batches of {options.batch}, in order of arrival",
    ):
        console.print(line, soft_wrap=True)


def main() -> None:
    options, console = parse(), Console(highlight=False)
    transformers = development_tool("transformers")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        source = resolve(options.model if options.shape is None else save_random(options.shape, Path(folder)))
        sides = Sides(source, options)
        print_header(source, sides, options, console)
        try:
            runs, alone, jobs = run_all(sides, options, console)
            kv = kv_rows(sides, jobs_of(options.requests, options.prompt, options.output, seed=999), options.batch)
            print_load_tables(runs, alone, kv, sides, console)
            found: dict[str, Any] = {
                "agreement": print_agreement(sides, runs, jobs, console),
                "kv": kv,
                "alone_s": alone,
            }
        finally:
            sides.stop()
        found["runs"] = {name: [{"seconds": run.seconds, "tokens_per_s": run.tokens_per_s, "use": run.use,
                                 "first_token_s": run.first_token_s, "finished_s": run.finished_s} for run in each]
                         for name, each in runs.items()}  # fmt: skip
        if options.questions:
            found["chat"] = chat_tables(source, sides.naive, options, console)
    if options.json is not None:
        settings = {name: str(value) for name, value in vars(options).items()}
        options.json.write_text(json.dumps({"machine": machine(), "settings": settings, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
