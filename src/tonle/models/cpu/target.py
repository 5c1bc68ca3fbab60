"""What numba compiles for, and where it keeps the result. Must run before the first kernel is defined."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba

from tonle.models.source import cache_dir


@functools.cache
def kernels_dir() -> Path:
    """Where compiled code lies: a folder for each version of the kernels.

    Numba alone would look at the file of the outermost function only, and keep code whose inner functions have changed.
    """
    sources = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    version = hashlib.blake2b(f"{numba.__version__} ".encode() + sources, digest_size=8).hexdigest()
    return cache_dir() / "kernels" / version


def prepare_numba() -> None:
    """Compiled code goes to the user's cache directory, not into the installed package.

    LLVM avoids 512-bit vectors on CPUs whose early models slowed down for them; for these loops they are worth it.
    """
    config: Any = numba.config
    config.CACHE_DIR = str(kernels_dir())
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        config.CPU_NAME = llvm.get_host_cpu_name()
        config.CPU_FEATURES = features.flatten() + ",-prefer-256-bit"
