"""`read_weights`: the safetensors of an encoder as the tensors of its spec.

Does: find names with and without the prefix of a head, check shapes, make queries, keys and values one matrix. Does not:
compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tonle.errors import ModelError
from tonle.models.safetensors_file import open_safetensors
from tonle.workers.encoders.spec import EncoderSpec

_OLD_NAMES = ((".gamma", ".weight"), (".beta", ".bias"))  # of the first BERT checkpoints


@dataclass(frozen=True, slots=True)
class Linear:
    """Also a norm: a weight and perhaps a bias."""

    weight: Tensor  # (out, in), or (size,)
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Layer:
    qkv: Linear  # (3 * hidden, hidden)
    out: Linear
    attention_norm: Linear | None  # None: ModernBERT's first layer, whose input has been normalized
    up: Linear
    down: Linear
    mlp_norm: Linear


@dataclass(frozen=True, slots=True)
class EncoderWeights:
    words: Tensor  # (vocab, hidden)
    positions: Tensor | None
    types: Tensor | None
    norm: Linear
    layers: list[Layer]
    final_norm: Linear | None


class Tensors:
    """Those of all safetensors files of a folder, read once and on their device."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises `ModelError`."""
        files = sorted(folder.glob("model*.safetensors"))
        if not files:
            raise ModelError(
                f"{folder} has no model.safetensors. If it has pytorch_model.bin, save it again with "
                "save_pretrained(folder, safe_serialization=True); or export it as model.onnx"
            )
        self._folder = folder
        self._found: dict[str, Tensor] = {}
        for file in files:
            opened = open_safetensors(file)
            for name in opened.keys():  # noqa: SIM118 (it is no dict)
                tensor = opened.get_tensor(name)
                if tensor.is_floating_point():
                    self._found[_new_name(name)] = tensor.to(device=device, dtype=dtype)

    def prefix(self, ending: str) -> str:
        """What stands before a name in this checkpoint: empty, or `bert.`. Raises `ModelError`."""
        for name in self._found:
            if name == ending or name.endswith("." + ending):
                return name.removesuffix(ending)
        raise ModelError(
            f"{self._folder}: the weights have no {ending}; they are not of the model that config.json names"
        )

    def get(self, name: str, *shape: int) -> Tensor:
        """Raises `ModelError`."""
        found = self._found.get(name)
        if found is None:
            raise ModelError(f"{self._folder}: the weights have no {name}")
        if found.shape != shape:
            raise ModelError(f"{self._folder}: {name} has the shape {tuple(found.shape)}; config.json says {shape}")
        return found

    def linear(self, name: str, *shape: int) -> Linear:
        """With its bias, if there is one."""
        has_bias = f"{name}.bias" in self._found
        return Linear(self.get(f"{name}.weight", *shape), self.get(f"{name}.bias", shape[0]) if has_bias else None)


def _new_name(name: str) -> str:
    for old, new in _OLD_NAMES:
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def read_weights(tensors: Tensors, spec: EncoderSpec) -> EncoderWeights:
    """Raises `ModelError`."""
    names, size = spec.family.names, spec.hidden_size
    prefix = tensors.prefix(f"{names.words}.weight")
    positions = types = None
    if names.positions:
        positions = tensors.get(f"{prefix}{names.positions}.weight", spec.max_tokens + spec.position_offset, size)
    if names.types:
        types = tensors.get(f"{prefix}{names.types}.weight", spec.num_types, size)
    return EncoderWeights(
        words=tensors.get(f"{prefix}{names.words}.weight", spec.vocab_size, size), positions=positions, types=types,
        norm=tensors.linear(prefix + names.norm, size),
        layers=[_read_layer(tensors, prefix, spec, number) for number in range(spec.num_layers)],
        final_norm=tensors.linear(prefix + names.final_norm, size) if names.final_norm else None,
    )  # fmt: skip


def _read_layer(tensors: Tensors, prefix: str, spec: EncoderSpec, number: int) -> Layer:
    names, size, inner = spec.family.names, spec.hidden_size, spec.intermediate_size
    start = prefix + names.layer.format(number)
    parts = [tensors.linear(start + name, 3 * size // len(names.qkv), size) for name in names.qkv]
    biases = [part.bias for part in parts if part.bias is not None]
    is_normal_before = spec.family.is_pre_norm and number == 0
    return Layer(
        qkv=Linear(torch.cat([part.weight for part in parts]), torch.cat(biases) if biases else None),
        out=tensors.linear(start + names.out, size, size),
        attention_norm=None if is_normal_before else tensors.linear(start + names.attention_norm, size),
        up=tensors.linear(start + names.up, inner * (2 if spec.family.is_gated else 1), size),
        down=tensors.linear(start + names.down, size, inner),
        mlp_norm=tensors.linear(start + names.mlp_norm, size),
    )
