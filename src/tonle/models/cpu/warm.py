"""Compiling the kernels, off to the side: in a process of its own, once per machine and kind of weights.

Numba keeps what it compiled in the cache directory. A marker says that this version of the kernels is there for these types
of weights; as long as it is not, steps run through torch and a child process (`python -m tonle.models.cpu.warm TYPES`)
compiles.
"""

from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np

from tonle.models.cpu.step import Buffers, Inputs, Matrix, Packed, forward, product
from tonle.models.cpu.vector import GROUP, HALF, LANES, ROWS
from tonle.models.source import cache_dir

log = logging.getLogger("tonle.models")

_KINDS = ("qkv", "o", "gate_up", "down", "head")


def types_of(packed: Packed) -> str:
    """What the compiled code depends on: the dtypes of each kind of matrix."""
    matrices = [getattr(packed, kind) for kind in _KINDS]
    return ",".join(f"{m.weights.dtype.name}:{m.scale.dtype.name}:{m.minimum.dtype.name}" for m in matrices)


def is_warm(types: str) -> bool:
    return _marker(types).exists()


def warm_later(types: str, done: Callable[[], None]) -> None:
    """Compile in a child process; call `done` from a thread of ours when it has succeeded."""

    def wait() -> None:
        began = time.monotonic()
        log.info("compiling the CPU kernels for this machine, once; until then steps run through torch")
        command = [sys.executable, "-m", "tonle.models.cpu.warm", types]
        result = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if result.returncode:
            log.warning(
                "the CPU kernels could not be compiled; steps stay with torch: %s", result.stderr.strip()[-500:]
            )
            return
        done()
        log.info("the CPU kernels are ready, after %.0f s", time.monotonic() - began)

    threading.Thread(target=wait, name="tonle-warm", daemon=True).start()


def compile_for(types: str) -> None:
    """Compile by running a model of one token and one layer with weights of these types."""
    dim, size = ROWS, ROWS  # one head, one block of everything
    matrices = {}
    for kind, spelled in zip(_KINDS, types.split(","), strict=True):
        weights, scale, minimum = (np.dtype(name) for name in spelled.split(":"))
        width = HALF if weights == np.uint8 else ROWS
        blocks = {"qkv": 3, "gate_up": 2}.get(kind, 1)
        groups = (1, blocks, size // GROUP, ROWS)
        matrices[kind] = Matrix(
            np.zeros((1, blocks, size, width), weights), np.zeros(groups, scale), np.zeros(groups, minimum)
        )
    floats = np.zeros((1, size), np.float32)
    none = np.zeros((1, 0), np.float32)
    packed = Packed(
        **matrices, qkv_bias=np.zeros((1, 3 * dim), np.float32), input_norm=floats, mlp_norm=floats,
        final_norm=floats[0], q_norm=none, k_norm=none, windows=np.zeros(1, np.int64),
    )  # fmt: skip
    one = np.zeros((1, 1, size), np.float32)
    buffers = Buffers(
        hidden=floats.copy(), qkv=np.zeros((1, 3 * dim), np.float32), q=np.zeros((1, 1, dim), np.float32),
        mixed=floats.copy(), act=floats.copy(), logits=floats.copy(), normed=one.copy(), total=one.copy(),
        tile=np.zeros((1, GROUP, ROWS), np.float32), sums=np.zeros((1, size), np.float32), scores=floats.copy(),
        scratch=np.zeros((1, size), np.int32),
    )  # fmt: skip
    zero = np.zeros(1, np.int64)
    step = Inputs(zero, zero, zero, np.zeros((1, 1), np.int32), zero, floats, floats)
    cache = np.zeros((1, 1, 1, 1, dim), np.float32)
    forward(packed, step, buffers, cache, cache.copy(), np.float32(1e-5), np.zeros(8, np.int64), 0, 1)
    product(packed.gate_up, 0, floats, np.zeros((1, 2 * ROWS), np.float32), 0, 1, buffers)
    _marker(types).touch()


def _marker(types: str) -> Path:
    sources = b"".join(file.read_bytes() for file in sorted(Path(__file__).parent.glob("*.py")))
    key = f"{types} {LANES} {numba.__version__}".encode() + sources
    folder = cache_dir() / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.blake2b(key, digest_size=8).hexdigest()}.ready"


if __name__ == "__main__":
    compile_for(sys.argv[1])
