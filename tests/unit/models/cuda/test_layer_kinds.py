"""Every kind of layer that the kernels run, through the CUDA runner in the interpreter, against the plain reference."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from tests.fakes.adapters import random_adapter
from tests.fakes.layer_kinds import ATTENTION, KINDS, MIXER, PLAIN, VOCAB, Reference, decoder_of, merged, spec_of, tensors_of
from tests.fakes.planned_rows import PlannedRows, logprobs_of
from tests.unit.models.stepper import random_tokens
from tonle.config.engine import EngineConfig
from tonle.engine.build_cuda import cuda_machine
from tonle.engine.run.cuda import CudaRunner
from tonle.models.cuda import decode_attention, decode_tiling, gemv, matrix, sample
from tonle.models.cuda.cuda_layer import support, unsupported
from tonle.models.cuda.skinny import SkinnyTiling
from tonle.models.layer_order import Piece, layer_order
from tonle.models.spec import LayerSpec, ModelSpec

CONFIG = EngineConfig(max_batch_size=4, max_num_batched_tokens=40, max_sequence_length=64, memory_pool_size=2**20)
BLOCKS_PER_ROW = 3
RUN = [kind for kind, layer in KINDS.items() if layer.mixer.kind != "experts"]
PROMPTS = [random_tokens(length, VOCAB) for length in (31, 9, 1)]


@pytest.fixture(autouse=True)
def small_tilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels cut for models of a few hundred numbers. Three rows are many; contexts are cut into stretches of 16 tokens."""
    for module in (decode_tiling, decode_attention):
        monkeypatch.setattr(
            module,
            "decode_tiling",
            lambda rows, kv_heads, fp8=False: decode_tiling.DecodeTiling(16, 4, 3, 16, rows < 3 and not fp8),
        )
    monkeypatch.setattr(decode_tiling, "_SHORTEST", 16)
    few_programs = SkinnyTiling(256, 64, stages=2)
    monkeypatch.setattr(matrix, "skinny_tiling", lambda rows, *_, **__: few_programs if rows == 2 else None)
    monkeypatch.setattr(gemv, "gemv_tiling", lambda outputs, inputs, norm: gemv.GemvTiling(64, 64, warps=1))
    monkeypatch.setattr(sample, "_STRETCHES", 1)
    monkeypatch.setattr(sample, "_BLOCK", 128)


def computed(spec: ModelSpec, tensors: dict[str, torch.Tensor], config: EngineConfig = CONFIG) -> PlannedRows:
    """Prompts, whole and in chunks, beside a row that goes on; then steps of many rows, of one and of two."""
    machine = cuda_machine(decoder_of(spec, tensors), config, capture=False)
    assert machine is not None
    rows = PlannedRows(machine.runner, BLOCKS_PER_ROW)
    for row, prompt in enumerate(PROMPTS):
        rows.join(row, prompt)
    rows.step({0: 20, 1: 9})
    rows.step({0: 11, 1: 0, 2: 1})
    rows.step({0: 0, 1: 0, 2: 0})
    rows.step({0: 0})
    rows.step({0: 0, 1: 0})
    return rows


def assert_as_described(rows: PlannedRows, reference: Reference) -> None:
    for row, text in rows.tokens.items():
        torch.testing.assert_close(rows.said(row), logprobs_of(reference.logits(text), text), rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", RUN)
def test_a_described_layer_computes_what_it_says(kind: str) -> None:
    spec = spec_of(PLAIN, KINDS[kind], gain_offset=1.0)
    tensors = tensors_of(spec)
    assert_as_described(computed(spec, tensors), Reference(spec, tensors))


@pytest.mark.parametrize("kind", ["soft cap", "sinks, soft cap, window"])
def test_keys_and_values_of_eight_bits(kind: str) -> None:
    """Caps concern scores with the keys' scales in them, and without those of values."""
    spec = spec_of(PLAIN, KINDS[kind])
    tensors = tensors_of(spec)
    rows = computed(spec, tensors, replace(CONFIG, kv_cache_dtype="fp8"))
    assert_as_described(rows, Reference(spec, tensors, eight_bits=True))
