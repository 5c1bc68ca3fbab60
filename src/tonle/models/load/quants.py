"""Unpacking GGML's stored types to numbers.

Does: plain floats and the block types in common use. The simple blocks are unpacked here, some three times faster than
the reference; the K types by the `gguf` package. Does not: know what a tensor is for. Numpy only; releases the GIL.
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
_Q4_0 = np.dtype([("scale", "<f2"), ("packed", "u1", (16,))])
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("packed", "u1", (16,))])
_Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", (32,))])


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
    blocks = data.view(_Q8_0)
    numbers: Numbers = np.multiply(blocks["values"], _column(blocks["scale"]), dtype=np.float32)
    return numbers


def _q4_0(data: Bytes) -> Numbers:
    blocks = data.view(_Q4_0)
    numbers = _unpack_4bit(blocks["packed"])
    numbers -= 8
    numbers *= _column(blocks["scale"])
    return numbers


def _q4_1(data: Bytes) -> Numbers:
    blocks = data.view(_Q4_1)
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


def _by_reference(type_: GGMLType) -> Callable[[Bytes], Numbers]:
    def unpack(data: Bytes) -> Numbers:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize as reference

        numbers: Numbers = reference(data.reshape(1, -1), GGMLQuantizationType(int(type_)))
        return numbers

    return unpack


SUPPORTED: dict[GGMLType, Callable[[Bytes], Numbers]] = {
    GGMLType.F32: _f32,
    GGMLType.F16: _f16,
    GGMLType.BF16: _bf16,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q4_K: _by_reference(GGMLType.Q4_K),
    GGMLType.Q5_K: _by_reference(GGMLType.Q5_K),
    GGMLType.Q6_K: _by_reference(GGMLType.Q6_K),
}
