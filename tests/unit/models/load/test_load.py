"""Loading: what is checked before a weight is read, what is shared, and what every kind of damage is called."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from safetensors.torch import load_file, save_file

from tests.fakes.checkpoints import save_folder, save_gguf, tiny_model
from tests.fakes.quantized_checkpoints import save_quantized
from tonle.errors import ModelError
from tonle.models.gguf_file import GGMLType, GGUFFile
from tonle.models.load import default_dtype, load
from tonle.models.load.folder import quantization_method
from tonle.models.source import resolve

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_folder("llama", tmp_path / "model")
    return tmp_path / "model"


def refused(path: Path, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint) as caught:
        load(resolve(path))
    assert str(path) in caught.value.message


def test_dtype_and_default_dtype(folder: Path) -> None:
    assert load(resolve(folder)).dtype == torch.float32
    assert load(resolve(folder), dtype=torch.bfloat16).dtype == torch.bfloat16
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert default_dtype("bfloat16", cpu) == torch.float32
    assert default_dtype("float16", cuda) == default_dtype("F16", cuda) == torch.float16
    assert default_dtype("Q4_1", cuda) == default_dtype("float32", cuda) == torch.bfloat16
    assert default_dtype("Q4_1", cuda, num_weights=135_000_000) == torch.float32  # small and rounded once already
    assert default_dtype("Q4_1", cuda, num_weights=7_000_000_000) == torch.bfloat16
    assert default_dtype("BF16", cuda, num_weights=135_000_000) == torch.bfloat16
    assert default_dtype("F32", cuda, num_weights=135_000_000) == torch.bfloat16  # not rounded before


def test_owned_weights_are_joined_and_do_not_hang_on_the_file(folder: Path) -> None:
    decoder = load(resolve(folder))
    layer = decoder.weights.layers[0]
    assert [len(linear.parts) for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)] == [1, 1, 1, 1]
    before = layer.mlp_norm.weight.clone()
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(bytes((folder / "model.safetensors").stat().st_size))
    assert torch.equal(layer.mlp_norm.weight, before)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "smollm3"])
def test_live_weights_are_shared(family: str) -> None:
    model = tiny_model(family)
    decoder = load(model)
    ours = [decoder.weights.embedding, decoder.weights.final_norm.weight]
    ours += [part.weight for part in decoder.weights.lm_head.parts]
    for layer in decoder.weights.layers:
        norms = [layer.input_norm, layer.attention_after, layer.mlp_norm, layer.mlp_after, layer.q_norm, layer.k_norm]
        ours += [norm.weight for norm in norms if norm is not None]
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
            ours += [tensor for part in linear.parts for tensor in (part.weight, part.bias) if tensor is not None]
    assert {_memory(tensor) for tensor in ours} == {_memory(tensor) for tensor in model.parameters()}


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_live_models_that_are_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    with pytest.raises(ModelError, match="class GPT2LMHeadModel are not supported; supported: LlamaForCausalLM"):
        load(GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=10)))
    model = tiny_model("llama")
    with pytest.raises(ModelError, match="is on cpu, not meta"):
        load(model, device=torch.device("meta"))
    with pytest.raises(ModelError, match=r"has dtype torch\.float32, not torch\.bfloat16"):
        load(model, dtype=torch.bfloat16)
    assert load(model, device=torch.device("cpu"), dtype=torch.float32).dtype == torch.float32
    model.model.norm.to(torch.bfloat16)
    with pytest.raises(ModelError, match="mixes dtypes"):
        load(model)
    model.merge_and_unload = lambda: None
    with pytest.raises(ModelError, match="carries adapters"):
        load(model)


def drop(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def reshape(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = torch.ones(63)


def add(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)


@pytest.mark.parametrize(("change", "complaint"), [
    (drop, r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"),
    (reshape, r"tensor model\.norm\.weight has shape \(63,\), but the model's config calls for \(64,\)"),
    (add, r"has no place for tensor model\.layers\.0\.self_attn\.q_proj\.bias"),
])  # fmt: skip
def test_wrong_tensors_are_named(folder: Path, change: Callable[[Tensors], None], complaint: str) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)
    refused(folder, complaint)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int8, torch.uint8, torch.bool])
def test_integers_without_a_quantization_are_refused(folder: Path, dtype: torch.dtype) -> None:
    """Copied as they are, they would be weights of another model."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    save_file(tensors | {name: torch.zeros(tensors[name].shape, dtype=dtype)}, file)
    refused(
        folder, r"tensor model\.layers\.1\.mlp\.up_proj\.weight has type (I32|I8|U8|BOOL), and .* names no quantization"
    )


