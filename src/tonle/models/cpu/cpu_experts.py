"""Mixtures of experts inside a compiled step: routing, and each expert's products with the tokens that chose it.

Does: choose experts, sort tokens by expert, multiply only the experts that some token chose, add up what they give. Does not: lay
weights out (`pack_experts.py`). Rows of the products are pairs of a token and an expert it chose, an expert's side by side,
so that an expert's weights are read once a step. What a token gets does not depend on the other tokens of the step: what its
experts give is added up in the order of its own choices.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tonle.models.cpu.exponential import gate_group
from tonle.models.cpu.kernels import normalize
from tonle.models.cpu.pieces import EXPERTS, NORM_AFTER, NORM_BEFORE, PERCEPTRON, norm_rows, share, store
from tonle.models.cpu.products import PackedMatrix, block_product, compiled, f32, set_group
from tonle.models.cpu.team import barrier
from tonle.models.cpu.vector import CHUNK, GROUP, ROWS

_FEW = 8  # tokens: up to here one thread chooses for all, and the others wait once instead of twice
_READ = 4  # what reading a block of weights costs, in rows multiplied with it: how work is divided among threads


class PackedExperts(NamedTuple):
    """The experts of all layers that have some, and what chooses among them. `PackedWeights.how` has each layer's place here."""

    router: PackedMatrix  # (places, ...) a row for each expert, then one that gates the shared expert if there is such a gate
    router_bias: Any  # (places, experts), or (places, 0)
    gate_up: PackedMatrix  # expert e of place p is matrix p * num_experts + e; rows as in `PackedWeights.gate_up`
    gate_up_bias: Any  # (matrices, rows in blocks), or (matrices, 0)
    down: PackedMatrix
    down_bias: Any
    num_experts: Any
    per_token: Any
    normed: Any  # 1: the shares of a token's experts add up to 1
    shared_gate: Any  # 1: what the shared expert gives is multiplied with a sigmoid
    activation: Any  # as `gate_group` counts them
    clamp: Any  # float32; of swigluoai


class ExpertBuffers(NamedTuple):
    """What routing and the experts' products write. T tokens, each with k experts: R = T * k rows."""

    to_router: Any  # `Floats` (T, hidden)
    scores: Any  # (T, router's rows in blocks)
    chosen: Any  # (T, k) int64
    shares: Any  # (T, k + 1); the last one is the shared expert's
    starts: Any  # (experts + 1,) int64: the first row of each expert
    tokens: Any  # (R,) int64: the token of each row
    rows: Any  # (T, k) int64: the row of each choice
    to_gate_up: Any  # `Floats`, `Digits` or `Bytes` (R, hidden)
    to_down: Any  # `Floats`, `Digits` or `Bytes` (R, size of an expert)
    parts: Any  # (R, hidden in blocks): what each expert gives each of its tokens


@compiled
def choose(scores: Any, bias: Any, num_experts: Any, per_token: Any, normed: Any, chosen: Any, shares: Any) -> None:
    """One token: from its scores, which are overwritten, to its experts, best first, and their shares."""
    top = f32(-np.inf)
    for e in range(num_experts):
        if bias.shape[0]:
            scores[e] += bias[e]
        top = max(top, scores[e])
    total = f32(0)
    for e in range(num_experts):
        scores[e] = np.exp(scores[e] - top)
        total += scores[e]
    kept = f32(0)
    for j in range(per_token):
        best = 0
        for e in range(1, num_experts):
            if scores[e] > scores[best]:
                best = e
        chosen[j] = best
        shares[j] = scores[best]
        kept += scores[best]
        scores[best] = f32(-1)  # not again
    if normed:
        total = kept
    for j in range(per_token):
        shares[j] /= total


