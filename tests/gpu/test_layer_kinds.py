"""On a GPU: every kind of layer that the kernels run, from graphs and without them, against the plain reference.

Half precision is judged by how far it is off on average, compared with torch's own operations on the same device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.fakes.adapters import random_adapter
from tests.fakes.layer_kinds import KINDS, SCALES, VOCAB, Reference, decoder_of, merged, spec_of, tensors_of
from tests.fakes.planned_rows import PlannedRows, logprobs_of
from tests.unit.models.stepper import Stepper, random_tokens
from tonle.config.engine import EngineConfig
from tonle.engine.build_cuda import cuda_machine
from tonle.engine.run.cuda import CudaRunner
from tonle.models.adapters import Adapter
from tonle.models.cuda import model as cuda_model
from tonle.models.spec import LayerSpec, ModelSpec

pytestmark = pytest.mark.gpu
CONFIG = EngineConfig(max_batch_size=24, max_num_batched_tokens=256, max_sequence_length=256, memory_pool_size=2**28)
BLOCKS_PER_ROW = 16
RUN = list(KINDS)
MODELS = ["; ".join(RUN[first : first + 4]) for first in range(0, len(RUN), 4)]
PROMPTS = [random_tokens(length, VOCAB) for length in (170, 33, 9, *range(1, 18))]  # more rows than are few
ADAPTED = ["norms before and after", "norms after alone", "no norms", "parallel", "plain mixer with biases", "gelu",
           "experts"]  # fmt: skip


def wider(layer: LayerSpec, head_dim: int) -> LayerSpec:
    """Heads and sizes as kernels are made for, no scale or cap of its own changed."""
    attention = dataclasses.replace(layer.attention, num_heads=6, num_kv_heads=2, head_dim=head_dim)
    return dataclasses.replace(layer, attention=attention, mixer=dataclasses.replace(layer.mixer, size=352))


def model_of(kinds: list[str], *, head_dim: int = 64, **scales: float) -> tuple[ModelSpec, dict[str, torch.Tensor]]:
    spec = spec_of(*(wider(KINDS[kind], head_dim) for kind in kinds), hidden_size=256, gain_offset=1.0, **scales)
    return spec, tensors_of(spec)


def computed(
    spec: ModelSpec, tensors: dict[str, torch.Tensor], dtype: torch.dtype, *, capture: bool,
    adapters: tuple[Adapter, ...] = (), **settings: Any,
) -> PlannedRows:  # fmt: skip
    """A long prompt in chunks, beside rows that go on; steps of 20 rows, of three, two and one. Row i has adapter i, if any."""
    decoder = decoder_of(spec, tensors, torch.device("cuda"), dtype)
    machine = cuda_machine(decoder, dataclasses.replace(CONFIG, **settings), capture=capture,
                           adapter_slots=len(adapters), max_rank=8)  # fmt: skip
    assert machine is not None and isinstance(machine.runner, CudaRunner)
    for slot, adapter in enumerate(adapters):
        machine.runner._net.set_adapter(slot, adapter)
    rows = PlannedRows(machine.runner, BLOCKS_PER_ROW)
    for row, prompt in enumerate(PROMPTS):
        rows.join(row, prompt, row if row < len(adapters) else -1)
    rows.step({0: 100, 1: 33, 2: 9})
    rows.step({1: 0, 0: 70, 2: 0, **{row: len(PROMPTS[row]) for row in range(3, 10)}})
    rows.step({row: len(PROMPTS[row]) for row in range(10, len(PROMPTS))})
    for count in (20, 20, 3, 3, 2, 2, 1, 1):
        rows.step(dict.fromkeys(range(count), 0))
    return rows


def off(rows: PlannedRows, references: dict[int, Reference], default: Reference) -> torch.Tensor:
    """How far every log-probability is from the reference's."""
    return torch.cat([
        (rows.said(row) - logprobs_of(references.get(row, default).logits(text), text)).abs()
        for row, text in rows.tokens.items()
    ])  # fmt: skip


def torch_off(spec: ModelSpec, tensors: dict[str, torch.Tensor], rows: PlannedRows, reference: Reference) -> float:
    """How far torch's operations in bfloat16 are off over the same texts, on average."""
    decoder, found = decoder_of(spec, tensors, torch.device("cuda"), torch.bfloat16), []
    for text in rows.tokens.values():
        stepper = Stepper(decoder, [text])
        stepper.run(1000)
        found.append((logprobs_of(stepper.of(0), text) - logprobs_of(reference.logits(text), text)).abs())
    return float(torch.cat(found).mean())


