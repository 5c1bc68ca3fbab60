"""Where the time of a CPU step goes, by kind, for one row and for sixteen.

    python -m benchmarks.cpu_profile [MODEL]

Each kind of matrix is timed alone over all layers, on the same threads; what is left of the whole step is attention, norms,
rotation, meetings of the threads and the call itself. Printed beside it: the share of a torch float32 step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.cpu.open import open_cpu
from tonle.models.cpu.step import product
from tonle.models.cpu.vector import ROWS
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.load import load
from tonle.models.source import resolve

CONTEXT = 160  # tokens: the middle of a 128-in, 64-out request
REPEATS = 15


def best_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times) * 1e3


def step_inputs(decoder: CpuDecoder, rows: int) -> tuple[StepInputs, KVCache]:
    spec, per_row = decoder.spec, -(-CONTEXT // 16)
    kv = KVCache(num_layers=spec.num_layers, num_blocks=rows * per_row, block_size=16, num_kv_heads=spec.num_kv_heads,
                 head_dim=spec.head_dim, dtype=torch.float32, device=torch.device("cpu"))  # fmt: skip
    tables = torch.arange(rows * per_row, dtype=torch.int32).view(rows, per_row)
    last = torch.full((rows,), CONTEXT - 1)
    inputs = StepInputs(
        tokens=torch.randint(0, spec.vocab_size, (rows,)), positions=last, slots=tables[:, -1].long() * 16 + (CONTEXT - 1) % 16,
        row_starts=list(range(rows + 1)), context_lens=[CONTEXT] * rows, block_tables=tables, num_decode=rows,
        logit_indices=torch.arange(rows),
    )  # fmt: skip
    return inputs, kv


def matrices_ms(decoder: CpuDecoder, rows: int) -> dict[str, float]:
    team, found = decoder._team, {}
    for kind in ("qkv", "o", "gate_up", "down", "head"):
        matrix = getattr(decoder._packed, kind)
        layers, blocks = matrix.weights.shape[:2]
        form = getattr(decoder._workspace.cut(rows, CONTEXT), f"to_{kind}")
        size = form[0].shape[1]
        x = np.random.default_rng(0).standard_normal((rows, size)).astype(np.float32)
        out = np.empty((rows, blocks * ROWS), np.float32)

        def member_work(member: int, matrix=matrix, layers=layers, x=x, out=out, form=form) -> None:  # type: ignore[no-untyped-def]
            for layer in range(layers):
                product(matrix, layer, x, form, out, decoder._workspace.scratch, member, team.size)

        found[kind] = best_ms(lambda work=member_work: team.run(work))  # type: ignore[misc]
    return found


@torch.inference_mode()
def main() -> None:
    source = resolve(sys.argv[1] if len(sys.argv) > 1 else None)
    decoder = open_cpu(source)
    if not isinstance(decoder, CpuDecoder):
        raise SystemExit("this model runs through torch alone: there is nothing to profile")
    while not decoder.crossover:
        time.sleep(0.1)  # the kernels are being compiled
    slow = load(source, device=torch.device("cpu"))
    table = Table(title=f"one step, {CONTEXT} tokens of context, {decoder._team.size} threads, ms")
    table.add_column("part")
    columns = []
    for rows in (1, 16):
        inputs, kv = step_inputs(decoder, rows)
        parts = matrices_ms(decoder, rows)
        whole = best_ms(lambda inputs=inputs, kv=kv: decoder._fast(inputs, kv))  # type: ignore[misc]
        parts["attention, norms, the rest"] = whole - sum(parts.values())
        parts["whole step"] = whole
        parts["the same through torch, float32"] = best_ms(lambda inputs=inputs, kv=kv: slow.forward(inputs, kv))  # type: ignore[misc]
        columns.append(parts)
        table.add_column(f"{rows} row{'s' * (rows > 1)}", justify="right")
    for part in columns[0]:
        table.add_row(part, *(f"{column[part]:.2f}" for column in columns))
    Console().print(table)


if __name__ == "__main__":
    main()
