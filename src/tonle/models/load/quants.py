"""Unpacking GGML's stored types to numbers.

Does: plain floats and the block types in common use; the layouts of their blocks. Does not: know what a tensor is for.
Numpy only; releases the GIL. Tests compare every type with the `gguf` package, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from tonle.models.gguf_file import GGMLType, GGUFTensor

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[Any]  # float32 or float16

# 32 numbers share a scale (and a minimum); 4-bit numbers i and i + 16 share a byte, the first in its low half.
Q4_0 = np.dtype([("scale", "<f2"), ("packed", "u1", (16,))])
Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("packed", "u1", (16,))])
Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", (32,))])
# As Q4_0 and Q4_1; bit i of `high` is the fifth bit of number i.
Q5_0 = np.dtype([("scale", "<f2"), ("high", "u1", (4,)), ("packed", "u1", (16,))])
Q5_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("high", "u1", (4,)), ("packed", "u1", (16,))])
IQ4_NL = Q4_0  # its numbers are places in IQ4_VALUES
# 256 numbers in 8 groups of 32. Each group's scale and minimum are 6-bit multiples of the block's two (`group_scales`).
# A row of `packed` is two groups, the first in the low halves of the bytes; bit g of `high` is the fifth bit of group g.
Q4_K = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("sixes", "u1", (12,)), ("packed", "u1", (4, 32))])
Q5_K = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("sixes", "u1", (12,)), ("high", "u1", (32,)),
                 ("packed", "u1", (4, 32))])  # fmt: skip
# 256 numbers in two halves of 4 x 32, and a scale for each 16. `packed` has the low four bits (rows 0 and 1 in the low
# halves of its bytes, 2 and 3 in the high ones), `high` two more, those of row 0 in its lowest bits.
Q6_K = np.dtype([("packed", "u1", (2, 2, 32)), ("high", "u1", (2, 32)), ("scales", "i1", (16,)), ("scale", "<f2")])
# 256 numbers in two halves of 4 x 32, and a scale for each 16: a row of `packed` is a half, row 0 of it in the lowest two bits.
# Q2_K: a byte of `fours` has a multiple of the block's scale in its low half, of the block's minimum in its high one. Q3_K: bit
# g of `high` is the third bit of group g of 32 numbers; scales are 6-bit (`q3_k_scales`).
Q2_K = np.dtype([("fours", "u1", (16,)), ("packed", "u1", (2, 32)), ("scale", "<f2"), ("minimum", "<f2")])
Q3_K = np.dtype([("high", "u1", (32,)), ("packed", "u1", (2, 32)), ("sixes", "u1", (12,)), ("scale", "<f2")])
# 256 numbers in 8 groups of 32 as in IQ4_NL. Each group's scale is a 6-bit multiple of the block's (`iq4_xs_scales`): four bits
# in `low`, two in `high`.
IQ4_XS = np.dtype([("scale", "<f2"), ("high", "<u2"), ("low", "u1", (4,)), ("packed", "u1", (8, 16))])
# 32 numbers that are places in MXFP4_VALUES share a power of two (`mxfp4_scales`).
MXFP4 = np.dtype([("exponent", "u1"), ("packed", "u1", (16,))])
MXFP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.int8)  # twice the numbers
# What the 16 numbers of the IQ4 types stand for.
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.int8)


def dequantize(tensor: GGUFTensor) -> Numbers:
    """The tensor's numbers in its shape: float32, or float16 where they are stored so. May be a read-only view."""
    return SUPPORTED[tensor.type](tensor.data).reshape(tensor.shape)


def _f32(data: Bytes) -> Numbers:
    return data.view("<f4")


def _f16(data: Bytes) -> Numbers:
    return data.view("<f2")


def _bf16(data: Bytes) -> Numbers:
    wide = data.view("<u2").astype(np.uint32)  # a bfloat16 is the upper half of a float32
    wide <<= 16
    return wide.view(np.float32)


def _q8_0(data: Bytes) -> Numbers:
    blocks = data.view(Q8_0)
    numbers: Numbers = np.multiply(blocks["values"], _column(blocks["scale"]), dtype=np.float32)
    return numbers


