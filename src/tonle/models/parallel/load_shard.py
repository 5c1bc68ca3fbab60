"""`load_shard`: one rank's part of a model, from files or made up.

Does: read each tensor and keep what this rank needs of it. Does not: check whether the model can be divided so (`check_size`).
Matrices that are quantized while they are loaded are quantized whole and cut afterwards, so that a model has the same numbers
however many ranks it has.
"""

from __future__ import annotations

import math

import torch

from tonle.models.decoder import Decoder
from tonle.models.layers import Linear, LinearPart, Weight
from tonle.models.load import default_dtype
from tonle.models.load.folder import open_folder
from tonle.models.load.gguf import GGUFWeights
from tonle.models.parallel.shard import Shard
from tonle.models.quantize import Quantization, quantizing
from tonle.models.read_spec import read_spec
from tonle.models.source import ModelSource
from tonle.models.spec import ModelSpec
from tonle.models.weights import Fetch, Owned, assemble, random_tensors, tensor_shapes


def load_shard(
    source: ModelSource, shard: Shard, *, device: torch.device, dtype: torch.dtype | None, context: int | None = None,
    quantization: Quantization | None = None, made_up: bool = False,
) -> Decoder:  # fmt: skip
    """As `load`, of a part. `made_up`: random weights of the right shapes. Raises `ModelError`."""
    whole, fetch = _open(source, context, device, made_up=made_up)
    num_weights = None
    if source.kind == "gguf" and not made_up:
        num_weights = sum(math.prod(shape) for shape in tensor_shapes(whole).values())
    dtype = dtype or default_dtype(whole.dtype, device, num_weights=num_weights)
    own_head = False
    if quantization is not None:
        fetch, own_head = quantizing(whole, fetch, quantization, device, dtype), quantization.to != "none"

    def fetch_part(name: str) -> Weight:
        return shard.weight(whole, name, fetch(name))

    weights = assemble(shard.spec(whole), fetch_part, Owned(device, dtype), own_head=own_head)
    if whole.tie_embeddings and not own_head:  # the rows of the embedding that are this rank's part of the last matrix
        weights.lm_head = Linear(LinearPart(weights.embedding[shard.vocabulary(whole)]))
    return Decoder(shard.spec(whole), weights)


def _open(source: ModelSource, context: int | None, device: torch.device, *, made_up: bool) -> tuple[ModelSpec, Fetch]:
    """The spec of the whole model, and its tensors."""
    if made_up:
        spec = read_spec(source).for_context(context)
        return spec, random_tensors(spec, device, seed=0)
    if source.kind == "gguf":
        weights = GGUFWeights(source.path, context)
        return weights.spec, weights.fetch
    return open_folder(source, context)
