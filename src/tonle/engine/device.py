"""What the settings say of a model's device, precision and weights, as torch and the loaders know it."""

from __future__ import annotations

from typing import Literal, cast

import torch

from tonle.config.engine import EngineConfig
from tonle.errors import ConfigError
from tonle.models.quantize import Quantization

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is none of auto, cpu, cuda, cuda:N", param="device") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch sees no CUDA device here", param="device")
    return device


def quantization_of(config: EngineConfig) -> Quantization | None:
    """None: matrices as they are stored."""
    if config.quantization == "auto":
        return None
    to = cast("Literal['none', 'int8', 'int4', 'fp8']", config.quantization)
    return Quantization(to, config.quantization_group_size)
