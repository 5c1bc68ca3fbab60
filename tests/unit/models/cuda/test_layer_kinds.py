"""Every kind of layer that the kernels run, through the CUDA runner in the interpreter, against the plain reference."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from tests.fakes.adapters import random_adapter
from tests.fakes.layer_kinds import KINDS, PLAIN, SCALES, VOCAB, Reference, decoder_of, merged, spec_of, tensors_of
from tests.fakes.planned_rows import PlannedRows, logprobs_of
from tests.unit.models.stepper import random_tokens
from tonle.config.engine import EngineConfig
from tonle.engine.build_cuda import cuda_machine
from tonle.engine.run.cuda import CudaRunner
from tonle.models.adapters import Adapter
from tonle.models.cpu import pack
from tonle.models.cuda import (
    cuda_layer,
    decode_attention,
    decode_tiling,
    experts_grouped,
    experts_one_row,
    gemv,
    matrix,
    model,
    sample,
)
from tonle.models.cuda.cuda_layer import support
from tonle.models.cuda.skinny import SkinnyTiling
from tonle.models.decoder import Decoder
from tonle.models.layer_order import Answer, Piece, layer_order
from tonle.models.layers import Quantized
from tonle.models.spec import LayerSpec, ModelSpec, RopeSpec
from tonle.models.weights import Owned, assemble

pytestmark = pytest.mark.crossed

CONFIG = EngineConfig(max_batch_size=3, max_num_batched_tokens=24, max_sequence_length=48, memory_pool_size=2**21)
BLOCKS_PER_ROW = 3
RUN = list(KINDS)
MODELS = [
    "; ".join(RUN[first : first + 4]) for first in range(0, len(RUN), 4)
]  # the interpreter is slow: four kinds in each
PROMPTS = [random_tokens(length, VOCAB) for length in (17, 4, 1)]


@pytest.fixture(autouse=True)
def small_tilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels cut for models of a few hundred numbers. Three rows are many; contexts are cut into stretches of 16 tokens."""
    for module in (decode_tiling, decode_attention):
        monkeypatch.setattr(
            module,
            "decode_tiling",
            lambda rows, kv_heads, fp8=False: decode_tiling.DecodeTiling(16, 4, 3, 6, rows < 3 and not fp8),
        )
    monkeypatch.setattr(decode_tiling, "_SHORTEST", 16)
    few_programs = SkinnyTiling(256, 64, stages=2)
    monkeypatch.setattr(matrix, "skinny_tiling", lambda rows, *_, **__: few_programs if rows == 2 else None)
    monkeypatch.setattr(gemv, "gemv_tiling", lambda outputs, inputs, norm: gemv.GemvTiling(32, 64, warps=1))
    whole = experts_one_row.OneRowTiling(64, 64, warps=1)
    monkeypatch.setattr(experts_one_row, "gate_up_tiling", lambda *_: whole)
    monkeypatch.setattr(experts_one_row, "down_tiling", lambda *_: whole)
    tiling = experts_grouped.GroupedTiling(128, 16, 128, stages=2)
    monkeypatch.setattr(experts_grouped, "grouped_tiling", lambda *_, **__: tiling)
    monkeypatch.setattr(sample, "_STRETCHES", 1)
    monkeypatch.setattr(sample, "_BLOCK", 128)


def computed(
    spec: ModelSpec, tensors: dict[str, torch.Tensor], *, adapters: tuple[Adapter, ...] = (), **settings: Any
) -> PlannedRows:
    """Prompts, whole and in chunks, beside a row that goes on; then a step of many rows, and one of a single row.

    The first row has the first adapter, the second one the second; the third has none.
    """
    return walked(decoder_of(spec, tensors), replace(CONFIG, **settings), adapters)


