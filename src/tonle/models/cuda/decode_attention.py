# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""Attention of rows with one token each over the paged cache: memory-bound, so every key is read once.

A program takes one item: a stretch of one row's context, for one key-value head and all the queries that share it.
The last stretch of a row to finish joins all of them: no second kernel. In a pure decode step (`fused`) the program that
holds the row's end also turns the new key, writes key and value to the cache, and all programs turn their own queries.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonle.models.cuda.batch import StepBuffer
from tonle.models.cuda.cuda_rope import angles_at, both_read, heads_at, turned
from tonle.models.cuda.decode_tiling import decode_tiling, in_small_memory, max_items
from tonle.models.cuda.fp8 import exponent, halved, numbers_of, packed, reciprocal
from tonle.models.cuda.gpu_features import roomy
from tonle.models.cuda.head_dims import in_heads, load_head, store_head
from tonle.models.cuda.launch import follow, launch
from tonle.models.cuda.softmax import LOG2E, capped, sinks_of, take_in, take_in_packed, weigh, with_sink
from tonle.models.inputs import LayerCache


@triton.jit
def _places(table, first, high, BLOCK: tl.constexpr, BN: tl.constexpr):
    """Keys (BN,) from `first` on: their blocks and offsets there, and which of them lie below `high`."""
    key = first + tl.arange(0, BN)
    inside = key < high
    return tl.load(table + key // BLOCK, mask=inside, other=0).to(tl.int64), key % BLOCK, inside


@triton.jit
def _read(K, V, table, first, high, KV_HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr,
          BN: tl.constexpr):  # fmt: skip
    """Keys and values (BN, P) of one head from `first` on, and which of them lie below `high`."""
    block, offset, inside = _places(table, first, high, BLOCK, BN)
    place = ((block * BLOCK + offset) * (KV_HEADS * D))[:, None] + tl.arange(0, P)[None, :]
    k = tl.load(K + place, mask=in_heads(inside, D, P), other=0.0)
    v = tl.load(V + place, mask=in_heads(inside, D, P), other=0.0)
    return k, v, inside


@triton.jit
def _attend(q, K, V, K_SCALES, V_SCALES, table, first, high, best, total, acc, scale, KV_HEADS: tl.constexpr,
            D: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr,
            IEEE: tl.constexpr):  # fmt: skip
    """One block of keys into the running softmax."""
    if K_SCALES is None:
        k, v, inside = _read(K, V, table, first, high, KV_HEADS, D, P, BLOCK, BN)
        return take_in(capped(weigh(q, k, scale, IEEE), CAP), inside[None, :], v, None, best, total, acc, True, IEEE)
    else:
        block, offset, inside = _places(table, first, high, BLOCK, BN)
        return take_in_packed(q, K, V, K_SCALES, V_SCALES, block, offset, inside, inside[None, :], best, total, acc,
                              scale, KV_HEADS, D, P, BLOCK, CAP, True, IEEE)  # fmt: skip


@triton.jit
def _walk(q, K, V, K_SCALES, V_SCALES, table, low, high, best, total, acc, scale, KV_HEADS: tl.constexpr, D: tl.constexpr,
          P: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, CAP: tl.constexpr, IEEE: tl.constexpr):  # fmt: skip
    """All keys from `low` to `high` into the running softmax."""
    for first in tl.range(low, high, BN):
        best, total, acc = _attend(q, K, V, K_SCALES, V_SCALES, table, first, high, best, total, acc, scale, KV_HEADS, D,
                                   P, BLOCK, BN, CAP, IEEE)  # fmt: skip
    return best, total, acc


@triton.jit
def _joined(PART, PART_MAX, PART_SUM, first_item, active, head, some, sink, HEADS: tl.constexpr, GP: tl.constexpr,
            D: tl.constexpr, P: tl.constexpr):  # fmt: skip
    """What the `active` stretches of a row have left, as one, and the sink: (GP, P)."""
    d = tl.arange(0, P)
    best = tl.full([GP], -1.0e30, tl.float32)
    total = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, P], tl.float32)
    for first in tl.range(first_item, first_item + active, 8):
        for more in tl.static_range(8):  # unrolled: their reads are under way together
            part = (first + more) * HEADS + head
            real = some & (first + more < first_item + active)
            its_best = tl.load(PART_MAX + part, mask=real, other=-1.0e30, cache_modifier=".cg")
            its_total = tl.load(PART_SUM + part, mask=real, other=0.0, cache_modifier=".cg")
            its_acc = tl.load(PART + part[:, None] * D + d[None, :], mask=in_heads(real, D, P), other=0.0,
                              cache_modifier=".cg")  # fmt: skip
            top = tl.maximum(best, its_best)
            mine = tl.exp2(best - top)
            its = tl.exp2(its_best - top)
            total = total * mine + its_total * its
            acc = acc * mine[:, None] + its_acc * its[:, None]
            best = top
    total = with_sink(total, best, sink)
    return acc * (1.0 / tl.where(some, total, 1.0))[:, None]


