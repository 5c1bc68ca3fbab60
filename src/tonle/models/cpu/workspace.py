"""Working memory of a step: one piece per buffer, as large as the largest step so far, cut to size for each."""

from __future__ import annotations

from typing import Any

import numpy as np

from tonle.models.cpu.cpu_experts import ExpertBuffers, PackedExperts
from tonle.models.cpu.memory import Array, aligned
from tonle.models.cpu.pieces import PERCEPTRON, SPAN
from tonle.models.cpu.products import Bytes, Digits, Floats, PackedMatrix, Scratch, num_inputs
from tonle.models.cpu.step import Buffers, PackedWeights
from tonle.models.cpu.vector import CHUNK, GROUP, ROWS
from tonle.models.spec import ModelSpec

_FLOAT = np.dtype(np.float32)
_SHORT = np.dtype(np.int8)
_WHOLE = np.dtype(np.int64)
_SCORES = 65536  # per thread: what fits the second-level cache


class Workspace:
    """`activation_bits`: for a number of x that is multiplied as an integer, 8 or 16."""

    def __init__(self, spec: ModelSpec, packed: PackedWeights, *, num_threads: int, activation_bits: int = 16) -> None:
        self._spec = spec
        self._packed = packed
        self._threads = num_threads
        self._activation_bits = activation_bits
        self._memory: dict[str, Array] = {}
        self._cut: dict[int, Buffers] = {}  # by number of tokens
        self._longest = ROWS  # context the scores have room for
        self.scratch = scratch_for(max(spec.hidden_size, ROWS), num_threads)

    def cut(self, num_tokens: int, longest: int) -> Buffers:
        """Buffers for a step of so many tokens whose contexts are at most `longest`; `logits` is the caller's."""
        if longest > self._longest:
            self._longest = 1 << (longest - 1).bit_length()
            self._cut.clear()
        if num_tokens not in self._cut:
            self._cut[num_tokens] = self._make(num_tokens)
        return self._cut[num_tokens]

    def form(self, name: str, matrix: PackedMatrix, num_tokens: int, columns: int) -> Floats | Digits | Bytes:
        """Room for rows of x as this matrix takes them."""
        rows, groups = (num_tokens, columns), (num_tokens, columns // GROUP)
        sums = self._take(f"{name} sums", groups)
        if matrix.weights.ndim == 4:
            return Floats(self._take(f"{name} values", rows), sums)
        scale = self._take(f"{name} scale", groups)
        if self._activation_bits == 8:
            numbers, outlier = self._take(f"{name} numbers", rows, _SHORT), self._take(f"{name} outlier", groups)
            count = num_tokens * groups[1]
            which = self._take(f"{name} which", (count + CHUNK,), np.dtype(np.uint8))  # read CHUNK at a time
            return Bytes(numbers, scale, sums, outlier, which[:count].reshape(groups[1], num_tokens))
        high, low = (self._take(f"{name} {digit}", rows, _SHORT) for digit in ("high", "low"))
        return Digits(high, low, scale, sums)

    def _make(self, num_tokens: int) -> Buffers:
        spec, packed, threads = self._spec, self._packed, self._threads
        shared = packed.experts is not None and bool((packed.how[:, PERCEPTRON] > 0).any())
        added = num_tokens if packed.mlp_after.shape[1] or shared else 1
        return Buffers(
            hidden=self._take("hidden", (num_tokens, spec.hidden_size)),
            qkv=self._take("qkv", (num_tokens, packed.qkv.weights.shape[1] * ROWS)),
            q=self._take("q", (num_tokens, spec.num_heads, spec.head_dim)),
            mixed=self._take("mixed", (num_tokens, spec.num_heads, spec.head_dim)),
            added=self._take("added", (added, packed.o.weights.shape[1] * ROWS)),
            logits=np.zeros((1, ROWS), np.float32),
            to_qkv=self.form("qkv", packed.qkv, num_tokens, spec.hidden_size),
            to_o=self.form("o", packed.o, num_tokens, spec.q_size),
            to_gate_up=self.form("gate_up", packed.gate_up, num_tokens, spec.hidden_size),
            to_down=self.form("down", packed.down, num_tokens, num_inputs(packed.down)),
            to_head=self.form("head", packed.head, num_tokens, spec.hidden_size),
            scratch=self.scratch,
            scores=self._take("scores", (threads, max(SPAN * (self._longest + ROWS), _SCORES))),
            experts=None if packed.experts is None else self._experts(packed.experts, num_tokens),
        )

    def _experts(self, experts: PackedExperts, num_tokens: int) -> ExpertBuffers:
        hidden, rows, per_token = self._spec.hidden_size, num_tokens * experts.per_token, experts.per_token
        return ExpertBuffers(
            to_router=self.form("router", experts.router, num_tokens, hidden),
            scores=self._take("router scores", (num_tokens, experts.router.weights.shape[1] * ROWS)),
            chosen=self._take("chosen", (num_tokens, per_token), _WHOLE),
            shares=self._take("shares", (num_tokens, per_token + 1)),
            starts=self._take("starts", (experts.num_experts + 1,), _WHOLE),
            tokens=self._take("tokens", (rows,), _WHOLE),
            rows=self._take("rows", (num_tokens, per_token), _WHOLE),
            to_gate_up=self.form("expert gate_up", experts.gate_up, rows, hidden),
            to_down=self.form("expert down", experts.down, rows, num_inputs(experts.down)),
            parts=self._take("parts", (rows, experts.down.weights.shape[1] * ROWS)),
        )

    def _take(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any] = _FLOAT) -> Array:
        size = int(np.prod(shape))
        if name not in self._memory or len(self._memory[name]) < size:
            self._memory[name] = aligned((1 << (size - 1).bit_length(),), dtype)
            self._cut.clear()  # its cuts would keep the smaller pieces alive
        return self._memory[name][:size].reshape(shape)


def scratch_for(widest: int, num_threads: int) -> Scratch:
    """Every thread's, the thread first. widest: the longest row that is normalized."""
    return Scratch(
        total=aligned((num_threads, CHUNK, ROWS), _FLOAT),
        tile=aligned((num_threads, GROUP, ROWS), _FLOAT),
        small=aligned((num_threads, GROUP * ROWS), np.dtype(np.uint8)),
        factors=aligned((num_threads, 2, ROWS), _FLOAT),
        row=aligned((num_threads, -(-widest // ROWS) * ROWS), _FLOAT),
    )
