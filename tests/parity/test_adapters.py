"""An adapter's truth: rows with adapters, mixed with others in one step, have the logits of the merged model alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Quant

from tests.fakes.adapters import merge, save_merged, write_adapter
from tests.fakes.checkpoints import FAMILIES, FIRST_FAMILIES, save_folder, save_gguf, tiny_model
from tests.unit.models.stepper import Stepper, random_tokens
from tonle.models.adapters import Adapter
from tonle.models.adapters.read_adapter import read_adapter
from tonle.models.decoder import Decoder
from tonle.models.load import load
from tonle.models.read_spec import read_spec
from tonle.models.source import resolve

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = {"rtol": 0, "atol": 2e-4}
LENGTHS = [33, 17, 60, 9, 1]
SLOTS = [0, -1, 2, 0, 2]  # of each of these sequences; slot 1 stays empty


@torch.inference_mode()
def reference(model: Any, prompt: list[int]) -> torch.Tensor:
    return model(torch.tensor([prompt])).logits[0]


def adapters_for(folder: Path, spec: Any) -> dict[int, Adapter]:
    """Two of different ranks, scalings and modules, by way of their files."""
    write_adapter(folder / "all", spec, rank=4, alpha=8, seed=1)
    write_adapter(folder / "some", spec, rank=16, alpha=5, use_rslora=True, modules=["k", "o", "down"], seed=2)
    return {
        0: read_adapter(folder / "all", spec, max_rank=16),
        2: read_adapter(folder / "some", spec, max_rank=16),
    }


def check(decoder: Decoder, adapters: dict[int, Adapter], models: dict[int, Any], chunk: int) -> None:
    """`models`: what each slot's rows must equal, and -1 for rows without an adapter."""
    decoder.enable_adapters(3, 16)
    for slot, adapter in adapters.items():
        decoder.set_adapter(slot, adapter)
    asked = [random_tokens(length, decoder.spec.vocab_size) for length in LENGTHS]
    stepper = Stepper(decoder, asked, adapter_slots=SLOTS)
    stepper.run(chunk)
    for row, prompt in enumerate(asked):
        torch.testing.assert_close(stepper.of(row), reference(models[SLOTS[row]], prompt), **TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixed_batch_equals_the_merged_models(family: str, tmp_path: Path) -> None:
    base = save_folder(family, tmp_path / "base")
    source = resolve(tmp_path / "base")
    adapters = adapters_for(tmp_path, read_spec(source))
    models = {slot: save_merged(family, tmp_path / f"merged-{slot}", adapter) for slot, adapter in adapters.items()}
    for chunk in (1000, 7, 1) if family in FIRST_FAMILIES else (7,):
        check(load(source), adapters, {-1: base, **models}, chunk)
    merged = Stepper(load(resolve(tmp_path / "merged-0")), [random_tokens(33, 320)])  # the folder holds the same model
    merged.run(1000)
    torch.testing.assert_close(merged.of(0), reference(models[0], random_tokens(33, 320)), **TOLERANCE)


@pytest.mark.parametrize("quant", [Quant.F32, Quant.Q8_0], ids=lambda quant: quant.name)
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "smollm3", "glm4"])
def test_over_a_gguf_base(family: str, quant: Quant, tmp_path: Path) -> None:
    """llama-type files interleave the rows of q and k; adapters, in the order of Hugging Face checkpoints, fit as they are."""
    base = save_gguf(family, tmp_path / "base.gguf", quant=quant)
    source = resolve(tmp_path / "base.gguf")
    adapters = adapters_for(tmp_path, read_spec(source))
    models = {slot: merge(copy.deepcopy(base), adapter) for slot, adapter in adapters.items()}
    check(load(source), adapters, {-1: base, **models}, 1000)


def test_over_a_live_model(tmp_path: Path) -> None:
    """Its own weights, which are shared, stay as they are."""
    live = tiny_model("qwen3")
    decoder = load(live)
    adapters = adapters_for(tmp_path, decoder.spec)
    models = {slot: merge(tiny_model("qwen3"), adapter) for slot, adapter in adapters.items()}
    check(decoder, adapters, {-1: live, **models}, 1000)
    for name, weight in tiny_model("qwen3").state_dict().items():
        assert torch.equal(weight, live.state_dict()[name])


def test_a_slot_that_is_replaced_and_cleared(tmp_path: Path) -> None:
    base = save_folder("llama", tmp_path / "base")
    decoder = load(resolve(tmp_path / "base"))
    adapters = adapters_for(tmp_path, decoder.spec)
    models = {slot: merge(tiny_model("llama"), adapter) for slot, adapter in adapters.items()}
    check(decoder, adapters, {-1: base, **models}, 1000)
    prompt = random_tokens(20, 320)
    for adapter, model in ((adapters[2], models[2]), (None, base), (adapters[0], models[0])):
        decoder.set_adapter(0, adapter)  # what the one before changed and this one does not is as in the model
        stepper = Stepper(decoder, [prompt], adapter_slots=[0])
        stepper.run(1000)
        torch.testing.assert_close(stepper.of(0), reference(model, prompt), **TOLERANCE)
