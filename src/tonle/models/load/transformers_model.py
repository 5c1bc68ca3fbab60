"""Weights of a live `transformers` model: shared, not copied.

Does: read the model's own config and refer to its tensors where they are. Does not: import transformers, move or cast
anything; training the model further is seen by the decoder.
"""

from __future__ import annotations

from typing import Any

import torch

from tonle.errors import ModelError
from tonle.models.decoder import Decoder
from tonle.models.families import FAMILIES
from tonle.models.layers import Weight
from tonle.models.load.places import places, stored_shapes
from tonle.models.quantize import Quantization, assemble_quantized
from tonle.models.read_spec import from_hf_config
from tonle.models.spec import ModelSpec
from tonle.models.text_part import is_around_text, text_name, text_part
from tonle.models.weights import EMBEDDING, LM_HEAD, Owned, Shared, check_tensors


def load_live(
    model: Any, *, device: torch.device | None, dtype: torch.dtype | None, context: int | None = None,
    quantization: Quantization | None = None,
) -> Decoder:  # fmt: skip
    spec = live_spec(model).for_context(context)
    tensors: dict[str, torch.Tensor] = model.state_dict()
    if is_around_text({"architectures": [type(model).__name__]}):
        tensors = {name: tensor for stored, tensor in tensors.items() if (name := text_name(stored)) is not None}
    where = f"the live {type(model).__name__}"
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    placed = places(spec, tensors)
    check_tensors(where, stored_shapes(spec, placed), shapes, [LM_HEAD] if spec.tie_embeddings else [])
    _check_placement(where, tensors, device, dtype)
    own = tensors[placed[EMBEDDING].stored]
    storage = Shared(own.dtype) if quantization is None else _SharedVectors(own.device, own.dtype)

    def fetch(name: str) -> Weight:
        return placed[name].of(tensors[placed[name].stored])

    return Decoder(spec, assemble_quantized(spec, fetch, storage, quantization, own.device, own.dtype))


class _SharedVectors(Owned):
    """For quantized matrices, which are memory of ours: all else stays where it is."""

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype)


def live_spec(model: Any) -> ModelSpec:
    """The spec of a live model. Raises `ModelError` if its class is not one we know."""
    name = type(model).__name__
    if hasattr(model, "merge_and_unload"):
        raise ModelError(
            f"{name} carries adapters; pass its base model and the adapter's folder as lora=, or model.merge_and_unload()"
        )
    config = text_part({**model.config.to_dict(), "architectures": [name], "dtype": str(model.dtype)})
    if config["architectures"][0] not in FAMILIES:
        raise ModelError(f"live models of class {name} are not supported; supported: {', '.join(FAMILIES)}")
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise ModelError(f"the live {name} is quantized; load it without a quantization_config")
    generation = getattr(model, "generation_config", None)
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
