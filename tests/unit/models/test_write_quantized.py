"""`tonle quantize`: what is written is what quantizing on load computes, and other programs read it, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.fakes.checkpoints import save_folder, save_gguf
from tests.fakes.other_models import AROUND_TEXT, model_around_text, save_other
from tests.fakes.quantized_checkpoints import save_quantized
from tests.unit.models.stepper import Stepper, random_tokens
from tonle.errors import ConfigError, ModelError
from tonle.models import write_quantized as module
from tonle.models.load import load
from tonle.models.quantize import FewBits, Quantization
from tonle.models.source import resolve
from tonle.models.text_part import text_name
from tonle.models.write_quantized import write_quantized

KINDS = ("qkv", "o", "gate_up", "down")


def write(source: Path, out: Path, to: FewBits, group_size: int = 32) -> Any:
    return write_quantized(resolve(source), out, to, group_size, lambda done, total: None)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original") / "m"
    save_folder("llama", folder, dtype=torch.bfloat16).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("to", "group_size"), [("int8", 32), ("int8", 0), ("int4", 32), ("int4", 0), ("fp8", 128)])
def test_read_back(original: Path, tmp_path: Path, to: FewBits, group_size: int) -> None:
    seen: list[tuple[int, int]] = []
    source, out = resolve(original), tmp_path / "deep" / "out"
    written = write_quantized(source, out, to, group_size, lambda done, total: seen.append((done, total)))
    assert written.num_matrices == 14 and written.after < written.before
    assert seen == sorted(seen) and seen[-1][0] > 0.9 * seen[-1][1]
    ours, expected = load(resolve(out)), load(source, quantization=Quantization(to, group_size))
    for mine, theirs in zip(ours.weights.layers, expected.weights.layers, strict=True):
        for kind in KINDS:
            assert torch.equal(getattr(mine, kind).parts[0].dense, getattr(theirs, kind).parts[0].dense)
    assert torch.equal(ours.weights.lm_head.parts[0].dense, load(source).weights.lm_head.parts[0].dense)
    assert {file.name for file in original.iterdir()} == {file.name for file in out.iterdir()}
    assert [folder.name for folder in out.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("to", ["int8", "int4", "fp8"])
def test_transformers_reads_it(original: Path, tmp_path: Path, to: FewBits) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    write(original, tmp_path / "out", to)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]))  # unpacks its weights
    ours = load(resolve(tmp_path / "out"), dtype=torch.bfloat16)
    for mine, theirs in zip(ours.weights.layers, model.model.layers, strict=True):
        assert torch.equal(mine.o.parts[0].dense, theirs.self_attn.o_proj.weight)
        assert torch.equal(mine.down.parts[0].dense, theirs.mlp.down_proj.weight)


@pytest.mark.parametrize("to", ["int8", "int4"])
@pytest.mark.parametrize("name", [name for name in AROUND_TEXT if name != "qwen3_vl_moe"])
@torch.inference_mode()
def test_the_text_of_models_that_see(name: str, to: FewBits, tmp_path: Path) -> None:
    """Other parts stay as they are, tensor by tensor; here and in transformers the copy says the same."""
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForImageTextToText

    original, out = tmp_path / "m", tmp_path / "out"
    save_other(model_around_text(name), original)
    written = write(original, out, to)
    assert written.num_matrices == 14
    before, after = load_file(original / "model.safetensors"), load_file(out / "model.safetensors")
    kept = {key for key in before if key in after}
    assert all(torch.equal(before[key], after[key]) for key in kept)
    assert {key for key in before if text_name(key) is None} <= kept
    tokens = random_tokens(40, 300)
    stepper = Stepper(load(resolve(out)), [tokens])
    stepper.run(25)
    model = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32)
    expected = model(torch.tensor([tokens])).logits[0]
    assert float((stepper.of(0) - expected).norm() / expected.norm()) < 1e-4


def test_shards(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SHARD_BYTES", 40_000)
    write(original, tmp_path / "out", "int4")
    names = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    stored = {name: load_file(tmp_path / "out" / name) for name in names}
    assert index["weight_map"] == {tensor: name for name, tensors in stored.items() for tensor in tensors}
    total = sum(tensor.nbytes for tensors in stored.values() for tensor in tensors.values())
    assert index["metadata"]["total_size"] == total
    load(resolve(tmp_path / "out"))


def test_what_is_refused(original: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists already; choose another folder"):
        write(original, tmp_path / "there", "int8")
    write(original, tmp_path / "out", "int8")
    with pytest.raises(ModelError, match="is quantized already, and quantizing twice adds up errors"):
        write(tmp_path / "out", tmp_path / "twice", "int4")
    save_other(model_around_text("qwen3_vl_moe"), tmp_path / "moe")
    with pytest.raises(ModelError, match=r"layers\.0\.mlp\.experts\.\w+ holds the matrices of all experts"):
        write(tmp_path / "moe", tmp_path / "few", "int4")
    save_quantized("llama", tmp_path / "old", "awq")
    config = json.loads((tmp_path / "old" / "config.json").read_text())
    (tmp_path / "old" / "quant_config.json").write_text(json.dumps(config.pop("quantization_config")))
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="is quantized already"):
        write(tmp_path / "old", tmp_path / "few", "int4")
    save_gguf("llama", tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"is a GGUF file.*give the folder of the original checkpoint"):
        write(tmp_path / "m.gguf", tmp_path / "gguf", "int4")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.gguf", "moe", "old", "out", "there"]


def test_a_place_that_cannot_be_written_is_said_so(original: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match=r"file/out cannot be written: (File exists|Not a directory)"):
        write(original, tmp_path / "file" / "out", "int8")


def test_nothing_is_left_of_one_that_failed(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_copy_others", full)
    with pytest.raises(ModelError, match="cannot be written: No space left on device"):
        write(original, tmp_path / "out", "int8")
    assert not list(tmp_path.iterdir())