def test_wrong_joined_tensors_are_named(tmp_path: Path) -> None:
    """By the checkpoint's own names and shapes, not ours."""
    save_folder("phi3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(tensors | {"model.layers.1.self_attn.qkv_proj.weight": torch.zeros(96, 64)}, file)
    refused(tmp_path, r"tensor model\.layers\.1\.self_attn\.qkv_proj\.weight has shape \(96, 64\), but .* \(128, 64\)")
    del tensors["model.layers.0.mlp.gate_up_proj.weight"]
    save_file(tensors, file)
    refused(tmp_path, r"tensor model\.layers\.0\.mlp\.gate_up_proj\.weight is missing")


def test_matrices_that_are_usually_joined_may_be_apart(tmp_path: Path) -> None:
    save_folder("phi3", tmp_path)
    whole = load(resolve(tmp_path)).weights.layers
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        q, k, v = tensors.pop(f"{prefix}.self_attn.qkv_proj.weight").split((64, 32, 32))
        tensors |= {
            f"{prefix}.self_attn.{name}_proj.weight": part.clone() for name, part in zip("qkv", (q, k, v), strict=True)
        }
    save_file(tensors, file)
    for ours, theirs in zip(load(resolve(tmp_path)).weights.layers, whole, strict=True):
        assert torch.equal(ours.qkv.parts[0].dense, theirs.qkv.parts[0].dense)


def test_leftovers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    save_folder("qwen2", tmp_path)  # tied
    file = tmp_path / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    tensors["lm_head.weight"] = torch.zeros(1, 1)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, file)
    load(resolve(tmp_path))


def test_a_truncated_file_names_the_tensor(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1000])
    refused(folder, r"model\.safetensors: truncated: tensor \S+ ends at byte \d+ but the file has \d+")
    file.write_bytes(content[:100])
    refused(folder, "truncated or not a safetensors file")
    file.write_bytes(b"")
    refused(folder, "truncated or not a safetensors file")
    file.write_bytes(content[:8] + b"x" + content[9:])
    refused(folder, "not a valid safetensors file")


