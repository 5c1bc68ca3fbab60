"""Whole steps with few-bit weights through the CUDA runner in the interpreter, adapters included: as unpacked ones say."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from benchmarks.gpu_step import matrices_of

from tests.fakes.adapters import random_adapter
from tests.fakes.layer_kinds import KINDS, Reference, decoder_of, merged, spec_of, tensors_of
from tests.fakes.planned_rows import logprobs_of
from tests.unit.models.cuda import test_layer_kinds as harness
from tonle.models.cuda import quantized_dot, quantized_matrix
from tonle.models.cuda.quantized_dot import DotTiling
from tonle.models.cuda.quantized_matrix import QuantizedMatrix
from tonle.models.decoder import Decoder
from tonle.models.layers import Quantized
from tonle.models.quantize import Quantization, assemble_quantized
from tonle.models.spec import ModelSpec
from tonle.models.weights import Owned

small_tilings = harness.small_tilings  # a fixture


def quantized(weight: torch.Tensor, form: str) -> Quantized:
    """What it gives, quantized again, is the same."""
    outputs, inputs = weight.shape
    group, most = (32, 7) if form == "int4" else (inputs, 127)
    grouped = weight.view(outputs, -1, group)
    scale = grouped.abs().amax(2, keepdim=True) / most
    numbers = (grouped / scale).round().to(torch.int8).view(outputs, inputs)
    return Quantized(numbers, scale[..., 0], bits=4 if form == "int4" else 8)


@pytest.mark.parametrize("form", ["int4"])
def test_steps_and_adapters(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts in chunks beside rows that go on, many rows, one row; unpacked to memory where there are more than eight tokens."""
    spec = spec_of(KINDS["gated mixer with biases"])
    tensors = {
        name: quantized(tensor, form).unpacked(torch.float32) if name.endswith("_proj.weight") else tensor
        for name, tensor in tensors_of(spec).items()
    }

    def few_bit_decoder(spec: ModelSpec, tensors: dict[str, torch.Tensor]) -> Decoder:
        decoder = decoder_of(spec, tensors)
        for part in matrices_of(decoder.weights, lm_head=False):
            part.weight, part.transposed = quantized(part.dense.contiguous(), form), False
        return decoder

    made: list[QuantizedMatrix] = []
    original = quantized_matrix.share_room

    def noted(matrices, tokens, like):  # type: ignore[no-untyped-def]
        made[:] = [matrix for matrix in matrices if isinstance(matrix, QuantizedMatrix)]
        original(matrices, tokens, like)

    monkeypatch.setattr(harness, "decoder_of", few_bit_decoder)
    monkeypatch.setattr(harness.model, "share_room", noted)
    monkeypatch.setattr(quantized_matrix, "UNPACK_ROWS", 8)
    monkeypatch.setattr(quantized_dot, "dot_tiling", lambda *_, **__: DotTiling(128, 16, stages=2))
    adapter = random_adapter(spec, rank=8, seed=1)
    rows = harness.computed(spec, tensors, adapters=(adapter,))
    assert len(made) == 4
    plain, adapted = Reference(spec, tensors), Reference(spec, merged(tensors, adapter))
    for reference, (row, text) in zip([adapted, plain, plain], rows.tokens.items(), strict=True):
        torch.testing.assert_close(rows.said(row), logprobs_of(reference.logits(text), text), rtol=0, atol=5e-3)


@pytest.mark.parametrize("kind", ["norms before and after", "parallel"])
def test_many_rows_in_eight_bits_and_logits_by_the_embedding(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(KINDS[kind], tie_embeddings=True)
    tensors = tensors_of(spec)
    monkeypatch.setattr(quantized_matrix, "multiplies_fp8", lambda: True)
    monkeypatch.setattr(quantized_matrix, "MAX_ROWS", 2)
    monkeypatch.setattr(quantized_matrix, "UNPACK_ROWS", 2)
    dense: list[torch.Tensor | None] = []
    original = QuantizedMatrix._columns

    def noted(self):  # type: ignore[no-untyped-def]
        dense.append(self.twin)
        return original(self)

    monkeypatch.setattr(QuantizedMatrix, "_columns", noted)
    cpu = torch.device("cpu")
    owned = Owned(cpu, torch.float32, unpacks=False)
    weights = assemble_quantized(spec, tensors.__getitem__, owned, Quantization("fp8"), cpu, torch.float32)
    rows = harness.walked(Decoder(spec, weights), harness.CONFIG)
    assert dense and all(twin is not None for twin in dense)
    reference = Reference(spec, tensors)
    for row, text in rows.tokens.items():
        said, expected = rows.said(row), logprobs_of(reference.logits(text), text)
        assert float((said - expected).norm()) <= 0.06 * float(expected.norm())  # e4m3 rounds by a sixteenth at most
