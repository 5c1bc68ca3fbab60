"""Quantized checkpoints compute what their unpacked weights compute in transformers; adapters add to them as to others."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.adapters import merge
from tests.fakes.checkpoints import save_folder
from tests.fakes.quantized_checkpoints import FORMS, save_quantized
from tests.parity import test_adapters
from tests.parity.test_forward import check
from tests.unit.models.stepper import Stepper, random_tokens
from tonle.engine.text import load_text
from tonle.errors import ModelError
from tonle.models.adapters import Adapter
from tonle.models.cpu import open as cpu_open
from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.cpu.open import open_cpu
from tonle.models.decoder import Decoder
from tonle.models.layers import Quantized
from tonle.models.load import load
from tonle.models.load.folder import open_folder
from tonle.models.quantize import Quantization, assemble_quantized, quantize
from tonle.models.source import ModelSource, resolve
from tonle.models.weights import Owned

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [1, 17, 60]


def kept_packed(source: ModelSource, how: Quantization | None = None) -> Decoder:
    """With matrices as they are on a GPU that has no kernels for the model: unpacked in every step."""
    spec, fetch = open_folder(source)
    device = torch.device("cpu")
    storage = Owned(device, torch.float32, unpacks=False)
    return Decoder(spec, assemble_quantized(spec, fetch, storage, how, device, torch.float32))


def compiled(source: ModelSource, **how: Any) -> CpuDecoder:
    decoder = open_cpu(source, **how)
    assert isinstance(decoder, CpuDecoder)
    decoder.crossover = sys.maxsize  # also steps that torch would compute faster
    return decoder


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_those_of_the_unpacked_weights(form: str, tmp_path: Path) -> None:
    model = save_quantized("llama", tmp_path / "m", form)
    source = resolve(tmp_path / "m")
    check(load(source), model, lengths=LENGTHS, chunk=25)
    packed = kept_packed(source)
    check(packed, model, lengths=LENGTHS, chunk=25)
    qkv = packed.weights.layers[0].qkv.parts[0]
    assert isinstance(qkv.weight, Quantized) == (form != "gptq act-order")
    assert qkv.sizes == (64, 32, 32)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """Biases beside quantized matrices; a last matrix that is the embedding."""
    model = save_quantized(family, tmp_path / "m", "awq")
    check(load(resolve(tmp_path / "m")), model, lengths=LENGTHS, chunk=25)


def test_biases_that_are_zeros(tmp_path: Path) -> None:
    """AutoGPTQ used to store one for every matrix, also where the model has none."""
    model = save_quantized("llama", tmp_path / "m", "gptq")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    matrices = {name.removesuffix(".qweight"): tensor for name, tensor in tensors.items() if name.endswith(".qweight")}
    biases = {f"{name}.bias": torch.zeros(tensor.shape[1], dtype=torch.float16) for name, tensor in matrices.items()}
    save_file(tensors | biases, file)
    check(load(resolve(tmp_path / "m")), model, lengths=LENGTHS, chunk=25)
    name = next(iter(biases))
    biases[name][3] = 1e-4
    save_file(tensors | biases, file)
    with pytest.raises(ModelError, match=f"has no place for tensor {re.escape(name)};"):
        load(resolve(tmp_path / "m"))


@torch.inference_mode()
def logits(decoder: Any) -> torch.Tensor:
    stepper = Stepper(decoder, [random_tokens(60, decoder.spec.vocab_size)])
    stepper.run(25)
    return stepper.of(0)


def test_compiled_kernels_compute_with_what_loading_made(tmp_path: Path) -> None:
    """Kernels for these types are compiled for files of Q8_0, too."""
    save_folder("llama", tmp_path / "m")
    source, how = resolve(tmp_path / "m"), Quantization("int8", 32)
    decoder = compiled(source, quantization=how)
    assert decoder.formats() == ["8-bit"]
    found, same, other = logits(decoder), logits(load(source, quantization=how)), logits(load(source))
    assert float((found - same).norm() / same.norm()) < 1e-3
    assert float((found - other).norm() / other.norm()) > 3e-3  # what rounding changes is more than that


def test_stored_integers_reach_the_compiled_kernels(tmp_path: Path) -> None:
    save_quantized("llama", tmp_path / "m", "awq")
    assert compiled(resolve(tmp_path / "m")).formats() == ["4-bit", "float32"]  # the last matrix is not quantized


@pytest.mark.parametrize("form", ["gptq", "awq", "fp8 blocks", "nf4", "bitsandbytes int8"])
def test_adapters_over_quantized_matrices(form: str, tmp_path: Path) -> None:
    base = save_quantized("llama", tmp_path / "base", form)
    source = resolve(tmp_path / "base")
    decoder = kept_packed(source)
    adapters = test_adapters.adapters_for(tmp_path, decoder.spec)
    test_adapters.check(decoder, adapters, merged(base, adapters), 1000)


@pytest.fixture
def in_int8(tmp_path: Path) -> tuple[ModelSource, Quantization, Any]:
    """A folder, how it is quantized on load, and a live model with the weights that makes."""
    base, how = save_folder("llama", tmp_path / "base"), Quantization("int8", 32)
    for module in base.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = quantize(module.weight.data, "int8", 32).unpacked(torch.float32)
    return resolve(tmp_path / "base"), how, base


def test_adapters_over_what_loading_quantized(in_int8: tuple[ModelSource, Quantization, Any], tmp_path: Path) -> None:
    source, how, base = in_int8
    decoder = kept_packed(source, how)
    assert isinstance(decoder.weights.layers[0].o.parts[0].weight, Quantized)
    adapters = test_adapters.adapters_for(tmp_path, decoder.spec)
    test_adapters.check(decoder, adapters, merged(base, adapters), 1000)


def test_adapters_in_the_compiled_step(
    in_int8: tuple[ModelSource, Quantization, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over quantized weights of a checkpoint, not over random ones as in `test_cpu_adapters.py`."""
    monkeypatch.setattr(cpu_open, "_FLOAT_SHARE", 0.0)  # no steps through torch
    source, how, base = in_int8
    decoder = compiled(source, quantization=how)
    assert decoder.formats() == ["8-bit"]
    adapters = test_adapters.adapters_for(tmp_path, decoder.spec)
    decoder.enable_adapters(3, 16)
    for slot, adapter in adapters.items():
        decoder.set_adapter(slot, adapter)
    prompts = [random_tokens(length, decoder.spec.vocab_size) for length in test_adapters.LENGTHS]
    models = merged(base, adapters)
    for chunk in (1000, 7):
        stepper = Stepper(decoder, prompts, adapter_slots=test_adapters.SLOTS)  # type: ignore[arg-type]
        stepper.run(chunk)
        for row, prompt in enumerate(prompts):
            expected = test_adapters.reference(models[test_adapters.SLOTS[row]], prompt)
            assert float((stepper.of(row) - expected).norm() / expected.norm()) < 1e-3


