"""Every difference that a layer's description can name, against transformers where a model there has it, and against a plain
reference (no cache, no steps) for all of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, relu, silu
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.unit.models.stepper import Stepper, random_tokens
from tonle.models.decoder import Decoder
from tonle.models.layer_order import Piece, layer_order
from tonle.models.rope import Rotary
from tonle.models.spec import AttentionSpec, LayerSpec, MixerSpec, ModelSpec, RopeSpec
from tonle.models.weights import Owned, assemble, tensor_shapes

CPU, VOCAB, HIDDEN = torch.device("cpu"), 97, 64
ATTENTION = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeSpec())
MIXER = MixerSpec(size=96)
PLAIN = LayerSpec(attention=ATTENTION, mixer=MIXER)


def spec_of(*layers: LayerSpec, **rest: Any) -> ModelSpec:
    return ModelSpec(architecture="any", vocab_size=VOCAB, hidden_size=HIDDEN, layers=layers, norm_eps=1e-6,
                     max_positions=512, **rest)  # fmt: skip


def tensors_of(spec: ModelSpec) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)

    def make(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.rand(shape, generator=generator) + 0.5 - spec.gain_offset
        spread = shape[-1] ** -0.5 if len(shape) == 2 and "embed" not in name else 1.0
        return torch.randn(shape, generator=generator) * spread

    return {name: make(name, shape) for name, shape in tensor_shapes(spec).items()}


def decoder_of(spec: ModelSpec, tensors: dict[str, torch.Tensor]) -> Decoder:
    return Decoder(spec, assemble(spec, tensors.__getitem__, Owned(CPU, torch.float32)))


def logits_of(decoder: Decoder, prompts: list[list[int]], chunk: int) -> list[torch.Tensor]:
    stepper = Stepper(decoder, prompts)
    stepper.run(chunk)
    return [stepper.of(row) for row in range(len(prompts))]


# -- the plain reference: one prompt, float64, straight from the description


class Reference:
    def __init__(self, spec: ModelSpec, tensors: dict[str, torch.Tensor]) -> None:
        self.spec = spec
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}

    def logits(self, prompt: list[int]) -> torch.Tensor:
        hidden = self.tensors["model.embed_tokens.weight"][prompt]
        for index, layer in enumerate(self.spec.layers):
            hidden = self.layer(f"model.layers.{index}.", layer, hidden)
        head = "model.embed_tokens.weight" if self.spec.tie_embeddings else "lm_head.weight"
        return (self.norm("model.norm", hidden) @ self.tensors[head].t()).float()

    def layer(self, at: str, layer: LayerSpec, hidden: torch.Tensor) -> torch.Tensor:
        before = self.norm(f"{at}input_layernorm", hidden) if layer.norm_before else hidden
        attended = self.attention(at, layer.attention, before)
        if layer.residual == "parallel":
            return hidden + attended + self.mixer(at, layer.mixer, before)
        if layer.norm_after:
            hidden = hidden + self.norm(f"{at}post_attention_layernorm", attended)
            seen = self.norm(f"{at}pre_feedforward_layernorm", hidden) if layer.norm_before else hidden
            return hidden + self.norm(f"{at}post_feedforward_layernorm", self.mixer(at, layer.mixer, seen))
        hidden = hidden + attended
        seen = self.norm(f"{at}post_attention_layernorm", hidden) if layer.norm_before else hidden
        return hidden + self.mixer(at, layer.mixer, seen)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        gain = self.tensors[f"{name}.weight"] + self.spec.gain_offset
        return x / (x.square().mean(-1, keepdim=True) + self.spec.norm_eps).sqrt() * gain

    def linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].t() + self.tensors.get(f"{name}.bias", torch.zeros(()).double())

    def attention(self, at: str, spec: AttentionSpec, x: torch.Tensor) -> torch.Tensor:
        count = len(x)
        q, k, v = (self.linear(f"{at}self_attn.{n}_proj", x).view(count, -1, spec.head_dim) for n in "qkv")
        if spec.qk_norm:
            q, k = self.norm(f"{at}self_attn.q_norm", q), self.norm(f"{at}self_attn.k_norm", k)
        if spec.rope is not None:
            cos, sin = Rotary(spec.rope, spec.head_dim, CPU).angles(torch.arange(count), torch.float64)
            q, k = (x * cos + x.roll(spec.head_dim // 2, -1) * sin for x in (q, k))
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
        return out

    def perceptron(self, at: str, spec: MixerSpec, x: torch.Tensor) -> torch.Tensor:
        def act(y: torch.Tensor) -> torch.Tensor:
            return {"silu": silu, "gelu": gelu, "gelu_tanh": lambda z: gelu(z, approximate="tanh"),
                    "relu2": lambda z: relu(z) ** 2}[spec.activation](y)  # fmt: skip

        up = self.linear(f"{at}.up_proj", x)
        inner = act(up) if spec.kind == "plain" else act(self.linear(f"{at}.gate_proj", x)) * up
        return self.linear(f"{at}.down_proj", inner)


def attention(**change: Any) -> LayerSpec:
    return dataclasses.replace(PLAIN, attention=dataclasses.replace(ATTENTION, **change))


def mixer(**change: Any) -> LayerSpec:
    return dataclasses.replace(PLAIN, mixer=dataclasses.replace(MIXER, **change))


KINDS: dict[str, LayerSpec] = {
    "plain": PLAIN,
    "no positions": attention(rope=None),
    "another theta": attention(rope=RopeSpec(theta=500.0)),
    "scaled positions": attention(rope=RopeSpec(kind="linear", factor=4.0)),
    "window": attention(window=7),
    "scale": attention(scale=0.05),
    "soft cap": attention(soft_cap=0.5),
    "soft cap and window": attention(soft_cap=0.5, window=7),
    "sinks": attention(sinks=True),
    "sinks, soft cap, window": attention(sinks=True, soft_cap=1.0, window=9),
    "norms per head": attention(qk_norm=True),
    "biases": attention(qkv_bias=True, o_bias=True),
    "norms before and after": dataclasses.replace(PLAIN, norm_after=True),
    "norms after alone": dataclasses.replace(PLAIN, norm_before=False, norm_after=True),
    "parallel": dataclasses.replace(PLAIN, residual="parallel"),
    "plain mixer": mixer(kind="plain", activation="relu2"),
    "plain mixer with biases": mixer(kind="plain", activation="gelu", bias=True),
    "gelu": mixer(activation="gelu_tanh"),
    "experts": mixer(kind="experts", num_experts=5, experts_per_token=2),
    "experts, shares as they are": mixer(kind="experts", num_experts=5, experts_per_token=2, normed_shares=False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1000, 5])
def test_a_described_layer_computes_what_it_says(kind: str, chunk: int) -> None:
    spec = spec_of(PLAIN, KINDS[kind], gain_offset=1.0)
    tensors, prompts = tensors_of(spec), [random_tokens(length, VOCAB) for length in (23, 1, 12)]
    reference = Reference(spec, tensors)
    for prompt, logits in zip(prompts, logits_of(decoder_of(spec, tensors), prompts, chunk), strict=True):
        torch.testing.assert_close(logits, reference.logits(prompt), rtol=0, atol=2e-4)


def _by_name(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The same tensor in every model that has one of this name."""
    random = torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) * shape[-1] ** -0.5
    return random + 1 if name.endswith("norm.weight") else random


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])
def test_what_a_layer_describes_makes_a_difference(kind: str) -> None:
    """Else the test above could not see it."""
    prompt = random_tokens(23, VOCAB)
    found = []
    for layer in (PLAIN, KINDS[kind]):
        spec = spec_of(PLAIN, layer)
        tensors = {name: _by_name(name, shape) for name, shape in tensor_shapes(spec).items()}
        tensors["model.embed_tokens.weight"] *= 8
        found.append(logits_of(decoder_of(spec, tensors), [prompt], 1000)[0])
    assert (found[0] - found[1]).abs().max() > 1e-2


