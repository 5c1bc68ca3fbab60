"""One row of 16-bit activations times few-bit weights in packed arithmetic, against float64 of the unpacked weights."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear, rms_norm, silu

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from tests.fakes.few_bits import few_bits
from tonle.models.cuda import quantized_matrix
from tonle.models.cuda.pair_gemv import PairTiling, pair_gemv, suits
from tonle.models.cuda.quantized_matrix import QuantizedMatrix
from tonle.models.packed import Packed, pack

EPS = 1e-5
FORMS = ["int4", "int4 per output", "int4 with minimums per output", "int8", "int8 with minimums", "fp8"]
every_form = pytest.mark.parametrize("form", FORMS)
# Of the largest output: 16-bit inputs are off by less than bfloat16's results are.
MAX_OFF = {"int4": 1e-4, "int8": 1e-4, "fp8": 1e-3}


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def packed_of(form: str, outputs: int, inputs: int, *, half: bool = False) -> Packed:
    weight = few_bits(form, outputs, inputs)
    if half:  # scales as most files have them: two are read at a time
        weight.scale = weight.scale.half()
    packed = pack(weight)
    assert packed is not None and suits(packed)
    return packed


def assert_near(got: torch.Tensor, expected: torch.Tensor, form: str) -> None:
    off = (got.double() - expected).abs().max() / expected.abs().max()
    assert float(off) < MAX_OFF[form[:4].strip()]


def product(x: torch.Tensor, packed: Packed) -> torch.Tensor:
    return linear(x.double(), packed.unpacked(torch.float32).double())


@every_form
@pytest.mark.parametrize("tiling", [None, PairTiling(4, 2), PairTiling(2, 1, times=3, ahead=2)], ids=str)
def test_norm_bias_and_gate(form: str, tiling: PairTiling | None) -> None:
    inputs = 1536
    packed, gain, bias, x = (
        packed_of(form, 2 * 11, inputs),
        numbers(inputs).abs() + 0.5,
        numbers(22),
        numbers(1, inputs),
    )
    normed = rms_norm(x.double(), (inputs,), gain.double(), EPS)
    gate, up = (product(normed, packed) + bias).chunk(2, dim=-1)
    out = torch.full((1, 11), torch.nan)
    pair_gemv(x, packed, out, gain=gain, eps=EPS, bias=bias, glu=1, tiling=tiling)
    assert_near(out, silu(gate) * up, form)


@every_form
@pytest.mark.parametrize("settled", [False, True])
def test_added(form: str, settled: bool) -> None:
    packed, x, out = packed_of(form, 7, 512), numbers(1, 512), numbers(1, 7)
    expected = out + product(x, packed)
    assert_near(pair_gemv(x, packed, out, add=True, settled=settled, tiling=PairTiling(2, 1, times=2)), expected, form)


@pytest.mark.parametrize("form", ["int4 per output", "int8", "fp8"])
@pytest.mark.parametrize("inputs", [72, 576])
def test_inputs_that_end_within_a_block(form: str, inputs: int) -> None:
    packed, x = packed_of(form, 3, inputs), numbers(1, inputs)
    assert_near(pair_gemv(x, packed, torch.full((1, 3), torch.nan)), product(x, packed), form)


@pytest.mark.parametrize("form", ["int4", "int8 with minimums"])
def test_scales_of_16_bits(form: str) -> None:
    packed, x = packed_of(form, 9, 768, half=True), numbers(1, 768)
    assert_near(pair_gemv(x, packed, torch.full((1, 9), torch.nan)), product(x, packed), form)


@every_form
def test_outliers(form: str) -> None:
    """One input a thousand times the others, and stretches of nothing but zeros and of tiny numbers."""
    packed, x = packed_of(form, 8, 1024), numbers(1, 1024)
    x[0, 300] *= 1000
    x[0, 512:640] = 0
    x[0, 640:768] *= 1e-20
    assert_near(pair_gemv(x, packed, torch.full((1, 8), torch.nan)), product(x, packed), form)


@pytest.mark.parametrize(("form", "number"), [("int4", 15), ("int8", 255)])
def test_the_largest_sums_are_held(form: str, number: int) -> None:
    """All inputs and all numbers at their most: float32 and 32-bit sums hold them."""
    packed = packed_of(form, 4, 512)
    packed.numbers.fill_(-1)
    assert int(packed.numbers.view(torch.uint8)[0, 0]) & number == number
    for sign in (1.0, -1.0):
        x = torch.full((1, 512), 3.7 * sign)
        assert_near(pair_gemv(x, packed, torch.full((1, 4), torch.nan)), product(x, packed), form)


def test_what_it_is_not_for() -> None:
    for form in ("int4 in groups of 32", "int4 with minimums", "int8 in groups", "fp8 in blocks", "table"):
        packed = pack(few_bits(form, 4, 256))
        assert packed is not None and not suits(packed)


def test_a_matrix_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def noted(x: torch.Tensor, packed: Packed, out: torch.Tensor, **rest: object) -> None:
        used.append(packed.form)

    monkeypatch.setattr(quantized_matrix, "pair_gemv", noted)
    monkeypatch.setattr(quantized_matrix, "IN_PAIRS", frozenset({"int4"}))
    for form, dtype in (("int4", torch.bfloat16), ("int4", torch.float32), ("int8", torch.bfloat16)):
        matrix = QuantizedMatrix(packed_of(form, 4, 256), None, dtype)
        if form == "int4" and dtype == torch.bfloat16:
            matrix.product(numbers(1, 256).to(dtype), torch.zeros(1, 4, dtype=dtype))
        else:
            assert not matrix.in_pairs
    assert used == ["int4"]
