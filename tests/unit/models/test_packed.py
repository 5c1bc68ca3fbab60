"""Few-bit weights packed into words: nothing is lost, places are where kernels look, groups that no kernel reads are refused."""

from __future__ import annotations

import pytest
import torch

from tests.fakes.few_bits import FORMS, few_bits
from tonle.models import packed as packed_module
from tonle.models.layers import Linear, LinearPart, Quantized
from tonle.models.packed import pack


@pytest.mark.parametrize("inputs", [256, 384, 640])
@pytest.mark.parametrize("form", FORMS)
def test_packed_weights_are_the_same(form: str, inputs: int) -> None:
    weight = few_bits(form, 24, inputs)
    packed = pack(weight)
    assert packed is not None and packed.shape == weight.shape
    torch.testing.assert_close(packed.unpacked(torch.float32), weight.unpacked(torch.float32), rtol=1e-5, atol=1e-6)
    assert packed.numbers.shape[1] * 4 <= -(-inputs // 256) * 256 * weight.bits // 8


@pytest.mark.parametrize("form", ["int4 per output", "int8", "fp8"])
def test_any_number_of_inputs(form: str) -> None:
    """72 are no whole block, and with one scale for each output they need not be whole groups."""
    weight = few_bits(form, 10, 72)
    packed = pack(weight)
    assert packed is not None and packed.numbers.shape == (10, 32)
    assert torch.equal(packed.unpacked(torch.float32), weight.unpacked(torch.float32))


def test_where_numbers_are() -> None:
    """Place p of word j: input 32 p + j of a block; as stored, integers begin at 0."""
    numbers = torch.arange(256).remainder(16).sub(8).to(torch.int8)[None]
    packed = pack(Quantized(numbers, torch.ones(1, 1), bits=4))
    assert packed is not None
    for j, p in [(0, 0), (5, 1), (31, 7), (17, 4)]:
        assert (int(packed.numbers[0, j]) >> (4 * p)) & 15 == numbers[0, 32 * p + j] + 8
    wide = torch.arange(-128, 128).to(torch.int8).view(1, 256)
    packed = pack(Quantized(wide, torch.ones(1, 1)))
    assert packed is not None
    for j, p in [(0, 0), (40, 1), (63, 3)]:
        block, word = divmod(j, 32)
        assert (int(packed.numbers[0, j]) >> (8 * p)) & 255 == wide[0, 128 * block + 32 * p + word] + 128


def test_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = few_bits("int4", 24, 256)
    whole = pack(weight)
    monkeypatch.setattr(packed_module, "_CHUNK", 256 * 5)
    parts = pack(weight)
    assert whole is not None and parts is not None and torch.equal(whole.numbers, parts.numbers)


def test_groups() -> None:
    """96 inputs are three groups of 32; 48 cannot be told apart by a kernel."""
    numbers = torch.randint(-8, 8, (4, 384)).to(torch.int8)
    weight = Quantized(numbers, torch.rand(4, 4), bits=4)
    packed = pack(weight)
    assert packed is not None and packed.group == 32
    torch.testing.assert_close(packed.unpacked(torch.float32), weight.unpacked(torch.float32))
    assert pack(Quantized(numbers, torch.rand(4, 8), bits=4)) is None
    assert pack(Quantized(numbers, torch.zeros(4, 3), torch.ones(4, 3), bits=4)) is None


def test_symmetric_numbers_need_no_minimum() -> None:
    scale = torch.rand(4, 2)
    stored = torch.randint(0, 16, (4, 256)).to(torch.uint8)
    packed = pack(Quantized(stored, scale, -8 * scale, bits=4))
    assert packed is not None and packed.minimum is None
    assert (packed := pack(Quantized(stored, scale, -7 * scale, bits=4))) is not None and packed.minimum is not None
    assert packed.minimum.dtype == torch.bfloat16  # zero points are whole numbers
    odd = pack(Quantized(stored, scale, -7.3 * scale, bits=4))
    assert odd is not None and odd.minimum is not None and odd.minimum.dtype == torch.float32


def test_a_map_of_packed_weights_still_multiplies() -> None:
    weight, x = few_bits("int4", 24, 256), torch.randn(3, 256)
    before = Linear(LinearPart(weight))(x)
    packed = pack(weight)
    assert packed is not None
    torch.testing.assert_close(Linear(LinearPart(packed))(x), before, rtol=1e-5, atol=1e-5)
