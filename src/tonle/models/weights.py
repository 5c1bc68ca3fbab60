"""The tensors a spec calls for, and how they become the weights of a decoder.

Does: names and shapes (in the Hugging Face spelling, which every loader translates to), joining and placing them.
Does not: read files. Memory we own is joined and laid out for speed; memory that belongs to a live model is only
referred to.
"""

from __future__ import annotations

import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from tonle.errors import ModelError
from tonle.models.layers import Layer, Linear, LinearPart, RMSNorm
from tonle.models.spec import ModelSpec

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_MAX_THREADS = 8

Shape = tuple[int, ...]
Fetch = Callable[[str], torch.Tensor]  # from a tensor's name to its values; called from several threads


@dataclass(slots=True, eq=False)
class Weights:
    """All of a decoder's weights."""

    embedding: torch.Tensor  # (vocab, hidden)
    layers: list[Layer]
    final_norm: RMSNorm
    lm_head: Linear


def tensor_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Every tensor the model has, and its shape: matrices are (out, in)."""
    shapes: dict[str, Shape] = {EMBEDDING: (spec.vocab_size, spec.hidden_size), FINAL_NORM: (spec.hidden_size,)}
    if not spec.tie_embeddings:
        shapes[LM_HEAD] = (spec.vocab_size, spec.hidden_size)
    layer = _layer_shapes(spec)
    for index in range(spec.num_layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _layer_shapes(spec: ModelSpec) -> dict[str, Shape]:
    hidden, intermediate = spec.hidden_size, spec.intermediate_size
    matrices: list[tuple[str, int, int, bool]] = [
        ("self_attn.q_proj", spec.q_size, hidden, spec.qkv_bias),
        ("self_attn.k_proj", spec.kv_size, hidden, spec.qkv_bias),
        ("self_attn.v_proj", spec.kv_size, hidden, spec.qkv_bias),
        ("self_attn.o_proj", hidden, spec.q_size, spec.o_bias),
        ("mlp.gate_proj", intermediate, hidden, spec.mlp_bias),
        ("mlp.up_proj", intermediate, hidden, spec.mlp_bias),
        ("mlp.down_proj", hidden, intermediate, spec.mlp_bias),
    ]
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
    for name, rows, columns, has_bias in matrices:
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if spec.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (spec.head_dim,), "self_attn.k_norm.weight": (spec.head_dim,)}
    return shapes


def check_tensors(where: str, expected: dict[str, Shape], found: dict[str, Shape], ignored: Iterable[str] = ()) -> None:
    """`ModelError` naming the first tensor that is missing, has another shape, or has no place in the model."""
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(f"{where}: tensor {name} is missing")
        if found[name] != shape:
            raise ModelError(
                f"{where}: tensor {name} has shape {found[name]}, but the model's config calls for {shape}"
            )
    if unexpected := sorted(found.keys() - expected.keys() - set(ignored)):
        more = f" and {len(unexpected) - 3} more" if len(unexpected) > 3 else ""
        raise ModelError(
            f"{where}: the model's architecture has no place for tensor {', '.join(unexpected[:3])}{more}; "
            f"running without it would give wrong answers"
        )


class Storage(Protocol):
    """What becomes of a fetched tensor."""

    def keep(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def join(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> Linear:
        """One map out of several; `biases` is empty or as long as `weights`."""


class Owned:
    """Copy to a device and dtype. Weights that see the same input become one.

    On a CPU matrices are kept as (in, out): measured with MKL and two threads, torch multiplies 4 to 32 rows by those
    two to three times faster than by (out, in).
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=self._dtype, device=self._device).copy_(tensor)

    def join(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> Linear:
        rows, columns = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        transposed = self._device.type == "cpu"
        shape = (columns, rows) if transposed else (rows, columns)
        joined = torch.empty(shape, dtype=self._dtype, device=self._device)
        out_major = joined.t() if transposed else joined  # (rows, columns)
        parts = out_major.split_with_sizes([weight.shape[0] for weight in weights])
        for part, weight in zip(parts, weights, strict=True):
            part.copy_(weight)
        bias = self.keep(torch.cat(tuple(biases))) if biases else None
        return Linear(LinearPart(joined, bias, transposed=transposed))


class Shared:
    """Leave every tensor where it is."""

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def join(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> Linear:
        if not biases:
            return Linear(*(LinearPart(weight) for weight in weights))
        return Linear(*(LinearPart(weight, bias) for weight, bias in zip(weights, biases, strict=True)))


def assemble(spec: ModelSpec, fetch: Fetch, storage: Storage) -> Weights:
    """Fetch and place all tensors, several layers at a time."""
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="tonle-load") as pool:
        embedding_soon = pool.submit(lambda: storage.keep(fetch(EMBEDDING)))
        layers = list(pool.map(lambda index: _assemble_layer(spec, index, fetch, storage), range(spec.num_layers)))
        embedding = embedding_soon.result()
    lm_head = Linear(LinearPart(embedding)) if spec.tie_embeddings else storage.join([fetch(LM_HEAD)], [])
    final_norm = RMSNorm(storage.keep(fetch(FINAL_NORM)), spec.norm_eps)
    return Weights(embedding, layers, final_norm, lm_head)


def _assemble_layer(spec: ModelSpec, index: int, fetch: Fetch, storage: Storage) -> Layer:
    def norm(name: str) -> RMSNorm:
        return RMSNorm(storage.keep(fetch(f"model.layers.{index}.{name}.weight")), spec.norm_eps)

    def linear(*names: str, bias: bool) -> Linear:
        paths = [f"model.layers.{index}.{name}" for name in names]
        return storage.join(
            [fetch(f"{path}.weight") for path in paths], [fetch(f"{path}.bias") for path in paths] if bias else []
        )

    return Layer(
        input_norm=norm("input_layernorm"),
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=spec.qkv_bias),
        q_norm=norm("self_attn.q_norm") if spec.qk_norm else None,
        k_norm=norm("self_attn.k_norm") if spec.qk_norm else None,
        o=linear("self_attn.o_proj", bias=spec.o_bias),
        mlp_norm=norm("post_attention_layernorm"),
        gate_up=linear("mlp.gate_proj", "mlp.up_proj", bias=spec.mlp_bias),
        down=linear("mlp.down_proj", bias=spec.mlp_bias),
    )


def random_weights(spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int) -> Weights:
    """Made on the device. A tensor depends on the seed and its name only, not on the order of making."""
    shapes = tensor_shapes(spec)

    def fetch(name: str) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode(), seed & 0xFFFFFFFF))
        if name.endswith("norm.weight"):
            return torch.rand(shapes[name], generator=generator, device=device).add_(0.5)
        spread = _random_spread(name, shapes[name])
        return torch.randn(shapes[name], generator=generator, device=device).mul_(spread)

    return assemble(spec, fetch, Owned(device, dtype))


def _random_spread(name: str, shape: Shape) -> float:
    """Of random values such that every part of the model matters to what it says.

    Embeddings are small beside what the layers add, or a model would only repeat its last token; queries and keys are large
    enough that a token attends to a few others and not to the average of all.
    """
    if len(shape) == 1:
        return 0.1
    unit = math.sqrt(1.0 / shape[-1])  # keeps the size of what a matrix is multiplied with
    if name == LM_HEAD:
        return 4.0 * unit
    if name == EMBEDDING:
        return 0.8 * unit
    return 1.5 * unit if name.endswith(("q_proj.weight", "k_proj.weight")) else unit
