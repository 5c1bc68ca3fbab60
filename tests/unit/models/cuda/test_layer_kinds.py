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
from tests.fakes.layer_kinds import KINDS, PLAIN, VOCAB, Reference, decoder_of, merged, spec_of, tensors_of
from tests.fakes.planned_rows import PlannedRows, logprobs_of
from tests.unit.models.stepper import random_tokens
from tonle.config.engine import EngineConfig
from tonle.engine.build_cuda import cuda_machine
from tonle.engine.run.cuda import CudaRunner
from tonle.models.adapters import Adapter
from tonle.models.cpu import pack
from tonle.models.cuda import decode_attention, decode_tiling, gemv, matrix, sample
from tonle.models.cuda.cuda_layer import support
from tonle.models.cuda.skinny import SkinnyTiling
from tonle.models.layer_order import Answer, Piece, layer_order
from tonle.models.spec import LayerSpec, ModelSpec

CONFIG = EngineConfig(max_batch_size=3, max_num_batched_tokens=24, max_sequence_length=48, memory_pool_size=2**21)
BLOCKS_PER_ROW = 3
RUN = [kind for kind, layer in KINDS.items() if layer.mixer.kind != "experts"]
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
    monkeypatch.setattr(sample, "_STRETCHES", 1)
    monkeypatch.setattr(sample, "_BLOCK", 128)


def computed(
    spec: ModelSpec, tensors: dict[str, torch.Tensor], *, adapters: tuple[Adapter, ...] = (), **settings: Any
) -> PlannedRows:
    """Prompts, whole and in chunks, beside a row that goes on; then a step of many rows, and one of a single row.

    The first row has the first adapter, the second one the second; the third has none.
    """
    decoder, config = decoder_of(spec, tensors), replace(CONFIG, **settings)
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


def test_keys_and_values_of_eight_bits() -> None:
    """Caps concern scores with the keys' scales in them, and without those of values; so do sinks."""
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
    )
    tensors = tensors_of(spec)
    adapters = random_adapter(spec, rank=8, seed=1), random_adapter(spec, rank=3, seed=2)
    references = [Reference(spec, merged(tensors, adapter)) for adapter in adapters] + [Reference(spec, tensors)]
    rows = computed(spec, tensors, adapters=adapters)
    assert_as_described(rows, references)
    for row in range(2):
        text = rows.tokens[row]
        assert (logprobs_of(references[-1].logits(text), text) - rows.said(row)).abs().mean() > 0.1


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


def test_experts_run_on_torch_operations(caplog: pytest.LogCaptureFixture) -> None:
    """On any device: without a machine of ours, the engine builds the one that `Decoder` runs on."""
    spec = spec_of(PLAIN, KINDS["experts"])
    with caplog.at_level(logging.INFO, "tonle.engine"):
        assert cuda_machine(decoder_of(spec, tensors_of(spec)), CONFIG, capture=False) is None
    assert caplog.messages == [
        "the CUDA kernels cannot run this model (which experts a token gets is decided on the host, out of reach of a CUDA "
        "graph); it runs on plain torch operations"
    ]


def test_the_log_says_what_is_not_fused(caplog: pytest.LogCaptureFixture) -> None:
    spec = spec_of(PLAIN, KINDS["norms before and after"], KINDS["norms before and after"], KINDS["gelu"])
    with caplog.at_level(logging.INFO, "tonle.engine"):
        assert cuda_machine(decoder_of(spec, tensors_of(spec)), CONFIG, capture=False) is not None
    said = [message for message in caplog.messages if "torch operations" in message]
    assert said == [
        "add attended of 2 layers runs on torch operations: a norm after the product",
        "add mixed of 2 layers runs on torch operations: a norm after the product",
        "mix of 1 layers runs on torch operations: a gated mixer with gelu_tanh",
    ]
    caplog.clear()
    plain = spec_of(PLAIN, KINDS["sinks, soft cap, window"])
    with caplog.at_level(logging.INFO, "tonle.engine"):
        assert cuda_machine(decoder_of(plain, tensors_of(plain)), CONFIG, capture=False) is not None
    assert not any("torch operations" in message for message in caplog.messages)
