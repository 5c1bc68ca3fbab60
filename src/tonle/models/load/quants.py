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
# 256 numbers in 8 groups of 32. Each group's scale and minimum are 6-bit multiples of the block's two (`group_scales`).
# A row of `packed` is two groups, the first in the low halves of the bytes; bit g of `high` is the fifth bit of group g.
Q4_K = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("sixes", "u1", (12,)), ("packed", "u1", (4, 32))])
Q5_K = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("sixes", "u1", (12,)), ("high", "u1", (32,)),
                 ("packed", "u1", (4, 32))])  # fmt: skip
# 256 numbers in two halves of 4 x 32, and a scale for each 16. `packed` has the low four bits (rows 0 and 1 in the low
# halves of its bytes, 2 and 3 in the high ones), `high` two more, those of row 0 in its lowest bits.
Q6_K = np.dtype([("packed", "u1", (2, 2, 32)), ("high", "u1", (2, 32)), ("scales", "i1", (16,)), ("scale", "<f2")])


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
    numbers = halves(blocks["packed"]).reshape(-1, 8, 32)
    fifth = blocks["high"][:, None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # (blocks, 8, 32)
    return _scaled(numbers | fifth << 4, *group_scales(blocks))


def _q6_k(data: Bytes) -> Numbers:
    blocks = data.view(Q6_K)
    low = halves(blocks["packed"], axis=2).reshape(-1, 2, 4, 32)
    high = blocks["high"][:, :, None, :] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    numbers = (low | high << 4).view(np.int8) - np.int8(32)
    scale = _column(blocks["scale"]) * blocks["scales"]  # (blocks, 16)
    unpacked: Numbers = np.multiply(numbers.reshape(-1, 16, 16), scale[..., None], dtype=np.float32)
    return unpacked


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
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
}
