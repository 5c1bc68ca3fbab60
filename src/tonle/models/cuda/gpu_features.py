"""What the device can do, asked once: dependent launches, room in shared memory; or that Triton's interpreter takes its place."""

from __future__ import annotations

import functools
import os

import torch
from triton.runtime import driver

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_ROOM_BYTES = 128 * 1024  # of shared memory for one program: what products of few rows and heads of 256 are cut for


@functools.cache
def dependent_launch_available() -> bool:
    """Hopper and newer; never under Triton's interpreter."""
    return not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


@functools.cache
def roomy() -> bool:
    """Whether a program may have 128 KiB: on data center GPUs from the A100 on, not on smaller ones."""
    if INTERPRETED or not torch.cuda.is_available():
        return True
    properties = driver.active.utils.get_device_properties(torch.cuda.current_device())
    return bool(properties["max_shared_mem"] >= _ROOM_BYTES)