@triton.jit
def _decode(COUNTS, ITEM_ROWS, ROW_ITEMS, ROW_STRETCHES, ROWS, STARTS, TABLES, QKV, K, V, K_SCALES, V_SCALES, OUT, PART,
            PART_MAX, PART_SUM, ARRIVED, ANGLES, Q_GAIN, K_GAIN, SINKS, eps, scale, table_width, G: tl.constexpr,
            GP: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
            BLOCK: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, FUSED: tl.constexpr,
            EAGER: tl.constexpr, NORM: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    # The step's integers and block tables are older than the kernel ahead, and in a pure decode step so are all keys
    # but the new ones: reading them need not wait. In a mixed step the kernel ahead is the prompts' attention, of which
    # nothing is read here; it has waited for all that is, and writes other rows: the two run side by side.
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    if item < tl.load(COUNTS + 7):
        b = tl.load(ITEM_ROWS + item)
        stretch = tl.load(ROW_STRETCHES + b)
        first_item = tl.load(ROW_ITEMS + b)
        last = tl.load(STARTS + b)  # the new token's position
        row = tl.load(ROWS + b).to(tl.int64)
        low = (item - first_item) * stretch
        high = tl.minimum(low + stretch, last + 1)
        active = tl.cdiv(last + 1, stretch)  # stretches of this row
        at_end = high == last + 1
        if WINDOW > 0:
            low = tl.maximum(low, last + 1 - WINDOW)
        g = tl.arange(0, GP)
        d = tl.arange(0, P)
        some = g < G
        sink = sinks_of(SINKS, kv_head * G + g, some) if SINKS is not None else None
        QKV += b.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * D)
        K += kv_head * D
        V += kv_head * D
        if K_SCALES is not None:
            K_SCALES += kv_head * BLOCK
            V_SCALES += kv_head * BLOCK
        table = TABLES + row * table_width
        best = tl.full([GP], -1.0e30, tl.float32)
        total = tl.zeros([GP], tl.float32)
        acc = tl.zeros([GP, P], tl.float32)
        if FUSED:
            high = tl.minimum(high, last)  # the new key comes from QKV
            if EAGER:
                k, v, inside = _read(K, V, table, low, high, KV_HEADS, D, P, BLOCK, BN)
            new_block = tl.load(table + last // BLOCK).to(tl.int64)
            cos, sin = None, None
            if ANGLES is not None:
                cos, sin = angles_at(ANGLES, last, P, R)
            follow(PDL)
            one = tl.arange(0, 1)  # all reads first, so that they are under way together
            new_v = load_head(QKV + (HEADS + KV_HEADS + kv_head) * D, d, D, P)[None, :]  # (1, P)
            new_x, new_y = heads_at(QKV + (HEADS + kv_head) * D, one, one < 1, D, P, R)
            x, y = heads_at(QKV + kv_head * G * D, g, some, D, P, R)
            x, y = both_read(x, y, PDL)
            q = turned(x, y, cos, sin, Q_GAIN, eps, D, P, R, NORM)
            new_k = turned(new_x, new_y, cos, sin, K_GAIN, eps, D, P, R, NORM)
            if K_SCALES is not None:
                new_k, k_scale = packed(new_k, K.dtype.element_ty)
                new_v, v_scale = packed(new_v, K.dtype.element_ty)
            if at_end:
                place = (new_block * BLOCK + last % BLOCK) * (KV_HEADS * D)
                store_head(K + place, new_k, D, P)
                store_head(V + place, new_v, D, P)
                if K_SCALES is not None:
                    scale_place = new_block * (KV_HEADS * BLOCK) + last % BLOCK + one
                    tl.store(K_SCALES + scale_place, k_scale)
                    tl.store(V_SCALES + scale_place, v_scale)
            best = tl.sum(q.to(tl.float32) * numbers_of(new_k), 1) * scale
            total = tl.where(g >= 0, 1.0, 0.0)
            if K_SCALES is not None:
                best = capped(best * k_scale, CAP) + exponent(v_scale)
                total = total * reciprocal(v_scale)
            else:
                best = capped(best, CAP)
            best = tl.where(at_end, best, -1.0e30)
            total = tl.where(at_end, total, 0.0)
            acc = tl.where(at_end & (g >= 0)[:, None], numbers_of(new_v), 0.0)
            if EAGER:
                score = capped(weigh(q, k, scale, IEEE), CAP)
                best, total, acc = take_in(score, inside[None, :], v, None, best, total, acc, True, IEEE)
                low += BN
        else:
            q = tl.load(QKV + (kv_head * G + g)[:, None] * D + d[None, :], mask=in_heads(some, D, P), other=0.0)
        factor = scale
        if K_SCALES is not None and not IEEE:
            q, factor = halved(q, scale)
        if EAGER and FUSED:
            if low < high:  # a loop not entered takes its time, too
                best, total, acc = _walk(q, K, V, K_SCALES, V_SCALES, table, low, high, best, total, acc, factor, KV_HEADS,
                                         D, P, BLOCK, BN, CAP, IEEE)  # fmt: skip
        else:
            best, total, acc = _walk(q, K, V, K_SCALES, V_SCALES, table, low, high, best, total, acc, factor, KV_HEADS, D,
                                     P, BLOCK, BN, CAP, IEEE)  # fmt: skip
        head = kv_head * G + g
        out = OUT + (b.to(tl.int64) * HEADS + head)[:, None] * D + d[None, :]
        if active == 1:
            total = with_sink(total, best, sink)
            tl.store(out, (acc * (1.0 / total)[:, None]).to(OUT.dtype.element_ty), mask=in_heads(some, D, P))
        else:
            part = item * HEADS + head
            tl.store(PART + part[:, None] * D + d[None, :], acc, mask=in_heads(some, D, P))
            tl.store(PART_MAX + part, best, mask=some)
            tl.store(PART_SUM + part, total, mask=some)
            tl.debug_barrier()
            counter = ARRIVED + b * KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == active - 1:
                tl.debug_barrier()
                joined = _joined(PART, PART_MAX, PART_SUM, first_item, active, head, some, sink, HEADS, GP, D, P)
                tl.store(counter, 0)
                tl.store(out, joined.to(OUT.dtype.element_ty), mask=in_heads(some, D, P))
    if not FUSED and item + kv_head == 0:  # one is enough: this kernel must not end before the one ahead
        follow(PDL)


class DecodeScratch:
    """Where stretches leave their partial results. One serves all layers and all batch sizes."""

    def __init__(self, max_rows: int, num_heads: int, kv_heads: int, head_dim: int, device: torch.device) -> None:
        size = max_items(max_rows, kv_heads) * num_heads
        self.acc = torch.zeros(size, head_dim, dtype=torch.float32, device=device)
        self.best = torch.zeros(size, dtype=torch.float32, device=device)
        self.total = torch.zeros(size, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(max_rows * kv_heads, dtype=torch.int32, device=device)  # 0 between steps


def decode_attention(
    batch: StepBuffer,
    tables: torch.Tensor,
    qkv: torch.Tensor,
    cache: LayerCache,
    out: torch.Tensor,
    scratch: DecodeScratch,
    *,
    rows: int,
    num_heads: int,
    window: int | None,
    angles: torch.Tensor | None,
    q_gain: torch.Tensor | None,
    k_gain: torch.Tensor | None,
    eps: float,
    fused: bool,
    scale: float | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """The step's first rows, up to `rows` of them: qkv (T, heads + 2 kv heads, D) -> out (T, heads, D).

    Tables (max rows, width) int32. `fused`: qkv is as projected; else queries are
    turned already and the new keys and values are in the cache. `angles` (positions, 2, R): the first R numbers of each
    head are turned; None: nothing turns. `scale` of scores; None = dim ** -0.5. `sinks` (heads,).
    """
    block, kv_heads, dim = cache.k.shape[-3:]
    group = num_heads // kv_heads
    tiling = decode_tiling(rows, kv_heads, fp8=cache.k_scales is not None)
    exact = qkv.dtype == torch.float32
    if exact and dim > 128 and not roomy():
        tiling = in_small_memory(tiling)
    launch(
        _decode, (kv_heads, max_items(rows, kv_heads)),
        batch["counts"], batch["item_rows"], batch["row_items"], batch["row_stretches"], batch["rows"], batch["starts"],
        tables, qkv, *cache, out, scratch.acc, scratch.best, scratch.total, scratch.arrived, angles, q_gain, k_gain,
        sinks, eps, (dim**-0.5 if scale is None else scale) * LOG2E,
        tables.shape[1], group, max(16, triton.next_power_of_2(group)), num_heads, kv_heads, dim,
        triton.next_power_of_2(dim), dim if angles is None else angles.shape[2], block, tiling.block_keys, window or 0,
        soft_cap or 0.0, fused, tiling.eager, q_gain is not None, exact,
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
