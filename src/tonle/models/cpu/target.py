"""What numba compiles for, and where it keeps the result. Must run before the first kernel is defined."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numba

from tonle.models.source import cache_dir


def prepare_numba() -> None:
    """Compiled code goes to the user's cache directory, not into the installed package.

    LLVM avoids 512-bit vectors on CPUs whose early models slowed down for them; for these loops they are worth it.
    """
    config: Any = numba.config
    config.CACHE_DIR = str(cache_dir() / "kernels")
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        config.CPU_NAME = llvm.get_host_cpu_name()
        config.CPU_FEATURES = features.flatten() + ",-prefer-256-bit"
