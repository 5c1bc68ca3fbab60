# mypy: disable-error-code="no-untyped-def,untyped-decorator,misc"
"""How every kernel of ours is started: `launch(kernel, grid, *arguments)`.

Does: what all launches share (programmatic dependent launch), and `compiling_only`, in which a launch compiles on a thread of
its own and nothing runs. Does not: know the kernels: steps that are run inside `compiling_only` compile what they would launch.
A kernel takes up to three seconds to compile, a model has some twenty of them.

Programmatic dependent launch: a kernel may begin before the one ahead of it in the stream has ended. `follow()` stands in every
kernel of ours, after the reads of weights (which nothing writes) and before the first access to the results of the kernel ahead.
It waits for that one, then lets the next one begin: so whatever was written two kernels back or earlier may be read before
`follow()`, too (this rests on memory being flushed where a kernel ends), and what no kernel since then touches may be written.
A kernel that needs nothing of the one ahead calls it at its end, and in one program at least: it must not end first. A kernel
launched this way without `follow()` would break the order of the whole stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton
import triton.language as tl
from triton.language.extra import cuda as tl_cuda

from tonle.config.cores import num_cores
from tonle.models.cuda.gpu_features import dependent_launch_available

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


@triton.jit
def follow(PDL: tl.constexpr):
    if PDL:
        tl_cuda.gdc_wait()
        tl_cuda.gdc_launch_dependents()


@triton.jit
def read(x, PDL: tl.constexpr):
    """x as it is, a tensor just read: reads that stand before this are under way before x is waited for.

    Without this triton may move x among threads, behind a barrier, before it begins the next read: twice the latency.
    """
    if PDL:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False,
                                         pack=32 // x.dtype.primitive_bitwidth)  # fmt: skip
    else:
        return x


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """`kernel[grid](*arguments, **options)`, with the kernel's own flag PDL, and the launcher's where it knows one."""
    if dependent_launch_available():
        options.update(PDL=True, launch_pdl=True)
    else:
        options["PDL"] = False
    if _compiling.get():
        kernel.warmup(*arguments, grid=grid, **options)
    else:
        kernel[grid](*arguments, **options)


@contextmanager
def compiling_only() -> Iterator[None]:
    """Launches of this thread compile instead, side by side; all are compiled when this ends.

    A kernel that cannot be compiled says so at its first launch: an error here would leave triton's mode on.
    """
    with (
        ThreadPoolExecutor(num_cores(), thread_name_prefix="compile") as threads,
        triton.AsyncCompileMode(threads, ignore_errors=True),
    ):
        token = _compiling.set(True)
        try:
            yield
        finally:
            _compiling.reset(token)
