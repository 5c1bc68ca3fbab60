"""On a GPU: every cut that `cut_for` names gives the product of float32, as compiled and one launch right after another."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks.gpu_products import products_of
from benchmarks.gpu_rehearsal import Rehearsal, Weights, check

from tonle.models.cuda.skinny_cuts import Cut, cut_for

pytestmark = pytest.mark.gpu
ROWS = (2, 3, 8, 16, 17, 32, 64, 65, 100, 128, 192, 256)


@pytest.mark.parametrize("index", range(4), ids=("qkv", "o", "gate_up", "down"))
@pytest.mark.parametrize("model", ("qwen2.5-1.5b", "llama-3.2-3b"))
def test_chosen_cuts(model: str, index: int) -> None:
    product = products_of(model)[index]
    by_cut: dict[Cut, list[int]] = {}
    for rows in ROWS:
        cut = cut_for(rows, product.outputs, product.inputs, glu=product.glu)
        if cut is not None:
            by_cut.setdefault(cut, []).append(rows)
    weights = Weights(product, 3, torch.device("cuda"))
    with torch.inference_mode():
        problems = {cut: check(Rehearsal(product, cut, tuple(rows)), weights) for cut, rows in by_cut.items()}
    assert not any(problems.values()), problems