def _q4_0(data: Bytes) -> Numbers:
    blocks = data.view(Q4_0)
    numbers = _unpack_4bit(blocks["packed"])
    numbers -= 8
    numbers *= _column(blocks["scale"])
    return numbers


def _q4_1(data: Bytes) -> Numbers:
    blocks = data.view(Q4_1)
    numbers = _unpack_4bit(blocks["packed"])
    numbers *= _column(blocks["scale"])
    numbers += _column(blocks["minimum"])
    return numbers


def _q5_0(data: Bytes) -> Numbers:
    blocks = data.view(Q5_0)
    numbers: Numbers = np.multiply(
        five_bits(blocks).view(np.int8) - np.int8(16), _column(blocks["scale"]), dtype=np.float32
    )
    return numbers


def _q5_1(data: Bytes) -> Numbers:
    blocks = data.view(Q5_1)
    numbers: Numbers = np.multiply(five_bits(blocks), _column(blocks["scale"]), dtype=np.float32)
    numbers += _column(blocks["minimum"])
    return numbers


def five_bits(blocks: npt.NDArray[Any]) -> Bytes:
    """Of Q5_0 or Q5_1 blocks: (blocks, 32) numbers 0 to 31."""
    low = halves(blocks["packed"]).reshape(-1, 32)
    fifth = np.unpackbits(np.ascontiguousarray(blocks["high"]), axis=1, bitorder="little")  # (blocks, 32)
    numbers: Bytes = np.bitwise_or(low, fifth << 4, dtype=np.uint8)
    return numbers


def _iq4_nl(data: Bytes) -> Numbers:
    blocks = data.view(IQ4_NL)
    values = IQ4_VALUES[halves(blocks["packed"]).reshape(-1, 32)]
    numbers: Numbers = np.multiply(values, _column(blocks["scale"]), dtype=np.float32)
    return numbers


def _column(values: npt.NDArray[np.float16]) -> npt.NDArray[np.float32]:
    return values.astype(np.float32)[:, None]


def _unpack_4bit(packed: Bytes) -> npt.NDArray[np.float32]:
    """(blocks, 16) bytes -> (blocks, 32) numbers 0 to 15."""
    packed = np.ascontiguousarray(packed)
    numbers = np.empty((len(packed), 32), np.float32)
    numbers[:, :16] = packed & 15
    numbers[:, 16:] = packed >> 4
    return numbers


def _q4_k(data: Bytes) -> Numbers:
    blocks = data.view(Q4_K)
    return _scaled(halves(blocks["packed"]).reshape(-1, 8, 32), *group_scales(blocks))


def _q5_k(data: Bytes) -> Numbers:
    blocks = data.view(Q5_K)
    return _scaled(q5_k_numbers(blocks), *group_scales(blocks))


