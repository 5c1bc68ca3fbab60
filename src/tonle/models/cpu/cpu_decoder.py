"""`CpuDecoder`: small steps from packed weights in one compiled call, large ones through torch.

Does: choose per step, by a crossover measured when it is made. Does not: differ from `Decoder` in results beyond rounding.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import torch

from tonle.models.adapters import Adapter
from tonle.models.cpu.cpu_adapters import CpuAdapters, sort_by_slot
from tonle.models.cpu.cpu_cache import Cache
from tonle.models.cpu.memory import Array
from tonle.models.cpu.numba_setup import kernels_dir
from tonle.models.cpu.pack import perceptron_size, rotations
from tonle.models.cpu.pieces import SPAN
from tonle.models.cpu.products import PackedMatrix
from tonle.models.cpu.step import Inputs, PackedWeights, forward, product
from tonle.models.cpu.team import Team
from tonle.models.cpu.tiles import has_tiles
from tonle.models.cpu.vector import ROWS
from tonle.models.cpu.wanted import Wanted
from tonle.models.cpu.warm import is_warm, types_of, warm_later, with_adapters
from tonle.models.cpu.workspace import Workspace
from tonle.models.decoder import Decoder
from tonle.models.inputs import KVCache, StepInputs
from tonle.models.rope import Rotary
from tonle.models.spec import ModelSpec

log = logging.getLogger("tonle.models")

Embed = Callable[[torch.Tensor, Array], None]  # tokens (T,) to their rows (T, hidden), written

_CANDIDATES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # tokens per step at which the two ways are compared
_CLEARLY = (
    1.2  # torch must be faster by this much: float32 weights cost memory, and other programs disturb the measurement
)
_USUAL_ROWS = 64  # logits of more tokens than this (log-probabilities of prompts) are not kept for the next step
_ENOUGH = 48  # if packed products keep up with torch's to here, whole steps do to several times as many tokens, and a
# float32 form of the weights is not worth its memory


class CpuDecoder:
    """A decoder with a fast lane.

    The slow lane, torch with float32 weights, exists while the kernels are being compiled, and after that only if torch
    turned out to be faster for large steps. `load_slow` is None for models too large to hold in float32.
    """

    def __init__(
        self, spec: ModelSpec, packed: PackedWeights, embed: Embed, load_slow: Callable[[], Decoder] | None, *,
        team: Team | None = None, activation_bits: int = 16, cache_dtype: torch.dtype | None = torch.float32,
        block_size: int = 16,
    ) -> None:  # fmt: skip
        """`cache_dtype`: of keys and values that the kernels are compiled for; None = what suits the weights, in blocks of
        `block_size` tokens."""
        self.spec = spec
        self.device, self.dtype = torch.device("cpu"), torch.float32
        self.crossover = 0  # most tokens of a fast step; 0 until the kernels are compiled
        self.kernel_changes = 0  # how often steps began to run from other kernels, which round differently
        self._packed = packed
        self._embed = embed
        self._load_slow = load_slow
        self._slow: Decoder | None = None
        self._lanes = (
            threading.Lock()
        )  # held while lanes open and close, which the thread that waits for kernels does too
        self._adapters: CpuAdapters | None = None
        self._adapter_limits = 0, 0  # slots, largest rank
        self._resident: dict[int, Adapter] = {}  # by slot: for a slow lane that is loaded later
        self._adapted = False  # whether the fast lane takes steps with adapters
        self._rotaries = [Rotary(rope, spec.head_dim, self.device) for rope in rotations(spec)]
        self._team = team or Team()
        self._workspace = Workspace(spec, packed, num_threads=self._team.size, activation_bits=activation_bits)
        self._cache: tuple[KVCache, Cache] | None = None
        self._logits: Array = np.empty((0, 0), dtype=np.float32)
        self._eps = np.float32(spec.norm_eps)
        self._embedding_scale = np.float32(spec.embedding_scale)
        self._activation_bits = activation_bits
        # float32 does not catch up with products of integers at any size
        self._integers = all(matrix.weights.ndim == 5 for matrix in self._matrices())
        # Where activations are of 8 bits, answers are rounded anyway; who asks for 16 wants them exact. Without kernels for it
        # attention to int8 would take longer than to float32.
        rounded = self._integers and activation_bits == 8
        suited = torch.int8 if rounded and has_tiles(spec.head_dim, block_size) else torch.float32
        self.cache_dtype = cache_dtype or suited
        self._types = types_of(packed, activation_bits, self.cache_dtype)
        self._compiling: threading.Thread | None = None
        if load_slow is None or is_warm(self._types):
            _say_compiled("CPU kernels", self._types)
            self.open_fast_lane()
        else:
            self._slow = load_slow()
            self._compiling = warm_later(self._types, _weak(self.open_fast_lane))

    def wait_for_kernels(self) -> None:
        """Until steps are as fast as they will be; at once where the kernels are there, or cannot be compiled."""
        if self._compiling is not None:
            self._compiling.join()

    def open_fast_lane(self) -> None:
        """The kernels are compiled: find from which step size on torch is faster, and keep what that calls for."""
        # experts: torch takes them one by one, in float32 they would be several times as large
        known = self._load_slow is None or self._integers or self._packed.experts is not None
        measured = _ENOUGH if known else self._measure()
        how = f"packed weights ({', '.join(self.formats())}) on {self._team.size} threads"
        if self._integers:
            how += f", {self._activation_bits}-bit activations"
        with self._lanes:
            if measured >= _ENOUGH:
                self.crossover = sys.maxsize
                log.info("every step runs from %s", how)
            else:
                self._open_slow_lane()
                self.crossover = measured
                log.info("steps of up to %d tokens run from %s, larger ones from float32", self.crossover, how)
            self._close_slow_lane()
            self.kernel_changes += 1

    def enable_adapters(self, num_slots: int, max_rank: int) -> None:
        """Once, before the first step: steps may have adapters. Those without run the code they ran before.

        Kernels that add adapters are compiled apart; until they are there, steps with adapters run through torch.
        """
        types = with_adapters(self._types)
        with self._lanes:
            self._adapter_limits = num_slots, max_rank
            self._adapters = CpuAdapters(self.spec, num_slots, max_rank)
            self._adapted = self._load_slow is None or is_warm(types)
            if self._adapted:
                _say_compiled("CPU kernels for adapters", types)
                if self._slow is not None:
                    self._slow.enable_adapters(num_slots, max_rank)
                return
            if self._slow is None:
                self._open_slow_lane()
            else:
                self._slow.enable_adapters(num_slots, max_rank)
        warm_later(types, _weak(self._take_adapters))

    def _take_adapters(self) -> None:
        """The kernels that add adapters are compiled."""
        with self._lanes:
            self._adapted = True
            self._close_slow_lane()
            self.kernel_changes += 1

    def set_adapter(self, slot: int, adapter: Adapter | None) -> None:
        """Between steps: what the slot adds from now on; None: nothing."""
        if self._adapters is None:
            raise RuntimeError("enable_adapters comes first")
        with self._lanes:
            fast = None if adapter is None else adapter.added_at(self.spec.residual_scale)
            self._adapters.set_adapter(slot, fast)
            if self._slow is not None:
                self._slow.set_adapter(slot, adapter)
            self._resident.pop(slot, None)
            if adapter is not None:
                self._resident[slot] = adapter

    def _open_slow_lane(self) -> None:
        """With the adapters there are. Under `_lanes`."""
        if self._slow is not None:
            return
        assert self._load_slow is not None
        slow = self._load_slow()
        if self._adapters is not None:
            slow.enable_adapters(*self._adapter_limits)
            for slot, adapter in self._resident.items():
                slow.set_adapter(slot, adapter)
        self._slow = slow

    def _close_slow_lane(self) -> None:
        """If no step needs it any more. Under `_lanes`."""
        if self.crossover == sys.maxsize and (self._adapters is None or self._adapted):
            self._slow = None

    def formats(self) -> list[str]:
        """The kinds of weights it holds, for the log."""
        names = {"uint8": "4-bit", "int8": "8-bit", "uint16": "bfloat16", "float32": "float32"}
        return sorted({names[matrix.weights.dtype.name] for matrix in self._matrices()})

    def _matrices(self) -> tuple[PackedMatrix, ...]:
        """Those that most of the time goes into."""
        packed = self._packed
        found = [packed.qkv, packed.o, packed.head]
        if packed.experts is not None:
            found += [packed.experts.gate_up, packed.experts.down]
        if perceptron_size(self.spec):
            found += [packed.gate_up, packed.down]
        return tuple(found)

    def forward(self, inputs: StepInputs, kv: KVCache) -> torch.Tensor:
        """Logits (S, vocab) float32 of the tokens `inputs.logit_indices` names; valid until the next step."""
        slow = self._slow_lane_for(inputs)
        return self._fast(inputs, kv) if slow is None else slow.forward(inputs, kv)

    def forward_hidden(self, inputs: StepInputs, kv: KVCache) -> tuple[torch.Tensor, torch.Tensor]:
        """As `forward`, and hidden states (P, hidden) float32, after the last norm, of tokens `inputs.hidden_indices` names."""
        slow = self._slow_lane_for(inputs)
        if slow is not None:
            return slow.forward_hidden(inputs, kv)
        logits, states = self._fast_step(inputs, kv)
        assert states is not None
        scale = torch.rsqrt(states.square().mean(dim=1, keepdim=True) + float(self._eps))
        return logits, states * scale * torch.from_numpy(self._packed.final_norm)

    def _slow_lane_for(self, inputs: StepInputs) -> Decoder | None:
        """Where this step runs through torch: that decoder."""
        slow = self._slow
        if slow is not None:
            waits = inputs.adapter_slots is not None and not self._adapted
            if waits or len(inputs.tokens) > self.crossover:
                return slow
        return None

    def _fast(self, inputs: StepInputs, kv: KVCache) -> torch.Tensor:
        return self._fast_step(inputs, kv)[0]

    def _fast_step(self, inputs: StepInputs, kv: KVCache) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits, and hidden states (P, hidden) before the last norm if such are wanted."""
        slots_of_tokens: Array | None = None
        if inputs.adapter_slots is not None:
            inputs, slots_of_tokens = sort_by_slot(inputs)
        num_tokens = len(inputs.tokens)
        wanted = Wanted.of(inputs)
        adapters = None
        if slots_of_tokens is not None:
            assert self._adapters is not None, "enable_adapters comes first"
            adapters = self._adapters.step(slots_of_tokens, slots_of_tokens[wanted.tokens])
        cos, sin = self._angles(inputs.positions)
        longest = max(inputs.context_lens)
        step = Inputs(
            row_of=np.repeat(np.arange(len(inputs.context_lens)), np.diff(inputs.row_starts)),
            spans=_spans(inputs.row_starts),
            longest=longest,
            positions=inputs.positions.numpy(),
            slots=inputs.slots.numpy(),
            tables=np.ascontiguousarray(inputs.block_tables.numpy()),
            wanted=wanted.tokens,
            places=wanted.places,
            cos=cos,
            sin=sin,
        )
        logits = self._room_for(wanted.num_logits)
        buffers = self._workspace.cut(num_tokens, longest)._replace(logits=logits)
        self._embed(inputs.tokens, buffers.hidden)
        if self._embedding_scale != 1:
            buffers.hidden[...] *= self._embedding_scale
        packed, cache, eps = self._packed, self._cache_of(kv), self._eps
        counter, size = self._team.counter, self._team.size
        self._team.run(lambda member: forward(packed, step, buffers, adapters, cache, eps, counter, member, size))
        states = None if wanted.hidden_rows is None else torch.from_numpy(buffers.hidden[wanted.hidden_rows])
        found = self._shaped(torch.from_numpy(logits)[:, : self.spec.vocab_size])
        return (found if wanted.logit_rows is None else found[torch.from_numpy(wanted.logit_rows)]), states

    def _shaped(self, logits: torch.Tensor) -> torch.Tensor:
        """Multiplied and kept within a limit, in place, as the model has it."""
        if self.spec.logit_scale != 1:
            logits *= self.spec.logit_scale
        if (cap := self.spec.logit_soft_cap) is not None:
            logits.div_(cap).tanh_().mul_(cap)
        return logits

    def _cache_of(self, kv: KVCache) -> Cache:
        """As the compiled step takes it: an engine has one, for good."""
        if self._cache is None or self._cache[0] is not kv:
            self._cache = kv, Cache.of(kv, self._team.size)
        return self._cache[1]

    def _angles(self, positions: torch.Tensor) -> tuple[Array, Array]:
        """cos and sin (ropes, T, rotated numbers)."""
        found = [rotary.angles(positions, torch.float32) for rotary in self._rotaries]  # (T, 1, rotated) each
        if len(found) == 1:
            cos, sin = found[0]
            return cos.view(1, len(positions), -1).numpy(), sin.view(1, len(positions), -1).numpy()
        if not found:
            none = np.zeros((0, len(positions), self.spec.head_dim), dtype=np.float32)
            return none, none
        made = np.zeros((2, len(found), len(positions), max(cos.shape[2] for cos, _ in found)), dtype=np.float32)
        for rope, angles in enumerate(found):
            for place, each in zip(made, angles, strict=True):
                place[rope, :, : each.shape[2]] = each.squeeze(1).numpy()
        return made[0], made[1]

    def _room_for(self, num_wanted: int) -> Array:
        """Logits (S, vocabulary in whole blocks). The same memory for every usual step: fresh pages cost time."""
        if num_wanted > len(self._logits):
            width = self._packed.head.weights.shape[1] * ROWS
            made = np.empty((num_wanted, width), dtype=np.float32)
            if num_wanted > _USUAL_ROWS:
                return made
            self._logits = made
        return self._logits[:num_wanted]

    def _measure(self) -> int:
        """The most tokens at which the compiled product still beats torch's, on the widest matrix of a layer."""
        num_layers = min(4, self.spec.num_layers)  # more than the caches hold
        shape = (self.spec.hidden_size, 2 * self.spec.intermediate_size)
        theirs = [torch.randn(shape) for _ in range(num_layers)]
        best = _CANDIDATES[0]
        for count in _CANDIDATES:
            rows = torch.randn(count, self.spec.hidden_size)
            ours = _quickest(lambda rows=rows: self._products(rows.numpy(), num_layers))  # type: ignore[misc]
            if ours > _CLEARLY * _quickest(lambda rows=rows: [rows @ weights for weights in theirs]):  # type: ignore[misc]
                break
            best = count
        return best

    def _products(self, x: Array, num_layers: int) -> None:
        team, gate_up, scratch = self._team, self._packed.gate_up, self._workspace.scratch
        form = self._workspace.cut(len(x), ROWS).to_gate_up
        out = np.empty((len(x), gate_up.weights.shape[1] * ROWS), dtype=np.float32)
        for layer in range(num_layers):
            team.run(lambda member, layer=layer: product(gate_up, layer, x, form, out, scratch, member, team.size))  # type: ignore[misc]


def _spans(row_starts: Sequence[int]) -> Array:
    """(spans, 2): each row's tokens, SPAN at a time."""
    spans = [
        (first, min(first + SPAN, end)) for start, end in pairwise(row_starts) for first in range(start, end, SPAN)
    ]
    return np.array(spans, dtype=np.int64)


def _quickest(work: Callable[[], object]) -> float:
    times = []
    for _ in range(6):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def _say_compiled(what: str, types: str) -> None:
    """Of kernels that need not be waited for."""
    how = f"using the {what} compiled earlier, in" if is_warm(types) else f"{what} are compiled at first use, to"
    log.info("%s %s", how, kernels_dir())


def _weak(method: Callable[[], None]) -> Callable[[], None]:
    """The same, without keeping its decoder: one that is freed before the kernels are compiled takes its weights along."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        if (found := reference()) is not None:
            found()

    return call