def test_missing_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "pickled weights")
    (folder / "pytorch_model.bin").unlink()
    refused(folder, r"has neither model\.safetensors nor")


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    save_folder("llama", tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    refused(tmp_path, f"{shard.name}: is named by")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    refused(tmp_path, "has no weight_map")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": [1]}}')
    refused(tmp_path, "has no weight_map")
    (tmp_path / "model.safetensors.index.json").write_text("[" * 5000)
    refused(tmp_path, "is not valid JSON")


@pytest.mark.parametrize(
    "config", [{"num_attention_heads": 0}, {"rope_parameters": 5}, {"architectures": 5}, {"rms_norm_eps": []}]
)
def test_values_that_make_no_sense_are_refused(folder: Path, config: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    refused(folder, "makes no sense|must be at least 1|should name a positive number")


@pytest.mark.parametrize(
    "header", [b"[" * 5000, b'{"a": {"data_offsets": [0, "x"]}}', b'{"a": {"data_offsets": [0, 1e999]}}', b"{" * 10]
)
def test_headers_that_make_no_sense_are_refused(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(folder, "not a valid safetensors file")


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        (
            {"quant_method": "aqlm"},
            "quantized with 'aqlm' are not supported; supported: AWQ .*; use another checkpoint",
        ),
        ({"bits": 4}, "quantized checkpoints that do not name their method"),
        ("int8", "quantization_config should be a JSON object, not 'int8'"),
        ({"quant_method": "awq", "version": "gemv"}, "AWQ checkpoints in the layout 'gemv'"),
        ({"quant_method": "awq", "format": "gemv"}, "AWQ checkpoints in the layout 'gemv'"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "GPTQ checkpoints in the layout 'marlin'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quantized with 'modelopt' in the form 'NVFP4'"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "compressed-tensors checkpoints in the format 'nvfp4-pack-quantized'",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "with sparse matrices .sparse-24-bitmask.",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"a": {}}}},
            "with transforms of activations",
        ),
    ],
)
def test_quantizations_that_are_refused(folder: Path, quantization: Any, said: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    refused(folder, said)


@pytest.mark.parametrize("beside", [False, True], ids=["in the config", "in a file beside it"])
def test_modelopt(tmp_path: Path, *, beside: bool) -> None:
    """Its settings in `config.json`, or alone in `hf_quant_config.json`; with scales of activations, keys and values."""
    folder = tmp_path / "m"
    model = save_quantized("llama", folder, "fp8 per tensor")
    file = folder / "model.safetensors"
    scales = {f"model.layers.{layer}.self_attn.{name}": torch.tensor(1.0) for layer in range(2)
              for name in ("q_proj.input_scale", "k_proj.k_scale", "v_proj.v_scale")}  # fmt: skip
    save_file(load_file(file) | scales, file)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]

    def write(algorithm: str | None) -> None:
        settings = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
        own = {} if beside else {"quantization_config": {"quant_method": "modelopt", **settings}}
        (folder / "config.json").write_text(json.dumps(config | own))
        if beside:
            about = {"producer": {"name": "modelopt"}, "quantization": settings}
            (folder / "hf_quant_config.json").write_text(json.dumps(about))

    write("FP8")
    decoder = load(resolve(folder))
    assert quantization_method(resolve(folder)) == "modelopt"
    assert torch.equal(decoder.weights.layers[1].o.parts[0].dense, model.model.layers[1].self_attn.o_proj.weight)
    write("NVFP4")
    refused(folder, "quantized with 'modelopt' in the form 'NVFP4' are not supported; supported: AWQ")
    save_folder("llama", folder)
    write(None)
    load(resolve(folder))


def test_gguf_types_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    save_gguf("llama", path, quant=Quant.TQ2_0, hidden_size=256, intermediate_size=256)
    refused(path, "has type TQ2_0, which is not supported; supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1")


def test_gguf_tensors_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    save_gguf("llama", path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_uq.weight"))
    refused(path, r"tensor blk\.1\.ffn_up\.weight is missing")
    key = b"llama.feed_forward_length" + (4).to_bytes(4, "little")
    path.write_bytes(content.replace(key + (160).to_bytes(4, "little"), key + (96).to_bytes(4, "little")))
    refused(path, r"tensor blk\.0\.ffn_gate\.weight has shape \(160, 64\), but the model's config calls for \(96, 64\)")


def test_k_quants_reach_their_places(tmp_path: Path) -> None:
    """The gguf package cannot write K types, so the blocks are random: enough to see each one arrive unpacked."""
    path, other = tmp_path / "tiny.gguf", tmp_path / "k.gguf"
    save_gguf("qwen2", path, hidden_size=256, intermediate_size=256)
    source = GGUFFile(path)
    blocks = np.random.default_rng(0).integers(0, 256, (256, 210), dtype=np.uint8)
    blocks[:, 209] = 0x1C  # the scale's high byte: small numbers
    writer = gguf.GGUFWriter(other, "qwen2")
    for key, value in source.metadata.items():
        if key.startswith("qwen2.") and isinstance(value, int):
            writer.add_uint32(key, value)
    for tensor in source.tensors.values():
        if tensor.name == "blk.1.ffn_down.weight":
            writer.add_tensor(tensor.name, blocks, raw_dtype=Quant.Q6_K)
        else:
            writer.add_tensor(tensor.name, tensor.data.view(np.float32).reshape(tensor.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GGUFFile(other).tensors["blk.1.ffn_down.weight"].type is GGMLType.Q6_K
    (part,) = load(resolve(other)).weights.layers[1].down.parts
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, Quant.Q6_K))
    assert torch.equal(part.weight.t() if part.transposed else part.weight, expected)
