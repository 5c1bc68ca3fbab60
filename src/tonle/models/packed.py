"""Few-bit weights as the GPU's kernels read them: 32-bit words of eight 4-bit or four 8-bit numbers.

Does: pack a `Quantized` weight, and unpack it. Does not: multiply (`cuda/quantized_matrix.py`), or import triton: loaders pack
each matrix as soon as it is on the device, so a model of 4-bit numbers never takes a byte for each.

Inputs come in blocks of 32 words. Place p of word j holds input 32 p + j of its block: words that stand side by side hold inputs
that stand side by side at every place, so kernels read both with wide loads, and 32 inputs in a row, the smallest group that may
have a scale of its own, are one place of a block's words.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from tonle.models.layers import Quantized

Form = Literal["int4", "int8", "fp8", "table"]
WORDS = 32  # of a block
ZERO = {"int4": 8, "int8": 128}  # added to signed numbers to store them
_CHUNK = 2**24  # numbers packed at a time: bounds the memory that packing takes


@dataclass(slots=True, eq=False)
class Packed(Quantized):
    """`numbers` (out, blocks * 32) int32; a weight is (number - ZERO + minimum) * scale, or table[number] * scale.

    `scale` and `minimum`, which is in units of the scale here, are (out, groups) of `group` inputs each; or scale is (out, 1)
    and `group` 0: one for each output.
    """

    inputs: int = 0
    form: Form = "int8"
    group: int = 0

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.numbers.shape[0], self.inputs))

    @property
    def places(self) -> int:
        """Numbers of a word."""
        return places_of(self.form)

    @property
    def num_blocks(self) -> int:
        return self.numbers.shape[1] // WORDS

    def times(self, factor: float) -> Packed:
        return replace(self, scale=self.scale.float() * factor)

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        numbers = _numbers(self)
        zero = ZERO.get(self.form)
        if self.table is not None:
            values = self.table[numbers.int()]
        else:
            values = numbers.float() if zero is None else numbers.float() - zero
        group = self.group or values.shape[1]
        scale = self.scale.float().repeat_interleave(group, dim=1)[:, : values.shape[1]]
        if self.minimum is not None:
            values += self.minimum.float().repeat_interleave(group, dim=1)[:, : values.shape[1]]
        values *= scale
        return values[:, : self.inputs].to(dtype)


def places_of(form: Form) -> int:
    return 8 if form in ("int4", "table") else 4


def pack(weight: Quantized) -> Packed | None:
    """None where no kernel reads it: scales of groups that are no multiple of 32 inputs, or a scale of 0 beside a minimum."""
    if isinstance(weight, Packed):
        return weight
    inputs, groups = weight.shape[1], weight.scale.shape[1]
    form = _form(weight)
    block = WORDS * places_of(form)
    if weight.minimum is not None and bool(((weight.scale == 0) & (weight.minimum != 0)).any()):
        return None
    scale, shift = weight.scale, _shift(weight, form)
    if scale.dtype not in (torch.float16, torch.bfloat16):
        scale = scale.float()
    group = 0
    if groups > 1 or shift is not None:
        own = inputs // groups if groups > 1 else block  # inputs of a scale as given
        if groups > 1 and (inputs % groups or own % WORDS):
            return None
        group = own if block % own == 0 or own % block == 0 else math.gcd(own, block)
        count = -(-(-(-inputs // block) * block) // group)
        scale = _per_group(scale, own // group, count)
        shift = None if shift is None else _per_group(shift, own // group, count)
    return Packed(_words(weight, form), scale.contiguous(), shift, weight.table, weight.bits, inputs, form, group)


def _per_group(scale: torch.Tensor, times: int, count: int) -> torch.Tensor:
    """(out, groups as given) -> (out, count): one for each `times` groups, zeros behind the last; or one for all of them."""
    if scale.shape[1] == 1:
        return scale.expand(-1, count).contiguous()
    scale = scale if times == 1 else scale.repeat_interleave(times, dim=1)
    return torch.nn.functional.pad(scale, (0, count - scale.shape[1])).contiguous()


def _form(weight: Quantized) -> Form:
    if weight.table is not None:
        return "table"
    if weight.numbers.dtype == torch.float8_e4m3fn:
        return "fp8"
    return "int4" if weight.bits == 4 else "int8"


def _shift(weight: Quantized, form: Form) -> torch.Tensor | None:
    """The minimum in units of the scale, once ZERO is taken off; None if it is 0, as in symmetric forms.

    Zero points are whole numbers, which bfloat16 holds exactly; others stay float32.
    """
    unsigned = form in ZERO and weight.numbers.dtype == torch.uint8
    if weight.minimum is None:
        return torch.full_like(weight.scale, ZERO[form], dtype=torch.bfloat16) if unsigned else None
    scale = weight.scale.float()
    shift = weight.minimum.float() / torch.where(scale == 0, torch.ones_like(scale), scale)
    whole = shift.round()
    if bool(((whole - shift).abs() < 1e-3).all()):
        shift = (whole + ZERO[form] if unsigned else whole).clamp(-256, 256)
        return shift.to(torch.bfloat16) if bool(shift.any()) else None
    return shift + ZERO[form] if unsigned else shift


def _words(weight: Quantized, form: Form) -> torch.Tensor:
    (outputs, inputs), places = weight.shape, places_of(form)
    blocks = -(-inputs // (WORDS * places))
    words = torch.empty(outputs, blocks * WORDS, dtype=torch.int32, device=weight.numbers.device)
    rows = max(1, _CHUNK // inputs)
    for first in range(0, outputs, rows):
        some = slice(first, first + rows)
        numbers = _bytes(weight.numbers[some], form)
        if inputs % (WORDS * places):
            numbers = torch.nn.functional.pad(numbers, (0, blocks * WORDS * places - inputs))
        ordered = numbers.view(-1, blocks, places, WORDS).transpose(2, 3)  # (rows, blocks, words, places)
        if places == 8:
            ordered = ordered[..., 0::2] | (ordered[..., 1::2] << 4)
        words[some] = ordered.contiguous().view(torch.int32).view(-1, blocks * WORDS)
    return words


def _bytes(numbers: torch.Tensor, form: Form) -> torch.Tensor:
    """uint8, from 0 on."""
    if numbers.dtype == torch.int8 and form in ZERO:
        return (numbers.view(torch.uint8) + ZERO[form]) & (15 if form == "int4" else 255)
    return numbers.view(torch.uint8)


def _numbers(packed: Packed) -> torch.Tensor:
    """(out, inputs padded to whole blocks), one number per element."""
    outputs, places = packed.numbers.shape[0], packed.places
    stored = packed.numbers.view(torch.uint8).view(outputs, packed.num_blocks, WORDS, 4)
    if places == 8:
        stored = torch.stack((stored & 15, stored >> 4), dim=-1).view(outputs, packed.num_blocks, WORDS, 8)
    numbers = stored.transpose(2, 3).reshape(outputs, -1)
    return numbers.view(torch.float8_e4m3fn) if packed.form == "fp8" else numbers