@pytest.mark.parametrize("capture", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("kinds", MODELS)
def test_described_layers_compute_what_they_say(kinds: str, capture: bool) -> None:
    spec, tensors = model_of(kinds.split("; "))
    found = off(computed(spec, tensors, torch.float32, capture=capture), {}, Reference(spec, tensors))
    print(f"{kinds}: at most {float(found.max()):.1e} off")
    assert float(found.max()) < 1e-3


@pytest.mark.parametrize("capture", [True, False], ids=["graphs", "eager"])
def test_scales_of_a_whole_model(capture: bool) -> None:
    spec, tensors = model_of(["usual", "gated mixer with biases"], **SCALES["all"])
    adapter = random_adapter(spec, rank=8, seed=8)
    rows = computed(spec, tensors, torch.float32, capture=capture, adapters=(adapter,))
    found = off(rows, {0: Reference(spec, merged(tensors, adapter))}, Reference(spec, tensors))
    print(f"scales: at most {float(found.max()):.1e} off")
    assert float(found.max()) < 1e-3


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("head_dim", [80, 96, 256])
def test_heads_of_any_size(head_dim: int, kv_cache_dtype: str) -> None:
    spec, tensors = model_of(["norms per head, part of it rotated", "soft cap and window"], head_dim=head_dim)
    tensors = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    for dtype in (torch.float32, torch.bfloat16):
        rows = computed(spec, tensors, dtype, capture=True, kv_cache_dtype=kv_cache_dtype)
        found = float(off(rows, {}, Reference(spec, tensors, eight_bits=kv_cache_dtype == "fp8")).mean())
        plain = torch_off(spec, tensors, rows, Reference(spec, tensors))
        print(
            f"heads of {head_dim}, {kv_cache_dtype}, {dtype}: {found:.5f} off on average, torch in bfloat16 {plain:.5f}"
        )
        assert found < (1e-3 if dtype == torch.float32 else 3 * plain)


def test_half_precision() -> None:
    """All kinds in one model, as graphs run it, but the one that has no norm ahead of a gelu: so deep down it overflows."""
    spec, tensors = model_of([kind for kind in RUN if kind != "gelu, norms after alone"])
    tensors = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    rows, reference = computed(spec, tensors, torch.bfloat16, capture=True), Reference(spec, tensors)
    found, plain = float(off(rows, {}, reference).mean()), torch_off(spec, tensors, rows, reference)
    print(f"bfloat16: {found:.4f} off on average, torch {plain:.4f}")
    assert found < 1.5 * plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_and_values_of_eight_bits(dtype: torch.dtype) -> None:
    spec, tensors = model_of(["soft cap", "sinks, soft cap, window", "sinks"])
    tensors = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    rows = computed(spec, tensors, dtype, capture=True, kv_cache_dtype="fp8")
    found = float(off(rows, {}, Reference(spec, tensors, eight_bits=True)).mean())
    plain = torch_off(spec, tensors, rows, Reference(spec, tensors))  # without eight bits
    print(f"fp8, {dtype}: {found:.4f} off on average, torch in bfloat16 {plain:.4f}")
    assert found < (1e-3 if dtype == torch.float32 else 3 * plain)  # numbers at a limit are rounded to either side


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 96])
def test_eight_bits_by_arithmetic_are_the_same(
    dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As GPUs without a type of 8-bit floats compute them: bit by bit what this one converts."""
    spec, tensors = model_of(["soft cap", "norms per head"], head_dim=head_dim)
    converted = computed(spec, tensors, dtype, capture=True, kv_cache_dtype="fp8")
    monkeypatch.setattr(cuda_model, "converts_fp8", lambda: False)
    rows = computed(spec, tensors, dtype, capture=True, kv_cache_dtype="fp8")
    assert rows.tokens == converted.tokens
    assert all(torch.equal(rows.said(row), converted.said(row)) for row in rows.tokens)


@pytest.mark.parametrize("capture", [True, False], ids=["graphs", "eager"])
def test_adapters_on_layers_of_every_kind(capture: bool) -> None:
    spec, tensors = model_of(ADAPTED)
    adapters = tuple(random_adapter(spec, rank=rank, seed=rank) for rank in (8, 3))
    own = {row: Reference(spec, merged(tensors, adapter)) for row, adapter in enumerate(adapters)}
    rows = computed(spec, tensors, torch.float32, capture=capture, adapters=adapters)
    found = off(rows, own, Reference(spec, tensors))
    print(f"with adapters: at most {float(found.max()):.1e} off")
    assert float(found.max()) < 1e-3
