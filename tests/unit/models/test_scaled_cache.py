"""Keys and values in eight bits, in torch: what is written comes back, and answers do not depend on how a prompt is divided."""

from __future__ import annotations

import pytest
import torch

from tests.fakes.checkpoints import tiny_model
from tests.unit.models.stepper import Stepper, random_tokens
from tonle.models.decoder import Decoder
from tonle.models.load import load
from tonle.models.scaled_cache import ScaledSlots, to_int8


def test_numbers_are_within_half_a_scale() -> None:
    torch.manual_seed(0)
    rows = torch.randn(7, 3, 64) * torch.logspace(-3, 3, 7)[:, None, None]
    rows[4, 1] = 0
    numbers, scales = to_int8(rows)
    assert numbers.dtype == torch.int8 and scales.shape == (7, 3)
    assert int(numbers.abs().amax(dim=-1).sum()) == 127 * 20  # each head uses the whole range, except the one of zeros
    assert bool(((numbers * scales[..., None] - rows).abs() <= scales[..., None] * 0.5001).all())


def test_slots_are_read_back_by_block() -> None:
    torch.manual_seed(0)
    numbers = torch.zeros(2, 6, 4, 3, 16, dtype=torch.int8)  # layers, blocks, block, kv heads, dim
    scales = torch.zeros(2, 6, 3, 4)
    slots = torch.tensor([5, 23, 0, 6])
    rows = torch.randn(4, 3, 16)
    cache = ScaledSlots(numbers, scales, slots)
    cache.write(1, rows)
    assert not numbers[0].any() and not scales[0].any()
    found = cache.read(1, torch.tensor([1, 5, 0], dtype=torch.int32))
    assert found.shape == (3, 4, 3, 16)
    for place, row in zip([(0, 1), (1, 3), (2, 0), (0, 2)], rows, strict=True):
        torch.testing.assert_close(found[place], row, atol=float(row.abs().max()) / 250, rtol=0)
    assert int((found != 0).any(dim=-1).any(dim=-1).sum()) == 4


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return load(tiny_model("llama"), device=torch.device("cpu"))


def logits(decoder: Decoder, chunk: int, dtype: torch.dtype) -> torch.Tensor:
    stepper = Stepper(decoder, [random_tokens(90, 200), random_tokens(33, 200)], cache_dtype=dtype)
    stepper.run(chunk)
    return torch.cat([stepper.of(0), stepper.of(1)])


def test_answers_do_not_depend_on_how_a_prompt_is_divided(decoder: Decoder) -> None:
    whole = logits(decoder, 100, torch.int8)
    for chunk in (1, 7, 32):
        torch.testing.assert_close(logits(decoder, chunk, torch.int8), whole, atol=2e-3, rtol=0)


def test_the_error_is_small_and_there(decoder: Decoder) -> None:
    exact, rounded = (logits(decoder, 100, dtype) for dtype in (torch.float32, torch.int8))
    assert 1e-4 < float((rounded - exact).norm() / exact.norm()) < 3e-2
