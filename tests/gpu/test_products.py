"""On a GPU: every tiling that the rule gives makes the product of float32, as compiled and one launch right after another."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, silu

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from benchmarks.gpu_products import Product, products_of

from tonle.models.cuda.pointwise import rms_norm
from tonle.models.cuda.skinny import MAX_ROWS, SplitScratch, skinny, skinny_tiling

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
MAX_ERROR = 2e-2  # of the largest output; gated: four roundings to bfloat16, 0.2 % each, and 1.01 % was seen
NUM_WEIGHTS = 3  # launches right behind one another: one that does not wait for the one ahead shows
GUARD = 7.0


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA, dtype=torch.bfloat16)


def reference(product: Product, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = linear(x.float(), weight.float(), None if bias is None else bias.float())
    return silu(y[:, : product.outputs]) * y[:, product.outputs :] if product.glu else y


PRODUCTS = [product for model in ("qwen2.5-1.5b", "llama-3.2-3b") for product in products_of(model)
            if skinny_tiling(2, product.outputs, product.inputs, glu=product.glu) is not None]  # fmt: skip


@pytest.mark.parametrize("rows", [2, 5, 16])
@pytest.mark.parametrize("product", PRODUCTS, ids=lambda product: f"{product.model}-{product.name}")
@torch.inference_mode()
def test_chosen_tilings(product: Product, rows: int) -> None:
    tiling = skinny_tiling(rows, product.outputs, product.inputs, glu=product.glu)
    assert tiling is not None
    torch.manual_seed(rows)
    raw, gain = numbers(rows, product.inputs), numbers(product.inputs)
    weights = [numbers(product.weight_rows, product.inputs) * product.inputs**-0.5 for _ in range(NUM_WEIGHTS)]
    bias = numbers(product.weight_rows) if product.bias else None
    old = numbers(rows, product.outputs)
    outs = [numbers(rows + MAX_ROWS, product.outputs).fill_(GUARD) for _ in weights]
    for out in outs:
        out[:rows] = old if product.add else torch.nan
    scratch = SplitScratch([(product.outputs, tiling)], CUDA)
    scratch.parts.fill_(torch.nan)
    x = torch.full_like(raw, torch.nan)
    rms_norm(raw, gain, 1e-6, x)  # the kernel ahead, which may not have ended when the first product begins
    for weight, out in zip(weights, outs, strict=True):
        skinny(x, weight, out[:rows], tiling, bias=bias, add=product.add, glu=product.glu, scratch=scratch)
    for weight, out in zip(weights, outs, strict=True):
        expected = reference(product, x, weight, bias) + (old.float() if product.add else 0.0)
        error = (out[:rows] - expected).abs().max() / expected.abs().max()
        assert error < MAX_ERROR  # and not NaN
        assert (out[rows:] == GUARD).all()
    assert not scratch.arrived.any()
