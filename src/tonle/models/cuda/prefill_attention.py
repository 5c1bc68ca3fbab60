# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""Attention of rows with several tokens over the paged cache, prefix included; causal, with or without a window,
a soft cap, sinks.

A program takes one head and up to `TILE_TOKENS` queries of one row; the step's buffer names the tiles. All of the step's
keys and values are in the cache before this runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from tonle.models.cuda.batch import TILE_TOKENS, StepBuffer
from tonle.models.cuda.fp8 import halved
from tonle.models.cuda.gpu_features import roomy
from tonle.models.cuda.head_dims import in_heads
from tonle.models.cuda.launch import follow, launch
from tonle.models.cuda.softmax import LOG2E, capped, sinks_of, take_in, take_in_packed, weigh, with_sink
from tonle.models.inputs import LayerCache


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """How a tile of queries goes through its keys."""

    block_keys: int  # per turn of the loop
    warps: int
    twice: bool  # a loop of its own, without masks, for keys that every query sees
    stages: int = 2


_HALF = PrefillTiling(64, warps=4, twice=True)
# float32: without tensor cores operands are held in registers; more would spill.
_EXACT = PrefillTiling(16, warps=8, twice=False)
# Heads of more than 128 numbers on GPUs with little shared memory.
_SMALL_HALF, _SMALL_EXACT = PrefillTiling(32, warps=8, twice=True), replace(_EXACT, stages=1)


@triton.jit
def _attend(q, K, V, K_SCALES, V_SCALES, table, first, high, position, best, total, acc, scale, KV_HEADS: tl.constexpr,
            D: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
            MASKED: tl.constexpr, IEEE: tl.constexpr):  # fmt: skip
    """One block of keys into the running softmax. Not MASKED: every query sees all of them."""
    key = first + tl.arange(0, BN)
    if MASKED:
        inside = key < high
        block = tl.load(table + key // BLOCK, mask=inside, other=0).to(tl.int64)
    else:
        inside = key >= 0
        block = tl.load(table + key // BLOCK).to(tl.int64)
    seen = key[None, :] <= position[:, None]
    if WINDOW > 0:
        seen &= key[None, :] > position[:, None] - WINDOW
    if K_SCALES is not None:
        return take_in_packed(q, K, V, K_SCALES, V_SCALES, block, key % BLOCK, inside, seen, best, total, acc, scale,
                              KV_HEADS, D, P, BLOCK, CAP, MASKED, IEEE)  # fmt: skip
    else:
        place = ((block * BLOCK + key % BLOCK) * (KV_HEADS * D))[:, None] + tl.arange(0, P)[None, :]
        if MASKED or P != D:
            k = tl.load(K + place, mask=in_heads(inside, D, P), other=0.0)
            v = tl.load(V + place, mask=in_heads(inside, D, P), other=0.0)
        else:
            k = tl.load(K + place)
            v = tl.load(V + place)
        return take_in(capped(weigh(q, k, scale, IEEE), CAP), seen, v, None, best, total, acc, MASKED, IEEE)


@triton.jit
def _prefill(COUNTS, TILE_ROWS, TILE_FIRSTS, ROWS, STARTS, BEGINS, SIZES, TABLES, QKV, K, V, K_SCALES, V_SCALES, OUT, SINKS,
             scale, table_width, G: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
             P: tl.constexpr, BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
             TWICE: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """TWICE: a loop of its own for keys that every query sees."""
    follow(PDL)
    head = tl.program_id(0)
    tile = tl.program_id(1)
    if tile < tl.load(COUNTS + 6):
        entry = tl.load(TILE_ROWS + tile)
        first_query = tl.load(TILE_FIRSTS + tile)
        size = tl.load(SIZES + entry)
        start = tl.load(STARTS + entry)
        table = TABLES + tl.load(ROWS + entry).to(tl.int64) * table_width
        token = tl.load(BEGINS + entry).to(tl.int64)
        d = tl.arange(0, P)
        query = first_query + tl.arange(0, BM)  # within the row's tokens of this step
        real = query < size
        position = start + query
        q = tl.load(QKV + (token + query)[:, None] * ((HEADS + 2 * KV_HEADS) * D) + head * D + d[None, :],
                    mask=in_heads(real, D, P), other=0.0)  # fmt: skip
        K += (head // G) * D
        V += (head // G) * D
        if K_SCALES is not None:
            K_SCALES += (head // G) * BLOCK
            V_SCALES += (head // G) * BLOCK
        factor = scale
        if K_SCALES is not None and not IEEE:
            q, factor = halved(q, scale)
        high = start + tl.minimum(first_query + BM, size)  # one past the last key any query of the tile sees
        low = 0
        if WINDOW > 0:
            low = tl.maximum(start + first_query + 1 - WINDOW, 0) // BN * BN
        best = tl.full([BM], -1.0e30, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, P], tl.float32)
        if TWICE:
            whole = (start + first_query + 1) // BN * BN  # up to here the tile's first query sees all keys
            for first in tl.range(low, whole, BN):
                best, total, acc = _attend(q, K, V, K_SCALES, V_SCALES, table, first, high, position, best, total,
                                           acc, factor, KV_HEADS, D, P, BLOCK, BN, WINDOW, CAP, False, IEEE)  # fmt: skip
            low = whole
        for first in tl.range(low, high, BN):
            best, total, acc = _attend(q, K, V, K_SCALES, V_SCALES, table, first, high, position, best, total, acc,
                                       factor, KV_HEADS, D, P, BLOCK, BN, WINDOW, CAP, True, IEEE)  # fmt: skip
        out = OUT + ((token + query)[:, None] * HEADS + head) * D + d[None, :]
        if SINKS is not None:
            total = with_sink(total, tl.where(real, best, 0.0), sinks_of(SINKS, head, head < HEADS))
        total = tl.where(real, total, 1.0)
        tl.store(out, (acc * (1.0 / total)[:, None]).to(OUT.dtype.element_ty), mask=in_heads(real, D, P))


def prefill_attention(
    batch: StepBuffer,
    tables: torch.Tensor,
    qkv: torch.Tensor,
    cache: LayerCache,
    out: torch.Tensor,
    *,
    tiles: int,
    num_heads: int,
    window: int | None,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """The tiles the step names, up to `tiles` of them: qkv (T, heads + 2 kv heads, D), turned -> out (T, heads, D).

    `scale` of scores; None = dim ** -0.5. `sinks` (heads,).
    """
    block, kv_heads, dim = cache.k.shape[-3:]
    exact = qkv.dtype == torch.float32
    if dim <= 128 or roomy():
        tiling = _EXACT if exact else _HALF
    else:
        tiling = _SMALL_EXACT if exact else _SMALL_HALF
    launch(
        _prefill, (num_heads, max(1, tiles)),  # never an empty grid: decode attention counts on the wait of this kernel
        batch["counts"], batch["tile_rows"], batch["tile_firsts"], batch["rows"], batch["starts"],
        batch["row_begins"], batch["row_sizes"], tables, qkv, *cache, out, sinks,
        (dim**-0.5 if scale is None else scale) * LOG2E,
        tables.shape[1], num_heads // kv_heads, num_heads, kv_heads, dim, triton.next_power_of_2(dim), block, TILE_TOKENS,
        tiling.block_keys, window or 0, soft_cap or 0.0, tiling.twice and window is None, exact,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
