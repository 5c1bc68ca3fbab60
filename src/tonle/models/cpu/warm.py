"""Compiling the kernels, off to the side: in a process of its own, once per machine and kind of weights.

Numba keeps what it compiled in the cache directory. A marker says that this version of the kernels is there for these types
of weights; as long as it is not, steps run through torch and a child process (`python -m tonle.models.cpu.warm TYPES`)
compiles.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import logging
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tonle.models.cpu.cpu_cache import Cache
from tonle.models.cpu.cpu_experts import PackedExperts
from tonle.models.cpu.low_rank import NUM_FIELDS, Adapters
from tonle.models.cpu.numba_setup import kernels_dir
from tonle.models.cpu.pieces import EXPERTS, NUM_SETTINGS, PERCEPTRON
from tonle.models.cpu.products import PackedMatrix
from tonle.models.cpu.step import Inputs, PackedWeights, forward, product
from tonle.models.cpu.vector import GROUP, HALF, LANES, ROWS
from tonle.models.cpu.workspace import Workspace
from tonle.models.inputs import KVCache
from tonle.models.layer_order import Piece

log = logging.getLogger("tonle.models")

_POLL_S = 0.2
_ADAPTERS = "adapters"
_EXPERTS = "experts="
_KINDS = ("qkv", "o", "gate_up", "down", "head")
_EXPERT_KINDS = ("router", "gate_up", "down")


def types_of(packed: PackedWeights, activation_bits: int, cache_dtype: torch.dtype = torch.float32) -> str:
    """What the compiled code depends on: the dtypes and the layout of each kind of matrix, the form of their input, the dtype
    of keys and values."""
    spelled = [_spelled(getattr(packed, kind)) for kind in _KINDS]
    spelled += [str(activation_bits), str(cache_dtype).removeprefix("torch.")]
    if packed.experts is not None:
        spelled.append(_EXPERTS + "+".join(_spelled(getattr(packed.experts, kind)) for kind in _EXPERT_KINDS))
    return ",".join(spelled)


def _spelled(matrix: PackedMatrix) -> str:
    parts = (matrix.weights, matrix.scale, matrix.minimum)
    return ":".join((*(part.dtype.name for part in parts), str(matrix.weights.ndim)))


def with_adapters(types: str) -> str:
    """The same for steps with adapters, which are compiled apart: a server without them does not wait for that."""
    return f"{types},{_ADAPTERS}"


def is_warm(types: str) -> bool:
    return _marker(types).exists()


def warm_later(types: str, done: Callable[[], None]) -> threading.Thread:
    """Compile in a child process; call `done` from a thread of ours, which is returned, when it has succeeded. The child goes on
    if this program ends first: otherwise programs that run shorter than a compilation would stay slow for ever."""
    command = [sys.executable, "-m", "tonle.models.cpu.warm", types]
    output = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed by the thread below)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=output, start_new_session=True
    )
    leaving = threading.Event()
    what, steps = "CPU kernels", "steps"
    if types.endswith(f",{_ADAPTERS}"):
        what, steps = "CPU kernels for adapters", "steps with adapters"

    def wait() -> None:
        began = time.monotonic()
        log.info("compiling the %s for this machine, once, to %s; until then %s run through torch",
                 what, kernels_dir(), steps)  # fmt: skip
        with output:
            while child.poll() is None:
                if leaving.wait(_POLL_S):
                    return
            if child.returncode:
                output.seek(0)
                complaint = output.read().strip()[-500:]
                log.warning("the %s could not be compiled; %s stay with torch: %s", what, steps, complaint)
                return
        done()
        log.info("the %s are ready, after %.0f s", what, time.monotonic() - began)

    thread = threading.Thread(target=wait, name="tonle-warm", daemon=True)
    thread.start()

    def leave() -> None:
        """torch must not be at work in a thread while the interpreter is taken down: it aborts the program."""
        leaving.set()
        thread.join()

    atexit.register(leave)
    return thread


def compile_once(types: str) -> None:
    """Compile, unless another process does or did so meanwhile: engines that start together would do the same work.

    One at a time, whatever the types: numba's index of what it compiled is rewritten with every addition.
    """
    with (_marker(types).parent / "compiling.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends with the process, however that ends
        if not is_warm(types):
            compile_for(types)


def compile_for(types: str) -> None:
    """Compile by running a model of one token and one layer with weights of these types."""
    spelled = types.split(",")
    activation_bits, cache_dtype, *more = spelled[len(_KINDS) :]
    experts = next((part.removeprefix(_EXPERTS) for part in more if part.startswith(_EXPERTS)), None)
    packed = _tiny_weights(spelled[: len(_KINDS)], experts)
    spec: Any = SimpleNamespace(
        hidden_size=ROWS, intermediate_size=ROWS, q_size=ROWS, num_heads=1, head_dim=ROWS, vocab_size=ROWS
    )
    workspace = Workspace(spec, packed, num_threads=1, activation_bits=int(activation_bits))
    floats = np.zeros((1, ROWS), np.float32)
    buffers = workspace.cut(1, ROWS)._replace(logits=floats.copy())
    buffers.hidden[...] = 0
    zero = np.zeros(1, np.int64)
    step = Inputs(
        row_of=zero, spans=np.array([[0, 1]]), longest=1, positions=zero, slots=zero, tables=np.zeros((1, 1), np.int32),
        wanted=zero, places=zero, cos=floats[None], sin=floats[None],
    )  # fmt: skip
    adapters = _no_adapters() if _ADAPTERS in more else None
    kv = KVCache(num_layers=1, num_blocks=1, block_size=1, num_kv_heads=1, head_dim=ROWS, dtype=getattr(torch, cache_dtype),
                 device=torch.device("cpu"))  # fmt: skip
    forward(packed, step, buffers, adapters, Cache.of(kv, 1), np.float32(1e-5), np.zeros(8, np.int64), 0, 1)
    out = np.zeros((1, 2 * ROWS), np.float32)
    product(packed.gate_up, 0, floats, buffers.to_gate_up, out, workspace.scratch, 0, 1)
    _marker(types).touch()


def _no_adapters() -> Adapters:
    """A step's adapters, by type; the one token has none."""
    floats, none = np.zeros((1, ROWS), np.float32), np.zeros((0, 3), np.int64)
    return Adapters(
        np.zeros((1, 1, 4, NUM_FIELDS), np.int64), np.zeros((4, 3, 1, 2), np.int64), none, none, floats, floats
    )


