"""Every difference that a layer's description can name, against transformers where a model there has it, and against a plain
reference (no cache, no steps) for all of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.fakes.adapters import random_adapter
from tests.fakes.layer_kinds import (
    ATTENTION,
    HIDDEN,
    KINDS,
    MIXER,
    PLAIN,
    SCALES,
    VOCAB,
    Reference,
    decoder_of,
    merged,
    spec_of,
    tensors_of,
)
from tests.unit.models.stepper import Stepper, random_tokens
from tonle.errors import ModelError
from tonle.models.decoder import Decoder
from tonle.models.layer_order import Piece, layer_order
from tonle.models.spec import LayerSpec, MixerSpec, ModelSpec
from tonle.models.weights import tensor_shapes


def logits_of(decoder: Decoder, prompts: list[list[int]], chunk: int) -> list[torch.Tensor]:
    stepper = Stepper(decoder, prompts)
    stepper.run(chunk)
    return [stepper.of(row) for row in range(len(prompts))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1000, 5])
def test_a_described_layer_computes_what_it_says(kind: str, chunk: int) -> None:
    spec = spec_of(PLAIN, KINDS[kind], gain_offset=1.0)
    tensors, prompts = tensors_of(spec), [random_tokens(length, VOCAB) for length in (23, 1, 12)]
    reference = Reference(spec, tensors)
    for prompt, logits in zip(prompts, logits_of(decoder_of(spec, tensors), prompts, chunk), strict=True):
        torch.testing.assert_close(logits, reference.logits(prompt), rtol=0, atol=2e-4)


@pytest.mark.parametrize("scale", SCALES)
def test_scales_of_a_whole_model(scale: str) -> None:
    spec = spec_of(PLAIN, KINDS["gated mixer with biases"], **SCALES[scale])
    tensors, prompt = tensors_of(spec), random_tokens(23, VOCAB)
    expected = Reference(spec, tensors).logits(prompt)
    for chunk in (1000, 5):
        logits = logits_of(decoder_of(spec, tensors), [prompt], chunk)[0]
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)
    for name in SCALES[scale]:  # each is seen
        without = dataclasses.replace(spec, **{name: None if name == "logit_soft_cap" else 1.0})
        assert (Reference(without, tensors).logits(prompt) - expected).abs().max() > 1e-2


def test_an_adapter_is_scaled_with_what_it_is_added_to() -> None:
    spec = spec_of(PLAIN, PLAIN, residual_scale=0.22)
    tensors, prompt, adapter = tensors_of(spec), random_tokens(23, VOCAB), random_adapter(spec, rank=4, seed=1)
    decoder = decoder_of(spec, tensors)
    decoder.enable_adapters(1, 4)
    decoder.set_adapter(0, adapter)
    stepper = Stepper(decoder, [prompt], adapter_slots=[0])
    stepper.run(1000)
    expected = Reference(spec, merged(tensors, adapter)).logits(prompt)
    torch.testing.assert_close(stepper.of(0), expected, rtol=0, atol=2e-4)
    assert (Reference(spec, tensors).logits(prompt) - expected).abs().max() > 1e-2


def test_a_residual_scale_that_a_norm_would_undo_is_refused() -> None:
    with pytest.raises(ModelError, match="residual_scale with norms after"):
        spec_of(KINDS["norms before and after"], residual_scale=0.5)


def _by_name(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The same tensor in every model that has one of this name."""
    random = torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) * shape[-1] ** -0.5
    return random + 1 if name.endswith("norm.weight") else random


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "usual"])
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
