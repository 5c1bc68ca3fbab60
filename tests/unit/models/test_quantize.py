"""Rounding to few bits: how far it may be off, what is left alone, and which matrices it is for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fakes.checkpoints import save_folder, save_gguf, tiny_model
from tonle.config.engine import EngineConfig
from tonle.errors import ConfigError
from tonle.models import quantize as module
from tonle.models.cpu.open import open_cpu
from tonle.models.layers import Quantized
from tonle.models.load import load
from tonle.models.quantize import FewBits, Quantization, quantize, quantizing
from tonle.models.read_spec import read_spec
from tonle.models.source import resolve
from tonle.models.weights import EMBEDDING, LM_HEAD, random_tensors

CPU = torch.device("cpu")


def random_matrix(rows: int = 24, columns: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(rows, columns, generator=generator) * torch.rand(rows, 1, generator=generator)


@pytest.mark.parametrize(
    ("to", "group_size", "groups", "error"),
    [
        ("int8", 128, 2, 0.008),
        ("int8", 0, 1, 0.009),
        ("int4", 128, 2, 0.12),
        ("int4", 32, 8, 0.095),
        ("fp8", 128, 1, 0.028),
    ],
)
def test_error_of_each_form(to: FewBits, group_size: int, groups: int, error: float) -> None:
    weight = random_matrix()
    made = quantize(weight, to, group_size)
    assert made.scale.shape == (24, groups)
    assert made.bits == (4 if to == "int4" else 8)
    unpacked = made.unpacked(torch.float32)
    assert 0.2 * error < float((unpacked - weight).norm() / weight.norm()) < error
    assert made.scale.dtype == torch.bfloat16  # as files hold them
    again = quantize(unpacked, to, group_size).unpacked(torch.float32)
    assert float((again - weight).norm() / weight.norm()) < 1.3 * error


@pytest.mark.parametrize("to", ["int8", "int4", "fp8"])
def test_zeros_stay_zeros(to: FewBits) -> None:
    weight = random_matrix()
    weight[3] = 0
    weight[5, :128] = 0
    weight[7] = weight[7].abs() + 1  # far from zero: its range still begins there
    weight[7, 9] = 0
    unpacked = quantize(weight, to, 128).unpacked(torch.float32)
    assert not unpacked[3].any() and not unpacked[5, :128].any() and unpacked[7, 9] == 0
    assert torch.isfinite(unpacked).all()


def test_large_and_small_numbers_are_finite() -> None:
    for factor in (1e-30, 1e30):
        for to in ("int8", "int4", "fp8"):
            assert torch.isfinite(quantize(random_matrix() * factor, to, 128).unpacked(torch.float32)).all()  # type: ignore[arg-type]


@pytest.mark.parametrize(("to", "error"), [("int8", 0.04), ("int4", 0.15), ("fp8", 0.035)])
def test_small_numbers_of_half_precision(to: FewBits, error: float) -> None:
    """Their scales are among the smallest numbers of float16, far apart."""
    weight = (random_matrix(500) * torch.logspace(-6, -1, 500)[:, None]).half()
    weight = weight[weight.abs().amax(dim=1) > 1e-6]
    made = quantize(weight, to, 128)
    largest = weight.float().view(len(weight), made.scale.shape[1], -1).abs().amax(dim=2) / made.scale.float()
    assert to != "fp8" or largest.max() <= 449  # float8_e4m3fn has numbers up to 448
    off = (made.unpacked(torch.float32) - weight.float()).norm(dim=1) / weight.float().norm(dim=1)
    assert off.max() < error


@pytest.mark.parametrize(
    ("inputs", "size", "group"), [(256, 128, 128), (160, 128, 32), (576, 128, 64), (48, 128, 48), (100, 0, 100)]
)
def test_groups_divide_the_inputs(inputs: int, size: int, group: int) -> None:
    assert quantize(random_matrix(2, inputs), "int8", size).scale.shape == (2, inputs // group)


@pytest.mark.parametrize("to", ["int8", "int4", "fp8"])
def test_a_few_rows_at_a_time_give_the_same(to: FewBits, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = quantize(random_matrix(), to, 64)
    monkeypatch.setattr(module, "_CHUNK", 5 * 256)
    parts = quantize(random_matrix(), to, 64)
    assert torch.equal(parts.numbers.view(torch.uint8), whole.numbers.view(torch.uint8))
    assert torch.equal(parts.scale, whole.scale)


def test_which_matrices(tmp_path: Path) -> None:
    save_folder("qwen2", tmp_path / "m")  # its last matrix is the embedding
    spec = read_spec(resolve(tmp_path / "m"))
    fetch = quantizing(spec, random_tensors(spec, CPU, seed=0), Quantization("int4", 32), CPU, torch.float32)
    layer = "model.layers.0."
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        weight = fetch(f"{layer}{name}.weight")
        assert isinstance(weight, Quantized) and weight.bits == 4
    for name in (EMBEDDING, f"{layer}input_layernorm.weight", f"{layer}self_attn.q_proj.bias"):
        assert isinstance(fetch(name), torch.Tensor)
    head = fetch(LM_HEAD)
    assert isinstance(head, Quantized) and head.bits == 8  # the last matrix never has fewer
    embedding = fetch(EMBEDDING)
    assert isinstance(embedding, torch.Tensor)
    assert float((head.unpacked(torch.float32) - embedding).norm() / embedding.norm()) < 0.01


def test_a_matrix_in_the_wanted_form_stays_as_it_is(tmp_path: Path) -> None:
    save_folder("llama", tmp_path / "m")
    spec = read_spec(resolve(tmp_path / "m"))
    stored = quantize(random_matrix(64, 64), "fp8", 0)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert quantizing(spec, lambda _: stored, Quantization("fp8"), CPU, torch.float32)(name) is stored
    other = quantizing(spec, lambda _: stored, Quantization("int8"), CPU, torch.float32)(name)
    assert isinstance(other, Quantized) and other.numbers.dtype == torch.int8
    plain = quantizing(spec, lambda _: stored, Quantization("none"), CPU, torch.bfloat16)(name)
    assert isinstance(plain, torch.Tensor) and plain.dtype == torch.bfloat16


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("to", ["int8", "int4", "fp8"])
def test_folders_files_and_live_models_give_the_same(to: str, tmp_path: Path) -> None:
    live = save_folder("qwen2", tmp_path / "m")
    save_gguf("qwen2", tmp_path / "m.gguf")
    how = Quantization(to, 32)  # type: ignore[arg-type]
    decoders = [load(each, quantization=how) for each in (resolve(tmp_path / "m"), resolve(tmp_path / "m.gguf"), live)]
    plain = load(resolve(tmp_path / "m"))
    for kind in ("qkv", "o", "gate_up", "down"):
        first, *others = [getattr(each.weights.layers[1], kind).parts[0].dense for each in decoders]
        assert all(torch.equal(first, other) for other in others)
        assert 1e-4 < distance(first, getattr(plain.weights.layers[1], kind).parts[0].dense) < 0.1
    heads = [each.weights.lm_head.parts[0].dense for each in decoders]
    assert all(torch.equal(heads[0], head) for head in heads)
    assert 1e-4 < distance(heads[0], plain.weights.embedding) < 0.01
    assert torch.equal(decoders[2].weights.embedding, live.model.embed_tokens.weight)
    assert decoders[2].weights.embedding.data_ptr() == live.model.embed_tokens.weight.data_ptr()  # still shared


def test_the_compiled_step_packs_what_was_asked_for(tmp_path: Path) -> None:
    save_folder("qwen2", tmp_path / "m")
    for to, formats in (("int8", ["8-bit"]), ("int4", ["4-bit", "8-bit"]), ("fp8", ["8-bit", "bfloat16"])):
        assert open_cpu(resolve(tmp_path / "m"), quantization=Quantization(to, 32)).formats() == formats  # type: ignore[union-attr,arg-type]


def test_settings_are_checked() -> None:
    EngineConfig(quantization="int4", quantization_group_size=64).validate()
    EngineConfig(quantization="int8", quantization_group_size=0).validate()
    with pytest.raises(ConfigError, match="quantization must be auto, none, int8, int4 or fp8, not 'int2'"):
        EngineConfig(quantization="int2").validate()
    for wrong in (16, 100, -128):
        with pytest.raises(ConfigError, match=r"must be 0 .one scale for each output. or a power of two from 32 on"):
            EngineConfig(quantization_group_size=wrong).validate()


def test_live_models_stay_as_they_are() -> None:
    live, untouched = tiny_model("llama"), tiny_model("llama")
    load(live, quantization=Quantization("int4", 32))
    for name, tensor in untouched.state_dict().items():
        assert torch.equal(tensor, live.state_dict()[name])
