# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""Attention of rows with several tokens over the paged cache, prefix included; causal, with or without a window.

A program takes one head and up to `TILE_TOKENS` queries of one row; the step's buffer names the tiles. All of the step's
keys and values are in the cache before this runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonle.models.cuda.batch import TILE_TOKENS, StepBuffer
from tonle.models.cuda.dependent import follow, launch_options

_BLOCK_KEYS, _WARPS = 64, 4
_EXACT_BLOCK_KEYS, _EXACT_WARPS = (
    16,
    8,
)  # float32: without tensor cores operands are held in registers; more would spill
_TWICE = {True: False, False: True}  # by exactness: a second loop takes registers, too
_LOG2E = 1.4426950408889634


@triton.jit
def _attend(q, K, V, table, first, high, position, best, total, acc, scale, KV_HEADS: tl.constexpr, D: tl.constexpr,
            BLOCK: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, MASKED: tl.constexpr,
            IEEE: tl.constexpr):  # fmt: skip
    """One block of keys into the running softmax. Not MASKED: every query sees all of them."""
    key = first + tl.arange(0, BN)
    d = tl.arange(0, D)
    if MASKED:
        inside = key < high
        block = tl.load(table + key // BLOCK, mask=inside, other=0).to(tl.int64)
        place = (block * BLOCK + key % BLOCK) * (KV_HEADS * D)
        k = tl.load(K + place[:, None] + d[None, :], mask=inside[:, None], other=0.0).to(q.dtype)
        v = tl.load(V + place[:, None] + d[None, :], mask=inside[:, None], other=0.0).to(q.dtype)
    else:
        block = tl.load(table + key // BLOCK).to(tl.int64)
        place = (block * BLOCK + key % BLOCK) * (KV_HEADS * D)
        k = tl.load(K + place[:, None] + d[None, :]).to(q.dtype)
        v = tl.load(V + place[:, None] + d[None, :]).to(q.dtype)
    if IEEE:
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    else:
        score = tl.dot(q, tl.trans(k)) * scale
    if MASKED:
        seen = key[None, :] <= position[:, None]
        if WINDOW > 0:
            seen &= key[None, :] > position[:, None] - WINDOW
        score = tl.where(seen, score, -1.0e30)
    top = tl.maximum(best, tl.max(score, 1))
    p = tl.exp2(score - top[:, None])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    fade = tl.exp2(best - top)
    total = total * fade + tl.sum(p, 1)
    if IEEE:
        acc = tl.dot(p, v, acc * fade[:, None], input_precision="ieee")
    else:
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None])
    return top, total, acc


@triton.jit
def _prefill(COUNTS, TILE_ROWS, TILE_FIRSTS, ROWS, STARTS, BEGINS, SIZES, TABLES, QKV, K, V, OUT, scale, table_width,
             G: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
             BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, TWICE: tl.constexpr,
             IEEE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
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
        d = tl.arange(0, D)
        query = first_query + tl.arange(0, BM)  # within the row's tokens of this step
        real = query < size
        position = start + query
        q = tl.load(QKV + (token + query)[:, None] * ((HEADS + 2 * KV_HEADS) * D) + head * D + d[None, :],
                    mask=real[:, None], other=0.0)  # fmt: skip
        K += (head // G) * D
        V += (head // G) * D
        high = start + tl.minimum(first_query + BM, size)  # one past the last key any query of the tile sees
        low = 0
        if WINDOW > 0:
            low = tl.maximum(start + first_query + 1 - WINDOW, 0) // BN * BN
        best = tl.full([BM], -1.0e30, tl.float32)
        total = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, D], tl.float32)
        if TWICE:
            whole = (start + first_query + 1) // BN * BN  # up to here the tile's first query sees all keys
            for first in tl.range(low, whole, BN):
                best, total, acc = _attend(q, K, V, table, first, high, position, best, total, acc, scale, KV_HEADS, D,
                                           BLOCK, BN, WINDOW, False, IEEE)  # fmt: skip
            low = whole
        for first in tl.range(low, high, BN):
            best, total, acc = _attend(q, K, V, table, first, high, position, best, total, acc, scale, KV_HEADS, D,
                                       BLOCK, BN, WINDOW, True, IEEE)  # fmt: skip
        out = OUT + ((token + query)[:, None] * HEADS + head) * D + d[None, :]
        total = tl.where(real, total, 1.0)
        tl.store(out, (acc / total[:, None]).to(OUT.dtype.element_ty), mask=real[:, None])


def prefill_attention(
    batch: StepBuffer,
    tables: torch.Tensor,
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    out: torch.Tensor,
    *,
    tiles: int,
    num_heads: int,
    window: int | None,
) -> None:
    """The tiles the step names, up to `tiles` of them: qkv (T, heads + 2 kv heads, D), turned -> out (T, heads, D)."""
    block, kv_heads, dim = k_cache.shape[-3:]
    exact = qkv.dtype == torch.float32
    keys, warps = (_EXACT_BLOCK_KEYS, _EXACT_WARPS) if exact else (_BLOCK_KEYS, _WARPS)
    twice = window is None and _TWICE[exact]
    _prefill[(num_heads, tiles)](
        batch["counts"], batch["tile_rows"], batch["tile_firsts"], batch["rows"], batch["starts"],
        batch["row_begins"], batch["row_sizes"], tables, qkv, k_cache, v_cache, out, dim**-0.5 * _LOG2E,
        tables.shape[1], num_heads // kv_heads, num_heads, kv_heads, dim, block, TILE_TOKENS, keys, window or 0, twice,
        exact, num_warps=warps, num_stages=2, **launch_options(),
    )  # fmt: skip
