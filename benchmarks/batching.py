"""The four strategies of `tonle.dynamic_batching` on the same texts of mixed lengths, with a real small encoder.

    python -m benchmarks.batching                  # 400 texts, 3 repeats, in turns
    python -m benchmarks.batching --items 100 --repeats 1

All texts wait from the start; each is embedded once (DistilBERT's architecture, random weights: what a batch costs does not
depend on their values). NAIVE, BUCKETED and MEMORY_AWARE run padded batches. CONTINUOUS runs ragged ones: the tokens of its
texts lie one after the other, each text attends to itself alone, and other texts join when these leave. `wait` is from
the start until a text is embedded. `peak` is measured: what the forward pass of the largest batch allocates; `estimated`
is what `MemoryEstimator` said before. `× NAIVE` is the median over repeats of the ratio within one repeat.

Another busy process distorts this table: torch's threads meet after every operation and wait there for the one that was not
given a core, so the smaller the operations, the more is lost. One busy process on two cores took half of NAIVE's speed
and three quarters of the others'. So the load is printed. On two threads, texts embedded one by one were slower than ragged
batches: 0.77 × on an idle machine, 0.84 × beside one busy process, half beside two or four (medians of two runs).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler says when it starts and stops
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from rich.console import Console
from torch.nn.functional import scaled_dot_product_attention
from transformers import DistilBertConfig, DistilBertModel

from benchmarks.tables import markdown_table, print_wide
from tonle.dynamic_batching import BatchingConfig, BatchingStrategy, DynamicBatcher, MemoryEstimator

MIB = 1024**2
TARGET = 1.5  # × NAIVE's items per second, of MEMORY_AWARE or CONTINUOUS
VOCABULARY = 1000


@dataclass
class Run:
    """One strategy, all texts once."""

    seconds: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    real_tokens: int = 0
    padded_tokens: int = 0  # real ones and padding
    largest: list[torch.Tensor] = field(default_factory=list)  # the texts of the batch that was estimated highest
    estimated_mb: float = 0.0  # of that batch

    @property
    def padding_waste(self) -> float:
        return 1 - self.real_tokens / self.padded_tokens


def encoder() -> Any:
    torch.manual_seed(0)
    config = DistilBertConfig(dim=256, n_layers=4, n_heads=4, hidden_dim=1024, vocab_size=VOCABULARY)
    return DistilBertModel(config).eval()


def texts(num_items: int, seed: int) -> list[torch.Tensor]:
    """Token ids. Most texts are short, some fill the context: log-normal, 8 to 512 tokens."""
    draw = random.Random(seed)
    lengths = [min(512, max(8, int(draw.lognormvariate(4.0, 1.0)))) for _ in range(num_items)]
    return [torch.tensor([draw.randrange(5, VOCABULARY) for _ in range(length)]) for length in lengths]


def embed_padded(model: Any, batch: list[torch.Tensor]) -> torch.Tensor:
    """[items, padded length, dim]"""
    lengths = torch.tensor([len(text) for text in batch])
    ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)  # [items, padded length]
    mask = (torch.arange(ids.shape[1])[None, :] < lengths[:, None]).long()
    return model(ids, attention_mask=mask).last_hidden_state


def embed_ragged(model: Any, batch: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """[length, dim] for each text: matrix products over all tokens together, attention text by text."""
    lengths, heads = [len(text) for text in batch], model.config.n_heads
    places = torch.cat([torch.arange(length) for length in lengths])
    embeddings = model.embeddings
    states = embeddings.word_embeddings(torch.cat(batch)) + embeddings.position_embeddings(places)
    states = embeddings.LayerNorm(states)  # [all tokens, dim]
    for layer in model.transformer.layer:
        attention = layer.attention
        parts = [
            product(states)
            .view(len(states), heads, -1)
            .transpose(0, 1)
            .split(lengths, dim=1)  # [heads, length, dim/heads]
            for product in (attention.q_lin, attention.k_lin, attention.v_lin)
        ]
        joined = torch.cat([scaled_dot_product_attention(*text) for text in zip(*parts, strict=True)], dim=1)
        states = layer.sa_layer_norm(attention.out_lin(joined.transpose(0, 1).flatten(1)) + states)
        states = layer.output_layer_norm(layer.ffn(states) + states)
    return states.split(lengths)


def batches(batcher: DynamicBatcher, estimator: MemoryEstimator) -> Iterator[tuple[list[torch.Tensor], int, float]]:
    """Until nothing waits: the texts to embed together, their tokens with padding, and their estimated MiB."""
    is_continuous = batcher.config.strategy is BatchingStrategy.CONTINUOUS
    while len(batcher):
        batch, info = batcher.get_next_batch()
        if not is_continuous:
            yield list(batch), info.padded_tokens, info.estimated_mb or 0.0
        while is_continuous and len(batch):
            lengths = [len(text) for text in batch]
            yield list(batch), sum(lengths), sum(map(estimator.sequence_mb, lengths))
            for slot in batch.slots():  # an encoder is done with a text after one pass
                batch.finish(slot)
            batch.join()


def run_once(model: Any, strategy: BatchingStrategy, items: list[torch.Tensor], memory_mb: float) -> Run:
    estimator = MemoryEstimator.of(model)
    batcher = DynamicBatcher(BatchingConfig(strategy=strategy, memory_limit_mb=memory_mb), estimator)
    batcher.add_items([(text, len(text)) for text in items])
    run, began = Run(), time.perf_counter()
    with torch.inference_mode():
        for texts_now, padded_tokens, estimated_mb in batches(batcher, estimator):
            embed(model, strategy, texts_now)
            run.waits_s += [time.perf_counter() - began] * len(texts_now)
            run.real_tokens += sum(map(len, texts_now))
            run.padded_tokens += padded_tokens
            if estimated_mb > run.estimated_mb:
                run.largest, run.estimated_mb = texts_now, estimated_mb
    run.seconds = time.perf_counter() - began
    return run


def embed(model: Any, strategy: BatchingStrategy, batch: list[torch.Tensor]) -> None:
    if strategy is BatchingStrategy.CONTINUOUS:
        embed_ragged(model, batch)
    else:
        embed_padded(model, batch)


def peak_mb(model: Any, strategy: BatchingStrategy, batch: list[torch.Tensor]) -> float:
    """MiB that a forward pass of this batch allocates, as the profiler counts them."""
    with torch.inference_mode(), torch.profiler.profile(profile_memory=True) as profile:
        embed(model, strategy, batch)
    now = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak / MIB


@torch.inference_mode()
def largest_difference(model: Any, batch: list[torch.Tensor]) -> float:
    """Between the embeddings of a ragged and of a padded batch: they must be the same."""
    padded = embed_padded(model, batch)
    return max(float((row[: len(ragged)] - ragged).abs().max())
               for row, ragged in zip(padded, embed_ragged(model, batch), strict=True))  # fmt: skip


def ratios(runs: dict[BatchingStrategy, list[Run]]) -> dict[BatchingStrategy, float]:
    """× NAIVE in items per second: the median over repeats, each compared with NAIVE's run in the same repeat."""
    naive = runs[BatchingStrategy.NAIVE]
    return {
        strategy: statistics.median(base.seconds / run.seconds for base, run in zip(naive, each, strict=True))
        for strategy, each in runs.items()
    }


