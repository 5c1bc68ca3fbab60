"""Blocks leave a cache on a GPU as bytes, and come back, as on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.unit.engine.kv.test_block_copies import DTYPES, check_copies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_are_the_same_elsewhere(dtype: torch.dtype) -> None:
    check_copies(dtype, "cuda")