@compiled
def sort_rows(chosen: Any, count: Any, starts: Any, tokens: Any, rows: Any) -> None:
    """Number the choices of the first `count` tokens, those of an expert side by side, its tokens in their order."""
    num_experts, per_token = starts.shape[0] - 1, chosen.shape[1]
    for e in range(num_experts + 1):
        starts[e] = 0
    for t in range(count):
        for j in range(per_token):
            starts[chosen[t, j] + 1] += 1
    for e in range(num_experts):
        starts[e + 1] += starts[e]
    for t in range(count):
        for j in range(per_token):
            e = chosen[t, j]
            rows[t, j] = starts[e]
            tokens[starts[e]] = t
            starts[e] += 1  # now where the next one goes; the next expert's start in the end
    for e in range(num_experts, 0, -1):
        starts[e] = starts[e - 1]
    starts[0] = 0


@compiled
def _route(experts: PackedExperts, place: Any, buffers: ExpertBuffers, first: Any, last: Any) -> None:
    """Tokens first..last choose; the gate of the shared expert."""
    for t in range(first, last):
        gate = f32(1)
        if experts.shared_gate:
            gate /= f32(1) + np.exp(-buffers.scores[t, experts.num_experts])
        buffers.shares[t, experts.per_token] = gate
        choose(buffers.scores[t], experts.router_bias[place], experts.num_experts, experts.per_token, experts.normed,
               buffers.chosen[t], buffers.shares[t])  # fmt: skip


@compiled
def _work(starts: Any, blocks: Any) -> Any:
    """What all products with so many blocks of each expert that has rows cost; see `_own_blocks`."""
    active = 0
    for e in range(starts.shape[0] - 1):
        if starts[e + 1] > starts[e]:
            active += 1
    return blocks * (starts[starts.shape[0] - 1] + _READ * active)


