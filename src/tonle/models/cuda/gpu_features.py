"""What the device can do, asked once: dependent launches, 8-bit floats, room in shared memory; or that Triton's interpreter
takes its place."""

from __future__ import annotations

import functools
import os

import torch
from triton.runtime import driver

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
OLDEST = (8, 0)  # compute capability: Ampere, the first with bfloat16 and asynchronous copies
_ROOM_BYTES = (
    128 * 1024
)  # of shared memory for one program: what products of few rows, and attention with heads of 256, are cut for


@functools.cache
def capability() -> tuple[int, int] | None:
    """Of the current device; None where there is none, or Triton's interpreter takes its place."""
    return None if INTERPRETED or not torch.cuda.is_available() else torch.cuda.get_device_capability()


@functools.cache
def dependent_launch_available() -> bool:
    """Hopper and newer; never under Triton's interpreter."""
    has = capability()
    return has is not None and has >= (9, 0)


@functools.cache
def converts_fp8() -> bool:
    """Whether e4m3 is a type of the device: Ada, Hopper and newer. Others read and write it as bytes (`fp8.py`)."""
    has = capability()
    return has is None or has >= (8, 9)


@functools.cache
def multiplies_fp8() -> bool:
    """Whether tensor cores take e4m3: Ada, Hopper and newer; never under Triton's interpreter."""
    has = capability()
    return has is not None and has >= (8, 9)


@functools.cache
def shared_bytes() -> int | None:
    """Shared memory that a program may have; None where there is no device."""
    if capability() is None:
        return None
    return int(driver.active.utils.get_device_properties(torch.cuda.current_device())["max_shared_mem"])


@functools.cache
def roomy() -> bool:
    """Whether a program may have 128 KiB: on data center GPUs from the A100 on, not on smaller ones."""
    has = shared_bytes()
    return has is None or has >= _ROOM_BYTES
