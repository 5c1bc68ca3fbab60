"""The pieces of a layer around attention: norms, products, activation, residual; without adapters and with them.

Does: run one piece for some tokens, by fused kernels where the layer has them (`support` in `cuda_layer.py`), by products and
torch operations elsewhere. Does not: know the order of pieces (`model.py` walks it), attend, or own weights.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tonle.models.cuda.adapted import AdaptedMatrix
from tonle.models.cuda.cuda_layer import CudaLayer
from tonle.models.cuda.gemv_adapter import OneRowAdapter
from tonle.models.cuda.lora import SlotTiles, expand, few_tokens, gate_expand, residual_norm
from tonle.models.cuda.matrix import Norm
from tonle.models.cuda.pointwise import add_normed
from tonle.models.cuda.quantized_matrix import AnyMatrix
from tonle.models.experts import activate, gated
from tonle.models.spec import MixerSpec


class Buffers:
    """Room for results that live from one piece to the next; tensors of any width, tokens times width numbers long."""

    def __init__(self, tokens: int, inner: int, addend: int, like: torch.Tensor) -> None:
        """`inner`: widest of what products with `gate_up`, or wide ones, give. `addend`: hidden size, 0 if no norm follows."""
        self._inner = like.new_zeros(tokens * inner)
        self._addend = like.new_zeros(tokens * addend)

    def inner(self, tokens: int, width: int) -> torch.Tensor:
        return self._inner[: tokens * width].view(tokens, width)

    def addend(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._addend[: hidden.numel()].view_as(hidden)


class Pieces(Protocol):
    """hidden (n, hidden) is read and changed; the others (n, …) are results of one piece that another one takes."""

    def project(self, layer: CudaLayer, hidden: torch.Tensor, qkv: torch.Tensor) -> None: ...
    def add_attended(self, layer: CudaLayer, attended: torch.Tensor, hidden: torch.Tensor) -> None: ...
    def mix(self, layer: CudaLayer, hidden: torch.Tensor, active: torch.Tensor) -> None: ...
    def add_mixed(self, layer: CudaLayer, active: torch.Tensor, hidden: torch.Tensor) -> None: ...
    def finish(self, norm: Norm, hidden: torch.Tensor, lm_head: AnyMatrix, logits: torch.Tensor) -> None: ...
    def normed(self, norm: Norm | None, hidden: torch.Tensor) -> torch.Tensor: ...


class BasePieces:
    """No token has an adapter, or there is one row and it may have one: its products take that along (`gemv_adapter.py`)."""

    def __init__(self, buffers: Buffers, live: torch.Tensor, *, adapted: bool = False) -> None:
        """live (1,) int32: how many of the tokens exist."""
        self._buffers = buffers
        self._live = live
        self._adapted = adapted

    def project(self, layer: CudaLayer, hidden: torch.Tensor, qkv: torch.Tensor) -> None:
        layer.qkv.apply(hidden, layer.input_norm, qkv, self._adapter(layer, "qkv"))

    def add_attended(self, layer: CudaLayer, attended: torch.Tensor, hidden: torch.Tensor) -> None:
        self._add(layer, "o", attended, layer.attention_after, hidden, settled=False)

    def mix(self, layer: CudaLayer, hidden: torch.Tensor, active: torch.Tensor) -> None:
        if layer.experts is not None:
            layer.experts.mix(hidden, layer.mlp_norm, self._live)
            return
        both = self._buffers.inner(hidden.shape[0], layer.gate_up.outputs)
        if layer.fused_mixer:
            layer.gate_up.gate(hidden, layer.mlp_norm, both, active, self._adapter(layer, "gate_up"),
                               activation=layer.spec.mixer.activation)  # fmt: skip
        else:
            layer.gate_up.apply(hidden, layer.mlp_norm, both, self._adapter(layer, "gate_up"))
            active.copy_(_activated(both, layer.spec.mixer))

    def add_mixed(self, layer: CudaLayer, active: torch.Tensor, hidden: torch.Tensor) -> None:
        settled = layer.spec.residual == "sequential"  # then hidden was last written two kernels ago
        if layer.experts is not None:
            _add_experts(layer, hidden, self._live, self._buffers, settled=settled)
        else:
            self._add(layer, "down", active, layer.mlp_after, hidden, settled=settled)

    def finish(self, norm: Norm, hidden: torch.Tensor, lm_head: AnyMatrix, logits: torch.Tensor) -> None:
        lm_head.apply(hidden, norm, logits)

    def normed(self, norm: Norm | None, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if norm is None else norm(hidden)

    def _add(
        self, layer: CudaLayer, name: str, x: torch.Tensor, after: Norm | None, hidden: torch.Tensor, *, settled: bool
    ) -> None:
        matrix, adapter = layer.matrices[name], self._adapter(layer, name)
        if after is None:
            matrix.add(x, hidden, adapter, settled=settled)
        else:
            addend = self._buffers.addend(hidden)
            matrix.product(x, addend, adapter)
            add_normed(addend, after.gain, after.eps, hidden)

    def _adapter(self, layer: CudaLayer, name: str) -> OneRowAdapter | None:
        if not self._adapted or layer.adapted is None:
            return None
        matrix: AdaptedMatrix = getattr(layer.adapted, name)
        return matrix.one_row


class AdaptedPieces:
    """Tokens have adapters, each its own or none: products are those of wide weights (`lora.py`).

    What a product adds to the hidden states is left in the buffer (`_pending`) until the norm that reads them: one kernel does
    both.
    """

    def __init__(self, buffers: Buffers, live: torch.Tensor, tiles: SlotTiles) -> None:
        self._buffers = buffers
        self._live = live
        self._tiles = tiles
        self._pending: tuple[AdaptedMatrix, torch.Tensor] | None = None

    def project(self, layer: CudaLayer, hidden: torch.Tensor, qkv: torch.Tensor) -> None:
        assert layer.adapted is not None
        self._narrow(layer.adapted.qkv, self.normed(layer.input_norm, hidden), qkv)

    def add_attended(self, layer: CudaLayer, attended: torch.Tensor, hidden: torch.Tensor) -> None:
        assert layer.adapted is not None
        self._add(layer.adapted.o, attended, layer.attention_after, hidden)

    def mix(self, layer: CudaLayer, hidden: torch.Tensor, active: torch.Tensor) -> None:
        x = self.normed(layer.mlp_norm, hidden)
        if layer.experts is not None:
            layer.experts.mix_normed(x, self._live)
            return
        assert layer.adapted is not None and layer.adapted.gate_up is not None
        matrix = layer.adapted.gate_up
        if layer.fused_mixer:
            gate_expand(self._tiles, self._wide(matrix, x), matrix.b, active, layer.spec.mixer.activation)
        else:
            both = x.new_empty(x.shape[0], sum(matrix.parts))
            self._narrow(matrix, x, both)
            active.copy_(_activated(both, layer.spec.mixer))

    def add_mixed(self, layer: CudaLayer, active: torch.Tensor, hidden: torch.Tensor) -> None:
        if layer.experts is not None:
            self._settle(hidden)
            _add_experts(layer, hidden, self._live, self._buffers)
            return
        assert layer.adapted is not None and layer.adapted.down is not None
        self._add(layer.adapted.down, active, layer.mlp_after, hidden)

    def finish(self, norm: Norm, hidden: torch.Tensor, lm_head: AnyMatrix, logits: torch.Tensor) -> None:
        lm_head.product(self.normed(norm, hidden), logits)

    def _add(self, matrix: AdaptedMatrix, x: torch.Tensor, after: Norm | None, hidden: torch.Tensor) -> None:
        if after is None:
            self._settle(hidden)
            self._pending = (matrix, self._wide(matrix, x))
        else:
            addend = self._buffers.addend(hidden)
            self._narrow(matrix, x, addend)
            add_normed(addend, after.gain, after.eps, hidden)

    def normed(self, norm: Norm | None, hidden: torch.Tensor) -> torch.Tensor:
        """What a product takes, with all there is to add to the hidden states added."""
        if self._pending is not None and norm is not None:
            matrix, wide = self._pending
            if hidden.shape[0] <= few_tokens(matrix.b.shape[2]):
                self._pending = None
                out = norm.buffer[: hidden.shape[0]]
                residual_norm(self._tiles, wide, matrix.b, hidden, norm.gain, norm.eps, out)
                return out
        self._settle(hidden)
        return hidden if norm is None else norm(hidden)

    def _settle(self, hidden: torch.Tensor) -> None:
        if self._pending is not None:
            matrix, wide = self._pending
            self._pending = None
            expand(self._tiles, wide, matrix.b, hidden, parts=matrix.parts, add=True)

    def _wide(self, matrix: AdaptedMatrix, x: torch.Tensor) -> torch.Tensor:
        """x @ W.T, then y of all slots, in the buffer that every product uses."""
        assert self._pending is None
        out = self._buffers.inner(x.shape[0], matrix.wide.outputs)
        matrix.wide.product(x, out)
        return out

    def _narrow(self, matrix: AdaptedMatrix, x: torch.Tensor, out: torch.Tensor) -> None:
        """out (n, N) = x @ W.T + B y."""
        expand(self._tiles, self._wide(matrix, x), matrix.b, out, parts=matrix.parts)


def _add_experts(
    layer: CudaLayer, hidden: torch.Tensor, live: torch.Tensor, buffers: Buffers, *, settled: bool = False
) -> None:
    assert layer.experts is not None
    if layer.mlp_after is None:
        layer.experts.add(hidden, live, settled=settled)
    else:
        addend = buffers.addend(hidden)
        layer.experts.add(addend, live, add=False)
        add_normed(addend, layer.mlp_after.gain, layer.mlp_after.eps, hidden)


def _activated(inner: torch.Tensor, mixer: MixerSpec) -> torch.Tensor:
    return gated(inner, mixer.activation, mixer.clamp) if mixer.kind == "gated" else activate(inner, mixer.activation)
