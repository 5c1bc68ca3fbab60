"""What is compiled at the start is what steps of every size launch, whatever the model's heads and layers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from benchmarks.workload import SHAPES, write_config

from tests.fakes.layer_kinds import KINDS, PLAIN, spec_of
from tonle.models.cuda import (
    cuda_rope,
    decode_attention,
    embed,
    experts_grouped,
    experts_one_row,
    experts_routing,
    gemv,
    lora,
    pointwise,
    prefill_attention,
    sample,
    skinny,
)
from tonle.models.cuda.batch import Sizes
from tonle.models.cuda.decode_tiling import max_items
from tonle.models.cuda.model import CudaModel
from tonle.models.decoder import Decoder
from tonle.models.inputs import KVCache
from tonle.models.read_spec import read_spec
from tonle.models.source import ModelSource
from tonle.models.spec import ModelSpec

pytestmark = pytest.mark.crossed

CPU = torch.device("cpu")
MAX_TOKENS = 64


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """Every kernel that would be launched, with the arguments it is compiled for; none runs."""
    seen: set[tuple[Any, ...]] = set()

    def note(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        named = zip(inspect.signature(kernel.fn).parameters.values(), arguments, strict=False)
        fixed = [value for parameter, value in named if parameter.annotation == "tl.constexpr"]
        seen.add((kernel.fn.__name__, *fixed, *sorted(options.items())))

    for module in (cuda_rope, decode_attention, embed, experts_grouped, experts_one_row, experts_routing, gemv, lora,
                   pointwise, prefill_attention, sample, skinny):  # fmt: skip
        monkeypatch.setattr(module, "launch", note)
    monkeypatch.setattr(skinny, "roomy", lambda: True)
    return seen


def model(
    kv_heads: int, layers: int, max_rows: int, root: Path, monkeypatch: pytest.MonkeyPatch, adapter_slots: int = 0
) -> CudaModel:
    shape = {"num_attention_heads": kv_heads * 2, "num_key_value_heads": kv_heads, "head_dim": 16, "vocab_size": 64,
             "num_hidden_layers": layers}  # fmt: skip
    monkeypatch.setitem(SHAPES, "tiny", {**SHAPES["tiny"], **shape})
    return model_of(read_spec(ModelSource("folder", write_config("tiny", root), "tiny")), max_rows, adapter_slots)


def model_of(spec: ModelSpec, max_rows: int, adapter_slots: int = 0) -> CudaModel:
    kv_heads = spec.num_kv_heads
    sizes = Sizes(max_rows, MAX_TOKENS, 64, max_items(max_rows, kv_heads), adapter_slots)
    made = CudaModel(Decoder.random(spec, CPU, torch.float32), sizes, 8, 128)
    made.kv = KVCache(num_layers=spec.num_layers, num_blocks=1, block_size=16, num_kv_heads=kv_heads, head_dim=16,
                      dtype=torch.float32, device=CPU)  # fmt: skip
    if adapter_slots:
        made.enable_adapters(adapter_slots, 16)
    return made


@pytest.mark.parametrize("max_rows", [1, 3, 16, 40])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 8])
def test_every_kernel_is_compiled(
    kv_heads: int, layers: int, max_rows: int, launched: set[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = model(kv_heads, layers, max_rows, tmp_path, monkeypatch)
    steps.compile()
    compiled = set(launched)
    for rows in range(1, max_rows + 1):
        steps.decode(rows)
        steps.head(rows)
    for tokens in range(skinny.MAX_ROWS, MAX_TOKENS + 1):
        steps.body(tokens, tiles=1)
    assert launched == compiled


@pytest.mark.parametrize("max_rows", [1, 3, 40])
@pytest.mark.parametrize("layers", [1, 3])
def test_every_kernel_of_adapters_is_compiled(
    layers: int, max_rows: int, launched: set[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "FEW_NUMBERS", 24 * 16)  # more than 24 tokens are many
    steps = model(2, layers, max_rows, tmp_path, monkeypatch, adapter_slots=3)
    steps.compile()
    compiled = set(launched)
    for rows in range(1, max_rows + 1):
        steps.decode(rows, adapted=True)
        steps.head(rows, adapted=True)
    for tokens in range(skinny.MAX_ROWS, MAX_TOKENS + 1):
        steps.body(tokens, tiles=1, adapted=True)
    for tokens in range(1, MAX_TOKENS + 1):
        steps.describe(torch.zeros(tokens, dtype=torch.int64), slot=0)
    assert launched == compiled
    assert {"_expand", "_gate_expand", "_residual_norm"} <= {name for name, *_ in launched}


@pytest.mark.parametrize("adapted", [False, True], ids=["base", "adapters"])
@pytest.mark.parametrize("max_rows", [1, 40])
def test_every_kernel_of_experts_is_compiled(max_rows: int, adapted: bool, launched: set[Any]) -> None:
    """Some layers have them, the last one too: a head of one row after another has its adapter's place to itself."""
    steps = model_of(spec_of(KINDS["experts"], PLAIN, KINDS["experts"]), max_rows, 2 if adapted else 0)
    steps.compile()
    compiled = set(launched)
    for rows in range(1, max_rows + 1):
        steps.decode(rows, adapted=adapted)
        steps.head(rows, adapted=adapted)
        steps.head(rows, adapted=adapted)
    for tokens in range(skinny.MAX_ROWS, MAX_TOKENS + 1):
        steps.body(tokens, tiles=1, adapted=adapted)
    assert launched == compiled
    assert {"_assign", "_grouped", "_add_up", "_gate_up", "_down"} <= {name for name, *_ in launched}
