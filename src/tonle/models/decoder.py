"""`Decoder`: the one forward pass all families share, in torch operations: the reference for every other backend.

Does: tokens of a step in, logits of the wanted ones out; reads and writes the KV cache through `attention`. Does not:
sample, schedule, know the order of a layer (`layer_order.py`) or where weights came from (see `load/`). The caller runs it
under `torch.inference_mode()`.
"""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from tonle.models.adapters import MODULES, Adapter
from tonle.models.attention import Attention, StepAttention, TorchAttention
from tonle.models.experts import activate, gated
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.layer_order import Piece, layer_order
from tonle.models.layers import ChosenAdapters, Layer, Linear, RMSNorm, SlotAdapters
from tonle.models.parallel.group import Group
from tonle.models.rope import Rotary, rotate
from tonle.models.spec import LayerSpec, ModelSpec, RopeSpec
from tonle.models.weights import Weights, random_weights

Angles = dict[RopeSpec | None, tuple[torch.Tensor, torch.Tensor] | None]  # cos and sin of a step; None: not rotated


class Decoder:
    """A decoder-only transformer, or one rank's part of one. `attention` is the seam where kernels are swapped; `group` are the
    ranks that hold the other parts, None where there are none."""

    group: Group | None = None

    def __init__(self, spec: ModelSpec, weights: Weights) -> None:
        self.spec = spec
        self.weights = weights
        self.rotaries = {rope: Rotary(rope, spec.head_dim, self.device) for rope in spec.ropes if rope is not None}
        self.attention: Attention = TorchAttention(spec, [layer.sinks for layer in weights.layers])
        self._orders = [layer_order(layer) for layer in spec.layers]
        self._embedding_scale = torch.tensor(spec.embedding_scale).to(self.dtype).item()

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
        return self._logits(self._all_layers(inputs, kv), inputs)

    def forward_hidden(self, inputs: StepInputs, kv: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, and hidden states (P, hidden) float32, after the last norm, of tokens `inputs.hidden_indices` names."""
        assert inputs.hidden_indices is not None
        hidden = self._all_layers(inputs, kv)
        states = self.weights.final_norm(hidden.index_select(0, inputs.hidden_indices))
        return self._logits(hidden, inputs), states.float()

    def _all_layers(self, inputs: StepInputs, kv: KVCache) -> torch.Tensor:
        """Hidden states (T, hidden) before the last norm."""
        attend = self.attention.prepare(inputs, kv)
        angles: Angles = {None: None}
        angles |= {rope: rotary.angles(inputs.positions, self.dtype) for rope, rotary in self.rotaries.items()}
        hidden = embedding(inputs.tokens, self.weights.embedding)  # (T, hidden), ours: updated in place below
        if self._embedding_scale != 1:
            hidden *= self._embedding_scale
        chosen = chosen_adapters(inputs)
        for index, order in enumerate(self._orders):
            described, layer = self.spec.layers[index], self.weights.layers[index]
            run = _LayerRun(index, described, layer, hidden, angles, attend, chosen, self.group)
            for piece in order:
                run.run(piece)
        return hidden

    def _logits(self, hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        wanted = hidden.index_select(0, inputs.logit_indices)  # (S, hidden)
        logits = self.weights.lm_head(self.weights.final_norm(wanted))
        if self.group is not None:
            logits = self.group.side_by_side(logits, self.spec.vocab_size)
        logits = logits.float().contiguous()
        if self.spec.logit_scale != 1:
            logits *= self.spec.logit_scale
        if (cap := self.spec.logit_soft_cap) is not None:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits

    # -- adapters

    def enable_adapters(self, num_slots: int, max_rank: int) -> None:
        """Room for adapters in so many slots. `max_rank` matters only to backends that lay memory out for it."""
        for layer in self.weights.layers:
            for linear in adapted_linears(layer).values():
                linear.adapters = SlotAdapters(linear.sizes, num_slots)

    def set_adapter(self, slot: int, adapter: Adapter | None) -> None:
        """From the next step on, rows of this slot are computed with this adapter; None: with none."""
        adapter = None if adapter is None else adapter.added_at(self.spec.residual_scale)
        for index, layer in enumerate(self.weights.layers):
            for modules, linear in adapted_linears(layer).items():
                assert linear.adapters is not None, "enable_adapters comes first"
                linear.adapters.set(slot, [self._placed(adapter, (index, module)) for module in modules])

    def _placed(self, adapter: Adapter | None, place: tuple[int, str]) -> tuple[torch.Tensor, torch.Tensor] | None:
        if adapter is None or (part := adapter.parts.get(place)) is None:
            return None
        return part.a.to(self.device, self.dtype), part.b.to(self.device, self.dtype)


def adapted_linears(layer: Layer) -> dict[tuple[str, ...], Linear]:
    """The linear maps that adapters may change, by the modules that stand side by side in them."""
    q, k, v, o, gate, up, down = MODULES
    found: dict[tuple[str, ...], Linear] = {(q, k, v): layer.qkv, (o,): layer.o}
    if layer.experts is None:
        found |= {(gate, up) if len(layer.gate_up.sizes) == 2 else (up,): layer.gate_up, (down,): layer.down}
    return found


def chosen_adapters(inputs: StepInputs) -> ChosenAdapters | None:
    """Which of the step's tokens have which slot's adapter; None if none has any."""
    if inputs.adapter_slots is None:
        return None
    tokens: dict[int, list[int]] = {}
    for row, slot in enumerate(inputs.adapter_slots):
        if slot >= 0:
            tokens.setdefault(slot, []).extend(range(inputs.row_starts[row], inputs.row_starts[row + 1]))
    return [(slot, torch.tensor(where, device=inputs.tokens.device)) for slot, where in tokens.items()] or None


class _LayerRun:
    """One layer of one step: the pieces of `layer_order` in torch operations, over hidden states updated in place."""

    __slots__ = (
        "_angles", "_attend", "_attended", "_chosen", "_group", "_hidden", "_index", "_layer", "_mixed", "_qkv", "_spec",
    )  # fmt: skip

    def __init__(
        self, index: int, spec: LayerSpec, layer: Layer, hidden: torch.Tensor, angles: Angles, attend: StepAttention,
        chosen: ChosenAdapters | None, group: Group | None,
    ) -> None:  # fmt: skip
        self._index = index
        self._spec = spec
        self._layer = layer
        self._hidden = hidden
        self._angles = angles[spec.attention.rope]
        self._attend = attend
        self._chosen = chosen
        self._group = group

    def run(self, piece: Piece) -> None:
        layer, chosen = self._layer, self._chosen
        match piece:
            case Piece.PROJECT:
                self._qkv = layer.qkv(_normed(layer.input_norm, self._hidden), chosen)
            case Piece.ATTEND:
                self._attended = self._attention(self._qkv)
            case Piece.ADD_ATTENDED:
                added = self._over_ranks(layer.o(self._attended, chosen))
                self._hidden += _normed(layer.attention_after, added)
            case Piece.MIX:
                self._mixed = self._mix(_normed(layer.mlp_norm, self._hidden))
            case Piece.ADD_MIXED:
                mixed = self._mixed if layer.experts is not None else layer.down(self._mixed, chosen)
                self._hidden += _normed(layer.mlp_after, self._over_ranks(mixed))

    def _over_ranks(self, added: torch.Tensor) -> torch.Tensor:
        """The all-reduce: what this rank computed is the share of its heads, its part of a perceptron or its experts."""
        return added if self._group is None else self._group.add_up(added)

    def _attention(self, qkv: torch.Tensor) -> torch.Tensor:
        """(T, rows of qkv) -> (T, heads * dim)."""
        spec, layer = self._spec.attention, self._layer
        num_tokens = qkv.shape[0]
        whole = spec.qk_norm_whole
        if whole and layer.q_norm is not None and layer.k_norm is not None:
            q, k, v = qkv.split_with_sizes((spec.q_size, spec.kv_size, spec.kv_size), dim=1)
            qkv = torch.cat((self._whole_norm(layer.q_norm, q), self._whole_norm(layer.k_norm, k), v), dim=1)
        heads = qkv.view(num_tokens, -1, spec.head_dim)  # (T, heads + 2 kv heads, dim)
        qk, v = heads.split_with_sizes((spec.num_heads + spec.num_kv_heads, spec.num_kv_heads), dim=1)
        if not whole and layer.q_norm is not None and layer.k_norm is not None:
            q, k = qk.split_with_sizes((spec.num_heads, spec.num_kv_heads), dim=1)
            qk = torch.cat((layer.q_norm(q), layer.k_norm(k)), dim=1)
        if self._angles is not None:
            qk = rotate(qk, *self._angles)
        q, k = qk.split_with_sizes((spec.num_heads, spec.num_kv_heads), dim=1)
        return self._attend(self._index, q, k, v).reshape(num_tokens, -1)

    def _whole_norm(self, norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        """Over the numbers of all heads: each rank has equally many of them, so the mean of squares is the ranks' mean."""
        if self._group is None:
            return norm(x)
        squares = self._group.add_up(x.float().square().mean(dim=-1, keepdim=True)) / self._group.size
        return (x.float() * torch.rsqrt(squares + norm.eps) * norm.weight.float()).to(x.dtype)

    def _mix(self, x: torch.Tensor) -> torch.Tensor:
        layer, mixer = self._layer, self._spec.mixer
        if layer.experts is not None:
            return layer.experts(x)
        inner = layer.gate_up(x, self._chosen)
        return (
            gated(inner, mixer.activation, mixer.clamp) if mixer.kind == "gated" else activate(inner, mixer.activation)
        )


def _normed(norm: RMSNorm | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)
