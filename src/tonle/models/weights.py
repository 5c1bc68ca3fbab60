"""The tensors a spec calls for, and how they become the weights of a decoder.

Does: names and shapes (in the Hugging Face spelling, which every loader translates to), joining and placing them.
Does not: read files. Memory we own is joined and laid out for speed; memory that belongs to a live model is only
referred to.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch

from tonle.errors import ModelError
from tonle.models.experts import Experts, Perceptron
from tonle.models.layers import Layer, Linear, LinearPart, RMSNorm
from tonle.models.spec import LayerSpec, MixerSpec, ModelSpec

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
    for index, layer in enumerate(spec.layers):
        of_layer = _layer_shapes(layer, spec.hidden_size)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in of_layer.items()}
    return shapes


@dataclass(frozen=True, slots=True)
class NormNames:
    """What the norms of a layer are called; None: it has no such norm."""

    before_attention: str | None
    after_attention: str | None
    before_mixer: str | None
    after_mixer: str | None


def norm_names(layer: LayerSpec) -> NormNames:
    before_attention = "input_layernorm" if layer.norm_before else None
    if layer.residual == "parallel":  # one norm for both
        return NormNames(before_attention, None, before_attention, None)
    if not layer.norm_after:
        return NormNames(before_attention, None, "post_attention_layernorm" if layer.norm_before else None, None)
    before_mixer = "pre_feedforward_layernorm" if layer.norm_before else None
    return NormNames(before_attention, "post_attention_layernorm", before_mixer, "post_feedforward_layernorm")


def _layer_shapes(layer: LayerSpec, hidden: int) -> dict[str, Shape]:
    attention, mixer = layer.attention, layer.mixer
    matrices: list[tuple[str, int, int, bool]] = [
        ("self_attn.q_proj", attention.q_size, hidden, attention.qkv_bias),
        ("self_attn.k_proj", attention.kv_size, hidden, attention.qkv_bias),
        ("self_attn.v_proj", attention.kv_size, hidden, attention.qkv_bias),
        ("self_attn.o_proj", hidden, attention.q_size, attention.o_bias),
    ]
    if mixer.kind == "experts":
        matrices.append(("mlp.gate", mixer.num_experts, hidden, False))
    for prefix in mixer_names(mixer):
        if mixer.kind != "plain":
            matrices.append((f"{prefix}.gate_proj", mixer.size, hidden, mixer.bias))
        matrices.append((f"{prefix}.up_proj", mixer.size, hidden, mixer.bias))
        matrices.append((f"{prefix}.down_proj", hidden, mixer.size, mixer.bias))
    names = norm_names(layer)
    norms = (names.before_attention, names.after_attention, names.before_mixer, names.after_mixer)
    shapes: dict[str, Shape] = {f"{name}.weight": (hidden,) for name in norms if name is not None}
    for name, rows, columns, has_bias in matrices:
        shapes[f"{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{name}.bias"] = (rows,)
    if attention.qk_norm:
        shapes |= {f"self_attn.{name}.weight": (attention.head_dim,) for name in ("q_norm", "k_norm")}
    if attention.sinks:
        shapes["self_attn.sinks"] = (attention.num_heads,)
    return shapes


def mixer_names(mixer: MixerSpec) -> list[str]:
    """What comes before the names of its matrices: once, or once for each expert."""
    if mixer.kind != "experts":
        return ["mlp"]
    return [f"mlp.experts.{expert}" for expert in range(mixer.num_experts)]


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
        sizes = tuple(weight.shape[0] for weight in weights)
        return Linear(LinearPart(joined, bias, transposed=transposed, sizes=sizes))


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
    final_norm = _norm(FINAL_NORM, spec, fetch, storage)
    return Weights(embedding, layers, final_norm, lm_head)


def _assemble_layer(spec: ModelSpec, index: int, fetch: Fetch, storage: Storage) -> Layer:
    described = spec.layers[index]
    attention, mixer, names = described.attention, described.mixer, norm_names(described)
    prefix = f"model.layers.{index}"

    def norm(name: str | None) -> RMSNorm | None:
        return None if name is None else _norm(f"{prefix}.{name}.weight", spec, fetch, storage)

    def linear(*names: str, bias: bool) -> Linear:
        paths = [f"{prefix}.{name}" for name in names]
        return storage.join(
            [fetch(f"{path}.weight") for path in paths], [fetch(f"{path}.bias") for path in paths] if bias else []
        )

    def perceptron(path: str) -> Perceptron:
        inner = [f"{path}.up_proj"] if mixer.kind == "plain" else [f"{path}.gate_proj", f"{path}.up_proj"]
        return Perceptron(linear(*inner, bias=mixer.bias), linear(f"{path}.down_proj", bias=mixer.bias))

    perceptrons = [perceptron(path) for path in mixer_names(mixer)]
    before = norm(names.before_attention)
    return Layer(
        input_norm=before,
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=attention.qkv_bias),
        q_norm=norm("self_attn.q_norm" if attention.qk_norm else None),
        k_norm=norm("self_attn.k_norm" if attention.qk_norm else None),
        sinks=storage.keep(fetch(f"{prefix}.self_attn.sinks")) if attention.sinks else None,
        o=linear("self_attn.o_proj", bias=attention.o_bias),
        attention_after=norm(names.after_attention),
        mlp_norm=before if described.residual == "parallel" else norm(names.before_mixer),
        gate_up=perceptrons[0].gate_up,
        down=perceptrons[0].down,
        mlp_after=norm(names.after_mixer),
        experts=Experts(linear("mlp.gate", bias=False), perceptrons, mixer) if mixer.kind == "experts" else None,
    )


def _norm(name: str, spec: ModelSpec, fetch: Fetch, storage: Storage) -> RMSNorm:
    weight = fetch(name)
    if spec.gain_offset:  # in float32: a small gain would be lost beside it
        kept = storage.keep(weight)
        return RMSNorm(weight.float().add(spec.gain_offset).to(kept.device), spec.norm_eps)
    return RMSNorm(storage.keep(weight), spec.norm_eps)


def random_weights(spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int) -> Weights:
    """Made on the device. A tensor depends on the seed and its name only, not on the order of making."""
    shapes = tensor_shapes(spec)

    def fetch(name: str) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shapes[name], device=device)
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode(), seed & 0xFFFFFFFF))
        spread = shapes[name][-1] ** -0.5 if name.endswith("_proj.weight") else 0.5
        return torch.randn(shapes[name], generator=generator, device=device).mul_(spread)

    return assemble(spec, fetch, Owned(device, dtype))
