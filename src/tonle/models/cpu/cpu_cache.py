"""The KV cache as the compiled step has it: float32 as it is, or int8 with a scale for each head and token.

Does: write a head to its place, give blocks back as float32; which of the two forms is decided when it is compiled. Does not:
attend (`kernels.py`), choose blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from tonle.models.cpu.products import OPTIONS, compiled, f32
from tonle.models.cpu.rounding import SMALLEST, largest_of, per_unit, rounded
from tonle.models.cpu.vector import F32, I8, I64, LANES, VF, VI, Code
from tonle.models.inputs import KVCache

TOP = 127  # the largest number


class Cache(NamedTuple):
    """Keys and values of all layers."""

    keys: Any  # (layers, blocks, block, kv heads, dim) float32 or int8
    values: Any
    key_scales: Any  # (layers, blocks, kv heads, block) float32; (layers, 0, 0, 0) without
    value_scales: Any
    unpacked: Any  # (threads, kv heads * block * dim): a block as float32; (threads, 0) where it is float32 already

    @classmethod
    def of(cls, kv: KVCache, num_threads: int) -> Cache:
        if kv.k_scales is None or kv.v_scales is None:
            none, room = np.zeros((kv.k.shape[0], 0, 0, 0), np.float32), np.zeros((num_threads, 0), np.float32)
            return cls(kv.k.numpy(), kv.v.numpy(), none, none, room)
        room = np.zeros((num_threads, int(np.prod(kv.k.shape[2:]))), np.float32)
        return cls(kv.k.numpy(), kv.v.numpy(), kv.k_scales.numpy(), kv.v_scales.numpy(), room)


def keep_head(head: Any, cache: Any, scales: Any, block: Any, offset: Any, h: Any) -> None:
    """head (dim,) float32, to cache (blocks, block, kv heads, dim) of one layer; if that is int8, its scale to scales (blocks, kv
    heads, block)."""


@overload(keep_head, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
def _keep_head(head: Any, cache: Any, scales: Any, block: Any, offset: Any, h: Any) -> Any:
    def copied(head: Any, cache: Any, scales: Any, block: Any, offset: Any, h: Any) -> None:
        for i in range(head.shape[0]):
            cache[block, offset, h, i] = head[i]

    def rounded(head: Any, cache: Any, scales: Any, block: Any, offset: Any, h: Any) -> None:
        dim, num_kv = head.shape[0], cache.shape[2]
        if dim % LANES == 0:
            at = ((block * cache.shape[1] + offset) * num_kv + h) * dim
            round_vectors(head, 0, dim // LANES, cache, at, scales, (block * num_kv + h) * cache.shape[1] + offset)
        else:
            scales[block, h, offset] = round_numbers(head, cache[block, offset, h])

    return rounded if cache.dtype == types.int8 else copied


def block_rows(cache: Any, scales: Any, unpacked: Any, block: Any, first: Any, last: Any, count: Any) -> Any:
    """One block of cache (blocks, block, kv heads, dim), with kv heads first..last and `count` positions of interest, as float32.

    Returns flat memory, where the block begins in it, how far apart positions are, and heads. unpacked: room for a block."""


@overload(block_rows, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
def _block_rows(cache: Any, scales: Any, unpacked: Any, block: Any, first: Any, last: Any, count: Any) -> Any:
    def floats(cache: Any, scales: Any, unpacked: Any, block: Any, first: Any, last: Any, count: Any) -> Any:
        _, size, num_kv, dim = cache.shape
        return cache.reshape(-1), block * size * num_kv * dim, num_kv * dim, dim

    def numbers(cache: Any, scales: Any, unpacked: Any, block: Any, first: Any, last: Any, count: Any) -> Any:
        _, size, num_kv, dim = cache.shape
        for h in range(first, last):
            for i in range(count):
                scale = scales[block, h, i]
                if dim % LANES == 0:
                    place = ((block * size + i) * num_kv + h) * dim
                    unpack_vectors(cache, place, dim // LANES, scale, unpacked, (h * size + i) * dim)
                else:
                    for k in range(dim):
                        unpacked[(h * size + i) * dim + k] = f32(cache[block, i, h, k]) * scale
        return unpacked, 0, dim, size * dim

    return numbers if cache.dtype == types.int8 else floats


@compiled
def round_numbers(head: Any, out: Any) -> Any:
    """out (dim,) int8 = head / the scale that is returned."""
    largest, square = f32(0), f32(0)
    for i in range(head.shape[0]):
        largest = max(largest, abs(head[i]))
        square += head[i] * head[i]
    if square != square:  # integers cannot say that a number is none
        largest = square
    inverse = f32(TOP) / largest if largest >= f32(SMALLEST) else f32(0)
    for i in range(head.shape[0]):
        out[i] = np.int8(np.rint(head[i] * inverse))
    return largest * f32(1 / TOP)


@intrinsic
def round_vectors(typingctx: Any, values: Any, v: Any, count: Any, numbers: Any, n: Any, scales: Any, s: Any) -> Any:
    """The same for `count` vectors, which lie one after the other; the scale goes to scales[s]."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, code = builder, Code(context, builder, signature, args)
        source, target, scale = (code.pointer(place) for place in (0, 3, 5))
        largest = largest_of(code, source, code.number(2))
        factor = per_unit(code, largest, TOP)

        def put(i: Any) -> None:
            at = code.times(i, LANES)
            number = rounded(code, code.load(source, at, VF), factor)
            code.store(b.trunc(number, ir.VectorType(I8, LANES)), target, at)

        code.loop(code.number(2), put)
        b.store(b.fmul(largest, ir.Constant(F32, 1.0 / TOP)), b.gep(scale, [ir.Constant(I64, 0)]))
        return context.get_dummy_value()

    return types.void(values, v, count, numbers, n, scales, s), generate


@intrinsic
def unpack_vectors(typingctx: Any, numbers: Any, n: Any, count: Any, scale: Any, out: Any, to: Any) -> Any:
    """out[to :] = `count` vectors of int8 numbers[n :], multiplied with scale."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, code = builder, Code(context, builder, signature, args)
        source, target, factor = code.pointer(0), code.pointer(4), code.spread(code.number(3))

        def put(i: Any) -> None:
            at = code.times(i, LANES)
            wide = b.sitofp(b.sext(code.load(source, at, ir.VectorType(I8, LANES)), VI), VF)
            code.store(b.fmul(wide, factor), target, at)

        code.loop(code.number(2), put)
        return context.get_dummy_value()

    return types.void(numbers, n, count, scale, out, to), generate
