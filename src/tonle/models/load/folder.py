"""Weights from a Hugging Face folder: one safetensors file, or several with an index; quantized or not.

Does: check every tensor's presence and shape before reading any. Does not: read pickled weights.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from tonle.config.model_json import read_json
from tonle.errors import ModelError
from tonle.models.decoder import Decoder
from tonle.models.layers import Quantized, Weight
from tonle.models.load import default_dtype
from tonle.models.load.places import places, stored_shapes
from tonle.models.load.quantized import QuantizedTensors, quantization_settings, read_form
from tonle.models.load.stored_tensors import StoredTensors, Tensors
from tonle.models.load.text_tensors import TextTensors
from tonle.models.quantize import Quantization, assemble_quantized
from tonle.models.read_spec import read_spec
from tonle.models.source import ModelSource
from tonle.models.spec import ModelSpec
from tonle.models.text_part import is_around_text
from tonle.models.weights import EMBEDDING, LM_HEAD, Fetch, Owned, check_tensors

# Files beside config.json that older checkpoints have their settings in, and their methods
_OLDER_SETTINGS = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


def load_folder(
    source: ModelSource, *, device: torch.device, dtype: torch.dtype | None, context: int | None = None,
    quantization: Quantization | None = None,
) -> Decoder:  # fmt: skip
    spec, fetch = open_folder(source, context)
    dtype = dtype or default_dtype(spec.dtype, device)
    return Decoder(spec, assemble_quantized(spec, fetch, Owned(device, dtype), quantization, device, dtype))


def open_folder(source: ModelSource, context: int | None = None) -> tuple[ModelSpec, Fetch]:
    """The spec, and tensors as stored by our names. Everything is checked; tensors are read when asked for."""
    spec = read_spec(source).for_context(context)
    tensors = open_tensors(source)
    if is_around_text(_config(source)):
        tensors = TextTensors(tensors, spec.hidden_size)
    # Old checkpoints carry rotary tables; tied ones sometimes a second copy of the embedding.
    rotary = [name for name in tensors.shapes if name.endswith("rotary_emb.inv_freq")]
    where = places(spec, tensors.shapes)
    expected = stored_shapes(spec, where)
    ignored = [*rotary, *_biases_of_zeros(tensors, expected), *[LM_HEAD] * spec.tie_embeddings]
    check_tensors(str(source.path), expected, tensors.shapes, ignored)
    _check_types(source, tensors, {place.stored for place in where.values()})

    def fetch(name: str) -> Weight:
        place = where[name]
        stored = tensors.get(place.stored, place.expert)
        if name == EMBEDDING and isinstance(stored, Quantized):  # read by rows, which no kernel unpacks
            stored = stored.unpacked(torch.float32)
        return replace(place, expert=None).of(stored)

    return spec, fetch


def _biases_of_zeros(tensors: Tensors, expected: Collection[str]) -> list[str]:
    """GPTQ checkpoints often have a bias for every matrix: zeros, where the model has none."""
    others = [name for name in tensors.shapes if name.endswith(".bias") and name not in expected]
    return [name for name in others if isinstance(bias := tensors.get(name), torch.Tensor) and not bias.float().any()]


def _check_types(source: ModelSource, tensors: Tensors, used: set[str]) -> None:
    """Integers stand for weights only with scales beside them, in a form of `quantized`."""
    for name in sorted(used & tensors.integers.keys()):
        raise ModelError(
            f"{source.path}: tensor {name} has type {tensors.integers[name]}, and its config names no quantization that "
            f"would say what its integers stand for"
        )


def open_tensors(source: ModelSource) -> Tensors:
    """By the checkpoint's names; a quantized matrix is one of them."""
    config = _config(source)
    try:
        form = read_form(config)
    except ModelError as error:
        raise ModelError(f"{source.path}: {error.message}") from None
    stored = StoredTensors(source.path)
    return stored if form is None else QuantizedTensors(stored, form)


def quantization_method(source: ModelSource) -> str | None:
    """As the checkpoint calls it; None if it is not quantized."""
    settings = quantization_settings(_config(source))
    return str(settings.get("quant_method")) if isinstance(settings, dict) else None


def _config(source: ModelSource) -> dict[str, Any]:
    """`config.json`, with the quantization that older checkpoints describe elsewhere."""
    config = read_json(source.path / "config.json")
    for name, method in _OLDER_SETTINGS.items():
        if quantization_settings(config) is None and (file := source.path / name).is_file():
            settings = read_json(file)
            inner = settings.get("quantization")  # modelopt's are beside what wrote them
            config["quantization_config"] = {"quant_method": method, **(inner if isinstance(inner, dict) else settings)}
    return config
