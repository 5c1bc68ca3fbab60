"""Embeddings: texts and tokens per second of Tonle against transformers, one by one and in padded batches, in one run.

    python -m benchmarks.embeddings                                          # the default model, on this machine's CPU
    python -m benchmarks.embeddings --shape qwen2.5-1.5b --texts 512         # random weights, on a GPU
    python -m benchmarks.embeddings --ranking                                # how well scores and embeddings rank, on a small set

Does: embed the same texts (token ids of a seed, lengths drawn evenly) on both sides in turns, print medians, ratios, and how far
the vectors are apart. Does not: judge a model's embeddings, but for `--ranking`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.baseline_sides import save_random, transformers_model, wait_for_kernels
from benchmarks.ranking import print_ranking
from benchmarks.workload import SHAPES
from tonle import EngineConfig, InferenceEngine
from tonle.engine.device import choose_device
from tonle.engine.embedding import normalized
from tonle.models.source import resolve

Vectors = np.ndarray  # (N, hidden size), of length 1


def texts_of(count: int, shortest: int, longest: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, vocab_size) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


class Transformers:
    """The base model's last hidden states, pooled."""

    def __init__(self, model: Any) -> None:
        self.model = model.base_model

    @torch.inference_mode()
    def embed(self, texts: list[list[int]], pooling: str, batch_size: int) -> Vectors:
        """Sorted by length, as those do who know that padding costs; padded on the right, which a decoder does not see."""
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        found: list[np.ndarray | None] = [None] * len(texts)
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            sizes = [len(texts[place]) for place in places]
            rows = [texts[place] + [0] * (max(sizes) - len(texts[place])) for place in places]
            mask = [[1] * size + [0] * (max(sizes) - size) for size in sizes]
            device = self.model.device
            states = self.model(
                torch.tensor(rows, device=device), attention_mask=torch.tensor(mask, device=device), use_cache=False
            ).last_hidden_state.float()
            for row, place in enumerate(places):
                own = states[row, : sizes[row]]
                found[place] = (own[-1] if pooling == "last" else own.mean(dim=0)).cpu().numpy()
        return normalized(np.stack([vector for vector in found if vector is not None]))


def measure(sides: dict[str, Callable[[], Vectors]], repeats: int) -> dict[str, tuple[float, Vectors]]:
    """Median seconds of each side, in turns, after one round that is not counted; and its vectors."""
    vectors = {name: work() for name, work in sides.items()}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, work in sides.items():
            began = time.monotonic()
            work()
            seconds[name].append(time.monotonic() - began)
    return {name: (statistics.median(seconds[name]), vectors[name]) for name in sides}


def compare(engine: InferenceEngine, theirs: Transformers, texts: list[list[int]], options: argparse.Namespace) -> None:
    console = Console()
    for pooling in ("last", "mean"):
        sides: dict[str, Callable[[], Vectors]] = {"Tonle": partial(engine.embed, texts, pooling)}
        some = texts[: options.one_by_one]
        sides["transformers, one by one"] = partial(theirs.embed, some, pooling, 1)
        for size in options.batch_sizes:
            sides[f"transformers, by {size}"] = partial(theirs.embed, texts, pooling, size)
        found = measure(sides, options.repeats)
        table = Table(
            title=f"{len(texts)} texts, {sum(map(len, texts))} tokens, pooling {pooling}", title_justify="left"
        )
        for name in ("", "texts/s", "tokens/s", "Tonle is", "furthest cosine"):
            table.add_column(name, justify="left" if not name else "right")
        ours_s, ours = found["Tonle"]
        for name, (seconds, vectors) in found.items():
            rate = sum(map(len, texts[: len(vectors)])) / seconds
            cells = ["", ""]
            if name != "Tonle":
                apart = float((vectors * ours[: len(vectors)]).sum(axis=1).min())
                cells = [f"{sum(map(len, texts)) / ours_s / rate:.2f} x", f"{apart:.4f}"]
            table.add_row(name, f"{len(vectors) / seconds:.1f}", f"{rate:.0f}", *cells)
        console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or GGUF file; the default model without")
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights of this shape instead")
    parser.add_argument("--device", default="auto", help="cpu or cuda")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--lengths", default="16-256", help="tokens of a text, from-to")
    parser.add_argument("--one-by-one", type=int, default=10**9, help="texts that transformers embeds one by one")
    parser.add_argument("--batch-sizes", type=lambda text: [int(size) for size in text.split(",")], default=[8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ranking", action="store_true", help="rank a small set instead")
    options = parser.parse_args()
    device = choose_device(options.device)
    with tempfile.TemporaryDirectory() as root:
        model = save_random(options.shape, Path(root)) if options.shape else options.model
        config = EngineConfig(  # the same texts come again: none is found in the prefix cache
            device=device.type, max_batch_size=None, max_sequence_length=2048, memory_pool_size=None,
            enable_prefix_caching=False,
        )  # fmt: skip
        with InferenceEngine(model, None, config) as engine:
            wait_for_kernels()
            if options.ranking:
                print_ranking(engine, Console())
                return
            source = resolve(model)
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
            theirs = Transformers(transformers_model(source, device.type, dtype))
            shortest, longest = map(int, options.lengths.split("-"))
            vocab_size = theirs.model.config.vocab_size
            compare(engine, theirs, texts_of(options.texts, shortest, longest, vocab_size), options)


if __name__ == "__main__":
    main()
