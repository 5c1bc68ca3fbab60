# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""Programmatic dependent launch: a kernel may begin before the one ahead of it in the stream has ended.

`follow()` stands in every kernel of ours, after the reads of weights (which nothing writes) and before the first access
to the results of the kernel ahead. It waits for that one, then lets the one behind begin: so whatever was written two
kernels back or earlier may be read before `follow()`, too (this rests on memory being flushed where a kernel ends), and what no
kernel since then touches may be written. A kernel that needs nothing of the one ahead calls it at its end, and in one program at
least: it must not end first. A kernel launched this way without `follow()` would break the order of the whole stream.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda


@triton.jit
def follow(PDL: tl.constexpr):
    if PDL:
        tl_cuda.gdc_wait()
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
