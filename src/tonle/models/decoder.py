"""`Decoder`: the one forward pass all families share.

Does: tokens of a step in, logits of the wanted ones out; reads and writes the KV cache through `attention`. Does not:
sample, schedule, or know where weights came from (see `load/`). The caller runs it under `torch.inference_mode()`.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding, silu

from tonle.models.attention import Attention, StepAttention, TorchAttention
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.layers import Layer
from tonle.models.rope import Rotary, rotate
from tonle.models.spec import ModelSpec
from tonle.models.weights import Weights, random_weights


class Decoder:
    """A decoder-only transformer. `attention` is the seam where kernels are swapped."""

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        self.weights = weights
        self.rotary = Rotary(spec.rope, spec.head_dim, self.device)
        self.attention: Attention = TorchAttention(spec)

    @classmethod
    def random(cls, spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Decoder:
        """A decoder with random weights made on the device, for tests and benchmarks."""
        return cls(spec, random_weights(spec, device, dtype, seed))

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weights.embedding.dtype

    def forward(self, inputs: StepInputs, kv: KVCache) -> torch.Tensor:
        """Logits (S, vocab) float32 of the tokens `inputs.logit_indices` names."""
        attend = self.attention.prepare(inputs, kv)
        cos, sin = self.rotary.angles(inputs.positions, self.dtype)
        hidden = embedding(inputs.tokens, self.weights.embedding)  # (T, hidden), ours: updated in place below
        for index, layer in enumerate(self.weights.layers):
            hidden += self._attend(index, layer, layer.input_norm(hidden), cos, sin, attend)
            hidden += _mlp(layer, layer.mlp_norm(hidden))
        wanted = hidden.index_select(0, inputs.logit_indices)  # (S, hidden)
        return self.weights.lm_head(self.weights.final_norm(wanted)).float().contiguous()

    def _attend(
        self,
        index: int,
        layer: Layer,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: StepAttention,
    ) -> torch.Tensor:
        spec = self.spec
        heads = layer.qkv(hidden).view(hidden.shape[0], -1, spec.head_dim)  # (T, heads + 2 kv heads, dim)
        qk, v = heads.split_with_sizes((spec.num_heads + spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split_with_sizes((spec.num_heads, spec.num_kv_heads), dim=1)
            qk = torch.cat((layer.q_norm(q), layer.k_norm(k)), dim=1)
        q, k = rotate(qk, cos, sin).split_with_sizes((spec.num_heads, spec.num_kv_heads), dim=1)
        return layer.o(attend(index, q, k, v).reshape(hidden.shape[0], -1))


def _mlp(layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
    gate, up = layer.gate_up(hidden).chunk(2, dim=-1)  # (T, intermediate) each
    return layer.down(silu(gate).mul_(up))
