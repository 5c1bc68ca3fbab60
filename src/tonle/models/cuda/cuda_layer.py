"""A layer's weights as kernels read them, and which of its pieces have fused kernels.

Does: `CudaLayer`, and `support`, the backend's answer for `layer_order.py`. Does not: run them (`pieces.py`, `model.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tonle.models.cuda.adapted import AdaptedLayer
from tonle.models.cuda.gpu_features import roomy
from tonle.models.cuda.matrix import Matrix, Norm
from tonle.models.layer_order import FUSED, Piece, Support, why_not
from tonle.models.layers import Layer, RMSNorm
from tonle.models.spec import LayerSpec, ModelSpec


def support(layer: LayerSpec, piece: Piece) -> Support:
    """Attention of every kind is fused, and so are mixers that norm before and gate with SiLU; norms after the products and
    other activations are torch operations around our products."""
    attention, mixer = layer.attention, layer.mixer
    if piece is Piece.ATTEND:
        if attention.head_dim not in (16, 32, 64, 128, 256):
            return Support("none", f"head_dim {attention.head_dim} is none of 16, 32, 64, 128, 256")
        if attention.head_dim == 256 and not roomy():
            return Support(
                "none", "head_dim 256 needs 128 KiB of shared memory per multiprocessor, as data center GPUs have"
            )
    if piece in (Piece.MIX, Piece.ADD_MIXED):
        if mixer.kind == "experts":
            return Support("none", "which experts a token gets is decided on the host, out of reach of a CUDA graph")
        if mixer.size % 16:
            return Support("none", "hidden_size and intermediate_size must be multiples of 16")
    if piece is Piece.MIX and (mixer.kind, mixer.activation) != ("gated", "silu"):
        return Support("plain", f"a {mixer.kind} mixer with {mixer.activation}")
    if piece is Piece.MIX and not layer.norm_before:
        return Support("plain", "no norm before the mixer")
    if piece in (Piece.ADD_ATTENDED, Piece.ADD_MIXED) and layer.norm_after:
        return Support("plain", "a norm after the product")
    return FUSED


def unsupported(spec: ModelSpec) -> str | None:
    """Why these kernels cannot run a model, or None."""
    if spec.hidden_size % 16:
        return "hidden_size and intermediate_size must be multiples of 16"
    return why_not(spec, support)


@dataclass(slots=True, eq=False)
class CudaLayer:
    """A norm is None where the layer has none."""

    spec: LayerSpec
    input_norm: Norm | None
    qkv: Matrix
    q_gain: torch.Tensor | None
    k_gain: torch.Tensor | None
    sinks: torch.Tensor | None  # (heads,)
    angles: torch.Tensor | None  # (positions, 2, head_dim); None: positions are not encoded
    o: Matrix
    attention_after: Norm | None
    mlp_norm: Norm | None
    gate_up: Matrix  # up alone in a plain mixer
    down: Matrix
    mlp_after: Norm | None
    adapted: AdaptedLayer | None = None

    @classmethod
    def of(
        cls, spec: LayerSpec, layer: Layer, eps: float, angles: torch.Tensor | None, normed: torch.Tensor
    ) -> CudaLayer:
        """`normed`: (tokens, hidden), where norms that are not fused leave their results."""

        def norm(found: RMSNorm | None) -> Norm | None:
            return None if found is None else Norm(found.weight, eps, normed)

        return cls(
            spec=spec,
            input_norm=norm(layer.input_norm),
            qkv=Matrix.of(layer.qkv),
            q_gain=None if layer.q_norm is None else layer.q_norm.weight,
            k_gain=None if layer.k_norm is None else layer.k_norm.weight,
            sinks=layer.sinks,
            angles=angles,
            o=Matrix.of(layer.o),
            attention_after=norm(layer.attention_after),
            mlp_norm=norm(layer.mlp_norm),
            gate_up=Matrix.of(layer.gate_up),
            down=Matrix.of(layer.down),
            mlp_after=norm(layer.mlp_after),
        )

    @property
    def fused_mixer(self) -> bool:
        return support(self.spec, Piece.MIX) is FUSED

    @property
    def matrices(self) -> dict[str, Matrix]:
        return {"qkv": self.qkv, "o": self.o, "gate_up": self.gate_up, "down": self.down}
