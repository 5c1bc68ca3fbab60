"""`Shard`: the part of a model that one of several ranks holds.

Does: say which sizes fit a model, and cut its spec, its weights and its adapters. Does not: load or compute. A part is a smaller
model of the same kind, so whatever runs a model runs a part of one: heads and the inner numbers of perceptrons are divided,
experts are dealt out, hidden states are whole everywhere. What the parts add to the hidden states is summed over all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from tonle.errors import ConfigError, ModelError
from tonle.models.adapters.adapter import MODULE_PATHS, Adapter, AdapterPart
from tonle.models.layers import Quantized, Weight
from tonle.models.spec import AttentionSpec, LayerSpec, MixerSpec, ModelSpec
from tonle.models.weights import LM_HEAD


@dataclass(frozen=True, slots=True)
class Cut:
    """What a rank keeps of a tensor."""

    along: Literal["outputs", "inputs"]
    part: slice


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of a model that is divided into `size` parts."""

    rank: int
    size: int

    def spec(self, whole: ModelSpec) -> ModelSpec:
        """Of the part. The vocabulary counts as whole, although the part has only some rows of the last matrix."""
        return replace(whole, layers=tuple(self._layer(layer) for layer in whole.layers))

    def weight(self, whole: ModelSpec, name: str, weight: Weight) -> Weight:
        """What this rank needs of a tensor of the whole model. Raises `ModelError` if a quantized one cannot be cut there."""
        cut = self.cut(whole, name)
        if cut is None:
            return weight
        if cut.along == "outputs":
            return weight.rows(cut.part) if isinstance(weight, Quantized) else weight[cut.part]
        if isinstance(weight, Quantized):
            try:
                return weight.columns(cut.part)
            except ValueError as error:
                raise ModelError(
                    f"{name} cannot be divided between {self.size} ranks: {error}. Take fewer ranks, or weights with smaller "
                    "groups, or unpack them: quantization none (--quantization none)"
                ) from None
        if name.endswith(".bias"):  # of a product that is summed: it must be added once
            return weight if self.rank == 0 else torch.zeros_like(weight)
        return weight[:, cut.part]

    def adapter(self, whole: ModelSpec, adapter: Adapter) -> Adapter:
        """What this rank adds: rows of b where outputs are divided, columns of a where inputs are."""

        def part_of(place: tuple[int, str], part: AdapterPart) -> AdapterPart:
            layer, module = place
            cut = self.cut(whole, f"model.layers.{layer}.{MODULE_PATHS[module]}.weight")
            if cut is None:
                return part
            if cut.along == "outputs":
                return AdapterPart(part.a, part.b[cut.part])
            return AdapterPart(part.a[:, cut.part], part.b)

        return replace(adapter, parts={place: part_of(place, part) for place, part in adapter.parts.items()})

    def cut(self, whole: ModelSpec, name: str) -> Cut | None:
        """How a tensor is divided; None: every rank has all of it (norms, routers, the embedding, its own experts)."""
        if name == LM_HEAD:
            return Cut("outputs", self.vocabulary(whole))
        if not name.startswith("model.layers."):
            return None
        index, _, path = name.removeprefix("model.layers.").partition(".")
        return self._cuts(whole.layers[int(index)]).get(path.removesuffix(".weight").removesuffix(".bias"))

    def vocabulary(self, whole: ModelSpec) -> slice:
        """The tokens whose logits this rank computes: as many on each, but for the last."""
        each = -(-whole.vocab_size // self.size)
        return slice(min(self.rank * each, whole.vocab_size), min((self.rank + 1) * each, whole.vocab_size))

    def experts(self, mixer: MixerSpec) -> range:
        each = mixer.num_experts // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def _layer(self, layer: LayerSpec) -> LayerSpec:
        attention, mixer = layer.attention, layer.mixer
        if mixer.kind == "experts":
            mixer = replace(mixer, held_experts=self.experts(mixer), shared_size=mixer.shared_size // self.size)
        else:
            mixer = replace(mixer, size=mixer.size // self.size)
        num_kv_heads = len(self._kv_heads(attention))
        attention = replace(attention, num_heads=attention.num_heads // self.size, num_kv_heads=num_kv_heads)
        return replace(layer, attention=attention, mixer=mixer)

    def _kv_heads(self, attention: AttentionSpec) -> range:
        """Those that this rank's heads read. Where there are fewer than ranks, several ranks have the same one."""
        each = max(1, attention.num_kv_heads // self.size)
        first = self.rank * attention.num_kv_heads // self.size
        return range(first, first + each)

    def _cuts(self, layer: LayerSpec) -> dict[str, Cut]:
        """By path within the layer, without `.weight` and `.bias`."""
        attention, mixer, dim = layer.attention, layer.mixer, layer.attention.head_dim
        q, kv_heads = self._equal(attention.q_size), self._kv_heads(attention)
        kv = slice(kv_heads.start * dim, kv_heads.stop * dim)
        cuts = {
            "self_attn.q_proj": Cut("outputs", q),
            "self_attn.k_proj": Cut("outputs", kv),
            "self_attn.v_proj": Cut("outputs", kv),
            "self_attn.o_proj": Cut("inputs", q),
            "self_attn.sinks": Cut("outputs", self._equal(attention.num_heads)),
        }
        if attention.qk_norm_whole:  # a gain for each number of each head
            cuts |= {"self_attn.q_norm": Cut("outputs", q), "self_attn.k_norm": Cut("outputs", kv)}
        perceptrons = {"mlp.shared_expert": mixer.shared_size} if mixer.kind == "experts" else {"mlp": mixer.size}
        for path, size in perceptrons.items():
            inner = self._equal(size)
            cuts |= {
                f"{path}.gate_proj": Cut("outputs", inner),
                f"{path}.up_proj": Cut("outputs", inner),
                f"{path}.down_proj": Cut("inputs", inner),
            }
        return cuts

    def _equal(self, count: int) -> slice:
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)


def check_size(spec: ModelSpec, size: int) -> None:
    """Raises `ConfigError` if the model cannot be divided into so many parts, with the sizes that do."""
    if (why := _refusal(spec, size)) is None:
        return
    fitting = [str(each) for each in range(1, spec.num_heads + 1) if _refusal(spec, each) is None]
    raise ConfigError(
        f"{spec.architecture} cannot be divided between {size} ranks: {why}. tensor_parallel_size (--tensor-parallel-size) can "
        f"be {', '.join(fitting)}",
        param="tensor_parallel_size",
    )


def _refusal(spec: ModelSpec, size: int) -> str | None:
    """Why not; None: it can."""
    heads, kv_heads = spec.num_heads, spec.num_kv_heads
    if heads % size:
        return f"its {heads} attention heads are no multiple of {size}"
    if kv_heads % size and size % kv_heads:
        return f"its {kv_heads} key-value heads are neither a multiple nor a divisor of {size}"
    for mixer in dict.fromkeys(layer.mixer for layer in spec.layers):
        if mixer.kind != "experts":
            if mixer.size % size:
                return f"the inner size of its perceptrons, {mixer.size}, is no multiple of {size}"
        elif mixer.num_experts % size:
            return f"its {mixer.num_experts} experts are no multiple of {size}"
        elif mixer.shared_size % size:
            return f"the inner size of its shared expert, {mixer.shared_size}, is no multiple of {size}"
    return None
