# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc,assignment"
"""e4m3 weights times many rows: rows are rounded to e4m3, too, so that tensor cores multiply eight bits at twice the rate.

Does: `fp8_rows`, which norms rows where asked and gives each a scale of its own; `fp8_product`, which multiplies both scales
into the sums, with bias and residual. Does not: serve few rows, where 16-bit activations cost nothing (`quantized_dot.py`), nor
weights with more scales than one per output.

Rows are written in the order in which packed words have their inputs (`models/packed.py`): a sum does not mind the order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from tonle.models.cuda import gpu_features
from tonle.models.cuda.gpu_features import INTERPRETED
from tonle.models.cuda.launch import follow, launch
from tonle.models.cuda.skinny import _joined, _leave
from tonle.models.packed import Packed

MOST = 448.0  # the largest e4m3 number
_INTERPRETED = tl.constexpr(INTERPRETED)
_MOST = tl.constexpr(MOST)


@triton.jit
def _fp8_rows(X, GAIN, OUT, SCALE, eps, K: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
              PDL: tl.constexpr):  # fmt: skip
    """One row: (K,) -> (PADDED,) e4m3 and a scale."""
    DTYPE: tl.constexpr = X.dtype.element_ty
    k = tl.arange(0, WIDTH)
    some = k < K
    if NORM:
        gain = tl.load(GAIN + k, mask=some, other=0.0).to(tl.float32)
    follow(PDL)
    t = tl.program_id(0).to(tl.int64)
    x = tl.load(X + t * K + k, mask=some, other=0.0).to(tl.float32)
    if NORM:
        x = (x * tl.rsqrt(tl.sum(x * x, 0) / K + eps) * gain).to(DTYPE).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(x), 0), 1.0e-30)
    tl.store(SCALE + t, most / _MOST)
    y = tl.minimum(tl.maximum(x * (_MOST / most), -_MOST), _MOST).to(tl.float8e4nv)
    # Put into the order of packed words as bytes, among threads: rows are read with wide loads, and written with wide stores.
    y = tl.reshape(tl.permute(tl.reshape(y, (WIDTH // 128, 4, 32)), (0, 2, 1)), (WIDTH,))
    tl.store(OUT + t * PADDED + k, y, mask=k < PADDED)


def fp8_rows(
    x: torch.Tensor, out: torch.Tensor, scale: torch.Tensor, *, gain: torch.Tensor | None = None, eps: float = 0.0
) -> None:
    """x (T, K), normed if there is a `gain` -> out (T, K padded to 128) e4m3, scale (T,) float32: their product is x."""
    rows, inputs = x.shape
    padded = out.shape[1]
    width = triton.next_power_of_2(padded)
    launch(
        _fp8_rows, (rows,), x, gain, out, scale, eps, inputs, padded, width, gain is not None,
        num_warps=8 if width > 4096 else 4,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fp8Tiling:
    """How one product is cut into programs."""

    block_n: int  # outputs
    block_m: int  # rows of x
    stages: int
    warps: int = 4
    block_k: int = 128
    split: int = 1  # programs that share the inputs of one tile
    fetch: int = 0  # blocks of 128 inputs asked for before the kernel ahead has ended: they come as far as L2


class Fp8Scratch:
    """Where programs that share a tile leave their parts. One serves all products, one after another."""

    def __init__(self, shapes: Iterable[tuple[int, int]], rows: int, device: torch.device) -> None:
        """Enough for all these (outputs, inputs) with up to so many rows."""
        tiles, parts = 1, 1
        for outputs, inputs in shapes:
            for count in range(1, min(rows, SWITCHES[-1]) + 1):
                tiling = fp8_tiling(outputs, inputs, count)
                if tiling.split > 1:
                    many = _num_tiles(tiling, outputs, count)
                    tiles = max(tiles, many)
                    parts = max(parts, many * tiling.split * tiling.block_n * tiling.block_m)
        self.parts = torch.zeros(parts, dtype=torch.float32, device=device)
        self.arrived = torch.zeros(tiles, dtype=torch.int32, device=device)  # 0 between kernels


@triton.jit(do_not_specialize=["M"])
def _fp8_product(X, XSCALE, W, SCALE, BIAS, OUT, PARTS, ARRIVED, M, STRIDE: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
                 BN: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
                 FETCH: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr):  # fmt: skip
    """One tile (BN outputs, BM rows), or with SPLIT one part of its inputs."""
    PART: tl.constexpr = (K + SPLIT * BK - 1) // (SPLIT * BK) * BK  # inputs of a part
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    low = tl.program_id(2) * PART
    k = low + tl.arange(0, BK)
    own = W + tl.minimum(n, N - 1)[:, None] * K + k[None, :]  # (BN, BK)
    own_x = X + m[:, None] * K + k[None, :]  # (BM, BK)
    present = (m < M)[:, None] & (k >= 0)[None, :]  # the others are not read: what L2 gives is what bounds a product
    if FETCH > 0:
        lines = W + tl.minimum(n, N - 1)[:, None] * K + tl.minimum(low + tl.arange(0, FETCH) * 128, K - 128)[None, :]
        tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [lines], dtype=tl.int32, is_pure=False,
                                  pack=1)  # fmt: skip
    w_scale = tl.load(SCALE + n, mask=n < N, other=0.0).to(tl.float32)
    follow(PDL)
    acc = tl.zeros([BN, BM], tl.float32)
    for first in tl.range(0, PART, BK, num_stages=STAGES):
        if K % (SPLIT * BK) == 0:
            w = tl.load(own + first)
            x = tl.load(own_x + first, mask=present, other=0.0)
        else:
            inside = (first + k < K)[None, :]
            w = tl.load(own + first, mask=inside, other=0.0)
            x = tl.load(own_x + first, mask=present & inside, other=0.0)
        if _INTERPRETED:
            acc += tl.dot(w.to(tl.float32), tl.trans(x.to(tl.float32)))
        else:
            acc = tl.dot(w, tl.trans(x), acc)
    if SPLIT == 1:
        _fp8_finish(acc, w_scale, XSCALE, BIAS, OUT, m, n, M, STRIDE, N, HAS_BIAS, ADD)
    else:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if _leave(acc, PARTS, ARRIVED, tile, tl.program_id(2), BM, BN, BM, SPLIT):
            total = _joined(PARTS, ARRIVED, tile, BM, BN, BM, SPLIT)
            _fp8_finish(total, w_scale, XSCALE, BIAS, OUT, m, n, M, STRIDE, N, HAS_BIAS, ADD)


@triton.jit
def _fp8_finish(acc, w_scale, XSCALE, BIAS, OUT, m, n, M, STRIDE: tl.constexpr, N: tl.constexpr, HAS_BIAS: tl.constexpr,
                ADD: tl.constexpr):  # fmt: skip
    """Scales, bias and residual on float32 sums (BN, BM)."""
    x_scale = tl.load(XSCALE + m, mask=m < M, other=0.0)
    y = acc * w_scale[:, None] * x_scale[None, :]
    if HAS_BIAS:
        y += tl.load(BIAS + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out = OUT + m[None, :].to(tl.int64) * STRIDE + n[:, None]
    stored = (m < M)[None, :] & (n < N)[:, None]
    if ADD:
        y += tl.load(out, mask=stored, other=0.0).to(tl.float32)
    tl.store(out, y.to(OUT.dtype.element_ty), mask=stored)


_MANY = 100  # tiles of 128 x 128 that keep an H200 busy
_PROGRAMS = 132  # as many as an H100 or H200 has multiprocessors
_WIDE, _WIDER = 4096, 8192  # outputs
_OTHER_BYTES = 2048  # of shared memory: what sums and scans take
SWITCHES = (64, 128, 256)  # more rows than each of these may be cut otherwise


def fp8_tiling(outputs: int, inputs: int, rows: int) -> Fp8Tiling:
    """With fewer blocks under way than `_wanted` where the device has less shared memory than an H200."""
    tiling, has = _wanted(outputs, inputs, rows), gpu_features.shared_bytes()
    turn = (tiling.block_n + tiling.block_m) * tiling.block_k  # bytes
    if has is None or tiling.stages * turn <= has - _OTHER_BYTES:
        return tiling
    return replace(tiling, stages=(has - _OTHER_BYTES) // turn)


def _wanted(outputs: int, inputs: int, rows: int) -> Fp8Tiling:
    """Found by trying some forty in whole steps of an H200, and where there are at most 64 rows product by product. Rows are
    read again for each tile of outputs, from L2: that is what bounds it."""
    if rows <= SWITCHES[0]:
        return Fp8Tiling(64, 64, stages=6, split=2 if inputs > 4096 else 1)
    if outputs >= _WIDE and rows <= SWITCHES[2]:
        if outputs < _WIDER and rows <= SWITCHES[1]:
            return Fp8Tiling(64, 128, stages=6, fetch=4)
        busy = triton.cdiv(outputs, 128) * triton.cdiv(rows, 128) > _PROGRAMS
        return Fp8Tiling(128, 128, stages=3) if busy else Fp8Tiling(128, 128, stages=5, warps=8)
    if rows <= SWITCHES[1]:
        return Fp8Tiling(64, 64, stages=6, fetch=4)
    if rows <= few_rows(outputs):
        return Fp8Tiling(128, 64, stages=6)
    return Fp8Tiling(128, 128, stages=5, warps=8)


def few_rows(outputs: int) -> int:
    """Up to so many, tiles are cut smaller, so that there are more of them."""
    return 128 * (-(-_MANY // -(-outputs // 128)) - 1)


def _num_tiles(tiling: Fp8Tiling, outputs: int, rows: int) -> int:
    return int(triton.cdiv(rows, tiling.block_m) * triton.cdiv(outputs, tiling.block_n))


def fp8_product(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    packed: Packed,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    add: bool = False,
    tiling: Fp8Tiling | None = None,
    scratch: Fp8Scratch | None = None,
) -> None:
    """x (T, K padded), x_scale (T,) of `fp8_rows`; packed (N, K), a scale per output; out (T, N), whose rows may be apart.
    `scratch` for tilings that split."""
    rows, padded = x.shape
    outputs = packed.shape[0]
    tiling = tiling or fp8_tiling(outputs, padded, rows)
    parts = arrived = None
    if tiling.split > 1:
        tiles = _num_tiles(tiling, outputs, rows)
        assert scratch is not None and scratch.arrived.numel() >= tiles
        assert scratch.parts.numel() >= tiles * tiling.split * tiling.block_n * tiling.block_m
        parts, arrived = scratch.parts, scratch.arrived
    weight = packed.numbers.view(torch.float8_e4m3fn)  # (N, K padded)
    assert x.numel() < 2**31 and weight.numel() < 2**31  # places are 32-bit
    launch(
        _fp8_product, (triton.cdiv(rows, tiling.block_m), triton.cdiv(outputs, tiling.block_n), tiling.split),
        x, x_scale, weight, packed.scale, bias, out, parts, arrived, rows, out.stride(0), outputs, padded, tiling.block_n,
        tiling.block_m, tiling.block_k, tiling.stages, tiling.split, 0 if INTERPRETED else tiling.fetch, bias is not None, add,
        num_warps=tiling.warps,
    )  # fmt: skip
