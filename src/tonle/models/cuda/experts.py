"""A mixture of experts as kernels read it, and the order of its kernels.

Does: `CudaExperts`, the weights of one layer's experts side by side, its router and its shared expert; from hidden states to what
is added to them, in two pieces, for one row or many, with no word to the host. `ExpertScratch`, the buffers that all layers use
in turn. Does not: own the norm, or the residual. Kernels: `experts_routing.py`, `experts_one_row.py`, `experts_grouped.py`,
`experts_packed.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tonle.models.cuda.experts_grouped import Routed, add_up, grouped_down, grouped_gate_up
from tonle.models.cuda.experts_one_row import one_row_down, one_row_gate_up
from tonle.models.cuda.experts_packed import packed_down, packed_gate_up
from tonle.models.cuda.experts_routing import assign
from tonle.models.cuda.experts_weights import ExpertWeights, dense
from tonle.models.cuda.matrix import Matrix, Norm
from tonle.models.cuda.quantized_matrix import AnyMatrix, matrix_of
from tonle.models.experts import Experts
from tonle.models.spec import MixerSpec

_ALIGN = 16  # rows of the router: cuBLAS is slow with odd numbers of outputs


class Room(NamedTuple):
    """Parts of the scratch, for a layer and a number of rows T."""

    logits: torch.Tensor  # (T, rows of the router)
    routed: Routed
    active: torch.Tensor  # (T * top, size)
    given: torch.Tensor  # (T * top, hidden): what each expert gives each of its tokens
    shared_both: torch.Tensor  # (T, 2 * shared size): in the memory of `given`, which is used later
    shared_active: torch.Tensor  # (T, shared size)
    shared: torch.Tensor  # (T, hidden)


class ExpertScratch:
    """Large enough for any of these layers' experts and so many tokens."""

    def __init__(self, experts: Sequence[CudaExperts], tokens: int) -> None:
        like = experts[0].router.weight
        self._hidden = like.shape[1]

        def most(of: list[int]) -> int:
            return tokens * max(of)

        specs = [one.spec for one in experts]
        tops = [spec.experts_per_token for spec in specs]
        shared = max(spec.shared_size for spec in specs)
        device = like.device
        self._logits = like.new_zeros(most([one.router.weight.shape[0] for one in experts]))
        self._counts = torch.zeros(max(spec.num_experts for spec in specs), dtype=torch.int32, device=device)
        self._lists = torch.zeros(most([spec.num_experts for spec in specs]), dtype=torch.int32, device=device)
        self._shares = torch.zeros(most(tops), dtype=torch.float32, device=device)
        self._active = like.new_zeros(most([spec.experts_per_token * spec.size for spec in specs]))
        self._given = like.new_zeros(most([max(top * self._hidden, 2 * shared) for top in tops]))
        self._shared_active = like.new_zeros(tokens * shared)
        self._shared = like.new_zeros(tokens * self._hidden if shared else 0)
        self._tokens = tokens

    def room(self, experts: CudaExperts, rows: int) -> Room:
        spec, hidden = experts.spec, self._hidden
        pairs, num = rows * spec.experts_per_token, spec.num_experts
        lists = self._lists[: num * self._tokens].view(num, self._tokens)
        shared = hidden if spec.shared_size else 0
        return Room(
            _of(self._logits, rows, experts.router.weight.shape[0]),
            Routed(self._counts[:num], lists, self._shares[:pairs]),
            _of(self._active, pairs, spec.size),
            _of(self._given, pairs, hidden),
            _of(self._given, rows, 2 * spec.shared_size),
            _of(self._shared_active, rows, spec.shared_size),
            _of(self._shared, rows, shared),
        )


