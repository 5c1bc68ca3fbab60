"""Folders that PEFT itself writes, and the logits that it computes with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from tests.fakes.adapters import write_adapter
from tests.fakes.checkpoints import save_folder, tiny_model
from tests.unit.models.stepper import Stepper, random_tokens
from tonle.errors import ModelError
from tonle.models.adapters.read_adapter import read_adapter
from tonle.models.decoder import Decoder
from tonle.models.load import load
from tonle.models.source import resolve

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = random_tokens(40, 320)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def decoder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tmp_path_factory.mktemp("model")
    save_folder(family, path)
    decoder = load(resolve(path))
    decoder.enable_adapters(1, 64)
    return decoder


def made_by_peft(family: str, folder: Path, **settings: Any) -> Any:
    """A live model with a random adapter, saved in `folder`; neither A nor B is zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = get_peft_model(
            tiny_model(family), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
        )
    model.eval().save_pretrained(folder)
    return model


def logits(decoder: Decoder, folder: Path) -> torch.Tensor:
    decoder.set_adapter(0, read_adapter(folder, decoder.spec, max_rank=64))
    stepper = Stepper(decoder, [PROMPT], adapter_slots=[0])
    stepper.run(1000)
    return stepper.of(0)


@torch.inference_mode()
def theirs(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([PROMPT])).logits[0]
    return found


@pytest.mark.parametrize("settings", [
    {"r": 8, "lora_alpha": 16, "target_modules": ATTENTION},
    {"r": 64, "lora_alpha": 16, "target_modules": "all-linear", "use_rslora": True},
    {"r": 4, "target_modules": ["q_proj", "up_proj", "down_proj"],
     "rank_pattern": {"0.self_attn.q_proj": 5, "q_proj": 2, r"1\.mlp\.up_proj": 9},
     "alpha_pattern": {"down_proj": 24, r"layers\.0\.self_attn\..*": 3}},
    {"r": 3, "target_modules": r".*\.1\.(self_attn\.[kv]|mlp\.gate)_proj"},
    {"r": 1, "lora_alpha": 2, "target_modules": ["o_proj", "gate_proj"], "layers_to_transform": [1]},
    {"r": 5, "target_modules": "all-linear", "exclude_modules": ["up_proj", "0.self_attn.q_proj"]},
    {"r": 2, "target_modules": ["v_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": 1, "layers_pattern": "layers"},
], ids=str)  # fmt: skip
def test_the_logits_are_those_of_peft(family: str, decoder: Decoder, settings: dict[str, Any], tmp_path: Path) -> None:
    model = made_by_peft(family, tmp_path, **settings)
    with model.disable_adapter():
        assert (theirs(model.base_model) - theirs(tiny_model(family))).abs().max() == 0
    expected = theirs(model)
    assert (expected - theirs(tiny_model(family))).abs().mean() > 0.05  # there is something to see
    torch.testing.assert_close(logits(decoder, tmp_path), expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("other", ["phi3", "granite", "glm4"])
def test_joined_matrices_rows_in_pairs_and_scaled_residuals(other: str, tmp_path: Path) -> None:
    """Adapters change a checkpoint's matrices, and ours are made of those when they are loaded."""
    model = made_by_peft(other, tmp_path / "peft", r=8, lora_alpha=16, target_modules="all-linear")
    expected = theirs(model)
    assert (expected - theirs(tiny_model(other))).abs().mean() > 0.05
    save_folder(other, tmp_path / "model")
    decoder = load(resolve(tmp_path / "model"))
    decoder.enable_adapters(1, 64)
    torch.testing.assert_close(logits(decoder, tmp_path / "peft"), expected, rtol=0, atol=2e-4)
    write_adapter(tmp_path / "ours", decoder.spec, rank=4)
    read_by_peft = PeftModel.from_pretrained(tiny_model(other), tmp_path / "ours")
    torch.testing.assert_close(logits(decoder, tmp_path / "ours"), theirs(read_by_peft), rtol=0, atol=2e-4)


def test_peft_reads_what_the_tests_write(decoder: Decoder, family: str, tmp_path: Path) -> None:
    """The folders that other tests use mean to PEFT what they mean here."""
    ranks = {"q": 3, "v": 8, "up": 1, "down": 16}
    write_adapter(tmp_path, decoder.spec, rank=ranks, modules=ranks, alpha=6, use_rslora=True)
    model = PeftModel.from_pretrained(tiny_model(family), tmp_path)
    torch.testing.assert_close(logits(decoder, tmp_path), theirs(model), rtol=0, atol=2e-4)


@pytest.mark.parametrize(("settings", "words"), [
    ({"target_modules": ATTENTION, "use_dora": True}, "DoRA"),
    ({"target_modules": [*ATTENTION, "embed_tokens"]}, "embed_tokens"),
    ({"target_modules": [*ATTENTION, "lm_head"]}, "lm_head"),
    ({"target_modules": ATTENTION, "modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"target_modules": ATTENTION, "trainable_token_indices": [5, 6]}, "trainable_token_indices"),
    ({"target_modules": ATTENTION, "bias": "all"}, "bias"),
], ids=str)  # fmt: skip
def test_what_peft_can_and_tonle_cannot_is_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    made_by_peft("llama", tmp_path, **settings)
    with pytest.raises(ModelError, match=words) as caught:
        read_adapter(tmp_path, load(tiny_model("llama")).spec, max_rank=64)
    assert str(tmp_path) in caught.value.message


def test_the_names_are_those_of_peft(decoder: Decoder, family: str, tmp_path: Path) -> None:
    made_by_peft(family, tmp_path / "theirs", r=4, target_modules="all-linear")
    write_adapter(tmp_path / "ours", decoder.spec, rank=4)
    names = [load_file(tmp_path / who / "adapter_model.safetensors").keys() for who in ("theirs", "ours")]
    assert names[0] == names[1]
