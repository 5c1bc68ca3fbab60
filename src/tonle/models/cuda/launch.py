"""How every kernel of ours is started: `launch(kernel, grid, *arguments)`.

Does: what all launches share (programmatic dependent launch, see `dependent.py`), and `side_by_side`, in which a launch only
compiles, on a thread of its own. Does not: know the kernels: whoever runs steps in `side_by_side` compiles what those steps
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
def side_by_side() -> Iterator[None]:
    """Launches of this thread compile instead; all are compiled when this ends."""
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="compile") as threads, triton.AsyncCompileMode(threads):
        token = _compiling.set(True)
        try:
            yield
        finally:
            _compiling.reset(token)
