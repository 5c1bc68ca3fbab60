"""Small random decoders for the CPU, of any kind of layer, beside torch's with the same weights.

Does: make weights of several stored formats (a kind of matrix has one, so that kernels are compiled once for all), a
`CpuDecoder` from them and `Decoder`s with adapters merged or not. Does not: need files.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tonle.models.adapters import Adapter
from tonle.models.cpu.cpu_decoder import CpuDecoder
from tonle.models.cpu.dots import HAS_DOTS
from tonle.models.cpu.pack import pack
from tonle.models.cpu.stored import Stored, from_floats
from tonle.models.cpu.team import Team
from tonle.models.cpu.vector import GROUP
from tonle.models.decoder import Decoder
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.spec import AttentionSpec, LayerSpec, MixerSpec, ModelSpec, RopeSpec
from tonle.models.weights import EMBEDDING, Owned, assemble, tensor_shapes

PATHS = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
         "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}  # fmt: skip
BLOCK = 16  # tokens
FLOAT = torch.float32


def plain_layer(**attention: Any) -> LayerSpec:
    """Four heads of 16, two of keys and values; gated, 96 wide."""
    described = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "rope": RopeSpec(), **attention}
    return LayerSpec(attention=AttentionSpec(**described), mixer=MixerSpec(size=96))


def spec_of(*layers: LayerSpec, **more: Any) -> ModelSpec:
    return ModelSpec(architecture="LlamaForCausalLM", vocab_size=200, hidden_size=64, layers=layers, norm_eps=1e-5,
                     max_positions=512, **more)  # fmt: skip


def _four_bits(values: np.ndarray) -> Stored:
    """(N, K) rounded to 16 levels in each group."""
    grouped = values.reshape(len(values), -1, GROUP)
    minimum = grouped.min(axis=-1).astype(np.float16).astype(np.float32)
    scale = ((grouped.max(axis=-1) - minimum) / 15).astype(np.float16).astype(np.float32)
    numbers = np.clip(np.rint((grouped - minimum[..., None]) / scale[..., None]), 0, 15).astype(np.uint8)
    return Stored(numbers.reshape(values.shape), scale, minimum)


class RandomModel:
    """Weights of one model. 4 bits: qkv and gate-up, or all of it; bfloat16: o; float32: down and the rest."""

    def __init__(self, spec: ModelSpec, *, seed: int = 0, all_four_bits: bool = False) -> None:
        self.spec = spec
        self._all_four_bits = all_four_bits
        generator = torch.Generator().manual_seed(seed)
        self._stored: dict[str, Stored] = {}
        self._vectors: dict[str, torch.Tensor] = {}
        for name, shape in tensor_shapes(spec).items():
            drawn = torch.randn(shape, generator=generator)
            if len(shape) == 1:
                self._vectors[name] = drawn * 0.2 + (1 - spec.gain_offset if name.endswith("norm.weight") else 0)
                continue
            drawn = drawn if name == EMBEDDING else drawn * shape[1] ** -0.5
            self._stored[name] = self._store(name, drawn)

    def _store(self, name: str, drawn: torch.Tensor) -> Stored:
        if self._all_four_bits:
            return _four_bits(drawn.numpy())
        if any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            return _four_bits(drawn.numpy())
        return from_floats((drawn.bfloat16().float() if "o_proj" in name else drawn).numpy())

    def fast(self, *, team: Team | None = None, dots: bool = HAS_DOTS, **settings: Any) -> CpuDecoder:
        """Without a slow lane: every step runs through the kernels. dots: of `pack`; settings: of `CpuDecoder`."""
        packed = pack(self.spec, lambda name: self._stored[name], lambda name: self._vectors[name].numpy(), dots=dots)

        def embed(tokens: torch.Tensor, out: np.ndarray) -> None:
            out[...] = self._stored[EMBEDDING].take(tokens.numpy()).floats()

        return CpuDecoder(self.spec, packed, embed, None, team=team, **settings)

    def torch(self, merged: Adapter | None = None) -> Decoder:
        """In float32, from the same numbers; with an adapter merged into them."""
        tensors = dict(self._vectors) | {name: torch.from_numpy(each.floats()) for name, each in self._stored.items()}
        for (layer, module), part in (merged.parts if merged else {}).items():
            name = f"model.layers.{layer}.{PATHS[module]}.weight"
            tensors[name] = (tensors[name].double() + part.b.double() @ part.a.double()).float()
        return Decoder(self.spec, assemble(self.spec, tensors.__getitem__, Owned(torch.device("cpu"), torch.float32)))

    def cache(self, num_blocks: int = 64, dtype: Any = FLOAT) -> KVCache:
        spec = self.spec
        return KVCache(num_layers=spec.num_layers, num_blocks=num_blocks, block_size=BLOCK, num_kv_heads=spec.num_kv_heads,
                       head_dim=spec.head_dim, dtype=dtype, device=torch.device("cpu"))  # fmt: skip


def step_of(
    spans: list[tuple[int, int]],
    slots: list[int] | None = None,
    *,
    tokens: list[torch.Tensor] | None = None,
    rows: list[int] | None = None,
) -> StepInputs:
    """Row i computes positions spans[i]; its tokens are row i's of `tokens`. Logits of all tokens are wanted.

    rows: whose blocks of the cache; by default row i has its own, 8 blocks long. Rows with one token come first.
    """
    rows = rows or list(range(len(spans)))
    tables = torch.arange(8 * 8, dtype=torch.int32).view(8, 8)[rows]
    positions = torch.cat([torch.arange(a, b) for a, b in spans])
    sizes = torch.tensor([b - a for a, b in spans])
    row_of = torch.repeat_interleave(torch.arange(len(spans)), sizes)
    texts = tokens or [torch.arange(b) * 7 % 200 for _, b in spans]
    return StepInputs(
        tokens=torch.cat([text[a:b] for text, (a, b) in zip(texts, spans, strict=True)]), positions=positions,
        slots=tables[row_of, positions // BLOCK].long() * BLOCK + positions % BLOCK, row_starts=[0, *sizes.cumsum(0).tolist()],
        context_lens=[b for _, b in spans], block_tables=tables, num_decode=int((sizes == 1).sum()),
        logit_indices=torch.arange(len(positions)), adapter_slots=slots,
    )  # fmt: skip


def of_row(inputs: StepInputs, row: int) -> StepInputs:
    """The same row alone, without an adapter."""
    start, end = inputs.row_starts[row], inputs.row_starts[row + 1]
    return replace(
        inputs, tokens=inputs.tokens[start:end], positions=inputs.positions[start:end], slots=inputs.slots[start:end],
        row_starts=[0, end - start], context_lens=[inputs.context_lens[row]], block_tables=inputs.block_tables[row : row + 1],
        num_decode=int(end - start == 1), logit_indices=torch.arange(end - start), adapter_slots=None,
    )  # fmt: skip
