"""Weights of a live `transformers` model: shared, not copied.

Does: read the model's own config and refer to its tensors where they are. Does not: import transformers, move or cast
anything; training the model further is seen by the decoder.
"""

from __future__ import annotations

from typing import Any

import torch

from tonle.errors import ModelError
from tonle.models.decoder import Decoder
from tonle.models.read_spec import from_hf_config
from tonle.models.spec import FAMILIES, ModelSpec
from tonle.models.weights import LM_HEAD, Shared, assemble, check_tensors, tensor_shapes


def load_live(model: Any, *, device: torch.device | None, dtype: torch.dtype | None) -> Decoder:
    spec = live_spec(model)
    tensors: dict[str, torch.Tensor] = model.state_dict()
    where = f"the live {type(model).__name__}"
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    check_tensors(where, tensor_shapes(spec), shapes, [LM_HEAD] if spec.tie_embeddings else [])
    _check_placement(where, tensors, device, dtype)
    return Decoder(spec, assemble(spec, lambda name: tensors[name], Shared()))


def live_spec(model: Any) -> ModelSpec:
    """The spec of a live model. Raises `ModelError` if its class is not one we know."""
    name = type(model).__name__
    if hasattr(model, "merge_and_unload"):
        raise ModelError(
            f"{name} carries adapters; pass its base model and the adapter's folder as lora=, or model.merge_and_unload()"
        )
    if name not in FAMILIES:
        raise ModelError(f"live models of class {name} are not supported; supported: {', '.join(FAMILIES)}")
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise ModelError(f"the live {name} is quantized; load it without a quantization_config")
    generation = getattr(model, "generation_config", None)
    config = {**model.config.to_dict(), "architectures": [name], "dtype": str(model.dtype)}
    return from_hf_config(config, generation.to_dict() if generation is not None else None)


def _check_placement(
    where: str, tensors: dict[str, torch.Tensor], device: torch.device | None, dtype: torch.dtype | None
) -> None:
    devices = {tensor.device for tensor in tensors.values()}
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(devices) > 1 or any(found.type == "meta" for found in devices):
        raise ModelError(f"{where} is spread over {', '.join(map(str, devices))}; load it onto one device")
    if len(dtypes) > 1:
        raise ModelError(f"{where} mixes dtypes {', '.join(map(str, dtypes))}; cast it to one with model.to(dtype)")
    (own_device,), (own_dtype,) = devices, dtypes
    same_device = device is None or (device.type == own_device.type and device.index in (None, own_device.index))
    if not same_device:
        raise ModelError(f"{where} is on {own_device}, not {device}; move it with model.to(), or leave device='auto'")
    if dtype is not None and dtype != own_dtype:
        raise ModelError(f"{where} has dtype {own_dtype}, not {dtype}; cast it with model.to(), or leave dtype='auto'")
