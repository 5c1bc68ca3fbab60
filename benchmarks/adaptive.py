"""Adaptive tuning against fixed limits: does it hold an ITL target under bursts of long prompts, and at what cost?

    python -m benchmarks.adaptive                                       # the default model, here
    python -m benchmarks.adaptive --repeats 1 --bursts 3                # quickly
    python -m benchmarks.adaptive --device cuda --model qwen2.5-1.5b --decoders 64 --burst 32 --prompt 2000 --times 4

Some users decode all the time; every few seconds a burst of long prompts arrives. The same requests go to an engine with its
default limits and to one with `target_itl_ms`, in turns, each in a process of its own that is started anew and warmed up with
a burst that does not count. The target is `--target-itl`, or `--times` the median gap while nothing but decoding goes on.
Bursts are so far apart that prompts take about half of the time. A gap is the time between two tokens of one answer as the
caller sees it; tok/s are tokens of answers, from the first request to the last token.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.closed_loop import Sample, ask, percentile
from benchmarks.gpu import NoText
from benchmarks.workload import SHAPES, Job, write_config
from tonle.config.engine import EngineConfig
from tonle.engine.front import Front
from tonle.engine.process import EngineProcess
from tonle.engine.request import GenerationConfig
from tonle.engine.text import Text
from tonle.models.source import ModelSource, resolve

ANSWER = 150  # tokens of one answer to a user who decodes; the next request follows
BURST_ANSWER = 16
PROMPT_SHARE = 0.5  # of the time that prompts should take


class Engine:
    """An engine process and its front, without text."""

    def __init__(self, source: ModelSource, config: EngineConfig) -> None:
        self.process = EngineProcess(source, config)
        self.front = Front(cast(Text, NoText()), source.name, self.process.send)

    async def __aenter__(self) -> Engine:
        await self.process.start(self.front)
        await self.process.wait_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.process.stop()

    async def generate(self, prompt: list[int], count: int) -> AsyncIterator[list[int]]:
        config = GenerationConfig(max_length=count, do_sample=False, early_stopping=False)
        async for delta in self.front.submit(prompt, config):
            yield delta.tokens


@dataclass
class Load:
    """What is asked, when. Drawn once: all runs get the same."""

    decoders: list[list[Job]]  # per user, one request after the other
    bursts: list[list[Job]]
    period_s: float  # between bursts


@dataclass
class Run:
    """What one engine did with a load."""

    gaps_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)  # of the prompts in bursts
    tok_s: float = 0.0
    adaptive: Any = None  # the controller's last word

    def numbers(self, target_ms: float) -> dict[str, float]:
        return {
            "ITL p50, ms": percentile(self.gaps_ms, 50),
            "ITL p99, ms": percentile(self.gaps_ms, 99),
            "above target, %": 100 * sum(gap > target_ms for gap in self.gaps_ms) / len(self.gaps_ms),
            "TTFT p50, ms": percentile(self.ttft_ms, 50),
            "TTFT p99, ms": percentile(self.ttft_ms, 99),
            "tok/s": self.tok_s,
        }


def job(rng: random.Random, size: int, count: int) -> Job:
    return [rng.randrange(10, 30000) for _ in range(size)], count


async def play(engine: Engine, load: Load) -> Run:
    """All of `load`. Users decode until their requests are done; bursts come at fixed times, ready or not."""
    began = time.perf_counter()

    async def user(jobs: list[Job]) -> list[Sample]:
        return [await ask(engine.generate, prompt, count) for prompt, count in jobs]

    async def burst(number: int, jobs: list[Job]) -> list[Sample]:
        await asyncio.sleep((number + 0.5) * load.period_s)
        return list(await asyncio.gather(*(ask(engine.generate, prompt, count) for prompt, count in jobs)))

    steady = asyncio.gather(*(user(jobs) for jobs in load.decoders))
    sudden = asyncio.gather(*(burst(number, jobs) for number, jobs in enumerate(load.bursts)))
    decoded = [sample for samples in await steady for sample in samples]
    prefilled = [sample for samples in await sudden for sample in samples]
    samples = decoded + prefilled
    return Run(
        gaps_ms=[gap * 1e3 for sample in samples for gap in sample.gaps],
        ttft_ms=[sample.ttft * 1e3 for sample in prefilled],
        tok_s=sum(sample.tokens for sample in samples) / (time.perf_counter() - began),
        adaptive=engine.front.stats.adaptive,
    )


def draw(options: argparse.Namespace, decode_s: float, prefill_tok_s: float, *, bursts: int, seed: int) -> Load:
    """Bursts that keep the machine busy with prompts for half of the time, and users who decode for all of it."""
    rng = random.Random(seed)
    period_s = options.burst * options.prompt / prefill_tok_s / PROMPT_SHARE
    answers = max(1, round(bursts * period_s * (1 - PROMPT_SHARE) / decode_s / ANSWER))
    return Load(
        decoders=[[job(rng, 32, ANSWER) for _ in range(answers)] for _ in range(options.decoders)],
        bursts=[[job(rng, options.prompt, BURST_ANSWER) for _ in range(options.burst)] for _ in range(bursts)],
        period_s=period_s,
    )


async def calibrate(options: argparse.Namespace, source: ModelSource) -> tuple[float, float]:
    """Median gap of decoding alone, seconds; prompt tokens per second alone."""
    rng = random.Random(99)
    async with Engine(source, config_of(options, None)) as engine:
        for _ in range(2):  # the first time is to warm up
            only = await play(engine, Load([[job(rng, 32, ANSWER)] for _ in range(options.decoders)], [], 0.0))
            began = time.perf_counter()
            await asyncio.gather(*(ask(engine.generate, *job(rng, options.prompt, 1)) for _ in range(2)))
            prefill_s = time.perf_counter() - began
    return percentile(only.gaps_ms, 50) / 1e3, 2 * options.prompt / prefill_s


async def measure(options: argparse.Namespace, source: ModelSource, target_ms: float | None, loads: list[Load]) -> Run:
    warm, load = loads
    async with Engine(source, config_of(options, target_ms)) as engine:
        await play(engine, warm)
        return await play(engine, load)


def config_of(options: argparse.Namespace, target_ms: float | None) -> EngineConfig:
    return EngineConfig(
        max_batch_size=None, max_sequence_length=None, memory_pool_size=None, device=options.device,
        load_format="random" if options.model in SHAPES else "auto", target_itl_ms=target_ms, log_level=options.log_level,
    )  # fmt: skip


async def compare(options: argparse.Namespace, source: ModelSource, console: Console) -> None:
    decode_s, prefill_tok_s = await calibrate(options, source)
    target_ms = options.target_itl or options.times * decode_s * 1e3
    loads = [draw(options, decode_s, prefill_tok_s, bursts=bursts, seed=bursts) for bursts in (1, options.bursts)]
    console.print(
        f"{source.name}, {options.device}: alone, {options.decoders} users decode at {decode_s * 1e3:.1f} ms per token, and "
        f"prompts take {1e3 / prefill_tok_s:.2f} ms per token.\nLoad: these users, and {options.burst} prompts of "
        f"{options.prompt} tokens every {loads[1].period_s:.1f} s, {options.bursts} times. Target: ITL p99 within "
        f"{target_ms:.0f} ms.",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    runs: dict[str, list[Run]] = {"fixed": [], "adaptive": []}
    for repeat in range(options.repeats):
        for name in runs if repeat % 2 == 0 else reversed(runs):
            run = await measure(options, source, target_ms if name == "adaptive" else None, loads)
            runs[name].append(run)
            shown = ", ".join(f"{title} {number:.1f}" for title, number in run.numbers(target_ms).items())
            console.print(f"  {repeat + 1} {name:8} {shown}", style="dim", highlight=False, soft_wrap=True)
    report(runs, target_ms, console)


def report(runs: dict[str, list[Run]], target_ms: float, console: Console) -> None:
    """Medians over repeats, what the controller settled on, and the verdict."""
    medians: dict[str, dict[str, float]] = {}
    for name, each in runs.items():
        rows = [run.numbers(target_ms) for run in each]
        medians[name] = {title: statistics.median(row[title] for row in rows) for title in rows[0]}
    table = Table(box=box.MARKDOWN)
    table.add_column("")
    for title in medians["fixed"]:
        table.add_column(title, justify="right")
    for name, row in medians.items():
        table.add_row(name, *(f"{number:.1f}" for number in row.values()))
    Console(width=max(console.width, 120)).print(table)  # never folded, so that it can be pasted
    for run in runs["adaptive"]:
        console.print(
            f"tuned to {run.adaptive.max_num_batched_tokens} tokens in mixed steps, {run.adaptive.max_num_seqs} sequences; "
            f"{run.adaptive.num_changes} changes, warm-up included; margin {run.adaptive.margin:.2f}",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
    fixed, adaptive = (medians[name]["ITL p99, ms"] for name in ("fixed", "adaptive"))
    share = medians["adaptive"]["tok/s"] / medians["fixed"]["tok/s"]
    console.print(
        f"{'PASS' if adaptive <= target_ms < fixed else 'MISS'}: ITL p99 target {target_ms:.0f} ms: fixed limits "
        f"{'break' if fixed > target_ms else 'hold'} it ({fixed:.0f} ms), adaptive tuning "
        f"{'holds' if adaptive <= target_ms else 'breaks'} it ({adaptive:.0f} ms), at {share:.0%} of the throughput",
        highlight=False, soft_wrap=True,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=f"a path, a hub name, or random weights of {', '.join(SHAPES)}")
    parser.add_argument("--device", default="auto", help="auto (default), cpu or cuda")
    parser.add_argument("--target-itl", type=float, metavar="MS", help="default: --times what decoding alone takes")
    parser.add_argument("--times", type=float, default=8.0, help="(default 8)")
    parser.add_argument(
        "--decoders", type=int, default=4, metavar="N", help="users who decode all the time (default 4)"
    )
    parser.add_argument("--burst", type=int, default=3, metavar="N", help="prompts that arrive together (default 3)")
    parser.add_argument("--prompt", type=int, default=800, metavar="TOKENS", help="length of each (default 800)")
    parser.add_argument("--bursts", type=int, default=5, metavar="N", help="of a run (default 5)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of both, in turns (default 3)")
    parser.add_argument("--log-level", default="WARNING", help="INFO shows every change of the limits")
    options = parser.parse_args()
    logging.basicConfig(format="%(message)s")
    with tempfile.TemporaryDirectory() as folder:
        if options.model in SHAPES:
            source = ModelSource("folder", write_config(options.model, Path(folder)), options.model)
        else:
            source = resolve(options.model)
        asyncio.run(compare(options, source, Console()))


if __name__ == "__main__":
    main()
