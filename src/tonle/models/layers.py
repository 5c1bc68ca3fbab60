"""The parts a decoder layer is made of: linear maps and norms over plain tensors.

Does: hold weights, shared or owned, and apply them. Does not: train, register parameters or move between devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import linear, rms_norm

# Measured on x86 with MKL and two threads: with this many rows, weight @ rows.T is two to three times faster than
# rows @ weight.T.
_FEW_ROWS = range(4, 49)


@dataclass(slots=True, eq=False)
class LinearPart:
    """One weight as stored. `weight` is (out, in), or its transpose when `transposed`."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None  # (out,)
    transposed: bool = False

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """rows (T, in) -> (T, out)."""
        if self.transposed:
            return rows @ self.weight if self.bias is None else torch.addmm(self.bias, rows, self.weight)
        if rows.shape[0] in _FEW_ROWS and rows.device.type == "cpu":
            columns = self.weight @ rows.t()  # (out, T)
            return columns.t() if self.bias is None else columns.t() + self.bias
        return linear(rows, self.weight, self.bias)


class Linear:
    """A linear map whose outputs are those of its parts side by side.

    One part where we own the memory and could join the weights; several where they belong to someone else's model.
    """

    __slots__ = ("parts",)

    def __init__(self, *parts: LinearPart) -> None:
        self.parts = parts

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """rows (T, in) -> (T, sum of the parts' outs)."""
        if len(self.parts) == 1:
            return self.parts[0].apply(rows)
        return torch.cat([part.apply(rows) for part in self.parts], dim=-1)

    def __repr__(self) -> str:
        return f"Linear({', '.join(str(tuple(part.weight.shape)) for part in self.parts)})"


class RMSNorm:
    """Scale to unit root mean square over the last dimension, in float32 whatever the dtype."""

    __slots__ = ("_eps_tensor", "eps", "weight")

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self.weight = weight
        self.eps = eps
        self._eps_tensor = torch.tensor(eps, dtype=weight.dtype, device=weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu" or x.dtype != torch.float32:
            return rms_norm(x, self.weight.shape, self.weight, self.eps)
        # torch's own is a chain of small operations on a CPU; this one is half as long.
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.addcmul(self._eps_tensor, length, length, value=1.0 / x.shape[-1]).rsqrt_()
        return (x * inverse).mul_(self.weight)


@dataclass(slots=True, eq=False)
class Layer:
    """The weights of one decoder layer."""

    input_norm: RMSNorm
    qkv: Linear  # queries, keys, values side by side
    q_norm: RMSNorm | None  # per head, before the rotation
    k_norm: RMSNorm | None
    o: Linear
    mlp_norm: RMSNorm
    gate_up: Linear  # gate and up side by side
    down: Linear
