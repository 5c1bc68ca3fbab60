"""Where the time of a CPU step goes, by kind: of one row, of 16, of 32, and of a prompt.

    python -m benchmarks.cpu_profile [MODEL]
    taskset -c 0 python -m benchmarks.cpu_profile --activation-bits 16     # on one thread
    python -m benchmarks.cpu_profile --beside 2        # and whole steps beside so many busy programs

Each kind of matrix is timed alone over all layers, on the same threads; what is left of the whole step is attention, norms,
rotation, meetings of the threads and the call itself. The decoder is the one that is served: 8-bit activations unless told
otherwise, keys and values in what suits the weights. Alone the best of `--repeats` counts, beside other programs the median.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.cpu.open import open_cpu
from tonle.models.cpu.step import product
from tonle.models.cpu.vector import ROWS
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.source import resolve

CONTEXT = 160  # tokens: the middle of a 128-in, 64-out request
BLOCK = 16
PROMPT = 128
STEPS = {
    "1 row": (1, 1),
    "16 rows": (16, 1),
    "32 rows": (32, 1),
    f"prompt of {PROMPT}": (1, PROMPT),
}  # rows, new tokens
BUSY = "while True: pass"


def times_ms(work: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append((time.perf_counter() - began) * 1e3)
    return times


def step_inputs(decoder: CpuDecoder, rows: int, new: int) -> tuple[StepInputs, KVCache]:
    """Rows whose contexts end at CONTEXT, or prompts of `new` tokens."""
    spec, length = decoder.spec, CONTEXT if new == 1 else new
    per_row = -(-length // BLOCK)
    kv = KVCache(num_layers=spec.num_layers, num_blocks=rows * per_row, block_size=BLOCK, num_kv_heads=spec.num_kv_heads,
                 head_dim=spec.head_dim, dtype=decoder.cache_dtype, device=torch.device("cpu"))  # fmt: skip
    tables = torch.arange(rows * per_row, dtype=torch.int32).view(rows, per_row)
    positions = torch.arange(length - new, length).repeat(rows)
    blocks = tables.repeat_interleave(new, dim=0)[torch.arange(rows * new), positions // BLOCK]
    ends = torch.arange(1, rows + 1) * new
    inputs = StepInputs(
        tokens=torch.randint(0, spec.vocab_size, (rows * new,)), positions=positions,
        slots=blocks.long() * BLOCK + positions % BLOCK, row_starts=[0, *ends.tolist()], context_lens=[length] * rows,
        block_tables=tables, num_decode=rows if new == 1 else 0, logit_indices=ends - 1,
    )  # fmt: skip
    return inputs, kv


def matrices_ms(decoder: CpuDecoder, rows: int, new: int, repeats: int) -> dict[str, float]:
    team, found = decoder._team, {}
    for kind in ("qkv", "o", "gate_up", "down", "head"):
        matrix = getattr(decoder._packed, kind)
        layers, blocks = matrix.weights.shape[:2]
        count = rows if kind == "head" else rows * new  # a prompt's last token alone has logits
        form = getattr(decoder._workspace.cut(count, CONTEXT), f"to_{kind}")
        x = np.random.default_rng(0).standard_normal((count, form[0].shape[1])).astype(np.float32)
        out = np.empty((count, blocks * ROWS), np.float32)

        def member_work(member: int, matrix=matrix, layers=layers, x=x, out=out, form=form) -> None:  # type: ignore[no-untyped-def]
            for layer in range(layers):
                product(matrix, layer, x, form, out, decoder._workspace.scratch, member, team.size)

        found[kind] = min(times_ms(lambda work=member_work: team.run(work), repeats))  # type: ignore[misc]
    return found


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    programs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        time.sleep(0.5 if count else 0)  # until they are
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


@torch.inference_mode()
def main() -> None:
    arguments = _parse()
    decoder = open_cpu(resolve(arguments.model), activation_bits=arguments.activation_bits, cache_dtype=None)
    if not isinstance(decoder, CpuDecoder):
        raise SystemExit("this model runs through torch alone: there is nothing to profile")
    decoder.wait_for_kernels()
    kept = str(decoder.cache_dtype).removeprefix("torch.")
    title = f"one step, {CONTEXT} tokens of context, {decoder._team.size} threads, {kept} keys and values, ms"
    table = Table("part", *STEPS, title=title)
    columns = [column(decoder, *step, arguments) for step in STEPS.values()]
    for part in columns[0]:
        table.add_row(part, *(f"{each[part]:.2f}" for each in columns))
    Console().print(table)


def column(decoder: CpuDecoder, rows: int, new: int, arguments: argparse.Namespace) -> dict[str, float]:
    inputs, kv = step_inputs(decoder, rows, new)
    parts = matrices_ms(decoder, rows, new, arguments.repeats)

    def step() -> object:
        return decoder.forward(inputs, kv)

    whole = min(times_ms(step, arguments.repeats))
    parts["attention, norms, the rest"] = whole - sum(parts.values())
    parts["whole step"] = whole
    if arguments.beside:
        with busy_programs(arguments.beside):
            parts[f"beside {arguments.beside} busy programs"] = statistics.median(times_ms(step, arguments.repeats))
    return parts


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--activation-bits", type=int, choices=(8, 16), default=8)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--beside", type=int, default=0, metavar="N", help="busy programs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
