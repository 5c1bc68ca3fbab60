"""Which dtype to compute in when nobody says."""

from __future__ import annotations

import torch

_HALVES = {"bfloat16": torch.bfloat16, "BF16": torch.bfloat16, "float16": torch.float16, "F16": torch.float16}


def default_dtype(stored: str, device: torch.device) -> torch.dtype:
    """float32 on a CPU, where half precision is slower; elsewhere half precision, the stored one if it is."""
    if device.type == "cpu":
        return torch.float32
    return _HALVES.get(stored, torch.bfloat16)
