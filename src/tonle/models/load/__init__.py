"""`load`: from a model's files, or a live `transformers` model, to a `Decoder`.

Does: Hugging Face folders (safetensors), GGUF files, live models. Does not: find or fetch files (`source.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from tonle.models.decoder import Decoder
from tonle.models.quantize import Quantization
from tonle.models.source import ModelSource
from tonle.models.spec import ModelSpec

_HALVES = {"bfloat16": torch.bfloat16, "BF16": torch.bfloat16, "float16": torch.float16, "F16": torch.float16}
# A small quantized model suffers from a second rounding: SmolLM2-135M (Q4_1) knows the capital of France in float32 and not in
# bfloat16. In float32 so many weights take 2 GB.
_SMALL_WEIGHTS = 500_000_000


def load(
    model: ModelSource | Any, *, device: torch.device | None = None, dtype: torch.dtype | None = None,
    context: int | None = None, quantization: Quantization | None = None,
) -> Decoder:  # fmt: skip
    """Build the decoder. Raises `ModelError` if the files are broken or the model is not supported.

    `device`: None = CPU for files, its own for a live model. `dtype`: None = float32 on a CPU, elsewhere the stored one
    where that is a half-precision type and bfloat16 otherwise, but for small quantized files (`default_dtype`); a live model
    keeps its own. `context`: the longest request there will be, tokens (`ModelSpec.for_context`). `quantization`: None =
    matrices as they are stored.
    """
    if not isinstance(model, ModelSource):
        from tonle.models.load.transformers_model import load_live

        return load_live(model, device=device, dtype=dtype, context=context, quantization=quantization)
    device = device or torch.device("cpu")
    if model.kind == "gguf":
        from tonle.models.load.gguf import load_gguf

        return load_gguf(model.path, device=device, dtype=dtype, context=context, quantization=quantization)
    from tonle.models.load.folder import load_folder

    return load_folder(model, device=device, dtype=dtype, context=context, quantization=quantization)


def stored_as(model: ModelSource | Any, spec: ModelSpec) -> str:
    """What the model's files hold: a dtype, a GGML type, or the method they were quantized with."""
    if not isinstance(model, ModelSource) or model.kind == "gguf":
        return spec.dtype
    from tonle.models.load.folder import quantization_method

    return quantization_method(model) or spec.dtype


def default_dtype(stored: str, device: torch.device, *, num_weights: int | None = None) -> torch.dtype:
    """float32 on a CPU, where half precision is slower. Elsewhere half precision, the stored one if it is; but float32 for
    quantized models of few weights, where `num_weights` is given."""
    if device.type == "cpu":
        return torch.float32
    if (
        stored not in _HALVES
        and stored not in ("float32", "F32")
        and num_weights is not None
        and num_weights <= _SMALL_WEIGHTS
    ):
        return torch.float32
    return _HALVES.get(stored, torch.bfloat16)
