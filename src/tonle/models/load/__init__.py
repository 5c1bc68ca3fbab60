"""`load`: from a model's files, or a live `transformers` model, to a `Decoder`.

Does: Hugging Face folders (safetensors), GGUF files, live models. Does not: find or fetch files (`source.py`).
"""

from __future__ import annotations

from typing import Any

import torch

from tonle.models.decoder import Decoder
from tonle.models.source import ModelSource


def load(model: ModelSource | Any, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Decoder:
    """Build the decoder. Raises `ModelError` if the files are broken or the model is not supported.

    `device`: None = CPU for files, its own for a live model. `dtype`: None = float32 on a CPU, elsewhere the stored one
    where that is a half-precision type and bfloat16 otherwise, but for small quantized files (`precision.py`); a live model
    keeps its own.
    """
    if not isinstance(model, ModelSource):
        from tonle.models.load.transformers_model import load_live

        return load_live(model, device=device, dtype=dtype)
    device = device or torch.device("cpu")
    if model.kind == "gguf":
        from tonle.models.load.gguf import load_gguf

        return load_gguf(model.path, device=device, dtype=dtype)
    from tonle.models.load.folder import load_folder

    return load_folder(model, device=device, dtype=dtype)
