"""Weights from a Hugging Face folder: one safetensors file, or several with an index.

Does: check every tensor's presence and shape before reading any. Does not: read pickled weights or quantized
checkpoints.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tonle.config.model_json import read_json
from tonle.errors import ModelError
from tonle.models.decoder import Decoder
from tonle.models.load import default_dtype
from tonle.models.read_spec import read_spec
from tonle.models.safetensors_file import open_safetensors
from tonle.models.source import ModelSource
from tonle.models.spec import ModelSpec
from tonle.models.weights import LM_HEAD, Fetch, Owned, Shape, assemble, check_tensors, tensor_shapes

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_folder(source: ModelSource, *, device: torch.device, dtype: torch.dtype | None) -> Decoder:
    spec, fetch = open_folder(source)
    return Decoder(spec, assemble(spec, fetch, Owned(device, dtype or default_dtype(spec.dtype, device))))


def open_folder(source: ModelSource) -> tuple[ModelSpec, Fetch]:
    """The spec, and tensors as stored by our names. Everything is checked; tensors are read when asked for."""
    spec = read_spec(source)
    _refuse_quantized(source.path)
    files = [open_safetensors(file) for file in _weight_files(source.path)]
    homes = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a mapping
    shapes: dict[str, Shape] = {name: tuple(file.get_slice(name).get_shape()) for name, file in homes.items()}
    # Old checkpoints carry rotary tables; tied ones sometimes a second copy of the embedding.
    ignored = [name for name in homes if name.endswith("rotary_emb.inv_freq")] + [LM_HEAD] * spec.tie_embeddings
    check_tensors(str(source.path), tensor_shapes(spec), shapes, ignored)

    def fetch(name: str) -> torch.Tensor:
        tensor: torch.Tensor = homes[name].get_tensor(name)
        return tensor

    return spec, fetch


def _refuse_quantized(folder: Path) -> None:
    quantization = read_json(folder / "config.json").get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ModelError(
            f"{folder}: checkpoints quantized with {method!r} are not supported; "
            f"use the original checkpoint, or a GGUF file of the model"
        )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index}: has no weight_map of tensors to files")
        files = [folder / name for name in sorted(set(weight_map.values()))]
        for file in files:
            if not file.is_file():
                raise ModelError(f"{file}: is named by {_INDEX} but missing")
        return files
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if any(folder.glob("*.bin")):
        raise ModelError(f"{folder}: holds pickled weights (.bin) only; convert them to safetensors")
    raise ModelError(f"{folder}: has neither {_SINGLE} nor {_INDEX}")
