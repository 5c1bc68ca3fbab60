"""Sampling on the device against `engine/sample`: the same tokens from the same logits, seeds and positions."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from tonle.engine.sample.draw import draw
from tonle.engine.sample.noise import uniform
from tonle.models.cuda import sample as device

VOCAB = 700
WISHES = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.2),
    (0.9, 50, 0.5, 0.01),
]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_STRETCHES", 4)
    monkeypatch.setattr(device, "_BLOCK", 128)


@pytest.mark.parametrize("seed", [0, 2**62 + 12345, -7])
def test_same_choices(seed: int) -> None:
    rows = len(WISHES)
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed % 1000)) * 3
    settings = device.RowSettings(8, torch.device("cpu"))
    placed = [7 - row for row in range(rows)]  # rows are not in the order of samples
    for row, (temperature, top_k, top_p, min_p) in zip(placed, WISHES, strict=True):
        settings.temperature[row], settings.top_k[row] = temperature, top_k
        settings.top_p[row], settings.min_p[row], settings.seed[row] = top_p, min_p, seed
    positions = [3 + 11 * row for row in range(rows)]
    out, last = torch.full((8,), -1, dtype=torch.int32), torch.full((8,), -1, dtype=torch.int32)
    device.sample(
        torch.tensor([rows], dtype=torch.int32), torch.tensor(placed, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32), logits, settings, device.SampleScratch(8, torch.device("cpu")),
        out, last,
    )  # fmt: skip
    for i, (temperature, *filters) in enumerate(WISHES):
        if temperature == 0:
            expected = int(logits[i].argmax())
        else:
            noise = torch.tensor([uniform(seed, positions[i])], dtype=torch.float64)
            expected = int(draw(logits[i : i + 1], *(torch.tensor([v]) for v in (temperature, *filters)), noise))
        assert int(out[i]) == expected and int(last[placed[i]]) == expected
    assert (out[rows:] == -1).all()


def test_the_lowest_of_equal_bests() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [650, 300, 301]] = 5.0
    out = torch.zeros(1, dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    device.sample(one, one - 1, one, logits, device.RowSettings(1, torch.device("cpu")),
                  device.SampleScratch(1, torch.device("cpu")), out, torch.zeros(1, dtype=torch.int32))  # fmt: skip
    assert int(out) == 300
