# mypy: allow-untyped-defs, disable-error-code="untyped-decorator,misc"
"""Programmatic dependent launch: a kernel may begin before the one ahead of it in the stream has ended.

`follow()` stands in every kernel of ours, after the reads of weights (which nothing writes) and before the first access
to anything a kernel ahead may write. It waits for the kernel ahead and lets the one behind begin: after the wait, so that
what stands two kernels back may be read early; or before it (`EARLY`), where the kernel behind reads only weights early.
A kernel launched this way without `follow()` would break the order of the whole stream.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@triton.jit
def follow(PDL: tl.constexpr):
    if PDL == 2:
        tl_cuda.gdc_launch_dependents()
    if PDL:
        tl_cuda.gdc_wait()
    if PDL == 1:
        tl_cuda.gdc_launch_dependents()


@triton.jit
def prefetch_bytes(pointer, num_bytes):
    """Ask for a stretch of memory in L2: one instruction of one thread (Hopper)."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .u32 t;
        mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;
        @p cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [pointer.to(tl.int64), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def dependent_launch_available() -> bool:
    """Hopper and newer; never under Triton's interpreter."""
    import torch

    return not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


_PDL: bool | None = None


def launch_options(*, early: bool = False) -> dict[str, int | bool]:
    """Keyword arguments for every launch: the kernel's own flag, and the launcher's where it knows one.

    `early`: the kernel behind may begin before the one ahead has ended. See above for when that is safe.
    """
    global _PDL
    if _PDL is None:
        _PDL = dependent_launch_available()
    return {"PDL": 2 if early else 1, "launch_pdl": True} if _PDL else {"PDL": 0}


def use_dependent_launch(*, enabled: bool) -> None:
    """For measurements: switch it off, or on again where the device has it."""
    global _PDL
    _PDL = enabled and dependent_launch_available()