def q5_k_numbers(blocks: npt.NDArray[Any]) -> Bytes:
    """(blocks, 8, 32) numbers 0 to 31."""
    fifth = blocks["high"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    numbers: Bytes = np.bitwise_or(halves(blocks["packed"]).reshape(-1, 8, 32), fifth << 4, dtype=np.uint8)
    return numbers


def _q6_k(data: Bytes) -> Numbers:
    blocks = data.view(Q6_K)
    low = halves(blocks["packed"], axis=2).reshape(-1, 2, 4, 32)
    high = blocks["high"][:, :, None, :] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    numbers = (low | high << 4).view(np.int8) - np.int8(32)
    scale = _column(blocks["scale"]) * blocks["scales"]  # (blocks, 16)
    unpacked: Numbers = np.multiply(numbers.reshape(-1, 16, 16), scale[..., None], dtype=np.float32)
    return unpacked


def _q2_k(data: Bytes) -> Numbers:
    blocks = data.view(Q2_K)
    scale = _column(blocks["scale"]) * (blocks["fours"] & 15)  # (blocks, 16)
    minimum = _column(blocks["minimum"]) * (blocks["fours"] >> 4)
    return _scaled(_two_bits(blocks).reshape(-1, 16, 16), scale, minimum)


def _q3_k(data: Bytes) -> Numbers:
    blocks = data.view(Q3_K)
    scale = _column(blocks["scale"]) * q3_k_scales(blocks)
    unpacked: Numbers = np.multiply(q3_k_numbers(blocks), scale[..., None], dtype=np.float32)
    return unpacked


def q3_k_numbers(blocks: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    """(blocks, 16, 16) numbers -4 to 3."""
    third = blocks["high"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # (blocks, 8, 32)
    numbers = _two_bits(blocks).reshape(-1, 8, 32) | third << 2
    return (numbers.view(np.int8) - np.int8(4)).reshape(-1, 16, 16)


def q3_k_scales(blocks: npt.NDArray[Any]) -> npt.NDArray[np.int8]:
    """(blocks, 16) multiples of the block's scale, -32 to 31."""
    low = halves(blocks["sixes"][:, :8]).reshape(-1, 16)
    high = blocks["sixes"][:, None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3  # (blocks, 4, 4)
    return (low | high.reshape(-1, 16) << 4).view(np.int8) - np.int8(32)


def _two_bits(blocks: npt.NDArray[Any]) -> Bytes:
    """Of Q2_K or Q3_K blocks: (blocks, 2, 4, 32) numbers 0 to 3."""
    shifted = blocks["packed"][:, :, None, :] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    numbers: Bytes = np.bitwise_and(shifted, 3, dtype=np.uint8)
    return numbers


def _iq4_xs(data: Bytes) -> Numbers:
    blocks = data.view(IQ4_XS)
    values = IQ4_VALUES[halves(blocks["packed"]).reshape(-1, 8, 32)]
    unpacked: Numbers = np.multiply(values, iq4_xs_scales(blocks)[..., None], dtype=np.float32)
    return unpacked


def iq4_xs_scales(blocks: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Of each group, (blocks, 8)."""
    low = np.stack((blocks["low"] & 15, blocks["low"] >> 4), axis=-1).reshape(-1, 8)
    high = blocks["high"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    multiples = (low | high << 4).astype(np.float32) - np.float32(32)
    scales: npt.NDArray[np.float32] = np.multiply(_column(blocks["scale"]), multiples, dtype=np.float32)
    return scales


def _mxfp4(data: Bytes) -> Numbers:
    blocks = data.view(MXFP4)
    values = MXFP4_VALUES[halves(blocks["packed"]).reshape(-1, 32)]
    unpacked: Numbers = np.multiply(values, mxfp4_scales(blocks)[:, None], dtype=np.float32)
    return unpacked


def mxfp4_scales(blocks: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """What MXFP4_VALUES are multiplied with, (blocks,)."""
    scales: npt.NDArray[np.float32] = np.ldexp(np.float32(1), blocks["exponent"].astype(np.int32) - 128)
    return scales


def group_scales(blocks: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Scale and minimum of each group of Q4_K or Q5_K blocks, (blocks, 8) each."""
    low, high, rest = np.split(blocks["sixes"], 3, axis=1)  # (blocks, 4) each
    scales = np.concatenate((low & 63, (rest & 15) | ((low >> 6) << 4)), axis=1)
    minimums = np.concatenate((high & 63, (rest >> 4) | ((high >> 6) << 4)), axis=1)
    return _column(blocks["scale"]) * scales, _column(blocks["minimum"]) * minimums


def halves(packed: Bytes, axis: int = -2) -> Bytes:
    """The low four bits of each byte, and the high ones after them along a new `axis`."""
    return np.stack((packed & 15, packed >> 4), axis=axis)


def _scaled(numbers: npt.NDArray[Any], scale: npt.NDArray[np.float32], minimum: npt.NDArray[np.float32]) -> Numbers:
    unpacked = numbers.astype(np.float32)
    unpacked *= scale[..., None]
    unpacked -= minimum[..., None]
    return unpacked


SUPPORTED: dict[GGMLType, Callable[[Bytes], Numbers]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16,
    GGMLType.BF16: _bf16,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
    GGMLType.IQ4_NL: _iq4_nl,
    GGMLType.IQ4_XS: _iq4_xs,
    GGMLType.MXFP4: _mxfp4,
}
