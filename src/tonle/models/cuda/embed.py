# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""The first kernels of a step: block tables brought up to date, tokens turned into hidden states; and the last gather."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonle.models.cuda.batch import StepBuffer
from tonle.models.cuda.dependent import follow, launch_options

_UPDATES_PER_PROGRAM = 256


@triton.jit
def _embed(COUNTS, ROWS, TOKENS, LAST, TABLE, OUT, PAIRS, BLOCK_TABLES, HIDDEN: tl.constexpr,
           HP: tl.constexpr, UPDATES: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
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
        tl.store(OUT + t.to(tl.int64) * HIDDEN + h, x, mask=wide)


def embed(
    batch: StepBuffer, last: torch.Tensor, table: torch.Tensor, block_tables: torch.Tensor, out: torch.Tensor
) -> None:
    """Apply the step's block table updates; out (T, hidden) = embeddings of its tokens. `last` (rows,) int32."""
    hidden = table.shape[1]
    _embed[(out.shape[0],)](
        batch["counts"], batch["rows"], batch["tokens"], last, table, out, batch["updates"],
        block_tables, hidden, triton.next_power_of_2(hidden), _UPDATES_PER_PROGRAM,
        num_warps=4, **launch_options(),
    )  # fmt: skip


@triton.jit
def _gather_norm(COUNTS, INDICES, X, GAIN, OUT, eps, HIDDEN: tl.constexpr, HP: tl.constexpr, PDL: tl.constexpr):
    h = tl.arange(0, HP)
    wide = h < HIDDEN
    gain = tl.load(GAIN + h, mask=wide, other=0.0).to(tl.float32)
    follow(PDL)
    s = tl.program_id(0)
    if s < tl.load(COUNTS + 4):
        t = tl.load(INDICES + s).to(tl.int64)
        x = tl.load(X + t * HIDDEN + h, mask=wide, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / HIDDEN + eps)
        tl.store(OUT + s.to(tl.int64) * HIDDEN + h, (x * scale * gain).to(OUT.dtype.element_ty), mask=wide)


def gather_norm(batch: StepBuffer, x: torch.Tensor, gain: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    """out (S, hidden) = the normed hidden states of the tokens whose logits are wanted."""
    hidden = x.shape[1]
    _gather_norm[(out.shape[0],)](
        batch["counts"], batch["sample_indices"], x, gain, out, eps, hidden, triton.next_power_of_2(hidden),
        num_warps=4, **launch_options(),
    )  # fmt: skip
