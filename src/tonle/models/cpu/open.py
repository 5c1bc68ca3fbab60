"""From a model's files to a decoder for the CPU: packed weights, and float32 beside them where memory allows."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from tonle.models.decoder import Decoder
from tonle.models.load import load
from tonle.models.source import ModelSource
from tonle.models.spec import ModelSpec
from tonle.models.weights import EMBEDDING, tensor_shapes

if TYPE_CHECKING:  # these bring numba
    from tonle.models.cpu.cpu_decoder import CpuDecoder
    from tonle.models.cpu.stored import Stored

log = logging.getLogger("tonle.models")

Array = npt.NDArray[Any]

_FLOAT_SHARE = 0.25  # of the machine's memory: above this a second, float32 form of the weights is too much


def open_cpu(source: ModelSource, *, activation_bits: int = 16, wait_for_kernels: bool = False) -> Decoder | CpuDecoder:
    """The fastest decoder this machine has for the model; says in the log which, and why not a faster one.

    Until its kernels are compiled, once per machine, it runs through torch, unless `wait_for_kernels`."""
    if importlib.util.find_spec("numba") is None:
        log.info("numba is not installed: every step runs through torch, in float32")
        return load(source, device=torch.device("cpu"))
    from tonle.models.cpu.cpu_decoder import CpuDecoder
    from tonle.models.cpu.pack import pack, why_not

    spec, matrix, vector = _weights(source)
    if (reason := why_not(spec)) is not None:
        log.info("every step runs through torch, in float32: %s", reason)
        return load(source, device=torch.device("cpu"))
    fits = _float_bytes(spec) <= _FLOAT_SHARE * _memory_bytes()
    load_slow = partial(load, source, device=torch.device("cpu")) if fits else None
    decoder = CpuDecoder(
        spec, pack(spec, matrix, vector), _embed(matrix(EMBEDDING)), load_slow, activation_bits=activation_bits
    )
    _return_memory()
    if wait_for_kernels:
        decoder.wait_for_kernels()
    return decoder


def _weights(source: ModelSource) -> tuple[ModelSpec, Callable[[str], Stored], Callable[[str], Array]]:
    """The spec, and by our names matrices as stored and vectors as float32."""
    from tonle.models.cpu.stored import from_floats, from_gguf

    if source.kind == "gguf":
        from tonle.models.load.gguf import GGUFWeights

        file = GGUFWeights(source.path)

        def matrix(name: str) -> Stored:
            stored, order = from_gguf(file.stored(name)), file.row_order(name)
            return stored if order is None else stored.take(order)

        return file.spec, matrix, lambda name: file.fetch(name).float().numpy()
    from tonle.models.load.folder import open_folder

    spec, fetch = open_folder(source)
    return spec, lambda name: from_floats(fetch(name).float().numpy()), lambda name: fetch(name).float().numpy()


def _embed(stored: Stored) -> Callable[[torch.Tensor, Array], None]:
    def embed(tokens: torch.Tensor, out: Array) -> None:
        out[...] = stored.take(tokens.numpy()).floats()

    return embed


def _return_memory() -> None:
    """What unpacking and packing used goes back to the system, where the C library can do that."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _float_bytes(spec: ModelSpec) -> int:
    return 4 * sum(int(np.prod(shape)) for shape in tensor_shapes(spec).values())


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
