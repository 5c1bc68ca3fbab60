"""The parts a decoder layer is made of: linear maps and norms over plain tensors.

Does: hold weights, shared or owned, and apply them; adapters by slot. Does not: train, register parameters, move
between devices, or know the order of a layer (`layer_order.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear, rms_norm

if TYPE_CHECKING:
    from tonle.models.experts import Experts

# Measured on x86 with MKL and two threads: with this many rows, weight @ rows.T is two to three times faster than
# rows @ weight.T.
_FEW_ROWS = range(4, 49)


@dataclass(slots=True, eq=False)
class Quantized:
    """A weight (out, in) in few bits: number * scale + minimum, one scale and minimum for each group of inputs.

    Whatever a checkpoint's layout, loaders give this form; backends pack it as their kernels read it.
    """

    numbers: torch.Tensor  # (out, in) int8; uint8; float8_e4m3fn
    scale: torch.Tensor  # (out, in / group); group = in where there is one scale for each output
    minimum: torch.Tensor | None = None  # the same; None = 0
    table: torch.Tensor | None = None  # (16,) float32: `numbers` are places in it (nf4, MXFP4)
    bits: int = 8  # 4: numbers are 0 to 15

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """(out, in), computed in float32 and rounded once."""
        rows, groups = self.scale.shape
        numbers = self.numbers.float() if self.table is None else self.table[self.numbers.int()]
        grouped = numbers.reshape(rows, groups, -1) * self.scale[..., None].float()
        if self.minimum is not None:
            grouped += self.minimum[..., None].float()
        return grouped.view(rows, -1).to(dtype)

    def rows(self, chosen: slice | torch.Tensor) -> Quantized:
        """These outputs, in this order."""
        minimum = None if self.minimum is None else self.minimum[chosen]
        return replace(self, numbers=self.numbers[chosen], scale=self.scale[chosen], minimum=minimum)

    def columns(self, chosen: slice) -> Quantized:
        """These inputs. `ValueError` if a group of them would be cut in two."""
        groups = self.scale.shape[1]
        if groups == 1:  # one scale for each output holds for any of its inputs
            return replace(self, numbers=self.numbers[:, chosen])
        group = self.numbers.shape[1] // groups
        first, last = chosen.start, chosen.stop
        if first % group or last % group:
            raise ValueError(
                f"{group} of its inputs share a scale, and inputs {first} to {last} are no whole groups of these"
            )
        own = slice(first // group, last // group)
        minimum = None if self.minimum is None else self.minimum[:, own]
        return replace(self, numbers=self.numbers[:, chosen], scale=self.scale[:, own], minimum=minimum)

    def times(self, factor: float) -> Quantized:
        """Multiplied through its scales, in float32."""
        minimum = None if self.minimum is None else self.minimum.float() * factor
        return replace(self, scale=self.scale.float() * factor, minimum=minimum)

    def to(self, device: torch.device) -> Quantized:
        parts = (self.scale, self.minimum, self.table)
        scale, minimum, table = (None if part is None else part.to(device) for part in parts)
        assert scale is not None
        return replace(self, numbers=self.numbers.to(device), scale=scale, minimum=minimum, table=table)

    @staticmethod
    def join(parts: Sequence[Quantized]) -> Quantized | None:
        """One below the other, exactly; None if their numbers do not mean the same."""
        first = parts[0]
        for part in parts[1:]:
            if (part.numbers.dtype, part.bits, part.table is None) != (
                first.numbers.dtype,
                first.bits,
                first.table is None,
            ):
                return None
            if first.table is not None and not torch.equal(first.table, part.table):  # type: ignore[arg-type]
                return None
        if len(parts) == 1:
            return first
        groups = math.lcm(*(part.scale.shape[1] for part in parts))
        if first.shape[1] % groups:
            return None
        has_minimum = any(part.minimum is not None for part in parts)
        scales = [part.scale.repeat_interleave(groups // part.scale.shape[1], dim=1) for part in parts]
        minimums = [
            torch.zeros_like(scale)
            if part.minimum is None
            else part.minimum.repeat_interleave(groups // part.minimum.shape[1], dim=1)
            for part, scale in zip(parts, scales, strict=True)
        ]
        return replace(
            first,
            numbers=torch.cat([part.numbers for part in parts]),
            scale=torch.cat(scales),
            minimum=torch.cat(minimums) if has_minimum else None,
        )


Weight = torch.Tensor | Quantized


@dataclass(slots=True, eq=False)
class LinearPart:
    """One weight as stored. `weight` is (out, in), or its transpose when `transposed`."""

    weight: Weight
    bias: torch.Tensor | None = None  # (out,)
    transposed: bool = False
    sizes: tuple[int, ...] = ()  # outputs of each of the matrices that were joined; empty: it is one

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """rows (T, in) -> (T, out)."""
        weight = self.weight.unpacked(rows.dtype) if isinstance(self.weight, Quantized) else self.weight
        if self.transposed:
            return rows @ weight if self.bias is None else torch.addmm(self.bias, rows, weight)
        if rows.shape[0] in _FEW_ROWS and rows.device.type == "cpu":
            columns = weight @ rows.t()  # (out, T)
            return columns.t() if self.bias is None else columns.t() + self.bias
        return linear(rows, weight, self.bias)

    @property
    def dense(self) -> torch.Tensor:
        """(out, in), a view where it can be."""
        if isinstance(self.weight, Quantized):
            return self.weight.unpacked(self.weight.scale.dtype)
        return self.weight.t() if self.transposed else self.weight

    @property
    def num_outputs(self) -> int:
        return self.weight.shape[1 if self.transposed else 0]


class Linear:
    """A linear map whose outputs are those of its parts side by side.

    One part where we own the memory and could join the weights; several where they belong to someone else's model. Optional:
    parts stored as integers (`Quantized`) and adapters (`adapters`).
    """

    __slots__ = ("adapters", "parts")

    def __init__(self, *parts: LinearPart) -> None:
        self.parts = parts
        self.adapters: SlotAdapters | None = None

    def __call__(self, rows: torch.Tensor, chosen: ChosenAdapters | None = None) -> torch.Tensor:
        """rows (T, in) -> (T, sum of the parts' outs). `chosen`: which rows have which adapter."""
        if len(self.parts) == 1:
            out = self.parts[0].apply(rows)
        else:
            out = torch.cat([part.apply(rows) for part in self.parts], dim=-1)
        if chosen is not None and self.adapters is not None:
            self.adapters.add(rows, out, chosen)
        return out

    @property
    def sizes(self) -> tuple[int, ...]:
        """Outputs of each of the matrices side by side."""
        return tuple(size for part in self.parts for size in (part.sizes or (part.num_outputs,)))

    def __repr__(self) -> str:
        return f"Linear({', '.join(str(tuple(part.weight.shape)) for part in self.parts)})"


# Slot and the rows (n,) int64 that have its adapter, for each slot with any.
ChosenAdapters = list[tuple[int, torch.Tensor]]


class SlotAdapters:
    """The adapters of one linear map, by slot: for each, low-rank additions to some of the matrices that stand side by side."""

    def __init__(self, sizes: tuple[int, ...], num_slots: int) -> None:
        self._firsts = [sum(sizes[:i]) for i in range(len(sizes))]  # the first output of each matrix
        self._slots: list[list[tuple[slice, torch.Tensor, torch.Tensor]]] = [[] for _ in range(num_slots)]

    def set(self, slot: int, parts: Sequence[tuple[torch.Tensor, torch.Tensor] | None]) -> None:
        """For each matrix: a (rank, in) and b (out, rank), on the device, or None."""
        self._slots[slot] = [
            (slice(first, first + part[1].shape[0]), part[0].t().contiguous(), part[1].t().contiguous())
            for first, part in zip(self._firsts, parts, strict=True)
            if part is not None
        ]

    def add(self, rows: torch.Tensor, out: torch.Tensor, chosen: ChosenAdapters) -> None:
        """rows (T, in), out (T, out)."""
        for slot, where in chosen:
            if not self._slots[slot]:
                continue
            mine = rows.index_select(0, where)
            for outputs, a, b in self._slots[slot]:
                out[where, outputs] += mine @ a @ b


class RMSNorm:
    """Scale to unit root mean square over the last dimension, in float32 whatever the dtype."""

    __slots__ = ("_eps_tensor", "eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._eps_tensor = torch.tensor(eps, dtype=weight.dtype, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.weight.dtype != x.dtype:
            return rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return rms_norm(x, self.weight.shape, self.weight, self.eps)
        # torch's own is a chain of small operations on a CPU; this one is half as long.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.addcmul(self._eps_tensor, length, length, value=1.0 / x.shape[-1]).rsqrt_()
        return (x * inverse).mul_(self.weight)


@dataclass(slots=True, eq=False)
class Layer:
    """The weights of one decoder layer. A norm is None where the layer has none."""

    input_norm: RMSNorm | None
    qkv: Linear  # queries, keys, values side by side
    q_norm: RMSNorm | None  # per head, before the rotation
    k_norm: RMSNorm | None
    sinks: torch.Tensor | None  # (heads,)
    o: Linear
    attention_after: RMSNorm | None
    mlp_norm: RMSNorm | None
    gate_up: Linear  # gate and up side by side; up alone in a plain mixer
    down: Linear
    mlp_after: RMSNorm | None
    experts: Experts | None = None  # in place of gate_up and down, which are those of the first