def walked(decoder: Decoder, config: EngineConfig, adapters: tuple[Adapter, ...] = ()) -> PlannedRows:
    machine = cuda_machine(decoder, config, capture=False, adapter_slots=len(adapters), max_rank=8)
    assert machine is not None and isinstance(machine.runner, CudaRunner)
    for slot, adapter in enumerate(adapters):
        machine.runner._net.set_adapter(slot, adapter)
    rows = PlannedRows(machine.runner, BLOCKS_PER_ROW)
    for row, prompt in enumerate(PROMPTS):
        rows.join(row, prompt, row if row < len(adapters) else -1)
    rows.step({0: 9, 1: 4})
    rows.step({0: 8, 1: 0, 2: 1})
    rows.step({0: 0, 1: 0, 2: 0})
    rows.step({0: 0})
    return rows


def assert_as_described(rows: PlannedRows, references: Sequence[Reference]) -> None:
    """One reference for each row."""
    for reference, (row, text) in zip(references, rows.tokens.items(), strict=True):
        torch.testing.assert_close(rows.said(row), logprobs_of(reference.logits(text), text), rtol=0, atol=2e-4)


@pytest.mark.parametrize("kinds", MODELS)
def test_described_layers_compute_what_they_say(kinds: str) -> None:
    spec = spec_of(*(KINDS[kind] for kind in kinds.split("; ")), gain_offset=1.0)
    tensors = tensors_of(spec)
    assert_as_described(computed(spec, tensors), [Reference(spec, tensors)] * 3)


def test_scales_of_a_whole_model() -> None:
    spec = spec_of(PLAIN, KINDS["gated mixer with biases"], **SCALES["all"])
    tensors = tensors_of(spec)
    adapter = random_adapter(spec, rank=8, seed=1)
    plain, adapted = Reference(spec, tensors), Reference(spec, merged(tensors, adapter))
    assert_as_described(computed(spec, tensors, adapters=(adapter,)), [adapted, plain, plain])


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(("head_dim", "rotated"), [(48, None), (80, 20), (256, 64)])
def test_heads_of_any_size(head_dim: int, rotated: int | None, kv_cache_dtype: str) -> None:
    layer = KINDS["norms per head"]
    attention = replace(layer.attention, head_dim=head_dim, rope=RopeSpec(rotated=rotated))
    spec = spec_of(replace(layer, attention=attention))
    tensors = tensors_of(spec)
    rows = computed(spec, tensors, kv_cache_dtype=kv_cache_dtype)
    assert_as_described(rows, [Reference(spec, tensors, eight_bits=kv_cache_dtype == "fp8")] * 3)