def _of(buffer: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return buffer[: rows * columns].view(rows, columns)


@dataclass(slots=True, eq=False)
class CudaExperts:
    """One layer's. Set `scratch` before the first call."""

    spec: MixerSpec
    router: Matrix  # a row for each expert, then one for the shared expert's gate, then zeros
    gate_up: ExpertWeights  # (experts, 2 * size, hidden)
    down: ExpertWeights  # (experts, hidden, size)
    shared_gate_up: AnyMatrix | None = None
    shared_down: AnyMatrix | None = None
    scratch: ExpertScratch | None = None

    @classmethod
    def of(cls, experts: Experts, spec: MixerSpec, dtype: torch.dtype) -> CudaExperts:
        """`dtype`: of hidden states."""
        gate_up = ExpertWeights.of([expert.gate_up for expert in experts.experts], dtype)
        down = ExpertWeights.of([expert.down for expert in experts.experts], dtype)
        made = cls(spec, _router(experts, dtype), gate_up, down)
        if experts.shared is not None:
            made.shared_gate_up = matrix_of(experts.shared.gate_up, dtype)
            made.shared_down = matrix_of(experts.shared.down, dtype)
        return made

    @property
    def matrices(self) -> list[AnyMatrix]:
        """Those that are multiplied like any other."""
        return [matrix for matrix in (self.router, self.shared_gate_up, self.shared_down) if matrix is not None]

    def mix(self, hidden: torch.Tensor, norm: Norm | None, live: torch.Tensor) -> None:
        """Everything up to the activation, of the first live[0] of hidden (T, hidden)."""
        if not self._alone(hidden):
            self.mix_normed(hidden if norm is None else norm(hidden), live)
            return
        room = self._room(1)
        self._gate_shared(hidden, norm, room)
        self.router.apply(hidden, norm, room.logits)
        gain, eps = (None, 0.0) if norm is None else (norm.gain, norm.eps)
        one_row_gate_up(hidden, room.logits, self.gate_up, self.spec, room.active, gain=gain, eps=eps)

    def mix_normed(self, x: torch.Tensor, live: torch.Tensor) -> None:
        """The same of x (T, hidden), normed already; T is 2 at least unless weights are packed."""
        room, spec = self._room(x.shape[0]), self.spec
        self._gate_shared(x, None, room)
        self.router.product(x, room.logits)
        assign(room.logits, live, *room.routed, top=spec.experts_per_token, normed=spec.normed_shares)
        gate_up = grouped_gate_up if self.gate_up.packed is None else packed_gate_up
        gate_up(x, self.gate_up, room.routed, spec, room.active)

    def add(self, out: torch.Tensor, live: torch.Tensor, *, add: bool = True, settled: bool = False) -> None:
        """What the experts give, to out (T, hidden), or added to it. `settled`: the kernel ahead does not write that."""
        room, spec = self._room(out.shape[0]), self.spec
        shared = None if self.shared_down is None else room.shared
        if self.shared_down is not None:
            self.shared_down.product(room.shared_active, room.shared)
        if self._alone(out):
            one_row_down(room.active, room.logits, self.down, shared, spec, out, add=add, settled=settled)
        else:
            down = grouped_down if self.down.packed is None else packed_down
            down(room.active, self.down, room.routed, room.given)
            add_up(room.given, room.routed, shared, room.logits, live, spec, out, add=add)

    def _alone(self, rows: torch.Tensor) -> bool:
        """Whether the kernels of a single row run; those of packed weights serve any number of rows."""
        return rows.shape[0] == 1 and self.gate_up.packed is None and self.down.packed is None

    def _gate_shared(self, x: torch.Tensor, norm: Norm | None, room: Room) -> None:
        if self.shared_gate_up is not None:
            activation = self.spec.activation
            self.shared_gate_up.gate(x, norm, room.shared_both, room.shared_active, activation=activation)

    def _room(self, rows: int) -> Room:
        assert self.scratch is not None, "scratch is set when the model is"
        return self.scratch.room(self, rows)


def _router(experts: Experts, dtype: torch.dtype) -> Matrix:
    """The experts' rows and the shared expert's gate as one matrix: one product gives the logits of both."""
    gate = () if experts.shared_gate is None else experts.shared_gate.parts
    weights = [dense(part, dtype) for part in (*experts.router.parts, *gate)]
    biases = [part.bias for part in experts.router.parts if part.bias is not None]
    num = sum(weight.shape[0] for weight in weights)
    weight = weights[0].new_zeros(-(-num // _ALIGN) * _ALIGN, weights[0].shape[1])
    weight[:num].copy_(torch.cat(weights))
    bias = None
    if biases:
        bias = weight.new_zeros(weight.shape[0])
        joined = torch.cat(biases)
        bias[: len(joined)].copy_(joined)
    return Matrix(weight, weight.t(), bias)
