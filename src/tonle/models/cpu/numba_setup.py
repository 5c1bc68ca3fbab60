"""What numba compiles for, and where it keeps the result. Must run before the first kernel is defined."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba

from tonle.config.cache_dir import cache_dir


@functools.cache
def kernels_dir() -> Path:
    """Where compiled code lies: a folder for each version of the kernels, installation and kind of CPU."""
    cpu = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"
    return cache_dir() / "kernels" / _version(Path(__file__).parent, f"{numba.__version__} {cpu}")


def _version(folder: Path, compiler: str) -> str:
    """Changes with all that numba asks for before it takes what it has kept, so that a folder is whole or empty.

    It asks for the path, the size and the time of a file, and for the CPU; but for the file of the outermost function only, and
    would keep code whose inner functions have changed.
    """
    known = hashlib.blake2b(f"{compiler} {folder}".encode(), digest_size=8)
    for file in sorted(folder.glob("*.py")):
        known.update(f"{file.name} {file.stat().st_mtime_ns}".encode() + file.read_bytes())
    return known.hexdigest()


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
