"""The tensors a spec calls for, and how they become the weights of a decoder.

Does: names and shapes (in the Hugging Face spelling, which every loader translates to), joining and placing them.
Does not: read files. Memory we own is joined and laid out for speed; memory that belongs to a live model is only
referred to.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, overload

import torch

from tonle.config.cores import num_cores
from tonle.errors import ModelError
from tonle.models.experts import Experts, Perceptron
from tonle.models.layers import Layer, Linear, LinearPart, Quantized, RMSNorm, Weight
from tonle.models.packed import pack
from tonle.models.spec import LayerSpec, MixerSpec, ModelSpec

EMBEDDING, FINAL_NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_MAX_THREADS = 8

Shape = tuple[int, ...]
# From a tensor's name to its values; called from several threads. Only matrices are ever `Quantized`, never the embedding.
Fetch = Callable[[str], Weight]


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
        matrices.append(("mlp.gate", mixer.num_experts, hidden, mixer.router_bias))
    if mixer.shared_size:
        matrices += [("mlp.shared_expert.gate_proj", mixer.shared_size, hidden, False),
                     ("mlp.shared_expert.up_proj", mixer.shared_size, hidden, False),
                     ("mlp.shared_expert.down_proj", hidden, mixer.shared_size, False)]  # fmt: skip
        if mixer.shared_gate:
            matrices.append(("mlp.shared_expert_gate", 1, hidden, False))
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
        whole = attention.qk_norm_whole
        shapes["self_attn.q_norm.weight"] = (attention.q_size if whole else attention.head_dim,)
        shapes["self_attn.k_norm.weight"] = (attention.kv_size if whole else attention.head_dim,)
    if attention.sinks:
        shapes["self_attn.sinks"] = (attention.num_heads,)
    return shapes


def mixer_names(mixer: MixerSpec) -> list[str]:
    """What comes before the names of its matrices: once, or once for each expert."""
    if mixer.kind != "experts":
        return ["mlp"]
    return [f"mlp.experts.{expert}" for expert in mixer.own_experts]


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

    def join(self, weights: Sequence[Weight], biases: Sequence[torch.Tensor]) -> Linear:
        """One map out of several; `biases` is empty or as long as `weights`."""


class Owned:
    """Copy to a device and dtype. Weights that see the same input become one.

    On a CPU matrices are kept as (in, out): measured with MKL and two threads, torch multiplies 4 to 32 rows by those
    two to three times faster than by (out, in). Quantized matrices stay so on a GPU; on a CPU, where torch would unpack
    them in every step, they are unpacked here (`models/cpu` has kernels that read them packed).
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *, unpacks: bool | None = None) -> None:
        self._device = device
        self.dtype = dtype
        self._unpacks = device.type == "cpu" if unpacks is None else unpacks

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=self.dtype, device=self._device).copy_(tensor)

    def join(self, weights: Sequence[Weight], biases: Sequence[torch.Tensor]) -> Linear:
        bias = self.keep(torch.cat(tuple(biases))) if biases else None
        sizes = tuple(weight.shape[0] for weight in weights)
        if not self._unpacks and (quantized := _join_quantized(weights)) is not None:
            moved = quantized.to(self._device)
            if self._device.type == "cuda":  # at once: 4-bit numbers have a byte each until they are packed
                moved = pack(moved) or moved
            return Linear(LinearPart(moved, bias, sizes=sizes))
        rows, columns = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
        transposed = self._device.type == "cpu"
        shape = (columns, rows) if transposed else (rows, columns)
        joined = torch.empty(shape, dtype=self.dtype, device=self._device)
        out_major = joined.t() if transposed else joined  # (rows, columns)
        parts = out_major.split_with_sizes([weight.shape[0] for weight in weights])
        for part, weight in zip(parts, weights, strict=True):
            part.copy_(weight.unpacked(self.dtype) if isinstance(weight, Quantized) else weight)
        return Linear(LinearPart(joined, bias, transposed=transposed, sizes=sizes))


def _join_quantized(weights: Sequence[Weight]) -> Quantized | None:
    """None if one of them is not quantized, or in another form."""
    quantized = [weight for weight in weights if isinstance(weight, Quantized)]
    return Quantized.join(quantized) if len(quantized) == len(weights) else None


