"""`CpuDecoder`: small steps from packed weights in one compiled call, large ones through torch.

Does: choose per step, by a crossover measured when it is made. Does not: differ from `Decoder` in results beyond rounding.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from tonle.models.cpu.step import Inputs, Packed, forward, product
from tonle.models.cpu.team import Team
from tonle.models.cpu.vector import ROWS
from tonle.models.cpu.warm import is_warm, types_of, warm_later
from tonle.models.cpu.workspace import Array, Workspace
from tonle.models.decoder import Decoder
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.rope import Rotary
from tonle.models.spec import ModelSpec

log = logging.getLogger("tonle.models")

Embed = Callable[[torch.Tensor, Array], None]  # tokens (T,) to their rows (T, hidden), written

_CANDIDATES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # tokens per step at which the two ways are compared


class CpuDecoder:
    """A decoder with a fast lane. Without `slow`, for models too large to hold twice, every step takes it."""

    def __init__(
        self, spec: ModelSpec, packed: Packed, slow: Decoder | None, embed: Embed, *, team: Team | None = None
    ) -> None:
        self.spec = spec
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.crossover = 0  # most tokens of a fast step; 0 until the kernels are compiled
        self._packed = packed
        self._slow = slow
        self._embed = embed
        self._rotary = Rotary(spec.rope, spec.head_dim, self.device)
        self._team = team or Team()
        self._workspace = Workspace(spec, qkv_rows=packed.qkv.weights.shape[1] * ROWS, num_threads=self._team.size)
        self._eps = np.float32(spec.norm_eps)
        types = types_of(packed)
        if is_warm(types) or slow is None:
            self.open_fast_lane()
        else:
            warm_later(types, self.open_fast_lane)

    def open_fast_lane(self) -> None:
        """The kernels are compiled: measure from which step size on torch is faster, and begin to use them."""
        self.crossover = sys.maxsize if self._slow is None else self._measure(self._slow)
        log.info("steps of up to %d tokens run from packed weights on %d threads", self.crossover, self._team.size)

    def formats(self) -> list[str]:
        """The kinds of weights it holds, for the log."""
        names = {"uint8": "4-bit", "int8": "8-bit", "uint16": "bfloat16", "float32": "float32"}
        matrices = (self._packed.qkv, self._packed.o, self._packed.gate_up, self._packed.down, self._packed.head)
        return sorted({names[matrix.weights.dtype.name] for matrix in matrices})

    def forward(self, inputs: StepInputs, kv: KVCache) -> torch.Tensor:
        """Logits (S, vocab) float32 of the tokens `inputs.logit_indices` names."""
        if self._slow is not None and len(inputs.tokens) > self.crossover:
            return self._slow.forward(inputs, kv)
        return self._fast(inputs, kv)

    def _fast(self, inputs: StepInputs, kv: KVCache) -> torch.Tensor:
        num_tokens, num_wanted = len(inputs.tokens), len(inputs.logit_indices)
        cos, sin = self._rotary.angles(inputs.positions, torch.float32)  # (T, 1, dim)
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
        logits = np.empty((num_wanted, self._packed.head.weights.shape[1] * ROWS), dtype=np.float32)
        buffers = self._workspace.cut(num_tokens, max(inputs.context_lens))._replace(logits=logits)
        self._embed(inputs.tokens, buffers.hidden)
        keys, values = kv.k.numpy(), kv.v.numpy()
        packed, eps, counter, size = self._packed, self._eps, self._team.counter, self._team.size
        self._team.run(lambda member: forward(packed, step, buffers, keys, values, eps, counter, member, size))
        return torch.from_numpy(logits)[:, : self.spec.vocab_size]

    def _measure(self, slow: Decoder) -> int:
        """The most tokens at which the compiled product still beats torch's, on the widest matrix of a layer."""
        best = _CANDIDATES[0]
        for count in _CANDIDATES:
            ours, theirs = self._products(slow, count)
            if _quickest(ours) > _quickest(theirs):
                break
            best = count
        return best

    def _products(self, slow: Decoder, count: int) -> tuple[Callable[[], object], Callable[[], object]]:
        rows = torch.randn(count, self.spec.hidden_size)
        layers = range(min(4, self.spec.num_layers))
        x, out = rows.numpy(), np.empty((count, self._packed.gate_up.weights.shape[1] * ROWS), dtype=np.float32)
        team, gate_up, buffers = self._team, self._packed.gate_up, self._workspace.cut(count, ROWS)

        def ours() -> None:
            for layer in layers:
                team.run(lambda member, layer=layer: product(gate_up, layer, x, out, member, team.size, buffers))  # type: ignore[misc]

        def theirs() -> None:
            for layer in layers:
                slow.weights.layers[layer].gate_up(rows)

        return ours, theirs


def _quickest(work: Callable[[], object]) -> float:
    times = []
    for _ in range(4):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)
