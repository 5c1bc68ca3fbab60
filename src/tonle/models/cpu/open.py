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
from tonle.models.layers import Quantized
from tonle.models.load import load
from tonle.models.quantize import Quantization, quantizing
from tonle.models.source import ModelSource
from tonle.models.spec import ModelSpec
from tonle.models.weights import EMBEDDING, LM_HEAD, Fetch, tensor_shapes, vector

if TYPE_CHECKING:  # these bring numba
    from tonle.models.cpu.cpu_decoder import CpuDecoder
    from tonle.models.cpu.stored import Stored

log = logging.getLogger("tonle.models")

Array = npt.NDArray[Any]

_FLOAT_SHARE = 0.25  # of the machine's memory: above this a second, float32 form of the weights is too much


def open_cpu(
    source: ModelSource, *, activation_bits: int = 16, cache_dtype: torch.dtype | None = torch.float32,
    block_size: int = 16, wait_for_kernels: bool = False, context: int | None = None,
    quantization: Quantization | None = None,
) -> Decoder | CpuDecoder:  # fmt: skip
    """The fastest decoder this machine has for the model; says in the log which, and why not a faster one.

    Until its kernels are compiled, once per machine, it runs through torch, unless `wait_for_kernels`. `cache_dtype`: of keys
    and values, in blocks of `block_size` tokens; None = what suits the weights (`CpuDecoder.cache_dtype`). `context`: the
    longest request there will be, tokens (`ModelSpec.for_context`). `quantization`: None = matrices as they are stored."""
    load_slow = partial(load, source, device=torch.device("cpu"), context=context, quantization=quantization)
    if importlib.util.find_spec("numba") is None:
        log.info("numba is not installed: every step runs through torch, in float32")
        return load_slow()
    from tonle.models.cpu.cpu_decoder import CpuDecoder
    from tonle.models.cpu.pack import pack, why_not

    spec, matrix, vector = _weights(source, context, quantization)
    if (reason := why_not(spec)) is not None:
        log.info("every step runs through torch, in float32: %s", reason)
        return load_slow()
    fits = _float_bytes(spec) <= _FLOAT_SHARE * _memory_bytes()
    own_head = LM_HEAD if quantization is not None and quantization.to != "none" else None
    packed = pack(spec, matrix, vector, head=own_head)
    embed = _embed(matrix(EMBEDDING))
    decoder = CpuDecoder(
        spec, packed, embed, load_slow if fits else None, activation_bits=activation_bits, cache_dtype=cache_dtype,
        block_size=block_size,
    )  # fmt: skip
    _return_memory()
    if wait_for_kernels:
        decoder.wait_for_kernels()
    return decoder


def _weights(
    source: ModelSource, context: int | None, quantization: Quantization | None
) -> tuple[ModelSpec, Callable[[str], Stored], Callable[[str], Array]]:
    """The spec, and by our names matrices as stored, or as `quantization` asks for, and vectors as float32."""
    from tonle.models.cpu.stored import from_floats, from_gguf, from_quantized

    if source.kind == "gguf":
        from tonle.models.load.gguf import GGUFWeights

        file = GGUFWeights(source.path, context)
        spec: ModelSpec = file.spec
        fetch: Fetch = file.fetch
    else:
        from tonle.models.load.folder import open_folder

        spec, fetch = open_folder(source, context)
    wanted = fetch
    if quantization is not None:
        wanted = quantizing(spec, fetch, quantization, torch.device("cpu"), torch.float32)

    def matrix(name: str) -> Stored:
        if source.kind == "gguf" and (quantization is None or name == EMBEDDING):
            stored, order = from_gguf(file.stored(name)), file.row_order(name)
            return stored if order is None else stored.take(order)
        found = wanted(name)
        return from_quantized(found) if isinstance(found, Quantized) else from_floats(found.float().numpy())

    return spec, matrix, lambda name: vector(fetch, name).float().numpy()


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
