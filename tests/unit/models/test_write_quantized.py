"""`tonle quantize`: what is written is what quantizing on load computes, and other programs read it, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.fakes.checkpoints import save_folder, save_gguf
from tonle.errors import ConfigError, ModelError
from tonle.models import write_quantized as module
from tonle.models.load import load
from tonle.models.quantize import FewBits, Quantization
from tonle.models.source import resolve
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
    from transformers import AutoModelForCausalLM, __version__

    if to == "int4" and __version__ == "5.23.0":
        pytest.skip("transformers 5.23.0 takes packed zero points for a mistake; 5.22 reads them")
    write(original, tmp_path / "out", to)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.inference_mode():
        model(torch.tensor([[1, 2, 3]]))  # unpacks its weights
    ours = load(resolve(tmp_path / "out"), dtype=torch.bfloat16)
    for mine, theirs in zip(ours.weights.layers, model.model.layers, strict=True):
        assert torch.equal(mine.o.parts[0].dense, theirs.self_attn.o_proj.weight)
        assert torch.equal(mine.down.parts[0].dense, theirs.mlp.down_proj.weight)


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
    save_gguf("llama", tmp_path / "m.gguf")
    with pytest.raises(ModelError, match=r"is a GGUF file.*give the folder of the original checkpoint"):
        write(tmp_path / "m.gguf", tmp_path / "gguf", "int4")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m.gguf", "out", "there"]


def test_nothing_is_left_of_one_that_failed(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_copy_others", full)
    with pytest.raises(ModelError, match="cannot be written: No space left on device"):
        write(original, tmp_path / "out", "int8")
    assert not list(tmp_path.iterdir())