@pytest.mark.parametrize("converts", [True, False], ids=["by the device", "by arithmetic"])
def test_keys_and_values_of_eight_bits(converts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caps concern scores with the keys' scales in them, and without those of values; so do sinks."""
    monkeypatch.setattr(model, "converts_fp8", lambda: converts)
    spec = spec_of(KINDS["soft cap"], KINDS["sinks, soft cap, window"])
    tensors = tensors_of(spec)
    rows = computed(spec, tensors, kv_cache_dtype="fp8")
    assert_as_described(rows, [Reference(spec, tensors, eight_bits=True)] * 3)


def test_adapters_on_layers_of_every_kind() -> None:
    """Those that concern products and what follows them; attention does not know of adapters."""
    spec = spec_of(
        replace(KINDS["norms before and after"], mixer=KINDS["gelu"].mixer),
        replace(KINDS["parallel"], mixer=KINDS["plain mixer with biases"].mixer),
        KINDS["no norms"],
        KINDS["experts"],
    )
    tensors = tensors_of(spec)
    adapters = random_adapter(spec, rank=8, seed=1), random_adapter(spec, rank=3, seed=2)
    references = [Reference(spec, merged(tensors, adapter)) for adapter in adapters] + [Reference(spec, tensors)]
    rows = computed(spec, tensors, adapters=adapters)
    assert_as_described(rows, references)
    for row in range(2):
        text = rows.tokens[row]
        assert (logprobs_of(references[-1].logits(text), text) - rows.said(row)).abs().mean() > 0.1


def test_experts_of_few_bits() -> None:
    """All matrices in 8 bits, a scale for each 32 inputs: the model is that of the numbers they stand for."""
    spec = spec_of(KINDS["experts beside a gated one"], KINDS["experts with biases, clamped"])

    def few_bits(tensor: torch.Tensor) -> Quantized:
        groups = tensor.view(tensor.shape[0], -1, 32)
        scale = groups.abs().amax(-1) / 127
        return Quantized((groups / scale[..., None]).round().to(torch.int8).view(tensor.shape), scale)

    stored = {name: few_bits(t) if "mlp" in name and t.ndim == 2 else t for name, t in tensors_of(spec).items()}
    tensors = {name: t.unpacked(torch.float32) if isinstance(t, Quantized) else t for name, t in stored.items()}
    decoder = Decoder(spec, assemble(spec, stored.__getitem__, Owned(torch.device("cpu"), torch.float32)))
    rows = walked(decoder, CONFIG)
    assert_as_described(rows, [Reference(spec, tensors)] * 3)


# -- what is said about them


def answered(layer: LayerSpec, answer: Answer) -> str:
    """As the table of docs/architecture.md has it."""
    forms = {piece.name: answer(layer, piece).form for piece in layer_order(layer)}
    if "none" in forms.values():
        return "none"
    plain = [piece.name for piece in Piece if forms[piece.name] == "plain"]
    return "plain: " + ", ".join(f"`{name}`" for name in plain) if plain else "fused"


def test_the_documented_table() -> None:
    page = (Path(__file__).parents[4] / "docs" / "architecture.md").read_text()
    table = page.partition("| layers | CUDA kernels | compiled CPU step |")[2].partition("\n\n")[0].splitlines()[2:]
    documented: dict[str, tuple[str, ...]] = {}
    for line in table:
        kinds, *answers = (cell.strip() for cell in line.strip("|").split("|"))
        documented |= {kind: tuple(answers) for kind in kinds.split("; ")}
    assert documented == {
        kind: (answered(layer, support), answered(layer, pack.support)) for kind, layer in KINDS.items()
    }


def test_what_has_no_kernel_runs_on_torch_operations(caplog: pytest.LogCaptureFixture) -> None:
    """On any device: without a machine of ours, the engine builds the one that `Decoder` runs on."""
    spec = spec_of(PLAIN, replace(KINDS["experts"], mixer=replace(KINDS["experts"].mixer, size=24)))
    with caplog.at_level(logging.INFO, "tonle.engine"):
        assert cuda_machine(decoder_of(spec, tensors_of(spec)), CONFIG, capture=False) is None
    assert caplog.messages == [
        "the CUDA kernels cannot run this model (hidden_size and intermediate_size must be multiples of 16); it runs on plain "
        "torch operations"
    ]


def test_the_log_says_what_is_not_fused(caplog: pytest.LogCaptureFixture) -> None:
    spec = spec_of(PLAIN, KINDS["plain mixer"], KINDS["plain mixer with biases"], KINDS["plain mixer"])
    with caplog.at_level(logging.INFO, "tonle.engine"):
        assert cuda_machine(decoder_of(spec, tensors_of(spec)), CONFIG, capture=False) is not None
    said = [message for message in caplog.messages if "torch operations" in message]
    assert said == [
        "mix of 2 layers runs on torch operations: a plain mixer with relu2",
        "mix of 1 layers runs on torch operations: a plain mixer with gelu",
    ]
    caplog.clear()
    plain = spec_of(PLAIN, KINDS["sinks, soft cap, window"], KINDS["gelu, norms after alone"])
    with caplog.at_level(logging.INFO, "tonle.engine"):
        assert cuda_machine(decoder_of(plain, tensors_of(plain)), CONFIG, capture=False) is not None
    assert not any("torch operations" in message for message in caplog.messages)


def test_gpus_that_are_too_old_run_torch_operations(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_layer, "capability", lambda: (7, 5))
    with caplog.at_level(logging.INFO, "tonle.engine"):
        assert cuda_machine(decoder_of(spec_of(PLAIN), tensors_of(spec_of(PLAIN))), CONFIG, capture=False) is None
    assert "they need a GPU of compute capability 8.0 or newer, and this one has 7.5" in caplog.text
