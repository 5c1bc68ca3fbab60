"""What configs of each family mean: as hub checkpoints spell them, and where they leave things to `transformers`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.fakes.checkpoints import save_gguf
from tests.fakes.tiny_families import SHAPE, TINY
from tonle.errors import ModelError
from tonle.models.load.transformers_model import live_spec
from tonle.models.read_spec import from_hf_config, read_spec
from tonle.models.source import resolve
from tonle.models.spec import ModelSpec, RopeSpec


def spec_of(architecture: str, **settings: Any) -> ModelSpec:
    return from_hf_config({**SHAPE, "architectures": [architecture], **settings})


@pytest.mark.parametrize("family", TINY)
def test_what_a_config_does_not_say_is_what_transformers_assumes(family: str) -> None:
    """A config of sizes alone, and the one that transformers makes of it."""
    config_class, model_class, _ = TINY[family]
    sizes = {**SHAPE, "num_hidden_layers": 12}
    whole = {**config_class(**sizes).to_dict(), "architectures": [model_class.__name__]}
    assert from_hf_config({**sizes, "architectures": [model_class.__name__]}) == from_hf_config(whole)


def test_gemma_2_of_27b() -> None:
    spec = spec_of(
        "Gemma2ForCausalLM", hidden_size=4608, num_attention_heads=32, num_key_value_heads=16, head_dim=128,
        query_pre_attn_scalar=144, sliding_window=4096, num_hidden_layers=4, rope_theta=10000.0,
        hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )  # fmt: skip
    attention, layer = spec.layers[1].attention, spec.layers[0]
    assert spec.windows == (4096, None, 4096, None)
    assert attention.score_scale == pytest.approx(1 / 12) and attention.soft_cap == 50 and spec.logit_soft_cap == 30
    assert (layer.norm_before, layer.norm_after, layer.mixer.activation) == (True, True, "gelu_tanh")
    assert (spec.gain_offset, spec.tie_embeddings) == (1.0, True)
    assert spec.embedding_scale == pytest.approx(math.sqrt(4608))
    assert spec_of("Gemma2ForCausalLM", final_logit_softcapping=None).logit_soft_cap is None


def test_gemma_3_has_two_ropes() -> None:
    old = spec_of("Gemma3ForCausalLM", num_hidden_layers=7, sliding_window=512, rope_theta=1e6,
                  rope_local_base_freq=1e4, rope_scaling={"rope_type": "linear", "factor": 8.0})  # fmt: skip
    assert old.windows == (512,) * 5 + (None, 512)
    ropes = [layer.attention.rope for layer in old.layers]
    assert ropes[0] == ropes[6] == RopeSpec(theta=1e4)
    assert ropes[5] == RopeSpec(theta=1e6, kind="linear", factor=8.0)
    nested = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
              "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}}  # fmt: skip
    assert spec_of("Gemma3ForCausalLM", num_hidden_layers=7, sliding_window=512, rope_parameters=nested) == old
    assert spec_of("Gemma3ForCausalLM", num_hidden_layers=4, sliding_window_pattern=2).windows == (4096, None) * 2


def test_phi_with_factors_for_long_contexts() -> None:
    """As in Phi-4-mini: three quarters of each head are rotated."""
    scaling = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    own: dict[str, Any] = {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096,
                           "partial_rotary_factor": 0.75, "rope_scaling": scaling, "sliding_window": 262_144}  # fmt: skip
    short = spec_of("Phi3ForCausalLM", **own)
    (rope,) = short.ropes
    assert rope is not None and (rope.rotated, rope.factors) == (12, (1.0,) * 6)
    assert rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert (short.max_positions, short.long_positions) == (4096, 131_072)
    assert short.for_context(None) == short.for_context(4096) == short
    long = short.for_context(4097)
    assert long.max_positions == 131_072 and long.ropes[0] is not None and long.ropes[0].factors == (2.0,) * 6
    assert long.for_context(10**6) == long
    with pytest.raises(ModelError, match="4 factors, but 6 frequencies"):
        spec_of("Phi3ForCausalLM", **{**own, "rope_scaling": {**scaling, "short_factor": [1.0] * 4}})
    with pytest.raises(ModelError, match="lacks the setting 'long_factor'"):
        spec_of("Phi3ForCausalLM", **{**own, "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6}})
    assert spec_of("LlamaForCausalLM").for_context(10**6) == spec_of("LlamaForCausalLM")


def test_granite_has_multipliers_and_others_do_not() -> None:
    own = {"embedding_multiplier": 12.0, "attention_multiplier": 0.015625, "residual_multiplier": 0.22,
           "logits_scaling": 16.0}  # fmt: skip
    spec = spec_of("GraniteForCausalLM", **own)
    found = (spec.embedding_scale, spec.layers[0].attention.scale, spec.residual_scale, spec.logit_scale)
    assert found == (12.0, 0.015625, 0.22, 1 / 16)
    other = spec_of("LlamaForCausalLM", **own, final_logit_softcapping=3.0, query_pre_attn_scalar=7)
    assert other == spec_of("LlamaForCausalLM")


def test_layers_without_positions() -> None:
    spec = spec_of("SmolLM3ForCausalLM", num_hidden_layers=8)
    assert [layer.attention.rope is None for layer in spec.layers] == [False, False, False, True] * 2
    assert spec.ropes[0] == RopeSpec(theta=2_000_000.0)
    listed = spec_of("SmolLM3ForCausalLM", no_rope_layers=[0, 1])
    assert [layer.attention.rope is None for layer in listed.layers] == [True, False]
    with pytest.raises(ModelError, match="has 2 layers, but no_rope_layers speaks of 1"):
        spec_of("SmolLM3ForCausalLM", no_rope_layers=[0])


def test_glm_4() -> None:
    spec = spec_of("Glm4ForCausalLM", head_dim=16, eos_token_id=None)
    attention, layer = spec.layers[0].attention, spec.layers[0]
    assert attention.rope is not None and attention.rope.rotated == 8
    assert (attention.qkv_bias, attention.o_bias) == (True, False)
    assert (layer.norm_before, layer.norm_after) == (True, True)
    assert from_hf_config({key: value for key, value in {**SHAPE, "architectures": ["Glm4ForCausalLM"]}.items()
                           if key != "eos_token_id"}).eos_ids == (151329, 151336, 151338)  # fmt: skip


@pytest.mark.parametrize(("architecture", "settings", "complaint"), [
    ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "see later ones"),
    ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "part of each head"),
    ("Gemma2ForCausalLM", {"hidden_activation": "relu"}, "activation 'relu' is not supported; supported: silu, swish, gelu"),
    ("Gemma3ForCausalLM", {"layer_types": ["sliding_attention", "linear_attention"]}, "type 'linear_attention'"),
    ("Gemma3ForCausalLM", {"layer_types": ["sliding_attention"]}, "has 2 layers, but layer_types speaks of 1"),
    ("Glm4ForCausalLM", {"head_dim": 16, "partial_rotary_factor": 0.2}, "even part of head_dim 16"),
])  # fmt: skip
def test_refusals(architecture: str, settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        spec_of(architecture, **settings)


@pytest.mark.parametrize(("family", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_gguf_files_of_the_largest_gemmas(family: str, layers: int, tmp_path: Path) -> None:
    """Their scores are scaled by another size than head_dim, which only the number of their layers tells."""
    path = tmp_path / "tiny.gguf"
    small: dict[str, Any] = {"num_hidden_layers": layers, "head_dim": 32, "intermediate_size": 32}
    model = save_gguf(family, path, query_pre_attn_scalar=16, **small)
    ours, theirs = read_spec(resolve(path)), live_spec(model)
    assert ours.layers[0].attention.score_scale == theirs.layers[0].attention.score_scale == 0.25
    assert ours.windows == theirs.windows


def test_ends_of_turns_in_gguf_files(tmp_path: Path) -> None:
    """Gemma's is not always typed as a control token."""
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    for name, value in {"embedding_length": 32, "block_count": 1, "attention.head_count": 1, "context_length": 64,
                        "feed_forward_length": 32}.items():  # fmt: skip
        writer.add_uint32(f"gemma3.{name}", value)
    writer.add_eos_token_id(0)
    writer.add_token_list(["<eos>", "<bos>", "<end_of_turn>", "</s>", "<|observation|>"])
    writer.add_token_types([3, 3, 4, 4, 3])
    writer.add_tensor("token_embd.weight", np.zeros((5, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_spec(resolve(path)).eos_ids == (0, 2, 4)