def test_the_order_of_a_layer() -> None:
    assert [piece.name for piece in layer_order(PLAIN)] == [
        "PROJECT", "ATTEND", "ADD_ATTENDED", "MIX", "ADD_MIXED",
    ]  # fmt: skip
    order = layer_order(KINDS["parallel"])
    assert order.index(Piece.MIX) < order.index(Piece.ADD_ATTENDED)


# -- against transformers


def _random(model: Any) -> Any:
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(-0.5, 0.5)
            else:
                parameter.normal_(std=0.5 if "embed" in name else parameter.shape[-1] ** -0.5)
    return model.eval()


def _check(model: Any, spec: ModelSpec, tensors: dict[str, torch.Tensor]) -> None:
    prompts = [random_tokens(length, VOCAB) for length in (40, 1, 17)]
    for chunk in (1000, 9):
        for prompt, logits in zip(prompts, logits_of(decoder_of(spec, tensors), prompts, chunk), strict=True):
            with torch.inference_mode():
                expected = model(torch.tensor([prompt])).logits[0]
            torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)


def test_layers_of_gemma_2() -> None:
    config = Gemma2Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, sliding_window=8, query_pre_attn_scalar=40, attn_logit_softcapping=1.5,
        final_logit_softcapping=None, attn_implementation="eager", pad_token_id=None,
    )  # fmt: skip
    model = _random(Gemma2ForCausalLM(config))
    described = dataclasses.replace(ATTENTION, soft_cap=1.5, scale=40**-0.5)
    layers = [
        LayerSpec(
            attention=dataclasses.replace(described, window=8 if kind == "sliding_attention" else None),
            mixer=dataclasses.replace(MIXER, activation="gelu_tanh"),
            norm_after=True,
        )
        for kind in config.layer_types
    ]
    assert {layer.attention.window for layer in layers} == {8, None}
    tensors = dict(model.state_dict())
    tensors["model.embed_tokens.weight"] = (
        tensors["model.embed_tokens.weight"] * HIDDEN**0.5
    )  # as Gemma does on the fly
    _check(model, spec_of(*layers, gain_offset=1.0), tensors)


def test_layers_of_a_mixture_of_experts() -> None:
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, moe_intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], rope_theta=10_000.0, pad_token_id=None,
    )  # fmt: skip
    model = _random(Qwen3MoeForCausalLM(config))
    layer = LayerSpec(
        attention=dataclasses.replace(ATTENTION, qk_norm=True),
        mixer=MixerSpec(kind="experts", size=48, num_experts=6, experts_per_token=2),
    )
    _check(model, spec_of(layer, layer), _one_by_one(dict(model.state_dict())))


def _one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts that transformers keeps in one tensor, each by itself."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):  # (experts, 2 * size, hidden)
            for index, one in enumerate(tensor):
                gate, up = one.chunk(2, dim=0)
                at = f"{name.removesuffix('gate_up_proj')}{index}."
                out |= {f"{at}gate_proj.weight": gate, f"{at}up_proj.weight": up}
        elif name.endswith("experts.down_proj"):
            at = name.removesuffix("down_proj")
            out |= {f"{at}{index}.down_proj.weight": one for index, one in enumerate(tensor)}
        else:
            out[name] = tensor
    return out
