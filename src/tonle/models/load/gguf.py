"""Weights from a GGUF file, dequantized.

Does: translate names, undo the interleaving of llama-type q and k rows, unpack the common block types. Does not:
compute on packed weights; they take the space of the dtype they are unpacked to.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from tonle.errors import ModelError
from tonle.models.decoder import Decoder
from tonle.models.gguf_file import GGUFFile
from tonle.models.load.precision import default_dtype
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


def load_gguf(path: Path, *, device: torch.device, dtype: torch.dtype | None) -> Decoder:
    file = GGUFFile(path)
    spec = from_gguf(file)
    expected = {gguf_name(name): shape for name, shape in tensor_shapes(spec).items()}
    check_tensors(str(path), expected, {name: tensor.shape for name, tensor in file.tensors.items()}, [_ROPE_TENSOR])
    for tensor in file.tensors.values():
        if tensor.type not in SUPPORTED:
            raise ModelError(
                f"{path}: tensor {tensor.name} has type {tensor.type.name}, which is not supported; "
                f"supported: {', '.join(type_.name for type_ in SUPPORTED)}"
            )
    interleaved = family(spec.architecture).gguf_interleaved

    def fetch(name: str) -> torch.Tensor:
        values = torch.from_numpy(dequantize(file.tensors[gguf_name(name)]))
        if interleaved and ".q_proj." in name:
            return _deinterleave(values, spec.num_heads)
        if interleaved and ".k_proj." in name:
            return _deinterleave(values, spec.num_kv_heads)
        return values

    return Decoder(spec, assemble(spec, fetch, Owned(device, dtype or default_dtype(spec.dtype, device))))


def gguf_name(name: str) -> str:
    """From our name of a tensor to GGUF's."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER_TENSOR.fullmatch(name)
    assert match is not None, name
    index, middle, kind = match.groups()
    return f"blk.{index}.{_LAYER_NAMES[middle]}.{kind}"


def _deinterleave(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from pairs (0, half, 1, half + 1, ...) back to two halves."""
    pairs = values.view(num_heads, -1, 2, *values.shape[1:])  # (heads, half, 2, ...)
    return pairs.transpose(1, 2).reshape(values.shape)