class Shared:
    """Leave every tensor where it is, but for the few that had to be computed (`scaled`): those get the model's dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype)

    def join(self, weights: Sequence[Weight], biases: Sequence[torch.Tensor]) -> Linear:
        kept = [weight if isinstance(weight, Quantized) else self.keep(weight) for weight in weights]
        if not biases:
            return Linear(*(LinearPart(weight) for weight in kept))
        return Linear(*(LinearPart(weight, self.keep(bias)) for weight, bias in zip(kept, biases, strict=True)))


def assemble(spec: ModelSpec, fetch: Fetch, storage: Storage, *, own_head: bool = False) -> Weights:
    """Fetch and place all tensors, several layers at a time. `own_head`: also where the embedding could be the last matrix,
    `fetch` has one of its own, quantized."""
    num_threads = min(_MAX_THREADS, num_cores())
    with ThreadPoolExecutor(num_threads, thread_name_prefix="tonle-load") as pool:
        embedding_soon = pool.submit(lambda: storage.keep(vector(fetch, EMBEDDING)))
        layers = list(pool.map(lambda index: _assemble_layer(spec, index, fetch, storage), range(spec.num_layers)))
        embedding = embedding_soon.result()
    tied = spec.tie_embeddings and not own_head
    lm_head = Linear(LinearPart(embedding)) if tied else storage.join([fetch(LM_HEAD)], [])
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
        weights = [scaled(spec, f"{path}.weight", fetch(f"{path}.weight")) for path in paths]
        biases = [scaled(spec, f"{path}.bias", vector(fetch, f"{path}.bias")) for path in paths if bias]
        return storage.join(weights, biases)

    def perceptron(path: str, *, bias: bool) -> Perceptron:
        inner = [f"{path}.up_proj"] if mixer.kind == "plain" else [f"{path}.gate_proj", f"{path}.up_proj"]
        return Perceptron(linear(*inner, bias=bias), linear(f"{path}.down_proj", bias=bias))

    def experts(perceptrons: list[Perceptron]) -> Experts:
        router = linear("mlp.gate", bias=mixer.router_bias)
        shared = perceptron("mlp.shared_expert", bias=False) if mixer.shared_size else None
        gate = linear("mlp.shared_expert_gate", bias=False) if mixer.shared_gate else None
        return Experts(router, perceptrons, mixer, shared, gate)

    perceptrons = [perceptron(path, bias=mixer.bias) for path in mixer_names(mixer)]
    before = norm(names.before_attention)
    return Layer(
        input_norm=before,
        qkv=linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=attention.qkv_bias),
        q_norm=norm("self_attn.q_norm" if attention.qk_norm else None),
        k_norm=norm("self_attn.k_norm" if attention.qk_norm else None),
        sinks=storage.keep(vector(fetch, f"{prefix}.self_attn.sinks")) if attention.sinks else None,
        o=linear("self_attn.o_proj", bias=attention.o_bias),
        attention_after=norm(names.after_attention),
        mlp_norm=before if described.residual == "parallel" else norm(names.before_mixer),
        gate_up=perceptrons[0].gate_up,
        down=perceptrons[0].down,
        mlp_after=norm(names.after_mixer),
        experts=experts(perceptrons) if mixer.kind == "experts" else None,
    )


def vector(fetch: Fetch, name: str) -> torch.Tensor:
    """A tensor that is never quantized: norms, biases, sinks, the embedding."""
    found = fetch(name)
    assert isinstance(found, torch.Tensor), f"{name} is quantized"
    return found


@overload
def scaled(spec: ModelSpec, name: str, weight: torch.Tensor) -> torch.Tensor: ...
@overload
def scaled(spec: ModelSpec, name: str, weight: Weight) -> Weight: ...
def scaled(spec: ModelSpec, name: str, weight: Weight) -> Weight:
    """A weight or bias with `spec.residual_scale` in it, if it is one of those whose product is added to the hidden states.

    In float32: rounding to the dtype of the model is the storage's.
    """
    if spec.residual_scale == 1 or name.split(".")[-2] not in ("o_proj", "down_proj"):
        return weight
    return weight.times(spec.residual_scale) if isinstance(weight, Quantized) else weight.float() * spec.residual_scale


def _norm(name: str, spec: ModelSpec, fetch: Fetch, storage: Storage) -> RMSNorm:
    weight = vector(fetch, name)
    if spec.gain_offset:  # in float32: a small gain would be lost beside it
        kept = storage.keep(weight)
        return RMSNorm(weight.float().add(spec.gain_offset).to(kept.device), spec.norm_eps)
    return RMSNorm(storage.keep(weight), spec.norm_eps)


def random_weights(spec: ModelSpec, device: torch.device, dtype: torch.dtype, seed: int) -> Weights:
    return assemble(spec, random_tensors(spec, device, seed), Owned(device, dtype))


def random_tensors(spec: ModelSpec, device: torch.device, seed: int) -> Fetch:
    """Made on the device. A tensor depends on the seed and its name only, not on the order of making."""
    shapes = tensor_shapes(spec)

    def fetch(name: str) -> torch.Tensor:
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode(), seed & 0xFFFFFFFF))
        if name.endswith("norm.weight"):
            return torch.rand(shapes[name], generator=generator, device=device).add_(0.5)
        spread = _random_spread(name, shapes[name])
        return torch.randn(shapes[name], generator=generator, device=device).mul_(spread)

    return fetch


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
