"""Weights from a GGUF file, dequantized.

Does: find tensors by our names, undo the interleaving of llama-type q and k rows, unpack the common block types. Does not:
compute on packed weights; they take the space of the dtype they are unpacked to.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tonle.errors import ModelError
from tonle.models.decoder import Decoder
from tonle.models.gguf_file import GGUFFile, GGUFTensor
from tonle.models.load import default_dtype
from tonle.models.load.gguf_places import gguf_places
from tonle.models.load.places import halves, stored_shapes
from tonle.models.load.quants import SUPPORTED, dequantize
from tonle.models.quantize import Quantization, assemble_quantized
from tonle.models.read_gguf import ROPE_TENSORS, from_gguf
from tonle.models.weights import Owned, check_tensors, tensor_shapes


class GGUFWeights:
    """A checked file: its spec, and its tensors by our names. Tensors are read when asked for."""

    def __init__(self, path: Path, context: int | None = None) -> None:
        file = GGUFFile(path)
        self.spec = from_gguf(file).for_context(context)
        self._tensors = {name: _as_matrix(tensor) for name, tensor in file.tensors.items()}
        self._places = gguf_places(self.spec, file.tensors)
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        check_tensors(str(path), stored_shapes(self.spec, self._places), shapes, ROPE_TENSORS)
        for tensor in file.tensors.values():
            if tensor.type not in SUPPORTED:
                raise ModelError(
                    f"{path}: tensor {tensor.name} has type {tensor.type.name}, which is not supported; "
                    f"supported: {', '.join(type_.name for type_ in SUPPORTED)}"
                )

    def stored(self, name: str) -> GGUFTensor:
        """As the file has it; the rows may be in another order (`row_order`)."""
        place = self._places[name]
        return part_of(self._tensors[place.stored], place.expert, place.rows)

    def row_order(self, name: str) -> npt.NDArray[np.int64] | None:
        """Where our rows stand in what the file has; None: as they are."""
        pairs = self._places[name].pairs
        return None if pairs is None else halves(self.stored(name).shape[0], *pairs).numpy()

    def fetch(self, name: str) -> torch.Tensor:
        """Dequantized, rows in our order."""
        values, order = dequantize(self.stored(name)), self.row_order(name)
        return torch.from_numpy(values if order is None else values[order])


def _as_matrix(tensor: GGUFTensor) -> GGUFTensor:
    """The gate of shared experts is stored as a vector; it is a matrix with one row."""
    if tensor.name.endswith(".ffn_gate_inp_shexp.weight") and len(tensor.shape) == 1:
        return replace(tensor, shape=(1, *tensor.shape))
    return tensor


def part_of(tensor: GGUFTensor, expert: int | None, rows: slice | None) -> GGUFTensor:
    """Of a tensor that holds several of ours: a matrix of it, rows of it. Still the stored bytes, not copied."""
    shape, data = tensor.shape, tensor.data
    if expert is not None:
        shape, data = shape[1:], data.reshape(shape[0], -1)[expert]
    if rows is not None:
        data = data.reshape(shape[0], -1)[rows].reshape(-1)
        shape = (len(range(*rows.indices(shape[0]))), *shape[1:])
    return replace(tensor, shape=shape, data=data)


def load_gguf(
    path: Path, *, device: torch.device, dtype: torch.dtype | None, context: int | None = None,
    quantization: Quantization | None = None,
) -> Decoder:  # fmt: skip
    weights = GGUFWeights(path, context)
    spec = weights.spec
    num_weights = sum(math.prod(shape) for shape in tensor_shapes(spec).values())
    dtype = dtype or default_dtype(spec.dtype, device, num_weights=num_weights)
    return Decoder(spec, assemble_quantized(spec, weights.fetch, Owned(device, dtype), quantization, device, dtype))
