# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""The first kernels of a step: block tables brought up to date, tokens turned into hidden states; and the gather of samples."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonle.models.cuda.batch import StepBuffer
from tonle.models.cuda.launch import follow, launch

_UPDATES_PER_PROGRAM = 256


@triton.jit
def _embed(COUNTS, ROWS, TOKENS, LAST, TABLE, OUT, PAIRS, BLOCK_TABLES, HIDDEN: tl.constexpr,
           HP: tl.constexpr, SCALE: tl.constexpr, UPDATES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One program per token copies its embedding; all of them together also write the new block table entries."""
    follow(PDL)
    t = tl.program_id(0)
    num_updates = tl.load(COUNTS + 5)
    for first in range(t * UPDATES, num_updates, tl.num_programs(0) * UPDATES):
        u = first + tl.arange(0, UPDATES)
        some = u < num_updates
        place = tl.load(PAIRS + 2 * u, mask=some, other=0)
        tl.store(BLOCK_TABLES + place, tl.load(PAIRS + 2 * u + 1, mask=some, other=0), mask=some)
    if t < tl.load(COUNTS + 3):
        if t < tl.load(COUNTS + 2):
            token = tl.load(LAST + tl.load(ROWS + t))
        else:
            token = tl.load(TOKENS + t)
        h = tl.arange(0, HP)
        wide = h < HIDDEN
        x = tl.load(TABLE + token.to(tl.int64) * HIDDEN + h, mask=wide, other=0.0)
        if SCALE != 1:
            x = (x.to(tl.float32) * SCALE).to(OUT.dtype.element_ty)
        tl.store(OUT + t.to(tl.int64) * HIDDEN + h, x, mask=wide)


def embed(
    batch: StepBuffer, last: torch.Tensor, table: torch.Tensor, block_tables: torch.Tensor, out: torch.Tensor,
    scale: float = 1.0,
) -> None:  # fmt: skip
    """Apply the step's block table updates; out (T, hidden) = embeddings of its tokens, times scale. `last` (rows,) int32."""
    hidden = table.shape[1]
    launch(
        _embed, (out.shape[0],),
        batch["counts"], batch["rows"], batch["tokens"], last, table, out, batch["updates"],
        block_tables, hidden, triton.next_power_of_2(hidden), scale, _UPDATES_PER_PROGRAM,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _gather(COUNTS, INDICES, X, Y, OUT_X, OUT_Y, X_SIZE: tl.constexpr, XP: tl.constexpr, Y_SIZE: tl.constexpr,
            YP: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One program per sample copies its row of X and of Y."""
    follow(PDL)
    s = tl.program_id(0).to(tl.int64)
    if s < tl.load(COUNTS + 4):
        t = tl.load(INDICES + s).to(tl.int64)
        i = tl.arange(0, XP)
        some = i < X_SIZE
        tl.store(OUT_X + s * X_SIZE + i, tl.load(X + t * X_SIZE + i, mask=some, other=0.0), mask=some)
        j = tl.arange(0, YP)
        some = j < Y_SIZE
        tl.store(OUT_Y + s * Y_SIZE + j, tl.load(Y + t * Y_SIZE + j, mask=some, other=0.0), mask=some)


def gather(
    batch: StepBuffer,
    hidden: torch.Tensor,
    attended: torch.Tensor,
    out_hidden: torch.Tensor,
    out_attended: torch.Tensor,
) -> None:
    """Rows of hidden (T, hidden) and attended (T, heads * D) of the tokens whose logits are wanted, to (S, …) each."""
    x_size, y_size = hidden.shape[1], attended.shape[1]
    launch(
        _gather, (out_hidden.shape[0],),
        batch["counts"], batch["sample_indices"], hidden, attended, out_hidden, out_attended, x_size,
        triton.next_power_of_2(x_size), y_size, triton.next_power_of_2(y_size), num_warps=4,
    )  # fmt: skip
