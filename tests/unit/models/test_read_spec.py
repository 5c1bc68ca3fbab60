"""Specs from configs: both spellings, every family, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.fakes.checkpoints import FAMILIES, save_folder, save_gguf, tiny_model
from tonle.errors import ModelError
from tonle.models.load.transformers_model import live_spec
from tonle.models.read_spec import from_hf_config, read_spec
from tonle.models.source import resolve
from tonle.models.spec import RopeSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 3, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "bos_token_id": 128_000, "eos_token_id": [128_001, 128_008],
    "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip
LLAMA3_SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32}
GRANITE = {"architectures": ["GraniteForCausalLM"]}
GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "sliding_window": None}


def test_llama_in_numbers() -> None:
    spec = from_hf_config(LLAMA, {"eos_token_id": 7})
    assert (spec.head_dim, spec.q_size, spec.kv_size) == (64, 2048, 512)
    assert (spec.eos_ids, spec.bos_id, spec.dtype, spec.tie_embeddings) == ((7,), 128_000, "bfloat16", True)
    assert spec.windows == (None, None, None) and spec.sliding_window is None
    assert from_hf_config(LLAMA).eos_ids == (128_001, 128_008)


def test_both_spellings_of_rope() -> None:
    old = {**LLAMA, "rope_theta": 500_000.0, "rope_scaling": {**LLAMA3_SCALING, "rope_type": "llama3"}}
    new = {**LLAMA, "rope_parameters": {**LLAMA3_SCALING, "rope_type": "llama3", "rope_theta": 500_000.0}}
    expected = RopeSpec(theta=500_000.0, kind="llama3", factor=32.0, original_max_positions=8192)
    assert from_hf_config(old).ropes[0] == from_hf_config(new).ropes[0] == expected
    oldest = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert from_hf_config(oldest).ropes[0] == RopeSpec(kind="linear", factor=2.0)
    assert from_hf_config({**LLAMA, "rope_scaling": None}).ropes[0] == RopeSpec()


def test_yarn_stretches_the_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    spec = from_hf_config({**LLAMA, "max_position_embeddings": 32_768, "rope_scaling": scaling})
    assert spec.max_positions == 131_072
    assert spec.ropes[0].attention_factor == pytest.approx(1.1386, abs=1e-4)


@pytest.mark.parametrize(("change", "complaint"), [
    ({"num_hidden_layers": 2**40}, "num_hidden_layers is beyond any real model's"),
    ({"num_hidden_layers": 20_000}, "num_hidden_layers may be at most 10000, not 20000"),
    ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; supported: LlamaForCausalLM, "),
    ({"architectures": None}, "not supported"),
    ({"hidden_act": "mish"}, "activation 'mish'"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported; supported: default, linear"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "'llama3' lacks the setting 'low_freq_factor'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"num_key_value_heads": 5}, "cannot share 5 key-value heads"),
    ({"hidden_size": "2048"}, "whole number as hidden_size, not '2048'"),
    ({"vocab_size": None}, "whole number as vocab_size"),
    ({"num_hidden_layers": 0}, "num_layers must be at least 1"),
    ({"head_dim": 65}, "even part of head_dim 65"),
    ({"rms_norm_eps": -5}, "should name a positive number as rms_norm_eps, not -5"),
    ({"rms_norm_eps": float("nan")}, "positive number as rms_norm_eps, not nan"),
    ({"rope_theta": True}, "positive number as rope_theta, not True"),
    ({"rope_scaling": {**YARN, "beta_fast": -1}}, "positive number as beta_fast, not -1"),
    ({"rope_scaling": {**YARN, "factor": -4.0}}, r"positive number as factor, not -4\.0"),
    ({"rope_scaling": {**YARN, "original_max_position_embeddings": -1}}, "positive number as original_max_position_embeddings"),
    ({"rope_scaling": YARN, "rope_theta": 0.5}, r"needs a rope_theta above 1 and .*, not 0\.5 and 4096"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "positive number as factor, not 'x'"),
    ({**GRANITE, "attention_multiplier": "x"}, "positive number as attention_multiplier, not 'x'"),
    ({**GRANITE, "logits_scaling": 0}, "positive number as logits_scaling, not 0"),
    ({**GEMMA2, "final_logit_softcapping": "x"}, "positive number as final_logit_softcapping, not 'x'"),
    ({**GEMMA2, "query_pre_attn_scalar": -1}, "positive number as query_pre_attn_scalar, not -1"),
    ({"rope_scaling": {**LONGROPE, "short_factor": []}}, r"list of numbers as short_factor, not \[\]"),
    ({"rope_scaling": {**LONGROPE, "long_factor": ["x"]}}, "positive number as long_factor, not 'x'"),
])  # fmt: skip
def test_refusals(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        from_hf_config({**LLAMA, **change})


def test_nulls_stand_for_what_the_family_has() -> None:
    spec = from_hf_config({**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "rope_theta": None})
    assert spec.ropes[0] == RopeSpec(theta=2_000_000.0)
    assert from_hf_config({**LLAMA, "architectures": ["Phi3ForCausalLM"], "rms_norm_eps": None}).norm_eps == 1e-5


def test_sliding_windows() -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert from_hf_config({**mistral, "sliding_window": 100}).windows == (100,) * 3
    assert from_hf_config({**mistral, "sliding_window": None}).windows == (None,) * 3
    assert from_hf_config(mistral).windows == (4096,) * 3  # what transformers assumes
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "max_window_layers": 1}
    assert from_hf_config(qwen).windows == (None,) * 3
    assert from_hf_config({**qwen, "use_sliding_window": True}).windows == (None, 100, 100)
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert from_hf_config({**qwen, "use_sliding_window": True, "layer_types": kinds}).windows == (100, None, None)
    assert from_hf_config({**LLAMA, "sliding_window": 100}).windows == (None,) * 3


def test_families_declare_their_differences() -> None:
    def of(architecture: str, **options: Any) -> tuple[bool, bool, bool, bool]:
        spec = from_hf_config({**LLAMA, "architectures": [architecture], **options})
        attention = spec.layers[0].attention
        return attention.qkv_bias, attention.o_bias, spec.layers[0].mixer.bias, attention.qk_norm

    assert of("LlamaForCausalLM") == (False, False, False, False)
    assert of("LlamaForCausalLM", attention_bias=True) == (True, True, False, False)
    assert of("LlamaForCausalLM", mlp_bias=True) == (False, False, True, False)
    assert of("MistralForCausalLM", attention_bias=True) == (False, False, False, False)
    assert of("Qwen2ForCausalLM") == (True, False, False, False)
    assert of("Qwen3ForCausalLM") == (False, False, False, True)
    assert from_hf_config({**LLAMA, "architectures": ["Qwen3ForCausalLM"]}).head_dim == 128


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_and_its_live_model_agree(family: str, tmp_path: Path) -> None:
    save_folder(family, tmp_path)
    assert read_spec(resolve(tmp_path)) == live_spec(tiny_model(family))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "granite", "olmo2", "smollm3", "glm", "glm4"])
def test_a_gguf_file_and_its_live_model_agree(family: str, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    theirs = live_spec(save_gguf(family, path))
    ours = read_spec(resolve(path))
    assert ours.norm_eps == pytest.approx(theirs.norm_eps)
    same = {"norm_eps": theirs.norm_eps, "dtype": theirs.dtype, "eos_ids": theirs.eos_ids}
    assert replace(ours, **same) == theirs
    assert ours.eos_ids == (0, 2)  # the named one, and the control token that ends texts
    assert ours.dtype == "F32"


def test_gguf_refusals(tmp_path: Path) -> None:
    def spec_of(architecture: str | None, **own: Any) -> None:
        path = tmp_path / "x.gguf"
        writer = gguf.GGUFWriter(path, architecture or "llama")
        for name, value in own.items():
            writer.add_uint32(f"{architecture}.{name}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        read_spec(resolve(path))

    with pytest.raises(ModelError, match="GGUF architecture 'mamba' is not supported; supported: llama, qwen2, qwen3"):
        spec_of("mamba")
    with pytest.raises(ModelError, match="'gemma2' with experts are not supported"):
        spec_of("gemma2", expert_count=8)
    with pytest.raises(ModelError, match=r"x\.gguf: tensor token_embd.weight is missing"):
        spec_of("llama")


@pytest.mark.parametrize(("content", "complaint"), [
    ("{", "is not valid JSON"),
    ("[]", "should hold a JSON object, not a list"),
    (json.dumps({"architectures": ["X"]}), "architecture 'X' is not supported"),
])  # fmt: skip
def test_broken_config_files_are_named(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=complaint) as caught:
        read_spec(resolve(tmp_path))
    assert str(tmp_path) in caught.value.message


def test_layers_that_make_no_sense_are_refused() -> None:
    spec = from_hf_config(LLAMA)
    parallel = dataclasses.replace(spec.layers[0], residual="parallel", norm_after=True)
    with pytest.raises(ModelError, match="parallel residuals and norms after"):
        dataclasses.replace(spec, layers=(parallel,))
    mixer = dataclasses.replace(spec.layers[0].mixer, kind="experts", num_experts=2, experts_per_token=3)
    with pytest.raises(ModelError, match="3 of 2 experts"):
        dataclasses.replace(spec, layers=(dataclasses.replace(spec.layers[0], mixer=mixer),))