def _tiny_matrix(spelled: str, blocks: int) -> PackedMatrix:
    """Of one layer, ROWS wide."""
    *names, ndim = spelled.split(":")
    weights, scale, minimum = (np.dtype(name) for name in names)
    width = HALF if weights == np.uint8 else ROWS
    shape = (1, blocks, ROWS, width) if ndim == "4" else (1, blocks, ROWS // 4, width, 4)
    groups = (1, blocks, ROWS // GROUP, ROWS)
    return PackedMatrix(np.zeros(shape, weights), np.zeros(groups, scale), np.zeros(groups, minimum))


def _tiny_experts(spelled: str) -> PackedExperts:
    """One expert."""
    router, gate_up, down = spelled.split("+")
    none = np.zeros((1, 0), np.float32)
    return PackedExperts(
        router=_tiny_matrix(router, 1), gate_up=_tiny_matrix(gate_up, 2), down=_tiny_matrix(down, 1), router_bias=none,
        gate_up_bias=none, down_bias=none, num_experts=1, per_token=1, normed=1, shared_gate=0, activation=0,
        clamp=np.float32(0),
    )  # fmt: skip


def _tiny_weights(kinds: list[str], experts: str | None) -> PackedWeights:
    """One layer, one head, one block of everything (two of gate_up, three of qkv); with experts or without."""
    blocks = {"qkv": 3, "gate_up": 2}
    matrices = {kind: _tiny_matrix(spelled, blocks.get(kind, 1)) for kind, spelled in zip(_KINDS, kinds, strict=True)}
    how = np.zeros((1, NUM_SETTINGS), np.int64)
    how[0, PERCEPTRON], how[0, EXPERTS] = 1, -1 if experts is None else 0
    floats, none = np.zeros((1, ROWS), np.float32), np.zeros((1, 0), np.float32)
    return PackedWeights(
        **matrices, order=np.arange(len(Piece))[None], how=how,
        scores=np.zeros((1, 2), np.float32), qkv_bias=np.zeros((1, 3 * ROWS), np.float32), o_bias=none, gate_up_bias=none,
        down_bias=none, input_norm=floats, attention_after=none, mlp_norm=floats, mlp_after=none, final_norm=floats[0],
        q_norm=none, k_norm=none, sinks=none, experts=None if experts is None else _tiny_experts(experts),
    )  # fmt: skip


def _marker(types: str) -> Path:
    folder = kernels_dir()
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{hashlib.blake2b(f'{types} {LANES}'.encode(), digest_size=8).hexdigest()}.ready"


if __name__ == "__main__":
    compile_once(sys.argv[1])
