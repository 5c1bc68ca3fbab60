"""Every difference that a layer's description can name: specs, random weights, and a plain reference to judge backends by.

Does: describe layers, make their tensors, compute logits in float64 straight from the description (no cache, no steps).
Does not: load or serve anything.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.nn.functional import gelu, relu, silu

from tonle.models.adapters import Adapter
from tonle.models.adapters.adapter import MODULE_PATHS
from tonle.models.decoder import Decoder
from tonle.models.rope import Rotary
from tonle.models.spec import AttentionSpec, LayerSpec, MixerSpec, ModelSpec, RopeSpec
from tonle.models.weights import Owned, assemble, tensor_shapes

CPU, VOCAB, HIDDEN = torch.device("cpu"), 97, 64
ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeSpec())
MIXER = MixerSpec(size=96)
PLAIN = LayerSpec(attention=ATTENTION, mixer=MIXER)


def spec_of(*layers: LayerSpec, **rest: Any) -> ModelSpec:
    given = {"architecture": "any", "vocab_size": VOCAB, "hidden_size": HIDDEN, "norm_eps": 1e-6, "max_positions": 512}
    return ModelSpec(layers=layers, **(given | rest))


def tensors_of(spec: ModelSpec) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.rand(shape, generator=generator) + 0.5 - spec.gain_offset
        spread = shape[-1] ** -0.5 if len(shape) == 2 and "embed" not in name else 1.0
        return torch.randn(shape, generator=generator) * spread

    return {name: make(name, shape) for name, shape in tensor_shapes(spec).items()}


def decoder_of(
    spec: ModelSpec, tensors: dict[str, torch.Tensor], device: torch.device = CPU, dtype: torch.dtype = torch.float32
) -> Decoder:
    return Decoder(spec, assemble(spec, tensors.__getitem__, Owned(device, dtype)))


def merged(tensors: dict[str, torch.Tensor], adapter: Adapter) -> dict[str, torch.Tensor]:
    """The weights with an adapter in them."""
    found = dict(tensors)
    for (layer, module), part in adapter.parts.items():
        name = f"model.layers.{layer}.{MODULE_PATHS[module]}.weight"
        found[name] = found[name] + part.b @ part.a
    return found


class Reference:
    """One prompt, float64. `eight_bits`: keys and values are what an fp8 cache keeps of them."""

    def __init__(self, spec: ModelSpec, tensors: dict[str, torch.Tensor], *, eight_bits: bool = False) -> None:
        self.spec = spec
        self.eight_bits = eight_bits
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def logits(self, prompt: list[int]) -> torch.Tensor:
        hidden = self.tensors["model.embed_tokens.weight"][prompt] * self.spec.embedding_scale
        for index, layer in enumerate(self.spec.layers):
            hidden = self.layer(f"model.layers.{index}.", layer, hidden)
        head = "model.embed_tokens.weight" if self.spec.tie_embeddings else "lm_head.weight"
        logits = self.norm("model.norm", hidden) @ self.tensors[head].t() * self.spec.logit_scale
        if (cap := self.spec.logit_soft_cap) is not None:
            logits = cap * (logits / cap).tanh()
        return logits.float()

    def layer(self, at: str, layer: LayerSpec, hidden: torch.Tensor) -> torch.Tensor:
        before = self.norm(f"{at}input_layernorm", hidden) if layer.norm_before else hidden
        attended = self.attention(at, layer.attention, before) * self.spec.residual_scale
        if layer.residual == "parallel":
            return hidden + attended + self.mixer(at, layer.mixer, before) * self.spec.residual_scale
        if layer.norm_after:
            hidden = hidden + self.norm(f"{at}post_attention_layernorm", attended)
            seen = self.norm(f"{at}pre_feedforward_layernorm", hidden) if layer.norm_before else hidden
            return hidden + self.norm(f"{at}post_feedforward_layernorm", self.mixer(at, layer.mixer, seen))
        hidden = hidden + attended
        seen = self.norm(f"{at}post_attention_layernorm", hidden) if layer.norm_before else hidden
        return hidden + self.mixer(at, layer.mixer, seen) * self.spec.residual_scale

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gain = self.tensors[f"{name}.weight"] + self.spec.gain_offset
        return x / (x.square().mean(-1, keepdim=True) + self.spec.norm_eps).sqrt() * gain

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].t() + self.tensors.get(f"{name}.bias", torch.zeros(()).double())

    def attention(self, at: str, spec: AttentionSpec, x: torch.Tensor) -> torch.Tensor:
        count = len(x)
        q, k, v = (self.linear(f"{at}self_attn.{n}_proj", x) for n in "qkv")
        if spec.qk_norm and spec.qk_norm_whole:
            q, k = self.norm(f"{at}self_attn.q_norm", q), self.norm(f"{at}self_attn.k_norm", k)
        q, k, v = (each.view(count, -1, spec.head_dim) for each in (q, k, v))
        if spec.qk_norm and not spec.qk_norm_whole:
            q, k = self.norm(f"{at}self_attn.q_norm", q), self.norm(f"{at}self_attn.k_norm", k)
        if spec.rope is not None:
            q, k = (_rotated(each, spec.rope, spec.rope.rotated or spec.head_dim) for each in (q, k))
        if self.eight_bits:
            k, v = _in_eight_bits(k), _in_eight_bits(v)
        out = torch.zeros(count, spec.num_heads, spec.head_dim, dtype=torch.float64)
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        for head in range(spec.num_heads):
            own = head // (spec.num_heads // spec.num_kv_heads)
            for t in range(count):
                first = 0 if spec.window is None else max(0, t + 1 - spec.window)
                scores = k[first : t + 1, own] @ q[t, head] * scale
                if spec.soft_cap is not None:
                    scores = spec.soft_cap * (scores / spec.soft_cap).tanh()
                weights = scores.exp()
                sink = self.tensors[f"{at}self_attn.sinks"][head].exp() if spec.sinks else 0.0
                out[t, head] = weights @ v[first : t + 1, own] / (weights.sum() + sink)
        return self.linear(f"{at}self_attn.o_proj", out.view(count, -1))

    def mixer(self, at: str, spec: MixerSpec, x: torch.Tensor) -> torch.Tensor:
        if spec.kind != "experts":
            return self.perceptron(f"{at}mlp", spec, x)
        shares = self.linear(f"{at}mlp.gate", x).softmax(-1)
        out = torch.zeros_like(x)
        for t in range(len(x)):
            best = shares[t].argsort(descending=True)[: spec.experts_per_token].tolist()
            total = sum(shares[t, e] for e in best) if spec.normed_shares else 1.0
            for expert in best:
                out[t] += shares[t, expert] / total * self.perceptron(f"{at}mlp.experts.{expert}", spec, x[t])
        if spec.shared_size:
            gate = self.linear(f"{at}mlp.shared_expert_gate", x).sigmoid() if spec.shared_gate else 1.0
            out = out + gate * self.perceptron(f"{at}mlp.shared_expert", spec, x)
        return out

    def perceptron(self, at: str, spec: MixerSpec, x: torch.Tensor) -> torch.Tensor:
        def act(y: torch.Tensor) -> torch.Tensor:
            return {"silu": silu, "gelu": gelu, "gelu_tanh": lambda z: gelu(z, approximate="tanh"),
                    "relu2": lambda z: relu(z) ** 2}[spec.activation](y)  # fmt: skip

        up = self.linear(f"{at}.up_proj", x)
        if spec.activation == "swigluoai":
            gate = self.linear(f"{at}.gate_proj", x).clamp(max=spec.clamp)
            inner = (up.clamp(-spec.clamp, spec.clamp) + 1) * gate * (1.702 * gate).sigmoid()
            return self.linear(f"{at}.down_proj", inner)
        inner = act(up) if spec.kind == "plain" else act(self.linear(f"{at}.gate_proj", x)) * up
        return self.linear(f"{at}.down_proj", inner)


def _rotated(heads: torch.Tensor, rope: RopeSpec, rotated: int) -> torch.Tensor:
    """The first `rotated` numbers of heads (tokens, heads, dim), as if there were no others; then the others."""
    cos, sin = Rotary(dataclasses.replace(rope, rotated=None), rotated, CPU).angles(
        torch.arange(len(heads)), torch.float64
    )
    turned, rest = heads[..., :rotated], heads[..., rotated:]
    return torch.cat((turned * cos + turned.roll(rotated // 2, -1) * sin, rest), dim=-1)


def _in_eight_bits(x: torch.Tensor) -> torch.Tensor:
    """e4m3, with a power of two for each head of each token by which its largest number becomes 128 to 256."""
    scale = torch.exp2(x.abs().amax(-1, keepdim=True).log2().floor() - 7)
    return (x / scale).to(torch.float8_e4m3fn).double() * scale


def attention(**change: Any) -> LayerSpec:
    return dataclasses.replace(PLAIN, attention=dataclasses.replace(ATTENTION, **change))


def mixer(**change: Any) -> LayerSpec:
    return dataclasses.replace(PLAIN, mixer=dataclasses.replace(MIXER, **change))


KINDS: dict[str, LayerSpec] = {
    "usual": PLAIN,
    "no positions": attention(rope=None),
    "another theta": attention(rope=RopeSpec(theta=500.0)),
    "scaled positions": attention(rope=RopeSpec(kind="linear", factor=4.0)),
    "window": attention(window=7),
    "scale": attention(scale=0.05),
    "soft cap": attention(soft_cap=0.5),
    "soft cap and window": attention(soft_cap=0.5, window=7),
    "sinks": attention(sinks=True),
    "sinks, soft cap, window": attention(sinks=True, soft_cap=1.0, window=9),
    "part of each head rotated": attention(rope=RopeSpec(rotated=6)),
    "norms per head": attention(qk_norm=True),
    "norms per head, part of it rotated": attention(qk_norm=True, rope=RopeSpec(rotated=12)),
    "norms over all heads": attention(qk_norm=True, qk_norm_whole=True),
    "norms over all heads, biases": attention(qk_norm=True, qk_norm_whole=True, qkv_bias=True),
    "biases": attention(qkv_bias=True, o_bias=True),
    "norms before and after": dataclasses.replace(PLAIN, norm_after=True),
    "norms after alone": dataclasses.replace(PLAIN, norm_before=False, norm_after=True),
    "no norms": dataclasses.replace(PLAIN, norm_before=False),
    "parallel": dataclasses.replace(PLAIN, residual="parallel"),
    "gated mixer with biases": mixer(bias=True),
    "plain mixer": mixer(kind="plain", activation="relu2"),
    "plain mixer with biases": mixer(kind="plain", activation="gelu", bias=True),
    "gelu": mixer(activation="gelu_tanh"),
    "exact gelu": mixer(activation="gelu"),
    "gelu, norms after alone": dataclasses.replace(mixer(activation="gelu_tanh"), norm_before=False, norm_after=True),
    "experts": mixer(kind="experts", num_experts=5, experts_per_token=2),
    "experts, shares as they are": mixer(kind="experts", num_experts=5, experts_per_token=2, normed_shares=False),
    "experts with biases, clamped": mixer(
        kind="experts",
        num_experts=5,
        experts_per_token=2,
        bias=True,
        router_bias=True,
        activation="swigluoai",
        clamp=0.8,
    ),
    "experts beside a shared one": mixer(kind="experts", num_experts=5, experts_per_token=2, size=64, shared_size=96),
    "experts beside a gated one": mixer(
        kind="experts", num_experts=5, experts_per_token=2, size=64, shared_size=96, shared_gate=True
    ),
}

# What a model's description names beside its layers.
SCALES: dict[str, dict[str, float]] = {
    "embeddings": {"embedding_scale": 5.3},
    "what a layer adds": {"residual_scale": 0.22},
    "logits": {"logit_scale": 0.125},
    "soft cap of logits": {"logit_soft_cap": 0.7},
    "all": {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 0.3, "logit_soft_cap": 2.0},
}