@compiled
def _own_blocks(low: Any, high: Any, cost: Any, blocks: Any) -> Any:
    """Of an expert whose blocks cost `cost` each: the first and the last + 1 of those that begin within low..high."""
    return min(max(-(-low // cost), 0), blocks), min(max(-(-high // cost), 0), blocks)


@compiled
def _gate(experts: PackedExperts, place: Any, buffers: ExpertBuffers, member: Any, size: Any, own: Any) -> None:
    """buffers.to_down = activation(gate) * up of each row."""
    matrix, starts = experts.gate_up, buffers.starts
    blocks = matrix.weights.shape[1]
    low, high = share(_work(starts, blocks), member, size)
    for e in range(experts.num_experts):
        at, cost = place * experts.num_experts + e, starts[e + 1] - starts[e] + _READ
        if starts[e + 1] == starts[e]:
            continue
        begin, end = _own_blocks(low, high, cost, blocks)
        low, high = low - blocks * cost, high - blocks * cost
        for b in range(begin, end):
            for first in range(starts[e], starts[e + 1], CHUNK):
                last = min(first + CHUNK, starts[e + 1])
                block_product(matrix, at, b, buffers.to_gate_up, first, last, own)
                for m in range(last - first):
                    if experts.gate_up_bias.shape[1]:
                        for j in range(ROWS):
                            own.total[m, j] += experts.gate_up_bias[at, b * ROWS + j]
                    gate_group(own.total, m * ROWS, experts.activation, experts.clamp)
                    set_group(buffers.to_down, first + m, b, own.total, m * ROWS)


@compiled
def _down(experts: PackedExperts, place: Any, buffers: ExpertBuffers, member: Any, size: Any, own: Any) -> None:
    """buffers.parts = what each row's expert gives."""
    matrix, starts = experts.down, buffers.starts
    blocks = matrix.weights.shape[1]
    low, high = share(_work(starts, blocks), member, size)
    for e in range(experts.num_experts):
        at, cost = place * experts.num_experts + e, starts[e + 1] - starts[e] + _READ
        if starts[e + 1] == starts[e]:
            continue
        begin, end = _own_blocks(low, high, cost, blocks)
        low, high = low - blocks * cost, high - blocks * cost
        for b in range(begin, end):
            for first in range(starts[e], starts[e + 1], CHUNK):
                last = min(first + CHUNK, starts[e + 1])
                block_product(matrix, at, b, buffers.to_down, first, last, own)
                for m in range(last - first):
                    for j in range(ROWS):
                        buffers.parts[first + m, b * ROWS + j] = own.total[m, j]
                    if experts.down_bias.shape[1]:
                        for j in range(ROWS):
                            buffers.parts[first + m, b * ROWS + j] += experts.down_bias[at, b * ROWS + j]


@compiled
def _add_up(experts: PackedExperts, buffers: ExpertBuffers, shared: Any, has_shared: Any, normed: Any, after: Any, eps: Any,
            hidden: Any, member: Any, size: Any, own: Any) -> None:  # fmt: skip
    """hidden (T, hidden) += what each token's experts give, and the shared one's shared (T, .), normed or not."""
    width, per_token = hidden.shape[1], experts.per_token
    row = own.row[:width]
    first, last = share(hidden.shape[0], member, size)
    for t in range(first, last):
        for i in range(width):
            row[i] = 0
        for j in range(per_token):
            part, weight = buffers.parts[buffers.rows[t, j]], buffers.shares[t, j]
            for i in range(width):
                row[i] += weight * part[i]
        if has_shared:
            weight = buffers.shares[t, per_token]
            for i in range(width):
                row[i] += weight * shared[t, i]
        if normed:
            normalize(row, after, eps, row)
        for i in range(width):
            hidden[t, i] += row[i]


@compiled
def mix_experts(experts: Any, packed: Any, layer: Any, hidden: Any, buffers: Any, eps: Any, counter: Any, arrivals: Any,
                member: Any, size: Any, own: Any) -> Any:  # fmt: skip
    """Norm before; routing; gate and up of each row, activation. `experts`, `buffers`: None in models without."""
    if experts is None:
        return arrivals
    place, count = packed.how[layer, EXPERTS], hidden.shape[0]
    norm_rows(hidden, packed.how[layer, NORM_BEFORE], packed.mlp_norm[layer], eps, buffers.to_router, None, member, size,
              own)  # fmt: skip
    arrivals = barrier(counter, arrivals, size)
    store(experts.router, place, buffers.to_router, buffers.scores[:count], None, 0, member, size, own)
    arrivals = barrier(counter, arrivals, size)
    if count > _FEW:
        first, last = share(count, member, size)
        _route(experts, place, buffers, first, last)
        arrivals = barrier(counter, arrivals, size)
    if member == 0:
        if count <= _FEW:
            _route(experts, place, buffers, 0, count)
        sort_rows(buffers.chosen, count, buffers.starts, buffers.tokens, buffers.rows)
    arrivals = barrier(counter, arrivals, size)
    first, last = share(count * experts.per_token, member, size)
    for row in range(first, last):
        at = buffers.tokens[row] * hidden.shape[1]
        for g in range(hidden.shape[1] // GROUP):
            set_group(buffers.to_gate_up, row, g, buffers.to_router.values, at + g * GROUP)
    arrivals = barrier(counter, arrivals, size)
    _gate(experts, place, buffers, member, size, own)
    return barrier(counter, arrivals, size)


@compiled
def add_experts(experts: Any, packed: Any, layer: Any, hidden: Any, shared: Any, to_shared: Any, buffers: Any, eps: Any,
                counter: Any, arrivals: Any, member: Any, size: Any, own: Any) -> Any:  # fmt: skip
    """Second products of the experts and of the shared one, norm after; added to hidden.

    shared: room for what the shared expert gives, of which to_shared (`Floats`, `Digits` or `Bytes`) is the activation.
    """
    if experts is None:
        return arrivals
    how = packed.how[layer]
    few = shared[: hidden.shape[0]]
    if how[PERCEPTRON]:
        store(packed.down, layer, to_shared, few, None, 0, member, size, own)
    _down(experts, how[EXPERTS], buffers, member, size, own)
    arrivals = barrier(counter, arrivals, size)
    _add_up(experts, buffers, few, how[PERCEPTRON], how[NORM_AFTER], packed.mlp_after[layer], eps, hidden, member, size,
            own)  # fmt: skip
    return barrier(counter, arrivals, size)
