# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment"
"""Grouped products with experts whose weights are few-bit numbers (`models/packed.py`): a half or a quarter of the bytes.

Does: what `experts_grouped.py` does, for any number of rows. Words are unpacked in registers as in `quantized_dot.py`, and
sums are scaled group by group in float32. Does not: choose experts, or add up what they give.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tonle.models.cuda import gpu_features
from tonle.models.cuda.experts_gate import EXPERT_GATES
from tonle.models.cuda.experts_grouped import GroupedTiling, Routed, grouped_tiling, most_tiles, store_tile
from tonle.models.cuda.experts_routing import tile_of
from tonle.models.cuda.experts_weights import ExpertWeights
from tonle.models.cuda.few_bit_pairs import pairs
from tonle.models.cuda.launch import follow, launch
from tonle.models.cuda.quantized_dot import _scale_of
from tonle.models.cuda.quantized_gemv import layout_of
from tonle.models.cuda.skinny import _dot, _weight_rows
from tonle.models.packed import WORDS, Packed
from tonle.models.spec import MixerSpec

_OTHER_BYTES = 4096  # of shared memory: what sums, scans and exchanges among threads take


@triton.jit
def _grouped_packed(X, W, SCALE, MINIMUM, TABLE, BIAS, OUT, COUNTS, LISTS, N: tl.constexpr, K: tl.constexpr,
                    LAYOUT: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, CAPACITY: tl.constexpr, TOP: tl.constexpr,
                    BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, GATE: tl.constexpr,
                    CLAMP: tl.constexpr, SETTLED: tl.constexpr, IEEE: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """As `_grouped`: one tile (BN outputs, BM pairs)."""
    PLACES: tl.constexpr = LAYOUT.places
    SPAN: tl.constexpr = LAYOUT.span
    IN_BLOCK: tl.constexpr = 32 * LAYOUT.places
    EVEN: tl.constexpr = LAYOUT.blocks * IN_BLOCK == K
    R: tl.constexpr = BN * 2 if GATE else BN
    ROWS: tl.constexpr = N * 2 if GATE else N
    DTYPE: tl.constexpr = X.dtype.element_ty
    if not SETTLED:
        follow(PDL)
    expert, begins, count = tile_of(COUNTS, tl.program_id(0), E, EP, BM)
    if expert < E:
        m = begins + tl.arange(0, BM)
        real = m < count
        pair = tl.load(LISTS + expert * CAPACITY + m, mask=real, other=0).to(tl.int64)
        j = tl.arange(0, 32)
        block_n = tl.program_id(1)
        w_rows = expert * ROWS + _weight_rows(block_n, N, BN, GATE != 0)
        own = W + w_rows.to(tl.int64)[:, None] * (LAYOUT.blocks * 32) + j[None, :]  # (R, 32)
        own_x = X + (pair // TOP)[:, None] * K + j[None, :]  # (BM, 32)
        present = real[:, None] & (j >= 0)[None, :]
        if SETTLED:
            follow(PDL)
        acc = tl.zeros([R, BM], tl.float32)
        for block in tl.range(0, LAYOUT.blocks, num_stages=STAGES):
            numbers = pairs(tl.load(own + block * 32), TABLE, LAYOUT.form, DTYPE)
            for begin in tl.static_range(0, PLACES, SPAN):
                if LAYOUT.group > 0:
                    some = tl.zeros([R, BM], tl.float32)
                    sums = tl.zeros([BM], tl.float32)
                for p in tl.static_range(begin, begin + SPAN):
                    first = block * IN_BLOCK + p * 32
                    if EVEN:
                        x = tl.load(own_x + first, mask=present, other=0.0)
                    else:
                        x = tl.load(own_x + first, mask=present & (first + j < K)[None, :], other=0.0)
                    if LAYOUT.group > 0:
                        some = _dot(numbers[p], x, some, IEEE)
                        if LAYOUT.minimum:
                            sums += tl.sum(x.to(tl.float32), 1)
                    else:
                        acc = _dot(numbers[p], x, acc, IEEE)
                if LAYOUT.group > 0:
                    if LAYOUT.minimum:
                        some += _scale_of(MINIMUM, w_rows, block, begin, LAYOUT)[:, None] * sums[None, :]
                    acc += some * _scale_of(SCALE, w_rows, block, begin, LAYOUT)[:, None]
        if LAYOUT.group == 0:
            acc *= tl.load(SCALE + w_rows).to(tl.float32)[:, None]
        store_tile(acc, BIAS, OUT, expert, pair, real, block_n, N, BN, BM, HAS_BIAS, GATE, CLAMP)
    else:
        if SETTLED:
            follow(PDL)


def packed_tiling(pairs_: int, experts: int, packed: Packed, *, glu: bool) -> GroupedTiling:
    """As `grouped_tiling`; what is under way are blocks of words and all their inputs, as far as shared memory goes."""
    wanted = grouped_tiling(pairs_, experts, glu=glu)
    block_n, block_m = min(wanted.block_n, 64 if glu else 128), min(wanted.block_m, 64)
    inputs = WORDS * packed.places
    room = (gpu_features.shared_bytes() or 2**18) - _OTHER_BYTES
    while True:
        rows = block_n * (2 if glu else 1)
        exchanged = 3 * inputs * rows if packed.form == "table" else 0  # numbers that were looked up change threads
        stages = (room - exchanged) // (4 * WORDS * rows + 2 * inputs * block_m)
        if stages >= 2 or block_n <= 16:
            return GroupedTiling(block_n, block_m, inputs, max(1, min(4, stages)))
        block_n //= 2


def _launch(
    x: torch.Tensor, weights: ExpertWeights, out: torch.Tensor, routed: Routed, top: int, gate: int, clamp: float,
    *, settled: bool,
) -> None:  # fmt: skip
    experts, capacity = routed.lists.shape
    outputs, packed = out.shape[1], weights.packed
    assert packed is not None
    tiling = packed_tiling(out.shape[0], experts, packed, glu=gate != 0)
    launch(
        _grouped_packed, (most_tiles(out.shape[0], experts, tiling.block_m), triton.cdiv(outputs, tiling.block_n)),
        x, packed.numbers, packed.scale, packed.minimum, weights.table, weights.bias, out, routed.counts, routed.lists,
        outputs, x.shape[1], layout_of(packed), experts, triton.next_power_of_2(experts), capacity, top, tiling.block_n,
        tiling.block_m, tiling.stages, weights.bias is not None, gate, clamp, settled, x.dtype == torch.float32,
        num_warps=tiling.warps,
    )  # fmt: skip


def packed_gate_up(
    x: torch.Tensor, weights: ExpertWeights, routed: Routed, mixer: MixerSpec, out: torch.Tensor
) -> None:
    """As `grouped_gate_up`."""
    gate = EXPERT_GATES[mixer.activation]
    _launch(x, weights, out, routed, mixer.experts_per_token, gate, mixer.clamp, settled=False)


def packed_down(x: torch.Tensor, weights: ExpertWeights, routed: Routed, out: torch.Tensor) -> None:
    """As `grouped_down`."""
    _launch(x, weights, out, routed, 1, 0, 0.0, settled=True)