def print_results(model: Any, runs: dict[BatchingStrategy, list[Run]], console: Console) -> None:
    columns = ("strategy", "items/s", "× NAIVE", "padding waste", "p95 wait, s", "peak, MiB", "estimated, MiB")
    gains, rows = ratios(runs), []
    for strategy, each in runs.items():
        p95_s = statistics.median(statistics.quantiles(run.waits_s, n=20)[18] for run in each)
        rate = statistics.median(len(run.waits_s) / run.seconds for run in each)
        rows.append((strategy.name, f"{rate:.1f}", f"{gains[strategy]:.2f}", f"{each[0].padding_waste:.0%}", f"{p95_s:.2f}",
                     f"{peak_mb(model, strategy, each[0].largest):.0f}", f"{each[0].estimated_mb:.0f}"))  # fmt: skip
    print_wide(markdown_table(columns, rows), console)
    best = max(BatchingStrategy.MEMORY_AWARE, BatchingStrategy.CONTINUOUS, key=lambda strategy: gains[strategy])
    verdict = "PASS" if gains[best] >= TARGET else "MISS"
    console.print(
        f"{verdict}: {best.name} embeds {gains[best]:.2f} × as many items per second as NAIVE (target {TARGET})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=400, help="texts to embed (default: 400)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each strategy, in turns (default: 3)")
    parser.add_argument("--memory-mb", type=float, default=256.0, help="memory_limit_mb (default: 256)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    console, model = Console(highlight=False), encoder()
    items = texts(options.items, options.seed)
    console.print(f"{len(items)} texts of {min(map(len, items))} to {max(map(len, items))} tokens, mean "
                  f"{statistics.mean(map(len, items)):.0f}; at most {options.memory_mb:g} MiB and 32 texts a batch; "
                  f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f} before", soft_wrap=True)  # fmt: skip
    difference = largest_difference(model, items[:8])  # and a warm-up
    console.print(f"ragged and padded embeddings differ by at most {difference:.0e}")
    runs: dict[BatchingStrategy, list[Run]] = {strategy: [] for strategy in BatchingStrategy}
    for repeat in range(options.repeats):
        for strategy in BatchingStrategy:
            console.print(f"  repeat {repeat + 1} of {options.repeats}: {strategy.name}", style="dim")
            runs[strategy].append(run_once(model, strategy, items, options.memory_mb))
    print_results(model, runs, console)


if __name__ == "__main__":
    main()
