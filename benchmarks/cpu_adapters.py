"""What adapters cost on a CPU: users with adapters against the same users without, step by step in turns, in one run.

    python -m benchmarks.cpu_adapters [MODEL] [--adapters 4] [--users 16] [--rank 16] [--float32] [--threads 1] [--repeats 7]

A run: every user's prompt of 128 tokens, a step each; then 64 tokens for each, all users in one step. Three ways, whose steps
take turns: no adapters; every user with one of the adapters; on the same decoder, with adapters resident, none of the users
with any. A way's throughput is that of its steps' lower quartile, since other programs disturb a shared machine. With
`--threads 1` what is measured is processor time, which they disturb least. Printed: tokens per second, ratios to the first way
(median and spread of the repeats), and the targets.
Adapters: random, on all seven matrices of every layer; in bfloat16, or `--float32`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from tonle.config.cores import num_cores
from tonle.models.adapters import Adapter, AdapterPart
from tonle.models.cpu import cpu_decoder
from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.cpu.open import open_cpu
from tonle.models.cpu.team import Team
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

    def draw(*shape: int, strength: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * strength * shape[1] ** -0.5).to(dtype).float()

    parts = {
        (layer, module): AdapterPart(draw(rank, columns), draw(rows, rank, strength=0.1))
        for layer in range(spec.num_layers)
        for module, (rows, columns) in shapes.items()
    }
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
        self._tokens = torch.zeros(count, dtype=torch.int64)  # each user's latest

    def prompt(self, user: int) -> None:
        self._tokens[user] = self._step([user], 0, self._prompts[user])[0]

    def decode(self, position: int) -> None:
        self._tokens = self._step(list(range(self._count)), position, self._tokens)

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


def in_turns(
    ways: dict[str, Users], steps: list[Callable[[Users], None]], clock: Callable[[], float]
) -> dict[str, float]:
    """Each way's seconds for a step: the lower quartile."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for step in steps:
        for name, users in ways.items():
            began = clock()
            step(users)
            times[name].append(clock() - began)
    return {name: sorted(each)[len(each) // 4] for name, each in times.items()}


def measure(
    ways: dict[str, Users], users: int, repeats: int, clock: Callable[[], float]
) -> dict[str, list[tuple[float, float]]]:
    """Each way's seconds for a prompt and for a step of all users, by repeat; a first round is not counted."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    prompts = [lambda way, user=user: way.prompt(user) for user in range(users)]  # type: ignore[misc]
    outputs = [lambda way, at=at: way.decode(at) for at in range(PROMPT, PROMPT + OUTPUT - 1)]  # type: ignore[misc]
    for turn in range(repeats + 1):
        prompt, output = in_turns(ways, prompts, clock), in_turns(ways, outputs, clock)
        for name in ways:
            if turn:
                found[name].append((prompt[name], output[name]))
    return found


def report(found: dict[str, list[tuple[float, float]]], users: int, title: str) -> None:
    table = Table(title=title)
    for column in ("", "tok/s", "of none", "prompt, ms", "of none", "step of all, ms", "of none", "target"):
        table.add_column(column, justify="right" if column else "left")

    def seconds(run: tuple[float, float]) -> float:
        return users * run[0] + (OUTPUT - 1) * run[1]

    base = found["none"]
    for name, runs in found.items():
        cells = [name]
        for digits, unit, part in (
            (0, users * OUTPUT, seconds), (1, 1e3, lambda run: run[0]), (1, 1e3, lambda run: run[1])
        ):  # fmt: skip
            times = [part(run) for run in runs]
            ratios = sorted(part(b) / each for b, each in zip(base, times, strict=True))
            middle = statistics.median(times)
            cells.append(f"{unit / middle if part is seconds else unit * middle:.{digits}f}")
            cells.append(f"{statistics.median(ratios):.3f} ±{(ratios[-1] - ratios[0]) / 2:.3f}")
        reached = statistics.median(seconds(b) / seconds(run) for b, run in zip(base, runs, strict=True))
        if name in TARGETS:
            cells.append(f">= {TARGETS[name]} {'holds' if reached >= TARGETS[name] else 'missed'}")
        table.add_row(*cells)
    Console(width=140).print(table)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description="what adapters cost on a CPU")
    parser.add_argument("model", nargs="?")
    for name, default in (("adapters", 4), ("users", 16), ("rank", 16), ("repeats", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--float32", action="store_true", help="adapters whose numbers are not bfloat16")
    parser.add_argument("--threads", type=int, help="of the decoder; 1: processor time is measured")
    asked = parser.parse_args()
    source, threads = resolve(asked.model), asked.threads or num_cores()
    cpu_decoder.Team = lambda: Team(threads)  # type: ignore[assignment, misc]
    without, decoder = ready(open_cpu(source), adapters=False), ready(open_cpu(source), adapters=False)
    decoder.enable_adapters(asked.adapters, asked.rank)
    dtype = torch.float32 if asked.float32 else torch.bfloat16
    made = [random_adapter(decoder.spec, asked.rank, seed, dtype) for seed in range(asked.adapters)]
    began = time.perf_counter()
    for slot, adapter in enumerate(made):
        decoder.set_adapter(slot, adapter)
    per_adapter = (time.perf_counter() - began) / asked.adapters
    ready(decoder, adapters=True)
    slots = [user % asked.adapters for user in range(asked.users)]
    ways = {"none": Users(without, asked.users, None), "adapters": Users(decoder, asked.users, slots),
            "base rows beside them": Users(decoder, asked.users, None)}  # fmt: skip
    found = measure(ways, asked.users, asked.repeats, time.thread_time if threads == 1 else time.perf_counter)
    title = f"{asked.users} users, {PROMPT} tokens in, {OUTPUT} out, {asked.adapters} adapters of rank {asked.rank}, {dtype}"
    report(found, asked.users, f"{title}, {threads} threads; an adapter is set in {per_adapter * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
