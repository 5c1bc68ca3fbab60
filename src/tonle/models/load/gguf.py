"""Weights from a GGUF file, dequantized.

Does: translate names, undo the interleaving of llama-type q and k rows, unpack the common block types. Does not:
compute on packed weights; they take the space of the dtype they are unpacked to.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tonle.errors import ModelError
from tonle.models.decoder import Decoder
from tonle.models.gguf_file import GGUFFile, GGUFTensor
from tonle.models.load import default_dtype
from tonle.models.load.quants import SUPPORTED, dequantize
from tonle.models.read_spec import from_gguf
from tonle.models.spec import family
from tonle.models.weights import EMBEDDING, FINAL_NORM, LM_HEAD, Owned, assemble, check_tensors, tensor_shapes

_TOP_NAMES = {EMBEDDING: "token_embd.weight", FINAL_NORM: "output_norm.weight", LM_HEAD: "output.weight"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_ROPE_TENSOR = "rope_freqs.weight"  # read with the spec


class GGUFWeights:
    """A checked file: its spec, and its tensors by our names. Tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        file = GGUFFile(path)
        self.spec = from_gguf(file)
        self._tensors = file.tensors
        self._interleaved = family(self.spec.architecture).gguf_interleaved
        expected = {gguf_name(name): shape for name, shape in tensor_shapes(self.spec).items()}
        check_tensors(str(path), expected, {name: t.shape for name, t in file.tensors.items()}, [_ROPE_TENSOR])
        for tensor in file.tensors.values():
            if tensor.type not in SUPPORTED:
                raise ModelError(
                    f"{path}: tensor {tensor.name} has type {tensor.type.name}, which is not supported; "
                    f"supported: {', '.join(type_.name for type_ in SUPPORTED)}"
                )

    def stored(self, name: str) -> GGUFTensor:
        """As the file has it; the rows may be in another order (`row_order`)."""
        return self._tensors[gguf_name(name)]

    def row_order(self, name: str) -> npt.NDArray[np.int64] | None:
        """Where our rows stand in the file: heads of llama-type q and k are stored as pairs, ours are two halves."""
        if not self._interleaved or not (".q_proj." in name or ".k_proj." in name):
            return None
        num_heads = self.spec.num_heads if ".q_proj." in name else self.spec.num_kv_heads
        pairs = np.arange(num_heads * self.spec.head_dim).reshape(num_heads, -1, 2)  # (heads, half, 2)
        return pairs.transpose(0, 2, 1).reshape(-1)

    def fetch(self, name: str) -> torch.Tensor:
        """Dequantized, rows in our order."""
        values, order = dequantize(self.stored(name)), self.row_order(name)
        return torch.from_numpy(values if order is None else values[order])


def load_gguf(path: Path, *, device: torch.device, dtype: torch.dtype | None) -> Decoder:
    weights = GGUFWeights(path)
    spec = weights.spec
    num_weights = sum(math.prod(shape) for shape in tensor_shapes(spec).values())
    storage = Owned(device, dtype or default_dtype(spec.dtype, device, num_weights=num_weights))
    return Decoder(spec, assemble(spec, weights.fetch, storage))


def gguf_name(name: str) -> str:
    """From our name of a tensor to GGUF's."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    assert match is not None, name
    index, middle, kind = match.groups()
    return f"blk.{index}.{_LAYER_NAMES[middle]}.{kind}"
