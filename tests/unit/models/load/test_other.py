"""Models without a row of their own: loaded whole and as they are, or refused with the reason."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.fakes.checkpoints import VOCAB_SIZE, save_folder, save_gguf
from tests.fakes.driver import Driver
from tests.fakes.other_models import other_model, save_other
from tonle.config.engine import EngineConfig
from tonle.deploy.model_size import model_size
from tonle.errors import ConfigError, ModelError
from tonle.models.load.other import open_other
from tonle.models.outline import outline
from tonle.models.source import resolve
from tonle.models.transformers_decoder import adopt


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_other(other_model("gpt2"), tmp_path / "gpt2")
    return tmp_path / "gpt2"


def refused(path: Path, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint) as caught:
        open_other(resolve(path))
    assert str(path) in caught.value.message


def change(path: Path, **fields: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_a_folder_is_loaded_as_it_is(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    decoder = open_other(resolve(folder))
    assert decoder is not None and decoder.dtype == torch.float32 and decoder.device.type == "cpu"
    spec = decoder.spec
    assert (spec.architecture, spec.num_layers, spec.num_heads, spec.head_dim) == ("GPT2LMHeadModel", 2, 4, 16)
    assert (spec.vocab_size, spec.hidden_size, spec.max_positions, spec.eos_ids) == (VOCAB_SIZE, 64, 512, (2,))
    half = open_other(resolve(folder), dtype=torch.bfloat16)
    assert half is not None and half.dtype == torch.bfloat16
    assert "it/s" not in capfd.readouterr().err  # no progress bars in the log


def test_families_are_not_taken_from_their_loaders(tmp_path: Path) -> None:
    model = save_folder("llama", tmp_path / "llama")
    save_gguf("llama", tmp_path / "llama.gguf")
    for given in (resolve(tmp_path / "llama"), resolve(tmp_path / "llama.gguf"), model, torch.nn.Linear(2, 2)):
        assert open_other(given) is None


def test_without_transformers_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None if name == "transformers" else find(name))
    refused(
        folder, r"'GPT2LMHeadModel' is not supported directly; with transformers it may run: pip install 'tonle\[hf\]'"
    )


def test_missing_tensors_are_not_made_up(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    lost = next(name for name in tensors if name.endswith("h.1.mlp.c_fc.weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, file, metadata={"format": "pt"})
    refused(folder, "tensor .*h.1.mlp.c_fc.weight is missing; the model would run with random numbers in its place")
    save_file({**tensors, lost: torch.zeros(3, 3)}, file, metadata={"format": "pt"})
    refused(folder, "tensor .*h.1.mlp.c_fc.weight is of another shape")


def test_damage_and_unknown_kinds_are_named(folder: Path) -> None:
    change(folder, model_type="no_such_kind", architectures=["NoSuchForCausalLM"])
    refused(folder, "transformers cannot load it: .*no_such_kind")
    change(folder, model_type="gpt2", architectures=["GPT2LMHeadModel"])
    (folder / "model.safetensors").write_bytes(b"")
    refused(folder, "transformers cannot load it: ")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, r"holds pickled weights \(.bin\) only; convert them to safetensors")


def test_code_of_a_checkpoint_is_not_run(folder: Path) -> None:
    (folder / "evil.py").write_text("raise SystemExit('code of the checkpoint ran')")
    change(folder, model_type="made_up", architectures=["EvilForCausalLM"], auto_map={
        "AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilForCausalLM"})  # fmt: skip
    refused(folder, "transformers knows it only by code that the checkpoint brings, which is not run")


SMALL: dict[str, Any] = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(("model", "complaint"), [
    (lambda: transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1)),
     "keep"),
    (lambda: transformers.BertLMHeadModel(transformers.BertConfig(**SMALL, intermediate_size=32)),
     "BertLMHeadModel cannot be served: attention of its BertSelfAttention is not causal"),
    (lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=320, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16)), "has an encoder"),
], ids=["state", "both directions", "encoder"])  # fmt: skip
def test_models_that_would_say_something_else_are_refused(model: Any, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        adopt(model().eval())


def test_layers_with_a_state_are_refused_by_their_kind() -> None:
    config = transformers.Lfm2Config(**SMALL, intermediate_size=32, num_key_value_heads=1, layer_types=["conv"])
    with pytest.raises(ModelError, match="Lfm2ForCausalLM has layers of kind conv, which keep a state other than"):
        adopt(transformers.Lfm2ForCausalLM(config).eval())


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(ModelError, match=r"is in training mode; call model.eval\(\) first"):
        adopt(other_model("gpt2").train())


def test_a_live_model_stays_where_it_is() -> None:
    model = other_model("gpt2")
    with pytest.raises(ModelError, match=r"has dtype torch.float32, not torch.bfloat16; cast it with model.to\(\)"):
        open_other(model, dtype=torch.bfloat16)
    with pytest.raises(ModelError, match="is on cpu, not meta"):
        open_other(model, device=torch.device("meta"))


def test_adapters_are_refused_before_any_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TransformersDecoder, which takes no LoRA adapters") as caught:
        Driver(other_model("gpt2"), EngineConfig(lora={"a": str(tmp_path / "nowhere")}))
    assert caught.value.param == "lora"


def test_quantization_is_refused_before_weights_are_read(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match="GPT2LMHeadModel runs through transformers, with weights as they are stored"
    ) as caught:
        Driver(resolve(folder), EngineConfig(quantization="int8"))
    assert caught.value.param == "quantization"


def test_an_outline_is_read_without_torch(folder: Path) -> None:
    spec = outline(transformers.FalconConfig(multi_query=True).to_dict())
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (32, 71, 1, 64)
    spec = outline(transformers.BloomConfig().to_dict())
    assert (spec.num_layers, spec.num_heads, spec.max_positions) == (2, 8, 2048)
    spec = outline(transformers.XGLMConfig().to_dict())
    assert (spec.num_layers, spec.num_heads, spec.head_dim, spec.intermediate_size) == (24, 16, 64, 4096)
    with pytest.raises(ModelError, match="the model's config names no hidden_size"):
        outline({"architectures": ["X"]})
    with pytest.raises(ModelError, match="should name a whole number as n_embd, not 'a'"):
        outline({"n_embd": "a"})
    size = model_size(str(folder), on_gpu=False)
    assert (size.kv_bytes_per_token, size.max_positions) == (2 * 2 * 4 * 16 * 2, 512)


def test_positions_that_would_change_for_all_are_not_offered() -> None:
    config = transformers.StableLmConfig(max_position_embeddings=8192).to_dict()
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    assert outline({**config, "rope_parameters": rope}).max_positions == 4096
