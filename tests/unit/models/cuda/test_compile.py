"""What is compiled at the start covers steps of every size, whatever the model's heads."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

pytest.importorskip("triton", reason="kernels run in Triton's interpreter: pip install triton")

from tonle.models.cuda.cuts import cut_for
from tonle.models.cuda.model import CudaModel
from tonle.models.cuda.skinny import MAX_ROWS

MAX_TOKENS = 1024


@pytest.mark.parametrize("max_rows", [1, 3, 16, 40, 256])
@pytest.mark.parametrize("kv_heads", [1, 2, 3, 4, 8, 32])
def test_every_kind_of_step_is_compiled_for(kv_heads: int, max_rows: int) -> None:
    model = Mock(_layers=[SimpleNamespace(window=None)], logits=torch.zeros(1, 8))
    model.spec.num_kv_heads = kv_heads
    model.sizes.max_rows, model.sizes.max_tokens = max_rows, MAX_TOKENS
    CudaModel.compile(model)

    def kind(tokens: int) -> tuple[object, ...]:
        """Which attention, and which products."""
        return cut_for(min(tokens, max_rows), kv_heads), tokens == 1, tokens <= MAX_ROWS

    decoded = {kind(call.args[0]) for call in model.decode.call_args_list}
    mixed = {kind(call.args[0]) for call in model.body.call_args_list}
    assert decoded == {kind(rows) for rows in range(1, max_rows + 1)}
    assert mixed == {kind(tokens) for tokens in range(MAX_ROWS, MAX_TOKENS + 1)}
