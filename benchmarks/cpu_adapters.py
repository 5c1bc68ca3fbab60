"""What adapters cost on a CPU: users with adapters against the same users without, in turns, in one run.

    python -m benchmarks.cpu_adapters [MODEL] [--adapters 4] [--users 16] [--rank 16] [--float32] [--repeats 7]

A run: every user's prompt of 128 tokens, then 64 tokens for each, all users in one step, as the engine would compute them. Three
ways in turns: no adapters; every user with one of the adapters; on the same decoder, with adapters resident, none of the users
with any. Printed: tokens per second, ratios to the first way (median and spread of the repeats), and the target.
Adapters: random, on all seven matrices of every layer; in bfloat16, as most are saved, or `--float32`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from tonle.models.adapters import Adapter, AdapterPart
from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.cpu.open import open_cpu
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.source import resolve
from tonle.models.spec import ModelSpec

PROMPT, OUTPUT, BLOCK = 128, 64, 16  # tokens
TARGETS = {"adapters": 0.85, "base rows beside them": 0.97}  # of the throughput without adapters


def random_adapter(spec: ModelSpec, rank: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Adapter:
    """On all seven matrices, as large as a trained one's: some percent of what the weights give."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, q, kv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    shapes = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q), "gate": (inner, hidden),
              "up": (inner, hidden), "down": (hidden, inner)}  # fmt: skip

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to(dtype).float()

    parts = {
        (layer, module): AdapterPart(draw(rank, columns), 0.1 * draw(rows, rank) if dtype == torch.float32 else draw(rows, rank) / 8)
        for layer in range(spec.num_layers)
        for module, (rows, columns) in shapes.items()
    }  # fmt: skip
    return Adapter(f"{seed:064x}", parts)


class Users:
    """`count` users with caches of their own; `slots`: their adapters."""

    def __init__(self, decoder: CpuDecoder, count: int, slots: list[int] | None) -> None:
        spec, per_row = decoder.spec, -(-(PROMPT + OUTPUT) // BLOCK)
        self._decoder, self._count, self._slots = decoder, count, slots
        self._kv = KVCache(num_layers=spec.num_layers, num_blocks=count * per_row, block_size=BLOCK,
                           num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype=torch.float32,
                           device=torch.device("cpu"))  # fmt: skip
        self._tables = torch.arange(count * per_row, dtype=torch.int32).view(count, per_row)
        self._prompts = torch.randint(0, spec.vocab_size, (count, PROMPT), generator=torch.Generator().manual_seed(0))

    def run(self) -> tuple[float, float]:
        """Seconds for the prompts, and for the tokens after them."""
        began = time.perf_counter()
        tokens = torch.cat([self._step([user], 0, self._prompts[user]) for user in range(self._count)])
        between = time.perf_counter()
        for position in range(PROMPT, PROMPT + OUTPUT - 1):
            tokens = self._step(list(range(self._count)), position, tokens)
        return between - began, time.perf_counter() - between

    def _step(self, rows: list[int], start: int, tokens: torch.Tensor) -> torch.Tensor:
        """The next token of each row; all rows are `start` tokens long, and have equally many new ones."""
        size = len(tokens) // len(rows)
        positions = torch.arange(start, start + size).repeat(len(rows))
        tables = self._tables[rows]
        blocks = tables.repeat_interleave(size, dim=0)[torch.arange(len(tokens)), positions // BLOCK]
        inputs = StepInputs(
            tokens=tokens, positions=positions, slots=blocks.long() * BLOCK + positions % BLOCK,
            row_starts=list(range(0, len(tokens) + 1, size)), context_lens=[start + size] * len(rows), block_tables=tables,
            num_decode=len(rows) if size == 1 else 0, logit_indices=torch.arange(size - 1, len(tokens), size),
            adapter_slots=None if self._slots is None else [self._slots[row] for row in rows],
        )  # fmt: skip
        return self._decoder.forward(inputs, self._kv).argmax(-1)


def ready(decoder: object, *, adapters: bool) -> CpuDecoder:
    """Once its kernels are compiled."""
    if not isinstance(decoder, CpuDecoder):
        raise SystemExit("this model runs through torch alone: there is nothing to measure")
    while not decoder.crossover or (adapters and not decoder._adapted):
        time.sleep(0.1)
    return decoder


def measure(ways: dict[str, Callable[[], tuple[float, float]]], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Each way's (prompt s, output s), in turns; a first round is not counted."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(repeats + 1):
        for name, run in ways.items():
            seconds = run()
            if turn:
                found[name].append(seconds)
    return found


def report(found: dict[str, list[tuple[float, float]]], users: int) -> None:
    table = Table(title=f"{users} users, {PROMPT} tokens in, {OUTPUT} out")
    for column in ("", "tok/s", "of none", "prompts alone", "outputs alone", "target"):
        table.add_column(column, justify="left" if not column else "right")
    base = found["none"]
    for name, runs in found.items():
        rate = statistics.median(users * OUTPUT / sum(run) for run in runs)
        whole, prompts, outputs = (
            [part(b) / part(r) for b, r in zip(base, runs, strict=True)]
            for part in (sum, lambda run: run[0], lambda run: run[1])
        )
        spread = (max(whole) - min(whole)) / 2
        middle = statistics.median(whole)
        target = "" if name not in TARGETS else f">= {TARGETS[name]} {'holds' if middle >= TARGETS[name] else 'missed'}"
        table.add_row(name, f"{rate:.0f}", f"{middle:.3f} ±{spread:.3f}", f"{statistics.median(prompts):.3f}",
                      f"{statistics.median(outputs):.3f}", target)  # fmt: skip
    Console(width=110).print(table)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description="what adapters cost on a CPU")
    parser.add_argument("model", nargs="?")
    for name, default in (("adapters", 4), ("users", 16), ("rank", 16), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--float32", action="store_true", help="adapters whose numbers are not bfloat16")
    asked = parser.parse_args()
    source = resolve(asked.model)
    without, decoder = ready(open_cpu(source), adapters=False), open_cpu(source)
    assert isinstance(decoder, CpuDecoder)
    decoder.enable_adapters(asked.adapters, asked.rank)
    dtype = torch.float32 if asked.float32 else torch.bfloat16
    began = time.perf_counter()
    for slot in range(asked.adapters):
        decoder.set_adapter(slot, random_adapter(decoder.spec, asked.rank, slot, dtype))
    print(f"an adapter is made and set in {(time.perf_counter() - began) / asked.adapters * 1e3:.0f} ms")
    ready(decoder, adapters=True)
    slots = [user % asked.adapters for user in range(asked.users)]
    ways = {"none": Users(without, asked.users, None).run, "adapters": Users(decoder, asked.users, slots).run,
            "base rows beside them": Users(decoder, asked.users, None).run}  # fmt: skip
    report(measure(ways, asked.repeats), asked.users)


if __name__ == "__main__":
    main()
