"""What eight bits cost and gain on a CPU: activations in 8 bits instead of 16, keys and values in int8 instead of float32.

    python -m benchmarks.cpu_eight_bits [MODEL] [--tokens 8192] [--threads 1] [--repeats 9] [--no-speed] [--no-text]

Exactness: the text is the project's documentation, in windows of 512 tokens, each computed as one prompt through the compiled
kernels. Per way: perplexity and its change (± one standard error), the mean Kullback-Leibler divergence from the exact way, how
often the most probable token is the same, and the share of groups of activations with a number that stands out.
Speed: a prompt of 128 tokens and steps of one and of 16 users, the ways in turns in one run; processor time of one thread with
`--threads 1`, which other programs disturb least. Printed as ratios to the exact way.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from tonle.config.cores import num_cores
from tonle.engine.text import load_text
from tonle.models.cpu import cpu_decoder
from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.cpu.open import open_cpu
from tonle.models.cpu.products import Bytes
from tonle.models.cpu.team import Team
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.source import ModelSource, resolve

WINDOW, BLOCK, PROMPT, CONTEXT = 512, 16, 128, 160  # tokens; CONTEXT: the middle of a request of 128 in, 64 out
WAYS = {
    "16-bit activations, float32 cache": (16, torch.float32),
    "8-bit activations, float32 cache": (8, torch.float32),
    "16-bit activations, int8 cache": (16, torch.int8),
    "8-bit activations, int8 cache": (8, torch.int8),
}
STEPS = {"prompt of 128": (1, PROMPT), "1 user": (1, 1), "16 users": (16, 1)}  # rows, new tokens of each


@dataclass
class Sums:
    """Over the tokens of a text."""

    count: int = 0
    loss: float = 0.0  # negative log-likelihood, nats
    change: float = 0.0  # of the loss, against the exact way
    square: float = 0.0  # of that change, token by token
    divergence: float = 0.0
    same: int = 0  # best tokens
    outliers: list[float] = field(default_factory=list)  # share of groups that have one, by step

    def add(self, logs: torch.Tensor, exact: torch.Tensor, tokens: torch.Tensor) -> None:
        """logs, exact (T, vocab): log-probabilities; tokens (T,): what came."""
        own, other = (-each.gather(1, tokens[:, None]).squeeze(1).double() for each in (logs, exact))
        self.count += len(tokens)
        self.loss += float(own.sum())
        self.change += float((own - other).sum())
        self.square += float((own - other).square().sum())
        self.divergence += float((exact.exp() * (exact - logs)).sum())
        self.same += int((logs.argmax(-1) == exact.argmax(-1)).sum())

    def row(self) -> list[str]:
        mean = self.change / self.count
        error = math.sqrt(max(self.square / self.count - mean**2, 0) / self.count)
        return [
            f"{math.exp(self.loss / self.count):.4f}", f"{math.expm1(mean):+.3%} ±{error:.3%}",
            f"{self.divergence / self.count:.5f}", f"{self.same / self.count:.2%}",
            f"{statistics.fmean(self.outliers):.1%}" if self.outliers else "",
        ]  # fmt: skip


def cache_for(decoder: CpuDecoder, num_blocks: int, dtype: torch.dtype) -> KVCache:
    spec = decoder.spec
    return KVCache(num_layers=spec.num_layers, num_blocks=num_blocks, block_size=BLOCK, num_kv_heads=spec.num_kv_heads,
                   head_dim=spec.head_dim, dtype=dtype, device=torch.device("cpu"))  # fmt: skip


def step_of(rows: int, start: int, tokens: torch.Tensor, *, all_logits: bool = False) -> StepInputs:
    """Each of `rows` users is `start` tokens long and has equally many of `tokens`."""
    size = len(tokens) // rows
    per_row = -(-(start + size) // BLOCK)
    tables = torch.arange(rows * per_row, dtype=torch.int32).view(rows, per_row)
    positions = torch.arange(start, start + size).repeat(rows)
    blocks = tables.repeat_interleave(size, dim=0)[torch.arange(len(tokens)), positions // BLOCK]
    ends = torch.arange(1, rows + 1) * size
    return StepInputs(
        tokens=tokens, positions=positions, slots=blocks.long() * BLOCK + positions % BLOCK,
        row_starts=[0, *ends.tolist()], context_lens=[start + size] * rows, block_tables=tables,
        num_decode=rows if size == 1 else 0, logit_indices=torch.arange(len(tokens)) if all_logits else ends - 1,
    )  # fmt: skip


def outlier_share(decoder: CpuDecoder, num_tokens: int) -> list[float]:
    """Of the groups of the last layer's inputs, and of the head's."""
    cut = decoder._workspace.cut(num_tokens, CONTEXT)
    forms = (cut.to_qkv, cut.to_o, cut.to_gate_up, cut.to_down, cut.to_head)
    return [float(np.mean(form.which != 0)) for form in forms if isinstance(form, Bytes)]


@torch.inference_mode()
def read_text(decoders: dict[str, CpuDecoder], tokens: torch.Tensor) -> dict[str, Sums]:
    sums = {way: Sums() for way in decoders}
    for window in tokens.split(WINDOW):
        inputs, exact = step_of(1, 0, window, all_logits=True), torch.empty(0)
        for way, decoder in decoders.items():
            kv = cache_for(decoder, WINDOW // BLOCK, WAYS[way][1])
            logs = decoder.forward(inputs, kv)[:-1].log_softmax(-1)
            exact = logs if way == next(iter(decoders)) else exact
            sums[way].add(logs, exact, window[1:])
            sums[way].outliers += outlier_share(decoder, len(window))
    return sums


@torch.inference_mode()
def time_steps(decoders: dict[str, CpuDecoder], repeats: int, clock: str) -> dict[str, dict[str, float]]:
    """Milliseconds of each step, by way: the median over repeats, in turns."""
    now = time.thread_time if clock == "processor" else time.perf_counter
    taken: dict[str, dict[str, list[float]]] = {way: {name: [] for name in STEPS} for way in decoders}
    caches = {way: cache_for(decoder, 16 * CONTEXT // BLOCK, WAYS[way][1]) for way, decoder in decoders.items()}
    for _ in range(repeats):
        for name, (rows, size) in STEPS.items():
            for way, decoder in decoders.items():
                inputs = step_of(rows, 0 if size > 1 else CONTEXT - 1, torch.arange(rows * size) * 97 % 4000 + 5)
                decoder.forward(inputs, caches[way])  # the weights come from memory again, as in a server's steps
                began = now()
                decoder.forward(inputs, caches[way])
                taken[way][name].append((now() - began) * 1e3)
    return {way: {name: statistics.median(each) for name, each in of_way.items()} for way, of_way in taken.items()}


def open_ways(source: ModelSource, threads: int) -> dict[str, CpuDecoder]:
    cpu_decoder.Team = lambda: Team(threads)  # type: ignore[assignment, misc]
    found = {}
    for way, (bits, dtype) in WAYS.items():
        decoder = open_cpu(source, activation_bits=bits, cache_dtype=dtype, wait_for_kernels=True)
        if not isinstance(decoder, CpuDecoder):
            raise SystemExit("this model runs through torch alone: there is nothing to compare")
        found[way] = decoder
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=num_cores())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--no-speed", action="store_true")
    parser.add_argument("--no-text", action="store_true")
    options = parser.parse_args()
    source = resolve(options.model)
    decoders, console = open_ways(source, options.threads), Console()
    if not options.no_text:
        docs = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
        text = load_text(source).encode("\n\n".join(each.read_text() for each in docs))
        table = Table("", "perplexity", "change", "divergence", "same best token", "with outliers", title=source.name)
        for way, sums in read_text(decoders, torch.tensor(text[: options.tokens])).items():
            table.add_row(way, *sums.row())
        console.print(table)
    if not options.no_speed:
        clock = "processor" if options.threads == 1 else "wall"
        times = time_steps(decoders, options.repeats, clock)
        first = times[next(iter(times))]
        table = Table("", *STEPS, title=f"{clock} time of a step on {options.threads} threads, ms (of the first)")
        for way, of_way in times.items():
            table.add_row(way, *(f"{ms:.1f} ({ms / first[name]:.2f})" for name, ms in of_way.items()))
        console.print(table)


if __name__ == "__main__":
    main()
