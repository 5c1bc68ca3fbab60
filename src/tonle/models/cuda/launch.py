"""How every kernel of ours is started: `launch(kernel, grid, *arguments)`.

Does: what all launches share (programmatic dependent launch, see `dependent.py`), and `compiling_only`, in which a launch
compiles on a thread of its own and nothing runs. Does not: know the kernels: whoever runs steps in it compiles what those steps
would launch. A kernel takes up to three seconds to compile, a model has some twenty of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton

from tonle.models.cuda.device import dependent_launch_available

_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


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
        ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compile") as threads,
        triton.AsyncCompileMode(threads, ignore_errors=True),
    ):
        token = _compiling.set(True)
        try:
            yield
        finally:
            _compiling.reset(token)
