"""A weight and the ways it is multiplied: one row by our GEMV, 2 to 16 by our skinny product where it wins, more by cuBLAS.

Does: choose by the number of rows, and put norm, bias, activation and residual around the product, fused where the kernel
can. Does not: own buffers; callers bring those that a way needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tonle.models.cuda.gemv import gemv
from tonle.models.cuda.gemv_adapter import OneRowAdapter
from tonle.models.cuda.pointwise import gate_mul, rms_norm
from tonle.models.cuda.skinny import MAX_ROWS, SkinnyTiling, SplitScratch, Tiling, skinny, skinny_tiling
from tonle.models.layers import Linear, LinearPart
from tonle.models.spec import Activation


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """Root mean square norm of a product's input, and where to put the result where it is not fused: (tokens, hidden)."""

    gain: torch.Tensor
    eps: float
    buffer: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.gain, self.eps, self.buffer[: x.shape[0]])


@dataclass(slots=True, eq=False)
class Matrix:
    """(out, in), its transpose as cuBLAS wants it, and its bias."""

    weight: torch.Tensor
    columns: torch.Tensor  # (in, out), a view
    bias: torch.Tensor | None
    scratch: SplitScratch | None = None  # of the model's; set by `share_scratch`
    gate_up: bool = False  # two matrices of the same size side by side, for a gated activation
    source: LinearPart | None = None  # whose memory `weight` is

    @classmethod
    def of(cls, linear: Linear) -> Matrix:
        """Weights that belong to a live model come in parts, and are copied into one here."""
        weights = [part.dense for part in linear.parts]
        biases = [part.bias for part in linear.parts if part.bias is not None]
        weight = weights[0].contiguous() if len(weights) == 1 else torch.cat(weights)
        source = linear.parts[0] if weight is linear.parts[0].weight else None
        return cls(weight, weight.t(), torch.cat(biases) if biases else None, source=source)

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    def widened(self, rows: int) -> tuple[Matrix, torch.Tensor]:
        """A product that also gives those of so many rows below this matrix's own, zeros at first: (rows, in).

        This matrix becomes a view of the first rows.
        """
        outputs, inputs = self.weight.shape
        weight = self.weight.new_empty(outputs + rows, inputs)
        weight[:outputs].copy_(self.weight)
        weight[outputs:].zero_()
        self.move(weight[:outputs])
        bias = self.bias
        if bias is not None:
            bias = torch.cat((bias, bias.new_zeros(rows)))
        return Matrix(weight, weight.t(), bias), weight[outputs:]

    def move(self, weight: torch.Tensor) -> None:
        """Use this memory, which has the same numbers, and let go of the memory there was."""
        self.weight, self.columns = weight, weight.t()
        if self.source is not None:
            self.source.weight = weight

    # `adapter`: of the one row there is; what it adds to W is added.

    def apply(
        self, x: torch.Tensor, norm: Norm | None, out: torch.Tensor, adapter: OneRowAdapter | None = None
    ) -> None:
        """out (n, out) = norm(x) @ W.T + bias."""
        if x.shape[0] == 1 and norm is not None:
            gemv(x, self.weight, out, gain=norm.gain, eps=norm.eps, bias=self.bias, adapter=adapter)
        else:
            self.product(x if norm is None else norm(x), out, adapter)

    def product(self, x: torch.Tensor, out: torch.Tensor, adapter: OneRowAdapter | None = None) -> None:
        """out (n, out) = x @ W.T + bias."""
        if x.shape[0] == 1:
            gemv(x, self.weight, out, bias=self.bias, adapter=adapter)
        elif (tiling := self.tiling(x.shape[0])) is not None:
            skinny(x, self.weight, out, tiling, bias=self.bias, scratch=self.scratch)
        else:
            self._cublas(x, out)

    def add(
        self, x: torch.Tensor, out: torch.Tensor, adapter: OneRowAdapter | None = None, *, settled: bool = False
    ) -> None:
        """out (n, out) += x @ W.T + bias. `settled`: the kernel ahead does not write out."""
        if x.shape[0] == 1:
            gemv(x, self.weight, out, bias=self.bias, add=True, settled=settled, adapter=adapter)
        elif (tiling := self.tiling(x.shape[0])) is not None:
            skinny(x, self.weight, out, tiling, bias=self.bias, add=True, settled=settled, scratch=self.scratch)
        else:
            out.addmm_(x, self.columns)
            if self.bias is not None:
                out.add_(self.bias)

    def gate(
        self, x: torch.Tensor, norm: Norm | None, both: torch.Tensor, out: torch.Tensor,
        adapter: OneRowAdapter | None = None, *, activation: Activation = "silu",
    ) -> None:  # fmt: skip
        """W is gate and up: out (n, out / 2) = activation(gate) * up of norm(x). `both` (n, out) is scratch."""
        outputs, inputs = out.shape[1], x.shape[1]
        if x.shape[0] == 1:
            gain, eps = (None, 0.0) if norm is None else (norm.gain, norm.eps)
            gemv(x, self.weight, out, gain=gain, eps=eps, bias=self.bias, glu=True, activation=activation,
                 adapter=adapter)  # fmt: skip
            return
        x = x if norm is None else norm(x)
        if (tiling := skinny_tiling(x.shape[0], outputs, inputs, glu=True)) is not None:
            skinny(x, self.weight, out, tiling, bias=self.bias, glu=True, activation=activation)
        else:
            self._cublas(x, both)
            gate_mul(both, out, activation)

    def tiling(self, rows: int) -> SkinnyTiling | None:
        return skinny_tiling(rows, *self.weight.shape, glu=False, gate_up=self.gate_up)

    def _cublas(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self.bias is None:
            torch.mm(x, self.columns, out=out)
        else:
            torch.addmm(self.bias, x, self.columns, out=out)


class Splitting(Protocol):
    """A matrix whose products of few rows may share a tile among programs."""

    scratch: SplitScratch | None

    @property
    def outputs(self) -> int: ...
    def tiling(self, rows: int) -> Tiling | None: ...


def share_scratch(matrices: Sequence[Splitting], device: torch.device) -> None:
    """One scratch for all of them: they are multiplied one after another."""
    scratch = SplitScratch([(m.outputs, m.tiling(rows)) for m in matrices for rows in (1, MAX_ROWS)], device)
    for matrix in matrices:
        matrix.scratch = scratch
