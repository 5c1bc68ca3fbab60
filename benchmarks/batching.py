"""The four strategies of `tonle.dynamic_batching` on the same texts of mixed lengths, with a real small encoder.

    python -m benchmarks.batching                  # 400 texts, 3 repeats, in turns
    python -m benchmarks.batching --items 100 --repeats 1

All texts wait from the start; each is embedded once (DistilBERT's architecture, random weights: what a batch costs does not
depend on their values). NAIVE, BUCKETED and MEMORY_AWARE run padded batches. CONTINUOUS has no padding: its texts are
computed one after the other, and texts join as others leave. `wait` is from the start until a text is embedded. `peak`
is measured: what the forward pass of the largest batch allocates; `estimated` is what `MemoryEstimator` said before.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import DistilBertConfig, DistilBertModel

from tonle.dynamic_batching import Batch, BatchInfo, BatchingConfig, BatchingStrategy, DynamicBatcher, MemoryEstimator

MIB = 1024**2
TARGET = 1.5  # × NAIVE's items per second, of MEMORY_AWARE or CONTINUOUS
VOCABULARY = 1000


@dataclass
class Run:
    seconds: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    infos: list[BatchInfo] = field(default_factory=list)


def encoder() -> Any:
    torch.manual_seed(0)
    config = DistilBertConfig(dim=256, n_layers=4, n_heads=4, hidden_dim=1024, vocab_size=VOCABULARY)
    return DistilBertModel(config).eval()


def texts(num_items: int, seed: int) -> list[torch.Tensor]:
    """Token ids. Most texts are short, some fill the context: log-normal, 8 to 512 tokens."""
    draw = random.Random(seed)
    lengths = [min(512, max(8, int(draw.lognormvariate(4.0, 1.0)))) for _ in range(num_items)]
    return [torch.tensor([draw.randrange(5, VOCABULARY) for _ in range(length)]) for length in lengths]


def embed_padded(model: Any, batch: list[torch.Tensor]) -> None:
    lengths = torch.tensor([len(text) for text in batch])
    ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)  # [items, padded length]
    mask = (torch.arange(ids.shape[1])[None, :] < lengths[:, None]).long()
    model(ids, attention_mask=mask)


def run_padded(model: Any, batcher: DynamicBatcher, run: Run, began: float) -> None:
    while len(batcher):
        batch, info = batcher.get_next_batch()
        embed_padded(model, list(batch))
        run.infos.append(info)
        run.waits_s += [time.perf_counter() - began] * info.size


def run_continuous(model: Any, batcher: DynamicBatcher, run: Run, began: float) -> None:
    batch, info = batcher.get_next_batch()
    run.infos.append(info)
    while len(batch):
        for slot in batch.slots():
            model(batch[slot][None, :])
            batch.finish(slot)
            run.waits_s.append(time.perf_counter() - began)
        batch.join()


def run_once(model: Any, strategy: BatchingStrategy, items: list[torch.Tensor], memory_mb: float) -> Run:
    estimator = MemoryEstimator.of(model)
    batcher = DynamicBatcher(BatchingConfig(strategy=strategy, memory_limit_mb=memory_mb), estimator)
    batcher.add_items([(text, len(text)) for text in items])
    run, began = Run(), time.perf_counter()
    step: Callable[[Any, DynamicBatcher, Run, float], None]
    step = run_continuous if strategy is BatchingStrategy.CONTINUOUS else run_padded
    with torch.inference_mode():
        step(model, batcher, run, began)
    run.seconds = time.perf_counter() - began
    return run


def largest_batch_mb(model: Any, strategy: BatchingStrategy, items: list[torch.Tensor], memory_mb: float) -> float:
    """MiB that the forward pass of the largest batch allocates, as the profiler counts them."""
    batcher = DynamicBatcher(BatchingConfig(strategy=strategy, memory_limit_mb=memory_mb), MemoryEstimator.of(model))
    batcher.add_items([(text, len(text)) for text in items])
    batches: list[tuple[Batch, BatchInfo]] = []
    while len(batcher):
        batches.append(batcher.get_next_batch())
    batch = list(max(batches, key=lambda pair: pair[1].estimated_mb or 0.0)[0])
    if strategy is BatchingStrategy.CONTINUOUS:
        batch = [max(batch, key=len)]  # one at a time
    with torch.inference_mode(), torch.profiler.profile(profile_memory=True) as profile:
        embed_padded(model, batch)
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=400, help="texts to embed (default: 400)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each strategy, in turns (default: 3)")
    parser.add_argument("--memory-mb", type=float, default=256.0, help="memory_limit_mb (default: 256)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console, model = Console(), encoder()
    items = texts(options.items, options.seed)
    console.print(f"{len(items)} texts of {min(map(len, items))} to {max(map(len, items))} tokens, mean "
                  f"{statistics.mean(map(len, items)):.0f}; at most {options.memory_mb:g} MiB and 32 texts a batch")  # fmt: skip
    with torch.inference_mode():
        embed_padded(model, items[:8])  # warm up
    runs: dict[BatchingStrategy, list[Run]] = {strategy: [] for strategy in BatchingStrategy}
    for repeat in range(options.repeats):
        for strategy in BatchingStrategy:
            console.print(f"  repeat {repeat + 1} of {options.repeats}: {strategy.name}", style="dim")
            runs[strategy].append(run_once(model, strategy, items, options.memory_mb))
    table = Table(box=box.MARKDOWN)
    columns = ("strategy", "items/s", "× NAIVE", "padding waste", "p95 wait, s", "peak, MiB", "estimated, MiB")
    for name in columns:
        table.add_column(name, justify="left" if name == "strategy" else "right")
    rates = {strategy: statistics.median(len(items) / run.seconds for run in each) for strategy, each in runs.items()}
    for strategy, each in runs.items():
        infos = each[0].infos
        waste = 1 - sum(info.real_tokens for info in infos) / sum(info.padded_tokens for info in infos)
        p95_s = statistics.median(statistics.quantiles(run.waits_s, n=20)[18] for run in each)
        estimated = max(info.estimated_mb or 0.0 for info in infos)
        if strategy is BatchingStrategy.CONTINUOUS:
            estimated = MemoryEstimator.of(model).sequence_mb(max(map(len, items)))
        peak = largest_batch_mb(model, strategy, items, options.memory_mb)
        table.add_row(strategy.name, f"{rates[strategy]:.1f}", f"{rates[strategy] / rates[BatchingStrategy.NAIVE]:.2f}",
                      f"{waste:.0%}", f"{p95_s:.2f}", f"{peak:.0f}", f"{estimated:.0f}")  # fmt: skip
    console.print(table)
    best = max(BatchingStrategy.MEMORY_AWARE, BatchingStrategy.CONTINUOUS, key=lambda strategy: rates[strategy])
    ratio = rates[best] / rates[BatchingStrategy.NAIVE]
    verdict = "PASS" if ratio >= TARGET else "MISS"
    console.print(f"{verdict}: {best.name} embeds {ratio:.2f} × as many items per second as NAIVE (target {TARGET})")


if __name__ == "__main__":
    main()
