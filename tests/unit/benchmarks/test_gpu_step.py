"""`benchmarks.gpu_step`: what its defaults ask for has room in the block tables of the machine it builds."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the CUDA runner needs it: pip install triton")

from benchmarks.gpu_step import _PROMPTS, longest_row, plan_of

from tonle.engine.run.packing import Packer
from tonle.models.cuda.batch import Sizes
from tonle.models.cuda.decode_tiling import max_items


def packer(context: int) -> Packer:
    """As `cuda_machine` makes it."""
    sizes = Sizes(2, 8192, 1024, max_items(2, 2))
    return Packer(sizes, -(-context // 16) + 1, 16, 2, pinned=False)


def test_the_longest_prompt_of_the_defaults_has_room() -> None:
    plan = plan_of(0, 0, max(_PROMPTS))
    assert packer(longest_row("qwen2.5-1.5b", 400, list(_PROMPTS))).pack(plan).num_tokens == max(_PROMPTS)
    with pytest.raises(ValueError, match="broadcast"):
        packer(4096).pack(plan)


def test_a_row_with_room_for_its_next_token() -> None:
    assert longest_row("tiny", 400, [32]) == 401


def test_longer_than_the_model() -> None:
    with pytest.raises(SystemExit, match="llama-2-7b was made for 4096 tokens"):
        longest_row("llama-2-7b", 400, [8192])
