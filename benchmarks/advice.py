"""The advice of docs/guide.md, measured: each setting against its alternative, in turns, on the default model.

    python -m benchmarks.advice                       # all of it
    python -m benchmarks.advice --only batch,prefix --repeats 5
    python -m benchmarks.advice --model FOLDER --device cuda

Does: run the same requests with each setting of a case, alternately, and print medians and ratios to the first setting (taken
within a repeat). Does not: judge. Greedy, answers at full length, new prompts in each repeat. Times are from a request's
arrival; `tok/s` are output tokens of all requests from the first arrival to the last token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rich.console import Console

from benchmarks.baseline_sides import greedy, wait_for_kernels
from benchmarks.baseline_tables import seconds
from benchmarks.gpu_targets import machine
from benchmarks.tables import markdown_table, print_wide
from benchmarks.workload import Job
from tonle import EngineConfig, InferenceEngine, RequestPriority
from tonle.engine.request import GenerationResult
from tonle.inference_optimizer import OptimizedEngine, create_optimized_engine

MIB = 2**20
HISTORY = 40  # messages
SHARED_TOKENS = 256


@dataclass
class Figures:
    """Of one run. None: says nothing here."""

    tokens_per_s: float | None = None
    first_token_s: float | None = None  # median over requests
    answer_s: float | None = None  # whole, median over requests
    notes: dict[str, float] = field(default_factory=dict)


Work = Callable[[Any, int], Figures]  # engine, seed


@dataclass
class Case:
    """Settings to compare, the first of which is the base, and what each is asked to do."""

    name: str  # for --only
    title: str
    settings: dict[str, tuple[Callable[[], Any], Work]]  # by the setting's text: what opens an engine, and the work


def jobs_of(count: int, prompt_tokens: int, answers: tuple[int, int], seed: int, shared: int = 0) -> list[Job]:
    draw = random.Random(seed)
    common = [draw.randrange(10, 30000) for _ in range(shared)]
    return [
        (common + [draw.randrange(10, 30000) for _ in range(prompt_tokens)], draw.randint(*answers))
        for _ in range(count)
    ]


def run(engine: InferenceEngine, jobs: list[Job], *, gap_s: float = 0.0) -> Figures:
    """A request every `gap_s`."""
    began_s, ids = time.monotonic(), []
    for place, (prompt, count) in enumerate(jobs):
        time.sleep(max(0.0, began_s + place * gap_s - time.monotonic()))
        ids.append(engine.submit_request(prompt, greedy(count)))
    return figures([engine.result(request_id) for request_id in ids], began_s)


def figures(results: list[GenerationResult], began_s: float) -> Figures:
    ended_s = max(result.timings.finished_s or 0.0 for result in results)
    return Figures(
        sum(result.usage.completion_tokens for result in results) / (ended_s - began_s),
        statistics.median(result.timings.ttft_s or 0.0 for result in results),
        statistics.median(result.timings.latency_s or 0.0 for result in results),
    )


def burst(engine: InferenceEngine, seed: int) -> Figures:
    return run(engine, jobs_of(16, 48, (8, 24), seed))


def trickle(engine: InferenceEngine, seed: int) -> Figures:
    return run(engine, jobs_of(10, 48, (4, 32), seed), gap_s=0.1)


def alone(engine: InferenceEngine, seed: int) -> Figures:
    return run(engine, jobs_of(1, 48, (8, 8), seed))


def long_prompt(engine: InferenceEngine, seed: int) -> Figures:
    return run(engine, jobs_of(4, 384, (16, 16), seed))


def steady(engine: InferenceEngine, seed: int) -> Figures:
    """An answer that is being generated while three long prompts arrive: the longest pause between its tokens."""
    (prompt, _), *others = [jobs_of(1, 48, (32, 32), seed)[0], *jobs_of(3, 384, (4, 4), seed + 500_000)]

    async def stream() -> tuple[list[float], list[str]]:
        moments: list[float] = []
        ids: list[str] = []
        async for delta in engine.stream(prompt, greedy(32)):
            moments += [time.monotonic()] * bool(delta.tokens)
            if len(moments) == 4:
                ids = ids or [engine.submit_request(each, greedy(count)) for each, count in others]
        return moments, ids

    moments, ids = asyncio.run(stream())
    results = [engine.result(request_id) for request_id in ids]
    first_s = statistics.median(result.timings.ttft_s or 0.0 for result in results)
    pause_s = max(late - early for early, late in pairwise(moments))
    return Figures(None, first_s, None, {"ms longest pause of a running answer": round(1e3 * pause_s)})


def shared_prefix(engine: InferenceEngine, seed: int) -> Figures:
    run(engine, jobs_of(1, 16, (1, 1), seed, SHARED_TOKENS))  # the first one computes it
    return run(engine, jobs_of(8, 16, (8, 8), seed, SHARED_TOKENS))


def crowded(engine: InferenceEngine, seed: int) -> Figures:
    before = engine.get_stats()["cache_info"]["num_preemptions"]
    found = run(engine, jobs_of(16, 48, (48, 48), seed))
    found.notes["preemptions"] = engine.get_stats()["cache_info"]["num_preemptions"] - before
    return found


def urgent(priority: RequestPriority) -> Callable[[InferenceEngine, int], Figures]:
    """One request behind 16 others, of which four run at a time. Its own times alone."""

    def work(engine: InferenceEngine, seed: int) -> Figures:
        *others, (prompt, _) = jobs_of(17, 48, (16, 16), seed)
        ids = [engine.submit_request(each, greedy(count)) for each, count in others]
        began_s = time.monotonic()
        last = engine.submit_request(prompt, greedy(4), priority)
        found = figures([engine.result(last)], began_s)
        for request_id in ids:
            engine.result(request_id)
        return Figures(None, found.first_token_s, found.answer_s)

    return work


def ask_twice(engine: OptimizedEngine, seed: int) -> Figures:
    """The second of two equal questions."""
    engine.generate(f"Question {seed}: what is a bridge?", max_tokens=24, early_stopping=False)
    _, metadata = engine.generate(f"Question {seed}: what is a bridge?", max_tokens=24, early_stopping=False)
    return Figures(answer_s=metadata["latency"], notes={"cache hit": float(metadata["cache_hit"])})


def long_history(engine: OptimizedEngine, seed: int) -> Figures:
    """The next question of a long conversation, whose history no engine has seen."""
    draw = random.Random(seed)
    words = ["river", "bridge", "market", "silver", "morning", "letter", "garden", "window"]
    history = [{"role": ("user", "assistant")[place % 2], "content": " ".join(draw.choices(words, k=20))}
               for place in range(HISTORY)]  # fmt: skip
    _, metadata = engine.generate("And then?", history, max_tokens=8, early_stopping=False)
    parts = metadata["breakdown"]
    first_s = parts["tokenization"] + parts["queue"] + parts["prefill"]
    return Figures(None, first_s, metadata["latency"], {"prompt tokens": metadata["prompt_tokens"]})


def cases(model: str | None, device: str) -> list[Case]:
    def engine(**settings: Any) -> Callable[[], Any]:
        base = {
            "device": device,
            "memory_pool_size": 256 * MIB,
            "max_sequence_length": 512,
            "generation_config": "none",
        }
        return lambda: InferenceEngine(model, config=EngineConfig(**{**base, **settings}))

    def chat(*, enable_cache: bool = True, **settings: Any) -> Callable[[], Any]:
        return lambda: create_optimized_engine(model, device, enable_cache, memory_pool_size=256 * MIB,
                                               max_sequence_length=2048, generation_config="none", **settings)  # fmt: skip

    def compared(name: str, title: str, work: Work, engines: dict[str, Callable[[], Any]]) -> Case:
        return Case(name, title, {label: (opened, work) for label, opened in engines.items()})

    return [
        compared("batch", "16 requests at once", burst,
                 {f"max_batch_size={size}": engine(max_batch_size=size) for size in (1, 8, 32)}),
        compared("continuous", "a request every 0.1 s", trickle,
                 {f"enable_continuous_batching={on}": engine(enable_continuous_batching=on) for on in (False, True)}),
        compared("timeout", "one request", alone,
                 {f"enable_continuous_batching={on}, batch_timeout_ms={wait}":
                  engine(enable_continuous_batching=on, batch_timeout_ms=wait)
                  for on, wait in ((False, 0.0), (False, 100.0), (True, 0.0), (True, 100.0))}),
        compared("prefix", f"8 requests that share {SHARED_TOKENS} tokens", shared_prefix,
                 {f"enable_prefix_caching={on}": engine(enable_prefix_caching=on) for on in (False, True)}),
        compared("pool", "16 requests at once", crowded,
                 {f"memory_pool_size={size} MiB": engine(memory_pool_size=size * MIB) for size in (24, 128)}),
        compared("step", "3 prompts of 384 tokens", steady,
                 {f"max_num_batched_tokens={tokens}": engine(max_num_batched_tokens=tokens) for tokens in (64, 512)}),
        compared("bits", "4 prompts of 384 tokens", long_prompt,
                 {f"activation_bits={bits}": engine(activation_bits=bits) for bits in (16, 8)}),
        compared("dtype", "16 requests at once", burst,
                 {f"dtype={dtype}": engine(dtype=dtype) for dtype in ("auto", "float32", "bfloat16")}),
        Case("priority", "one request behind 16",
             {priority.name: (engine(max_batch_size=4), urgent(priority))
              for priority in (RequestPriority.NORMAL, RequestPriority.CRITICAL)}),
        compared("profile", "16 requests at once", burst,
                 {f"profile_performance={on}": engine(profile_performance=on) for on in (False, True)}),
        compared("cache", "the same question again", ask_twice,
                 {f"enable_cache={on}": chat(enable_cache=on) for on in (False, True)}),
        compared("history", f"a question after {HISTORY} messages", long_history,
                 {f"context_window={window}": chat(context_window=window, enable_cache=False) for window in (None, 10)}),
    ]  # fmt: skip


def run_case(case: Case, repeats: int, seeds: Iterator[int]) -> dict[str, list[Figures]]:
    found: dict[str, list[Figures]] = {name: [] for name in case.settings}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(opened()) for name, (opened, _) in case.settings.items()}
        wait_for_kernels()
        seed = next(seeds)
        for name, engine in engines.items():
            case.settings[name][1](engine, seed)  # warm up
        for repeat in range(repeats):
            seed = next(seeds)
            for name in list(engines) if repeat % 2 == 0 else reversed(list(engines)):
                found[name].append(case.settings[name][1](engines[name], seed))
    return found


def rows(case: Case, found: dict[str, list[Figures]]) -> list[tuple[str, ...]]:
    """A row per setting: medians, and ratios to the first one's."""
    base = next(iter(found.values()))
    return [
        (case.name, f"{case.title}: {name}",
         _cell([each.tokens_per_s for each in runs], [each.tokens_per_s for each in base], lambda value: f"{value:.0f}"),
         _cell([each.first_token_s for each in runs], [each.first_token_s for each in base], seconds),
         _cell([each.answer_s for each in runs], [each.answer_s for each in base], seconds),
         ", ".join(f"{statistics.median(each.notes[note] for each in runs):g} {note}" for note in runs[0].notes))
        for name, runs in found.items()
    ]  # fmt: skip


