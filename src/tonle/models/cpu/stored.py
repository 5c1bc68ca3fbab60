"""A matrix as it was stored: small integers with scales, bfloat16, or float32. Exact: nothing is rounded here, but for `times`.

Does: read GGML's block types and float tensors into one form, widen forms so that they can be joined. Does not: lay anything
out for the kernels (`pack.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tonle.models.cpu.vector import GROUP
from tonle.models.gguf_file import GGMLType, GGUFTensor
from tonle.models.layers import Quantized
from tonle.models.load.quants import (
    IQ4_NL,
    IQ4_VALUES,
    IQ4_XS,
    MXFP4,
    MXFP4_VALUES,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q8_0,
    dequantize,
    five_bits,
    group_scales,
    halves,
    iq4_xs_scales,
    mxfp4_scales,
    q3_k_numbers,
    q3_k_scales,
    q5_k_numbers,
)

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

    def times(self, factor: float) -> Stored:
        """Through the scales of integers; bfloat16 is rounded to it again, so that it does not take twice the memory."""
        if self.scale is not None:
            minimum = None if self.minimum is None else self.minimum * np.float32(factor)
            return Stored(self.numbers, self.scale * np.float32(factor), minimum)
        values = self.floats() * np.float32(factor)
        if self.numbers.dtype == np.float32:
            return Stored(values)
        bits = values.view(np.uint32)
        return Stored(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))

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


def from_quantized(weight: Quantized) -> Stored:
    """Integers stay integers, exactly, where their groups are whole groups of ours, and so do tables of multiples of one half
    (MXFP4). Other forms (8-bit floats, nf4) are unpacked and rounded to bfloat16, as checkpoints in them are computed."""
    inputs, groups = weight.shape[1], weight.scale.shape[1]
    numbers, scale = weight.numbers, weight.scale.float()
    if weight.table is not None and torch.equal(doubled := weight.table * 2, doubled.round()):
        numbers, scale = doubled.to(torch.int8)[numbers.int()], scale / 2
    elif weight.table is not None or numbers.dtype == torch.float8_e4m3fn:
        return from_floats(weight.unpacked(torch.bfloat16).float().numpy())
    if (inputs // groups) % GROUP:
        return from_floats(weight.unpacked(torch.float32).numpy())
    times = inputs // groups // GROUP
    minimum = torch.zeros_like(scale) if weight.minimum is None else weight.minimum.float()
    return Stored(numbers.numpy(), scale.numpy().repeat(times, axis=1), minimum.numpy().repeat(times, axis=1))


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
        case GGMLType.Q5_K:
            blocks = tensor.data.view(Q5_K)
            scale, minimum = group_scales(blocks)
            return _grouped(q5_k_numbers(blocks).view(np.int8), scale, -minimum, rows)
        case _:
            return _from_rare_gguf(tensor, rows)


def _from_rare_gguf(tensor: GGUFTensor, rows: int) -> Stored:
    match tensor.type:
        case GGMLType.Q5_0:
            blocks = tensor.data.view(Q5_0)
            scale = blocks["scale"].astype(np.float32)
            return _grouped(five_bits(blocks).view(np.int8) - np.int8(16), scale, np.zeros_like(scale), rows)
        case GGMLType.Q5_1:
            blocks = tensor.data.view(Q5_1)
            scale, minimum = blocks["scale"].astype(np.float32), blocks["minimum"].astype(np.float32)
            return _grouped(five_bits(blocks).view(np.int8), scale, minimum, rows)
        case (
            GGMLType.Q3_K
        ):  # a scale for each 16 numbers: its multiple, -32 to 31, times a number, -4 to 3, is at most 128
            blocks = tensor.data.view(Q3_K)
            negated = -q3_k_numbers(blocks) * q3_k_scales(blocks)[..., None]  # (blocks, 16, 16), -128 to 124
            scale = np.repeat(-blocks["scale"].astype(np.float32), 256 // GROUP)
            return _grouped(negated, scale, np.zeros_like(scale), rows)
        case GGMLType.IQ4_NL:
            blocks = tensor.data.view(IQ4_NL)
            scale = blocks["scale"].astype(np.float32)
            return _grouped(IQ4_VALUES[halves(blocks["packed"])], scale, np.zeros_like(scale), rows)
        case GGMLType.IQ4_XS:
            blocks = tensor.data.view(IQ4_XS)
            scale = iq4_xs_scales(blocks)
            return _grouped(IQ4_VALUES[halves(blocks["packed"])], scale, np.zeros_like(scale), rows)
        case GGMLType.MXFP4:
            blocks = tensor.data.view(MXFP4)
            scale = mxfp4_scales(blocks)
            return _grouped(MXFP4_VALUES[halves(blocks["packed"])], scale, np.zeros_like(scale), rows)
        case _:  # plain floats; Q2_K and Q6_K, whose groups of 16 have scales of their own
            return from_floats(dequantize(tensor))


def _grouped(numbers: Array, scale: Array, minimum: Array, rows: int) -> Stored:
    return Stored(numbers.reshape(rows, -1), scale.reshape(rows, -1), minimum.reshape(rows, -1))
