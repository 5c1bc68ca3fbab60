"""Rotation: what it must keep, and what the scalings do to long and short waves."""

from __future__ import annotations

import pytest
import torch

from tonle.models.rope import Rotary, frequencies, rotate
from tonle.models.spec import RopeSpec

CPU = torch.device("cpu")
LLAMA3 = RopeSpec(theta=500_000.0, kind="llama3", factor=8.0, original_max_positions=8192)
YARN = RopeSpec(kind="yarn", factor=4.0, original_max_positions=4096, attention_factor=1.1)


def turned(heads: torch.Tensor, *positions: int) -> torch.Tensor:
    cos, sin = Rotary(RopeSpec(), heads.shape[-1], CPU).angles(torch.tensor(positions), torch.float32)
    return rotate(heads, cos, sin)


def test_position_zero_does_nothing_and_lengths_stay() -> None:
    heads = torch.randn(2, 3, 16)
    torch.testing.assert_close(turned(heads, 0, 0), heads)
    torch.testing.assert_close(turned(heads, 5, 900).norm(dim=-1), heads.norm(dim=-1))


def test_only_the_distance_counts() -> None:
    q, k = torch.randn(1, 1, 32), torch.randn(1, 1, 32)
    near = (turned(q, 7) * turned(k, 3)).sum()
    far = (turned(q, 107) * turned(k, 103)).sum()
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-4)


def test_dimension_i_turns_with_i_plus_half() -> None:
    out = turned(torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]), 1)
    torch.testing.assert_close(out[0, 0, 0], torch.tensor(1.0).cos())
    torch.testing.assert_close(out[0, 0, 2], torch.tensor(1.0).sin())


@pytest.mark.parametrize("spec", [LLAMA3, YARN], ids=lambda spec: spec.kind)
def test_short_waves_stay_and_long_waves_are_stretched(spec: RopeSpec) -> None:
    plain, scaled = frequencies(RopeSpec(theta=spec.theta), 128), frequencies(spec, 128)
    torch.testing.assert_close(scaled[0], plain[0])
    torch.testing.assert_close(scaled[-1], plain[-1] / spec.factor)
    ratio = plain / scaled
    assert (ratio.diff() >= -1e-6).all() and ((ratio > 1.01) & (ratio < spec.factor - 0.01)).any()


def test_linear_and_divisors() -> None:
    plain = frequencies(RopeSpec(), 8)
    torch.testing.assert_close(frequencies(RopeSpec(kind="linear", factor=2.0), 8), plain / 2)
    divisors = (1.0, 2.0, 4.0, 8.0)
    torch.testing.assert_close(
        frequencies(RopeSpec(kind="factors", factors=divisors), 8), plain / torch.tensor(divisors)
    )


def test_yarn_scales_cos_and_sin() -> None:
    cos, _ = Rotary(YARN, 16, CPU).angles(torch.tensor([0]), torch.float32)
    torch.testing.assert_close(cos, torch.full((1, 1, 16), 1.1))
