"""A layer's weights as kernels read them, and which of its pieces have fused kernels.

Does: `CudaLayer`, and `support`, the backend's answer for `layer_order.py`. Does not: run them (`pieces.py`, `model.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tonle.models.cuda.activation import GATES
from tonle.models.cuda.adapted import AdaptedLayer
from tonle.models.cuda.experts import CudaExperts
from tonle.models.cuda.gpu_features import OLDEST, capability
from tonle.models.cuda.matrix import Norm
from tonle.models.cuda.quantized_matrix import AnyMatrix, matrix_of
from tonle.models.layer_order import FUSED, Piece, Support, why_not
from tonle.models.layers import Layer, RMSNorm
from tonle.models.spec import LayerSpec, ModelSpec


def support(layer: LayerSpec, piece: Piece) -> Support:
    """Attention of every kind is fused, and so are norms and gated mixers; what plain mixers do between their products is torch
    operations."""
    attention, mixer = layer.attention, layer.mixer
    if piece is Piece.ATTEND and (attention.head_dim % 16 or attention.head_dim > 256):
        return Support("none", f"head_dim {attention.head_dim} is not a multiple of 16 up to 256")
    if piece in (Piece.MIX, Piece.ADD_MIXED):
        if mixer.size % 16 or mixer.shared_size % 16:
            return Support("none", "hidden_size and intermediate_size must be multiples of 16")
        if mixer.shared_size and mixer.activation not in GATES:
            return Support("none", f"a shared expert with {mixer.activation} has no kernel")
    if piece is Piece.MIX and mixer.kind != "experts" and (mixer.kind != "gated" or mixer.activation not in GATES):
        return Support("plain", f"a {mixer.kind} mixer with {mixer.activation}")
    return FUSED


def unsupported(spec: ModelSpec) -> str | None:
    """Why these kernels cannot run a model, or None."""
    if (has := capability()) is not None and has < OLDEST:
        return f"they need a GPU of compute capability {OLDEST[0]}.{OLDEST[1]} or newer, and this one has {has[0]}.{has[1]}"
    if spec.hidden_size % 16:
        return "hidden_size and intermediate_size must be multiples of 16"
    return why_not(spec, support)


@dataclass(slots=True, eq=False)
class CudaLayer:
    """A norm is None where the layer has none."""

    spec: LayerSpec
    input_norm: Norm | None
    qkv: AnyMatrix
    q_gain: torch.Tensor | None  # of norms per head (head_dim,), or over all heads together (heads * head_dim,)
    k_gain: torch.Tensor | None
    sinks: torch.Tensor | None  # (heads,)
    angles: torch.Tensor | None  # (positions, 2, head_dim); None: positions are not encoded
    o: AnyMatrix
    attention_after: Norm | None
    mlp_norm: Norm | None
    gate_up: AnyMatrix  # up alone in a plain mixer
    down: AnyMatrix
    mlp_after: Norm | None
    experts: CudaExperts | None = None  # in place of gate_up and down, which are those of the first
    adapted: AdaptedLayer | None = None

    @classmethod
    def of(
        cls, spec: LayerSpec, layer: Layer, eps: float, angles: torch.Tensor | None, normed: torch.Tensor
    ) -> CudaLayer:
        """`normed`: (tokens, hidden), where norms that are not fused leave their results."""

        def norm(found: RMSNorm | None) -> Norm | None:
            return None if found is None else Norm(found.weight, eps, normed)

        # First: the weights of experts move.
        experts = None if layer.experts is None else CudaExperts.of(layer.experts, spec.mixer, normed.dtype)
        return cls(
            spec=spec,
            input_norm=norm(layer.input_norm),
            qkv=matrix_of(layer.qkv, normed.dtype),
            q_gain=None if layer.q_norm is None else layer.q_norm.weight,
            k_gain=None if layer.k_norm is None else layer.k_norm.weight,
            sinks=layer.sinks,
            angles=angles,
            o=matrix_of(layer.o, normed.dtype),
            attention_after=norm(layer.attention_after),
            mlp_norm=norm(layer.mlp_norm),
            gate_up=matrix_of(layer.gate_up, normed.dtype),
            down=matrix_of(layer.down, normed.dtype),
            mlp_after=norm(layer.mlp_after),
            experts=experts,
        )

    @property
    def fused_mixer(self) -> bool:
        return support(self.spec, Piece.MIX) is FUSED

    @property
    def matrices(self) -> dict[str, AnyMatrix]:
        """Those that adapters may change."""
        found = {"qkv": self.qkv, "o": self.o}
        return found if self.experts is not None else found | {"gate_up": self.gate_up, "down": self.down}