def merged(base: Any, adapters: dict[int, Adapter]) -> dict[int, Any]:
    """By slot; -1: without an adapter."""
    return {-1: base, **{slot: merge(copy.deepcopy(base), adapter) for slot, adapter in adapters.items()}}


def test_unpacking_on_request(tmp_path: Path) -> None:
    model = save_quantized("llama", tmp_path / "m", "awq")
    source = resolve(tmp_path / "m")
    check(load(source, quantization=Quantization("none")), model, lengths=LENGTHS)
    assert compiled(source, quantization=Quantization("none")).formats() == ["float32"]


QUESTIONS = ("What is the capital of France?", "Name three colours.", "How many days does a week have?")
NEW = 12  # tokens of each answer


@pytest.mark.model
def test_the_default_model_answers_the_same_in_int8(default_model: ModelSource) -> None:
    text = load_text(default_model)
    prompts = [text.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    answers = [greedy(load(default_model, quantization=how), prompts) for how in (None, Quantization("int8"))]
    assert answers[0] == answers[1]
    assert "Paris" in text.decode(answers[0][0])


def greedy(decoder: Decoder, prompts: list[list[int]]) -> list[list[int]]:
    """All prompts together."""
    texts = [list(prompt) for prompt in prompts]
    stepper = Stepper(decoder, [prompt + [0] * NEW for prompt in prompts])
    stepper.step({row: len(prompt) for row, prompt in enumerate(prompts)})
    for _ in range(NEW):
        for row, sequence in enumerate(texts):
            sequence.append(int(stepper.logits[row][-1].argmax()))
            stepper._sequences[row][len(sequence) - 1] = sequence[-1]
        stepper.step(dict.fromkeys(range(len(texts)), 1))
    return [sequence[len(prompt) :] for sequence, prompt in zip(texts, prompts, strict=True)]
