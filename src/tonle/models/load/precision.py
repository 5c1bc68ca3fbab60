"""Which dtype to compute in when none is configured."""

from __future__ import annotations

import torch

_HALVES = {"bfloat16": torch.bfloat16, "BF16": torch.bfloat16, "float16": torch.float16, "F16": torch.float16}


# A small quantized model suffers from a second rounding: SmolLM2-135M (Q4_1) knows the capital of France in float32 and not in
# bfloat16. In float32 so many weights take 2 GB.
_SMALL_WEIGHTS = 500_000_000


def default_dtype(stored: str, device: torch.device, *, num_weights: int | None = None) -> torch.dtype:
    """float32 on a CPU, where half precision is slower. Elsewhere half precision, the stored one if it is; but float32 for
    quantized models of few weights, where `num_weights` is given."""
    if device.type == "cpu":
        return torch.float32
    if (
        stored not in _HALVES
        and stored not in ("float32", "F32")
        and num_weights is not None
        and num_weights <= _SMALL_WEIGHTS
    ):
        return torch.float32
    return _HALVES.get(stored, torch.bfloat16)
