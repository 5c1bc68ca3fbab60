"""A matrix as it was stored: small integers with scales, bfloat16, or float32. Exact: nothing is rounded here.

Does: read GGML's block types and float tensors into one form, widen forms so that they can be joined. Does not: lay anything
out for the kernels (`pack.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tonle.models.cpu.vector import GROUP
from tonle.models.gguf_file import GGMLType, GGUFTensor
from tonle.models.load.quants import Q4_0, Q4_1, Q4_K, Q8_0, dequantize, group_scales, halves

Array = npt.NDArray[Any]

_WIDTH = {np.dtype(np.uint8): 0, np.dtype(np.int8): 1, np.dtype(np.uint16): 2, np.dtype(np.float32): 3}


@dataclass(slots=True, eq=False)
class Stored:
    """numbers (N, K): uint8 0..15, int8, uint16 (bfloat16 bits) or float32. Integers have scale, minimum (N, K / GROUP)."""

    numbers: Array
    scale: Array | None = None
    minimum: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.numbers.shape[0], self.numbers.shape[1]

    def take(self, rows: Array) -> Stored:
        """These rows, in this order."""
        return Stored(self.numbers[rows], *(None if a is None else a[rows] for a in (self.scale, self.minimum)))

    def floats(self) -> Array:
        """(N, K) float32."""
        if self.numbers.dtype == np.float32:
            return self.numbers
        if self.numbers.dtype == np.uint16:
            return (self.numbers.astype(np.uint32) << 16).view(np.float32)
        assert self.scale is not None and self.minimum is not None
        grouped = self.numbers.reshape(*self.scale.shape, GROUP).astype(np.float32)
        return (grouped * self.scale[..., None] + self.minimum[..., None]).reshape(self.shape)

    def widen(self, dtype: np.dtype[Any]) -> Stored:
        if self.numbers.dtype == dtype:
            return self
        if self.numbers.dtype == np.uint8 and dtype == np.int8:
            return Stored(self.numbers.view(np.int8), self.scale, self.minimum)
        return Stored(self.floats())


def join(parts: list[Stored]) -> Stored:
    """One below the other, in the narrowest form that holds all exactly."""
    kinds = {part.numbers.dtype for part in parts}
    widest = max(kinds, key=lambda kind: _WIDTH[kind])
    if widest == np.uint16 and len(kinds) > 1:
        widest = np.dtype(np.float32)
    parts = [part.widen(widest) for part in parts]
    numbers = np.concatenate([part.numbers for part in parts])
    if parts[0].scale is None:
        return Stored(numbers)
    scale = np.concatenate([part.scale for part in parts if part.scale is not None])
    return Stored(numbers, scale, np.concatenate([part.minimum for part in parts if part.minimum is not None]))


def from_floats(values: Array) -> Stored:
    """bfloat16 if every value is one, as with checkpoints that were saved so; float32 otherwise."""
    values = np.ascontiguousarray(values, dtype=np.float32)
    bits = values.view(np.uint32)
    if not (bits & 0xFFFF).any():
        return Stored((bits >> 16).astype(np.uint16))
    return Stored(values)


def from_gguf(tensor: GGUFTensor) -> Stored:
    """A stored matrix (N, K), with K in whole groups."""
    rows = tensor.shape[0]
    match tensor.type:
        case GGMLType.Q4_0:
            blocks = tensor.data.view(Q4_0)
            scale = blocks["scale"].astype(np.float32)
            return _grouped(halves(blocks["packed"]), scale, scale * -8, rows)
        case GGMLType.Q4_1:
            blocks = tensor.data.view(Q4_1)
            scale, minimum = blocks["scale"].astype(np.float32), blocks["minimum"].astype(np.float32)
            return _grouped(halves(blocks["packed"]), scale, minimum, rows)
        case GGMLType.Q8_0:
            blocks = tensor.data.view(Q8_0)
            scale = blocks["scale"].astype(np.float32)
            return _grouped(blocks["values"], scale, np.zeros_like(scale), rows)
        case GGMLType.Q4_K:
            blocks = tensor.data.view(Q4_K)
            scale, minimum = group_scales(blocks)
            return _grouped(halves(blocks["packed"]), scale, -minimum, rows)
        case _:
            return from_floats(dequantize(tensor))


def _grouped(numbers: Array, scale: Array, minimum: Array, rows: int) -> Stored:
    return Stored(numbers.reshape(rows, -1), scale.reshape(rows, -1), minimum.reshape(rows, -1))
