"""The text part of a multimodal checkpoint says what transformers says with the whole of it; images are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.other_models import AROUND_TEXT, model_around_text, save_other
from tests.unit.models.stepper import Stepper, random_tokens
from tonle.models.decoder import Decoder
from tonle.models.load import load
from tonle.models.load.other import open_other
from tonle.models.source import resolve

pytestmark = pytest.mark.usefixtures("one_thread")


@torch.inference_mode()
def assert_same(model: Any, decoder: Decoder) -> None:
    tokens = random_tokens(60, 300)
    stepper = Stepper(decoder, [tokens])
    stepper.run(25)
    torch.testing.assert_close(stepper.of(0), model(torch.tensor([tokens])).logits[0].float(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", AROUND_TEXT)
def test_folders_and_live_models(name: str, tmp_path: Path) -> None:
    model = model_around_text(name)
    assert open_other(model) is None
    assert_same(model, load(model))
    save_other(model, tmp_path)
    assert open_other(resolve(tmp_path)) is None
    assert_same(model, load(resolve(tmp_path)))


def test_the_layout_that_qwen2_vl_was_published_in(tmp_path: Path) -> None:
    """Text sizes at the top of the config, text tensors without a prefix."""
    model = model_around_text("qwen2_vl")
    save_other(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    scaling = {"type": "mrope", "mrope_section": text["rope_parameters"]["mrope_section"]}
    text = {key: value for key, value in text.items() if key not in ("rope_parameters", "model_type", "layer_types")}
    published = {**text, **config, "rope_theta": 10_000.0, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(published))
    file = tmp_path / "model.safetensors"
    tensors = {_published_name(name): tensor for name, tensor in load_file(file).items()}
    assert "model.layers.0.self_attn.q_proj.weight" in tensors and any(name.startswith("visual.") for name in tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    assert_same(model, load(resolve(tmp_path)))


def test_the_layout_that_qwen3_vl_moe_was_published_in(tmp_path: Path) -> None:
    """Matrices of all experts as (experts, in, out)."""
    model = model_around_text("qwen3_vl_moe")
    save_other(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if ".mlp.experts." in name]:
        rows, columns = (96, 64) if "gate_up" in name else (64, 48)
        if tensors[name].shape == (4, rows, columns):
            tensors[name] = tensors[name].transpose(1, 2).contiguous()
        assert tensors[name].shape == (4, columns, rows)
    save_file(tensors, file, metadata={"format": "pt"})
    assert_same(model, load(resolve(tmp_path)))


def _published_name(name: str) -> str:
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
