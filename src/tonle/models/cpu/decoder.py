"""`CpuDecoder`: small steps from packed weights in one compiled call, large ones through torch.

Does: choose per step, by a crossover measured when it is made. Does not: differ from `Decoder` in results beyond rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from tonle.models.cpu.vector import GROUP, ROWS
from tonle.models.cpu.pack import Array, aligned
from tonle.models.cpu.step import Buffers, Inputs, Packed, forward
from tonle.models.cpu.team import Team
from tonle.models.decoder import Decoder
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.spec import ModelSpec

_CANDIDATES = (8, 16, 24, 32, 48, 64, 96, 128)  # tokens per step at which the two ways are compared


class CpuDecoder:
    """A `Decoder` with a fast lane."""

    def __init__(self, decoder: Decoder, packed: Packed, *, team: Team | None = None, crossover: int | None = None) -> None:
        self.spec: ModelSpec = decoder.spec
        self.device, self.dtype = decoder.device, decoder.dtype
        self._slow = decoder
        self._packed = packed
        self._team = team or Team()
        self._buffers: dict[int, Buffers] = {}
        self._memory: dict[str, Array] = {}
        self._eps = np.float32(self.spec.norm_eps)
        self.crossover = self._measure() if crossover is None else crossover  # most tokens of a fast step

    def forward(self, inputs: StepInputs, kv: KVCache) -> torch.Tensor:
        """Logits (S, vocab) float32 of the tokens `inputs.logit_indices` names."""
        if len(inputs.tokens) > self.crossover:
            return self._slow.forward(inputs, kv)
        return self._fast(inputs, kv)

    def _fast(self, inputs: StepInputs, kv: KVCache) -> torch.Tensor:
        num_tokens, num_wanted = len(inputs.tokens), len(inputs.logit_indices)
        cos, sin = self._slow.rotary.angles(inputs.positions, torch.float32)  # (T, 1, dim)
        sizes = np.diff(inputs.row_starts)
        step = Inputs(
            row_of=np.repeat(np.arange(len(sizes)), sizes),
            positions=inputs.positions.numpy(),
            slots=inputs.slots.numpy(),
            tables=np.ascontiguousarray(inputs.block_tables.numpy()),
            wanted=inputs.logit_indices.numpy(),
            cos=cos.squeeze(1).numpy(),
            sin=sin.squeeze(1).numpy(),
        )
        longest = max(inputs.context_lens)
        logits = np.empty((num_wanted, self._packed.head.weights.shape[1] * ROWS), dtype=np.float32)
        buffers = self._room(num_tokens, longest)._replace(logits=logits)
        torch.index_select(self._slow.weights.embedding, 0, inputs.tokens, out=torch.from_numpy(buffers.hidden))
        keys, values = kv.k.numpy(), kv.v.numpy()
        packed, eps, counter, size = self._packed, self._eps, self._team.counter, self._team.size
        self._team.run(lambda member: forward(packed, step, buffers, keys, values, eps, counter, member, size))
        return torch.from_numpy(logits)[:, : self.spec.vocab_size]

    def _room(self, num_tokens: int, longest: int) -> Buffers:
        """Working memory for a step; the same memory serves all steps."""
        known = self._buffers.get(num_tokens)
        if known is not None and known.scores.shape[1] >= longest:
            return known
        spec, threads = self.spec, self._team.size
        if known is None and self._buffers:
            longest = max(longest, next(iter(self._buffers.values())).scores.shape[1])
        longest = max(1 << (longest - 1).bit_length(), ROWS)
        rows = self._packed.qkv.weights.shape[1] * ROWS
        shapes = {
            "hidden": (num_tokens, spec.hidden_size),
            "qkv": (num_tokens, rows),
            "q": (num_tokens, spec.num_heads, spec.head_dim),
            "mixed": (num_tokens, spec.q_size),
            "act": (num_tokens, spec.intermediate_size),
            "normed": (threads, num_tokens, spec.hidden_size),
            "total": (threads, num_tokens, ROWS),
            "tile": (threads, GROUP, ROWS),
            "sums": (threads, max(spec.hidden_size, spec.intermediate_size, spec.q_size) // GROUP),
            "scores": (threads, longest),
        }
        parts = {name: self._take(name, shape) for name, shape in shapes.items()}
        scratch = self._take("scratch", (threads, longest)).view(np.int32)
        self._buffers[num_tokens] = Buffers(**parts, logits=None, scratch=scratch)
        return self._buffers[num_tokens]

    def _take(self, name: str, shape: tuple[int, ...]) -> Array:
        size = int(np.prod(shape))
        if name not in self._memory or len(self._memory[name]) < size:
            self._memory[name] = aligned((size,), np.dtype(np.float32))
        return self._memory[name][:size].reshape(shape)

    def _measure(self) -> int:
        """The most tokens at which the compiled product still beats torch's, on the widest matrix of a layer."""
        best = _CANDIDATES[0]
        for count in _CANDIDATES:
            ours, theirs = self._products(count)
            if _quickest(ours) > _quickest(theirs):
                break
            best = count
        return best

    def _products(self, count: int) -> tuple[Callable[[], object], Callable[[], object]]:
        from tonle.models.cpu.step import product

        rows = torch.randn(count, self.spec.hidden_size)
        layers = self._slow.weights.layers
        x, out = rows.numpy(), np.empty((count, self._packed.gate_up.weights.shape[1] * ROWS), dtype=np.float32)
        room, gate_up, size = self._room(count, ROWS), self._packed.gate_up, self._team.size

        def ours() -> None:
            for layer in range(min(4, len(layers))):
                self._team.run(lambda member, layer=layer: product(gate_up, layer, x, out, member, size, room))  # type: ignore[misc]

        def theirs() -> None:
            for layer in layers[:4]:
                layer.gate_up(rows)

        return ours, theirs


def _quickest(work: Callable[[], object]) -> float:
    times = []
    for _ in range(4):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