def _cell(values: list[float | None], base: list[float | None], write: Callable[[float], str]) -> str:
    known = [(value, other) for value, other in zip(values, base, strict=True) if value is not None and other]
    if not known:
        return ""
    ratio = statistics.median(value / other for value, other in known)
    times = f"{ratio:.2f}" if ratio >= 0.01 else f"{ratio:.1g}"
    return f"{write(statistics.median(value for value, _ in known))} ({times}×)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder or a .gguf file (default: the default model)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--only", help="names of cases, separated by commas")
    parser.add_argument("--repeats", type=int, default=3, help="of each setting, in turns (default: 3)")
    options, console = parser.parse_args(), Console(highlight=False)
    known = cases(options.model, options.device)
    wanted = options.only.split(",") if options.only else [case.name for case in known]
    if missing := set(wanted) - {case.name for case in known}:
        parser.error(
            f"no case is called {', '.join(sorted(missing))}; there are {', '.join(case.name for case in known)}"
        )
    console.print(f"{machine()}; load {os.getloadavg()[0]:.1f} before; medians of {options.repeats}", soft_wrap=True)
    table: list[tuple[str, ...]] = []
    seeds = iter(range(1, 10**9))
    for case in known:
        if case.name in wanted:
            console.print(f"  {case.name}: {', '.join(case.settings)}", style="dim", soft_wrap=True)
            table += rows(case, run_case(case, options.repeats, seeds))
    print_wide(markdown_table(("case", "", "tok/s", "first token", "whole answer", ""), table), console)


if __name__ == "__main__":
    main()
