"""The weights of a layer's experts, side by side in one tensor, as kernels read them: 16-bit numbers, or packed words.

Does: `ExpertWeights.of`, without a copy where memory has them side by side already. Does not: multiply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tonle.models.cuda.few_bits import table_words
from tonle.models.layers import Linear, LinearPart, Quantized
from tonle.models.packed import Packed, pack


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """One matrix of every expert."""

    weight: torch.Tensor  # (experts, out, in); packed: words (experts, out, words of a row)
    bias: torch.Tensor | None = None  # (experts, out)
    packed: Packed | None = None  # all experts' rows below one another: few-bit numbers
    table: torch.Tensor | None = None  # of `packed`, as kernels take it

    @classmethod
    def of(cls, linears: Sequence[Linear], dtype: torch.dtype) -> ExpertWeights:
        """Maps of the same shape. Few-bit weights stay so if all of them are, in the same way; else they become `dtype`.

        Where weights are copied, the maps then refer to the copy: what they had is given back unless others hold it.
        """
        parts = [part for linear in linears for part in linear.parts]
        outputs, inputs = sum(linears[0].sizes), parts[0].weight.shape[0 if parts[0].transposed else 1]
        biases = [part.bias for part in parts if part.bias is not None]
        bias = torch.cat(biases).view(len(linears), outputs) if biases else None
        if (packed := _packed(parts)) is not None:
            return cls(packed.numbers.view(len(linears), outputs, -1), bias, packed, table_words(packed, dtype))
        weight = None
        if not any(isinstance(part.weight, Quantized) for part in parts):
            weight = _side_by_side([part.dense for part in parts])
        if weight is None:
            weight = _copied(parts, dtype)
        return cls(weight.view(len(linears), outputs, inputs), bias)


def dense(part: LinearPart, dtype: torch.dtype) -> torch.Tensor:
    """(out, in)"""
    return part.weight.unpacked(dtype) if isinstance(part.weight, Quantized) else part.dense


def _packed(parts: Sequence[LinearPart]) -> Packed | None:
    """All rows of all parts, of which each part is a view from now on; None if they do not share a form."""
    every = [pack(part.weight) for part in parts if isinstance(part.weight, Quantized)]
    made = [one for one in every if one is not None]
    if len(made) < len(parts) or any(_kind(one) != _kind(made[0]) for one in made):
        return None
    first, num_rows = made[0], sum(one.shape[0] for one in made)
    minimum = None if first.minimum is None else _taller(first.minimum, num_rows)
    whole = replace(
        first, numbers=_taller(first.numbers, num_rows), scale=_taller(first.scale, num_rows), minimum=minimum
    )
    at = 0
    for part, one in zip(parts, made, strict=True):
        part.weight = view = whole.rows(slice(at, at + one.shape[0]))
        view.numbers.copy_(one.numbers)
        view.scale.copy_(one.scale)
        if view.minimum is not None and one.minimum is not None:
            view.minimum.copy_(one.minimum)
        at += one.shape[0]
    return whole


def _taller(like: torch.Tensor, rows: int) -> torch.Tensor:
    return like.new_empty(rows, *like.shape[1:])


def _kind(packed: Packed) -> tuple[object, ...]:
    """What must be the same for one kernel to read both."""
    table = None if packed.table is None else tuple(packed.table.tolist())
    return (
        packed.form,
        packed.group,
        packed.inputs,
        packed.scale.shape[1],
        packed.scale.dtype,
        None if packed.minimum is None else packed.minimum.dtype,
        table,
    )


def _copied(parts: Sequence[LinearPart], dtype: torch.dtype) -> torch.Tensor:
    """One flat tensor, of which each part is a view from now on."""
    sizes = [part.weight.shape.numel() for part in parts]
    whole = dense(parts[0], dtype).new_empty(sum(sizes), dtype=dtype)
    for part, place in zip(parts, whole.split_with_sizes(sizes), strict=True):
        found = dense(part, dtype)
        part.weight, part.transposed = place.view(found.shape).copy_(found), False
    return whole


def _side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One flat tensor over the memory of all of them, if they lie there one after another without gaps."""
    first = tensors[0]
    storage, at = first.untyped_storage(), first.storage_offset()
    for tensor in tensors:
        if (
            not tensor.is_contiguous()
            or tensor.untyped_storage().data_ptr() != storage.data_ptr()
            or tensor.storage_offset() != at
            or tensor.dtype != first.dtype
        ):
            return None
        at += tensor.numel()
    return torch.as_strided(first, (sum(tensor.numel() for tensor in tensors),), (1,), first.storage_offset())
