"""What several forms share: numbers out of 32-bit words, zero points, and scales spread over a matrix's outputs.

Does: arithmetic on tensors. Does not: know names of tensors.
"""

from __future__ import annotations

import math

import torch

from tonle.errors import ModelError
from tonle.models.layers import Quantized, Weight


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """(rows, n) int32 -> (rows, n * 32 / bits) uint8, the first number in the lowest bits of each word."""
    octets = words.flatten().view(torch.uint8).view(len(words), -1)
    return octets if bits == 8 else unpack_halves(octets)


def unpack_halves(octets: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """(..., n) bytes -> (..., 2 n) numbers 0 to 15, the first in the low half of each byte."""
    low, high = octets & 15, octets >> 4
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten(-2)


def with_zero_points(numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int) -> Quantized:
    """(number - zero) * scale. numbers (out, in) uint8; scale, zero (out, groups); zero as integers."""
    if zero.shape != scale.shape:
        raise ValueError(f"{tuple(zero.shape)} zero points for {tuple(scale.shape)} scales")
    if bits == 4:  # in float32 the minimum is exact
        return Quantized(numbers, scale, zero.float() * -scale.float(), bits=4)
    signed = (numbers ^ 128).view(torch.int8)  # less 128
    if not (centred := 128 - zero.int()).any():
        return Quantized(signed, scale)
    return Quantized(signed, scale, centred * scale.float())


def in_groups(weight: Quantized, group_of: torch.Tensor | None) -> Weight:
    """The weight, whose scale has one column for each group that `group_of` (in,) names. Groups that are not contiguous and
    equally long (act-order) have no form but floats."""
    inputs, groups = weight.shape[1], weight.scale.shape[1]
    if not groups or inputs % groups:
        raise ValueError(f"{inputs} inputs cannot have {groups} groups of one size")
    if group_of is None or torch.equal(group_of.long(), torch.arange(inputs) // (inputs // groups)):
        return weight
    order = group_of.long()
    if order.shape != (inputs,) or int(order.min()) < 0:
        raise ValueError(
            f"g_idx of shape {tuple(order.shape)} from {int(order.min())} on names no group for each input"
        )
    values = weight.numbers.float() * weight.scale[:, order].float()
    return values if weight.minimum is None else values.add_(weight.minimum[:, order])


def spread(scale: torch.Tensor, shape: torch.Size, block: tuple[int, int] | None = None) -> torch.Tensor:
    """(out, groups) of a scale for the whole matrix, for each output, each group of inputs, or each block."""
    outputs, inputs = shape
    if scale.dtype.itemsize == 1:  # a power of two
        scale = scale.float()
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(outputs, 1)
    if scale.ndim == 1:
        scale = scale[:, None]
    if scale.shape[0] == outputs and inputs % scale.shape[1] == 0:
        return scale
    height, width = block or (outputs // scale.shape[0], inputs // scale.shape[1])
    if scale.shape != (-(-outputs // height), -(-inputs // width)):
        raise ValueError(f"a scale of shape {tuple(scale.shape)} for a matrix of shape {tuple(shape)}")
    height, width = min(height, outputs), min(width, inputs)  # one block may be larger than the matrix
    scale = scale.repeat_interleave(height, dim=0)[:outputs]
    if inputs % width == 0:
        return scale
    group = math.gcd(inputs, width)  # the last block is cut short
    return scale.repeat_interleave(width // group, dim=1)[:, : inputs // group]


def wanted_bits(bits: int, allowed: tuple[int, ...], method: str) -> int:
    if bits not in allowed:
        expected = " and ".join(map(str, allowed))
        raise ModelError(f"{method} weights of {bits} bits are not supported; supported: {expected} bits")
    return bits
