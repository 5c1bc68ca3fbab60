"""Kernels that add B y of each token's own adapter, against float32 torch: every slot, none, tiles of any size, ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import rms_norm, silu

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from tonle.models.cuda import lora
from tonle.models.cuda.lora import SlotTiles, expand, gate_expand, residual_norm
from tonle.models.cuda.slot_tiling import fill_slot_tiles, max_slot_tiles

pytestmark = pytest.mark.crossed

NUM_SLOTS = 3
PADDING = 2  # rows of buffers past the last token, as in a graph made for more
GUARD = 7.0
# Of each token: one token; all of one slot and more than a tile; a mix with and without; none at all.
STEPS = [[2], [1] * 19, [0, -1, 2, 2, -1, 0, 1, 2], [-1] * 5]
each_step = pytest.mark.parametrize("slots", STEPS, ids=["one", "many", "mixed", "none"])
each_rank = pytest.mark.parametrize("rank", [16, 32])


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def tiles_of(slots: list[int], width: int = 16) -> SlotTiles:
    most = max_slot_tiles(len(slots) + PADDING, NUM_SLOTS, width)
    tiles = np.full((most, 1 + width), 99, dtype=np.int32)
    assert fill_slot_tiles(tiles, np.array(slots), NUM_SLOTS) <= most
    padded = torch.tensor([*slots, *[-1] * PADDING], dtype=torch.int32)
    return SlotTiles(padded, torch.from_numpy(tiles).flatten(), width, most)


def wide_of(tokens: int, parts: tuple[int, ...], rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a product with a wide weight gives, and B (slots, N, rank)."""
    outputs = sum(parts)
    wide = numbers(tokens + PADDING, outputs + NUM_SLOTS * len(parts) * rank)
    return wide, numbers(NUM_SLOTS, outputs, rank, seed=1)


def expected(slots: list[int], wide: torch.Tensor, b: torch.Tensor, parts: tuple[int, ...]) -> torch.Tensor:
    """Token by token and module by module."""
    rank, outputs = b.shape[2], sum(parts)
    out = wide[: len(slots), :outputs].clone()
    for t, slot in enumerate(slots):
        first = 0
        for module, part in enumerate(parts):
            if slot >= 0:
                y = wide[t, outputs + (slot * len(parts) + module) * rank :][:rank]
                out[t, first : first + part] += b[slot, first : first + part] @ y
            first += part
    return out


@each_step
@each_rank
@pytest.mark.parametrize("width", [16, 64])
@pytest.mark.parametrize("parts", [(64, 32, 32), (72,)], ids=["qkv", "o"])
@pytest.mark.parametrize("add", [False, True])
def test_expand(slots: list[int], rank: int, width: int, parts: tuple[int, ...], add: bool) -> None:
    wide, b = wide_of(len(slots), parts, rank)
    before = numbers(len(slots), sum(parts), seed=2)
    out = torch.full((len(slots) + PADDING, sum(parts)), GUARD)
    out[: len(slots)] = before if add else torch.nan
    expand(tiles_of(slots, width), wide, b, out, parts=parts, add=add)
    wanted = expected(slots, wide, b, parts) + (before if add else 0)
    torch.testing.assert_close(out[: len(slots)], wanted, rtol=1e-5, atol=1e-5)
    assert (out[len(slots) :] == GUARD).all()


@each_step
@each_rank
@pytest.mark.parametrize("width", [16, 64])
def test_gate_expand(slots: list[int], rank: int, width: int) -> None:
    size = 80  # no multiple of a block
    wide, b = wide_of(len(slots), (size, size), rank)
    out = torch.full((len(slots) + PADDING, size), GUARD)
    gate_expand(tiles_of(slots, width), wide, b, out)
    gate, up = expected(slots, wide, b, (size, size)).chunk(2, 1)
    torch.testing.assert_close(out[: len(slots)], silu(gate) * up, rtol=1e-5, atol=1e-5)
    assert (out[len(slots) :] == GUARD).all()


@each_step
@each_rank
@pytest.mark.parametrize("outputs", [48, 1100])
@pytest.mark.parametrize("chunk", [256 * 16, 2048 * 16])  # several, the last not full, some of them not read ahead; one
def test_residual_norm(monkeypatch: pytest.MonkeyPatch, slots: list[int], rank: int, outputs: int, chunk: int) -> None:
    monkeypatch.setattr(lora, "NORM_CHUNK", chunk)
    wide, b = wide_of(len(slots), (outputs,), rank)
    before, gain = numbers(len(slots) + PADDING, outputs, seed=2), numbers(outputs, seed=3)
    hidden, out = before.clone(), torch.full_like(before, torch.nan)
    residual_norm(tiles_of(slots), wide, b, hidden, gain, 1e-5, out)
    wanted = before + expected(
        [*slots, *[-1] * PADDING], wide, b, (outputs,)
    )  # rows past the last token have no adapter
    torch.testing.assert_close(hidden, wanted, rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(out, rms_norm(wanted, (outputs,), gain, 1e-5), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [16, 64])
def test_tiles_hold_every_token_once(width: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        num_slots = int(rng.integers(1, 9))
        slots = rng.integers(-1, num_slots, int(rng.integers(1, 200)))
        tiles = np.full((max_slot_tiles(len(slots), num_slots, width) + 1, 1 + width), 99, dtype=np.int32)
        num_tiles = fill_slot_tiles(tiles, slots, num_slots)
        assert (tiles[num_tiles:] == -1).all()
        seen: list[int] = []
        for slot, *held in tiles[:num_tiles].tolist():
            size = held.index(-1) if -1 in held else width
            assert size and set(held[size:]) <= {-1} and (slots[held[:size]] == slot).all()
            seen += held[:size]
        assert sorted(seen) == list(range(len(slots)))
