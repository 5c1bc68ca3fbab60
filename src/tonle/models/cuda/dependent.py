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
