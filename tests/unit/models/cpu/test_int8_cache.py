"""Keys and values in eight bits in the compiled step: as torch computes with the same rounding, whatever the head size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from tests.fakes.cpu_models import RandomModel, of_row, plain_layer, spec_of, step_of
from tonle.models.cpu.cpu_cache import keep_head
from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.cpu.dots import HAS_DOTS
from tonle.models.cpu.products import OPTIONS
from tonle.models.cpu.team import Team
from tonle.models.cpu.tiles import has_tiles
from tonle.models.decoder import Decoder

# Head sizes with loops of their own, with vectors, and with neither.
LAYERS: dict[str, dict[str, Any]] = {
    "heads of 64": {"head_dim": 64},
    "heads of 128, a window": {"head_dim": 128, "window": 20},
    "heads of 16, sinks": {"head_dim": 16, "sinks": True},
    "heads of 24, a soft cap": {"head_dim": 24, "soft_cap": 2.0, "scale": 1.0},
}


def logits_of(decoder: Decoder | CpuDecoder, model: RandomModel, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Of a decoding row, a chunk on top of cached tokens, and a prompt."""
    kv = model.cache(dtype=dtype)
    decoder.forward(step_of([(0, 11), (0, 30)]), kv)
    return decoder.forward(step_of([(11, 12), (30, 50), (0, 9)]), kv).clone()


@torch.inference_mode()
@pytest.mark.parametrize("kind", LAYERS)
def test_the_compiled_step_equals_torch(kind: str) -> None:
    model = RandomModel(spec_of(plain_layer(**LAYERS[kind]), plain_layer(**LAYERS[kind])))
    fast, slow = model.fast(team=Team(2), cache_dtype=torch.int8), model.torch()
    expected, found = logits_of(slow, model), logits_of(fast, model)
    error = float((found - expected).norm() / expected.norm())
    rounding = float((logits_of(slow, model, torch.float32) - expected).norm() / expected.norm())
    assert error < 2e-3 < rounding < 3e-2


@torch.inference_mode()
def test_rows_are_the_same_bits_alone() -> None:
    model = RandomModel(spec_of(plain_layer(head_dim=64), plain_layer(head_dim=64)))
    decoder = model.fast(cache_dtype=torch.int8)
    kv = model.cache(dtype=torch.int8)
    decoder.forward(step_of([(0, 11), (0, 30)]), kv)
    inputs = step_of([(11, 12), (30, 50), (0, 9)])
    together = decoder.forward(inputs, kv).clone()
    for row in range(3):
        alone = decoder.forward(of_row(inputs, row), kv)
        expected = together[inputs.row_starts[row] : inputs.row_starts[row + 1]]
        if HAS_DOTS:
            assert torch.equal(alone, expected)
        else:  # sums of float32, in another order for one row than for several
            torch.testing.assert_close(alone, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("packed", "dots", "bits", "head_dim", "expected"), [
    (True, True, 8, 64, torch.int8 if has_tiles(64, 16) else torch.float32),
    (True, True, 8, 16, torch.float32),  # attention has no kernels for int8 and such heads
    (True, True, 16, 64, torch.float32),  # exact answers were asked for
    (True, False, 8, 64, torch.float32),  # products are of floats, whose inputs are not rounded
    (False, True, 8, 64, torch.float32),  # some weights are floats
])  # fmt: skip
def test_left_to_the_decoder_it_is_where_that_is_faster_and_answers_are_rounded_anyway(
    packed: bool, dots: bool, bits: int, head_dim: int, expected: torch.dtype
) -> None:
    model = RandomModel(spec_of(plain_layer(head_dim=head_dim)), all_four_bits=packed)
    assert model.fast(dots=dots, activation_bits=bits, cache_dtype=None).cache_dtype == expected
    assert model.fast(dots=dots, activation_bits=bits, cache_dtype=torch.int8).cache_dtype == torch.int8
    assert model.fast(dots=dots, activation_bits=bits, cache_dtype=torch.float32).cache_dtype == torch.float32


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("head_dim", [64, 24])
def test_who_attends_to_what_is_not_a_number_gets_none(head_dim: int, dtype: torch.dtype) -> None:
    """With a number that looks like one, a broken model would answer, and nobody could tell."""
    model = RandomModel(spec_of(plain_layer(head_dim=head_dim)))
    decoder = model.fast(team=Team(1), cache_dtype=dtype)
    inputs = step_of([(0, 8)])
    embed = decoder._embed

    def poisoned(tokens: torch.Tensor, out: np.ndarray) -> None:
        embed(tokens, out)
        out[3, 5] = np.nan

    decoder._embed = poisoned
    found = decoder.forward(inputs, model.cache(dtype=dtype))
    assert torch.isnan(found).any(dim=1).tolist() == [False] * 3 + [True] * 5


@njit(**OPTIONS)  # type: ignore[untyped-decorator]
def _keep(head: Any, cache: Any, scales: Any) -> None:
    keep_head(head, cache, scales, 0, 0, 0)


@pytest.mark.parametrize("place", [0, 17, 23])
@pytest.mark.parametrize("dim", [64, 24])
def test_one_number_of_a_head_that_is_none_is_seen_in_its_scale(dim: int, place: int) -> None:
    head = np.linspace(-1, 1, dim, dtype=np.float32)
    cache, scales = np.zeros((1, 1, 1, dim), np.int8), np.zeros((1, 1, 1), np.float32)
    _keep(head, cache, scales)
    assert scales[0, 0, 0] == pytest.approx(1 / 127)
    head[place] = np.nan
    _keep(head, cache, scales)
    assert np.isnan(scales).all()
