"""Linear maps in every layout they are stored in, and norms in low precision."""

from __future__ import annotations

import pytest
import torch

from tonle.models.layers import Linear, LinearPart, Quantized, RMSNorm, SlotAdapters


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 16, 48, 49])  # on both sides of every special case
def test_every_layout_gives_the_same(num_rows: int, bias: bool) -> None:
    rows = torch.randn(num_rows, 24)
    weights = [torch.randn(10, 24), torch.randn(6, 24)]
    biases = [torch.randn(10) if bias else None, torch.randn(6) if bias else None]
    expected = torch.cat([torch.nn.functional.linear(rows, w, b) for w, b in zip(weights, biases, strict=True)], dim=-1)
    shared = Linear(*(LinearPart(w, b) for w, b in zip(weights, biases, strict=True)))
    whole_bias = torch.cat([b for b in biases if b is not None]) if bias else None
    joined = Linear(LinearPart(torch.cat(weights), whole_bias))
    transposed = Linear(LinearPart(torch.cat(weights).t().contiguous(), whole_bias, transposed=True))
    for linear in (shared, joined, transposed):
        torch.testing.assert_close(linear(rows), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norm_is_computed_in_float32(dtype: torch.dtype) -> None:
    x = (torch.randn(4, 64) * 300).to(dtype)  # squares overflow float16
    weight = torch.rand(64).to(dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    out = RMSNorm(weight, 1e-6)(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


def test_quantized_storage_is_its_numbers() -> None:
    numbers, scale, minimum = torch.randint(0, 16, (6, 8), dtype=torch.uint8), torch.rand(6, 2), torch.randn(6, 2)
    linear, rows = Linear(LinearPart(Quantized(numbers, scale, minimum))), torch.randn(3, 8)
    weight = numbers * scale.repeat_interleave(4, dim=1) + minimum.repeat_interleave(4, dim=1)
    assert torch.allclose(linear(rows), rows @ weight.t(), atol=1e-5)


def test_each_row_gets_the_adapter_of_its_slot() -> None:
    weight = torch.randn(24, 16)
    linear = Linear(LinearPart(weight, sizes=(12, 4, 8)))
    linear.adapters = SlotAdapters(linear.sizes, 3)
    a, b, other_a, other_b = torch.randn(2, 16), torch.randn(12, 2), torch.randn(1, 16), torch.randn(8, 1)
    linear.adapters.set(0, [(a, b), None, None])
    linear.adapters.set(2, [None, None, (other_a, other_b)])
    rows = torch.randn(4, 16)
    expected = rows @ weight.t()
    expected[1, :12] += rows[1] @ a.t() @ b.t()
    expected[3, 16:] += rows[3] @ other_a.t() @ other_b.t()
    chosen = [(0, torch.tensor([1])), (1, torch.tensor([2])), (2, torch.tensor([3]))]
    assert torch.allclose(linear(rows, chosen), expected, atol=1e-5)
    linear.adapters.set(0, [None, None, None])
    assert torch.allclose(linear(rows, chosen)[1], rows[1] @ weight.t(), atol=1e-5)
