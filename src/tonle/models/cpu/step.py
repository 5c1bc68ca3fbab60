"""The whole step of a decoder, all layers, as one compiled function that every thread of a team runs.

Does: walk the order of each layer (`layer_order.py`, as integers), then the wanted logits. The pieces: `pieces.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from tonle.models.cpu.cpu_cache import Cache
from tonle.models.cpu.cpu_experts import add_experts, mix_experts
from tonle.models.cpu.low_rank import of_wanted
from tonle.models.cpu.pieces import (
    EXPERTS,
    PERCEPTRON,
    add_attended,
    add_mixed,
    attend_all,
    gather,
    mix,
    norm_wanted,
    own_scratch,
    project,
    store,
    to_form,
)
from tonle.models.cpu.products import OPTIONS, PackedMatrix
from tonle.models.cpu.team import barrier
from tonle.models.layer_order import Piece

PROJECT, ATTEND, ADD_ATTENDED, MIX = (
    int(piece) for piece in (Piece.PROJECT, Piece.ATTEND, Piece.ADD_ATTENDED, Piece.MIX)
)


class PackedWeights(NamedTuple):
    """A decoder's weights for `forward`."""

    order: Any  # (layers, pieces) int64: `layer_order` of each
    how: Any  # (layers, NUM_SETTINGS) int64, see `pieces.py`; rope, experts -1: none; window 0: all
    scores: Any  # (layers, 2) float32: what scores are multiplied with; what they are kept within, or 0
    qkv: PackedMatrix
    qkv_bias: Any  # (layers, rows)
    o: PackedMatrix
    o_bias: Any  # (layers, rows in blocks), or (layers, 0)
    gate_up: PackedMatrix  # in every block: HALF rows of gate, then the HALF rows of up that belong to them
    gate_up_bias: Any  # likewise, or (layers, 0)
    down: PackedMatrix
    down_bias: Any  # (layers, rows in blocks), or (layers, 0)
    head: PackedMatrix  # one layer: the vocabulary
    input_norm: Any  # (layers, hidden)
    attention_after: Any  # (layers, hidden), or (layers, 0) if no layer norms what it adds
    mlp_norm: Any  # (layers, hidden)
    mlp_after: Any  # as attention_after
    final_norm: Any  # (hidden,)
    q_norm: Any  # (layers, dim), or (layers, heads * dim) of norms over all heads together; (layers, 0) without
    k_norm: Any
    sinks: Any  # (layers, heads), or (layers, 0)
    experts: Any  # `PackedExperts`, or None if no layer has any; then gate_up and down may be those of shared experts


class Buffers(NamedTuple):
    """What a step writes. Shared, except those whose first dimension is the thread."""

    hidden: Any  # (T, hidden): the residual stream; holds the embeddings on entry
    qkv: Any  # (T, rows)
    q: Any  # (T, heads, dim) rotated
    mixed: Any  # (T, heads, dim) attention's output
    added: Any  # (T, hidden in blocks) what a shared expert gives, or is normed before it is added to hidden; (1, .) if neither
    logits: Any  # (S, vocabulary rounded up to blocks)
    to_qkv: Any  # what each matrix is multiplied with, as `Floats`, `Digits` or `Bytes`: hidden wide
    to_o: Any  # heads * dim
    to_gate_up: Any  # hidden
    to_down: Any  # intermediate
    to_head: Any  # (S, hidden)
    scratch: Any  # `Scratch` of every thread: arrays with the thread first
    scores: Any  # (threads, at least SPAN times the longest context in whole vectors)
    experts: Any  # `ExpertBuffers`, or None


class Inputs(NamedTuple):
    """One step: T tokens, S of them with logits wanted."""

    row_of: Any  # (T,) which block table
    spans: Any  # (spans, 2): from which token to which; up to SPAN consecutive ones of a row
    longest: Any  # tokens: the largest context
    positions: Any  # (T,)
    slots: Any  # (T,)
    tables: Any  # (R, blocks) int32
    wanted: Any  # (S,) which tokens, rising
    places: Any  # (S,) the row of logits that each of them gets
    cos: Any  # (ropes, T, the most numbers of a head that any of them rotates)
    sin: Any


@njit(**OPTIONS, cache=True)  # type: ignore[untyped-decorator]
def forward(packed: PackedWeights, step: Inputs, buffers: Buffers, adapters: Any, cache: Cache, eps: Any, counter: Any,
            member: Any, size: Any) -> None:  # fmt: skip
    """All layers, then the wanted logits.

    adapters: `Adapters`, or None, which compiles to code that knows nothing of them.
    Once the last layer's keys and values are in the cache, a token without logits is done: the rest runs for the wanted ones.
    """
    own, hidden, chosen, count = own_scratch(buffers.scratch, member), buffers.hidden, adapters, step.wanted.shape[0]
    mixed = buffers.mixed.reshape(hidden.shape[0], -1)  # (T, heads * dim)
    arrivals = np.int64(0)
    num_layers, num_pieces = packed.order.shape
    for item in range(num_layers * num_pieces):
        layer = item // num_pieces
        piece = packed.order[layer, item % num_pieces]
        if piece == PROJECT:
            arrivals = project(packed, layer, hidden, buffers, chosen, eps, counter, arrivals, member, size, own)
        elif piece == ATTEND:
            arrivals = attend_all(packed, layer, step, buffers, cache, eps, counter, arrivals, member, size)
            if layer == num_layers - 1:
                if count == 0:
                    return
                if member == 0:
                    gather(hidden, step.wanted)
                if member == size - 1:
                    gather(mixed, step.wanted)
                arrivals = barrier(counter, arrivals, size)
                hidden, mixed, chosen = hidden[:count], mixed[:count], of_wanted(adapters)
        elif piece == ADD_ATTENDED:
            arrivals = add_attended(
                packed, layer, hidden, mixed, buffers, chosen, eps, counter, arrivals, member, size, own
            )
        elif piece == MIX:
            if packed.how[layer, PERCEPTRON]:
                arrivals = mix(packed, layer, hidden, buffers, chosen, eps, counter, arrivals, member, size, own)
            if packed.how[layer, EXPERTS] >= 0:
                arrivals = mix_experts(packed.experts, packed, layer, hidden, buffers.experts, eps, counter, arrivals, member,
                                       size, own)  # fmt: skip
        elif packed.how[layer, EXPERTS] >= 0:
            arrivals = add_experts(packed.experts, packed, layer, hidden, buffers.added, buffers.to_down, buffers.experts,
                                   eps, counter, arrivals, member, size, own)  # fmt: skip
        else:
            arrivals = add_mixed(packed, layer, hidden, buffers, chosen, eps, counter, arrivals, member, size, own)
    norm_wanted(hidden, packed.final_norm, eps, step.places, buffers.to_head, member, size, own)
    arrivals = barrier(counter, arrivals, size)
    store(packed.head, 0, buffers.to_head, buffers.logits, None, 0, member, size, own)


@njit(**OPTIONS, cache=True)  # type: ignore[untyped-decorator]
def product(
    matrix: PackedMatrix, layer: Any, x: Any, form: Any, out: Any, scratch: Any, member: Any, size: Any
) -> None:
    """One matrix alone, for measuring and for tests: out (T, blocks * ROWS) = x (T, K) times it.

    form: room for x as the matrix wants it, one for each thread (there is no barrier here).
    """
    to_form(x, form, 0, 1)
    store(matrix, layer, form, out, None, 0, member, size, own_scratch(scratch, member))
