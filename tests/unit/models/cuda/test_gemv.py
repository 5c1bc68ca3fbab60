"""A matrix times one row against torch: every fusion, sizes that do not divide evenly, outputs poisoned beforehand."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from tonle.models.cuda import pointwise
from tonle.models.cuda.gemv import GemvTiling, gemv, gemv_tiling

pytestmark = pytest.mark.crossed

TILINGS = [
    None,
    GemvTiling(8, 32, warps=4),
    GemvTiling(8, 32, warps=4, ahead=2),
    GemvTiling(8, 32, warps=4, ahead=3),
    GemvTiling(4, 32, warps=4, stages=2),
    GemvTiling(16, 64, warps=4, stages=3),
]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


HALF = torch.float16  # weights are read ahead in half precision only
PRECISE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, HALF: {"rtol": 1e-2, "atol": 1e-2}}


@pytest.mark.parametrize("dtype", PRECISE, ids=str)
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_norm_bias_and_gated_activation(tiling: GemvTiling | None, dtype: torch.dtype) -> None:
    """72 columns end within the third block of 32."""
    x, gain, weight, bias = (
        t.to(dtype) for t in (numbers(1, 72), numbers(72).abs() + 0.5, numbers(84, 72) / 8, numbers(84))
    )
    out = torch.full((1, 42), torch.nan, dtype=dtype)
    gemv(x, weight, out, gain=gain, eps=1e-5, bias=bias, glu=True, tiling=tiling)
    gate, up = linear(rms_norm(x, (72,), gain, 1e-5), weight, bias).chunk(2, dim=-1)
    torch.testing.assert_close(out, silu(gate) * up, **PRECISE[dtype])


@pytest.mark.parametrize(("dtype", "settled"), [(torch.float32, False), (HALF, False), (HALF, True)])
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_adds_to_what_is_there(tiling: GemvTiling | None, dtype: torch.dtype, settled: bool) -> None:
    x, weight, out = (t.to(dtype) for t in (numbers(1, 96), numbers(50, 96) / 8, numbers(1, 50, seed=1)))
    expected = out + linear(x, weight)
    torch.testing.assert_close(
        gemv(x, weight, out, add=True, settled=settled, tiling=tiling), expected, **PRECISE[dtype]
    )


SIZES = [(64, 64), (1536, 1536), (2048, 1536), (8960, 1536), (1536, 8960), (3072, 3072), (3072, 8192), (4096, 4096), (2048, 4096),
         (128256, 3072)]  # fmt: skip


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_tilings_are_powers_of_two_and_fit_into_registers(outputs: int, inputs: int, norm: bool) -> None:
    """A product with a norm may be gated, with twice the weights and sums: it reads no more than one block ahead."""
    tiling = gemv_tiling(outputs, inputs, norm=norm)
    assert tiling.block_n & (tiling.block_n - 1) == 0 and tiling.block_k & (tiling.block_k - 1) == 0
    ahead = tiling.ahead * tiling.block_n * tiling.block_k * 2 / (tiling.warps * 32)  # bytes per thread, of 1,020
    assert (tiling.ahead - 1) * tiling.block_k < inputs and ahead <= 512 and not (norm and tiling.ahead > 1)


def test_norm_and_gated_activation_alone() -> None:
    x, gain = numbers(3, 72), numbers(72)
    torch.testing.assert_close(
        pointwise.rms_norm(x, gain, 1e-6, torch.full((3, 72), torch.nan)), rms_norm(x, (72,), gain, 1e-6)
    )
    wide = numbers(3, 2 * 1100)
    gate, up = wide.chunk(2, dim=-1)
    torch.testing.assert_close(pointwise.gate_mul(wide, torch.full((3, 1100), torch.nan)), silu(gate) * up)
