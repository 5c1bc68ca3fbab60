"""The whole step of a decoder, all layers, as one compiled function that every thread of a team runs.

Work is divided by output rows (products), by token (norms) and by token and head (attention); the threads wait for
each other where one part needs all of another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import njit

from tonle.models.cpu.exponential import gate_group
from tonle.models.cpu.kernels import attend, normalize, normalize_head, rotate_head, row_room
from tonle.models.cpu.low_rank import DOWN, GATE_UP, QKV, Adapters, O, expand, shrink
from tonle.models.cpu.products import OPTIONS, PackedMatrix, Scratch, block_product, compiled, rows_at_once, set_group
from tonle.models.cpu.team import barrier
from tonle.models.cpu.vector import GROUP, ROWS

SPAN = 8  # tokens of one row whose attention is computed together: keys and values are read once for them


class PackedWeights(NamedTuple):
    """A decoder's weights for `forward`."""

    qkv: PackedMatrix
    qkv_bias: Any  # (layers, rows)
    o: PackedMatrix
    gate_up: PackedMatrix  # in every block: HALF rows of gate, then the HALF rows of up that belong to them
    down: PackedMatrix
    head: PackedMatrix  # one layer: the vocabulary
    input_norm: Any  # (layers, hidden)
    mlp_norm: Any
    final_norm: Any  # (hidden,)
    q_norm: Any  # (layers, dim), or (layers, 0) without
    k_norm: Any
    windows: Any  # (layers,) int64; 0 = all


class Buffers(NamedTuple):
    """What a step writes. Shared, except those whose first dimension is the thread."""

    hidden: Any  # (T, hidden): the residual stream; holds the embeddings on entry
    qkv: Any  # (T, rows)
    q: Any  # (T, heads, dim) rotated
    mixed: Any  # (T, heads, dim) attention's output
    logits: Any  # (S, vocabulary rounded up to blocks)
    to_qkv: Any  # what each matrix is multiplied with, as `Floats` or `Digits`: hidden wide
    to_o: Any  # heads * dim
    to_gate_up: Any  # hidden
    to_down: Any  # intermediate
    to_head: Any  # (S, hidden)
    scratch: Any  # `Scratch` of every thread: arrays with the thread first
    scores: Any  # (threads, at least SPAN times the longest context in whole vectors)


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
    cos: Any  # (T, dim)
    sin: Any


@compiled
def _share(count: Any, member: Any, size: Any) -> Any:
    return count * member // size, count * (member + 1) // size


@compiled
def _own(scratch: Any, member: Any) -> Any:
    return Scratch(scratch.total[member], scratch.tile[member], scratch.small[member], scratch.factors[member],
                   scratch.row[member])  # fmt: skip


@compiled
def _portion(matrix: PackedMatrix, count: Any, member: Any, size: Any) -> Any:
    """A thread's part of a product with `count` rows: rows at a time, chunks of rows, first and last (block, chunk)."""
    blocks = matrix.weights.shape[1]
    step = rows_at_once(count, blocks, size)
    chunks = -(-count // step)
    begin, end = _share(blocks * chunks, member, size)
    return step, chunks, begin, end


@compiled
def _store(matrix: PackedMatrix, layer: Any, x: Any, out: Any, adapters: Any, kind: Any, member: Any, size: Any,
           own: Any) -> None:  # fmt: skip
    """out (T, rows) = x times the matrix."""
    count = out.shape[0]
    step, chunks, begin, end = _portion(matrix, count, member, size)
    for item in range(begin, end):
        b, first, last = item // chunks, item % chunks * step, min(item % chunks * step + step, count)
        block_product(matrix, layer, b, x, first, last, own)
        if adapters is not None:
            expand(adapters, layer, kind, b, first, last, own.total)
        for m in range(last - first):
            for j in range(ROWS):
                out[first + m, b * ROWS + j] = own.total[m, j]


@compiled
def _add(matrix: PackedMatrix, layer: Any, x: Any, out: Any, adapters: Any, kind: Any, member: Any, size: Any,
         own: Any) -> None:  # fmt: skip
    """out (T, rows) += x times the matrix; rows need not fill the last block."""
    count = out.shape[0]
    step, chunks, begin, end = _portion(matrix, count, member, size)
    for item in range(begin, end):
        b, first, last = item // chunks, item % chunks * step, min(item % chunks * step + step, count)
        block_product(matrix, layer, b, x, first, last, own)
        if adapters is not None:
            expand(adapters, layer, kind, b, first, last, own.total)
        width = min(ROWS, out.shape[1] - b * ROWS)
        for m in range(last - first):
            for j in range(width):
                out[first + m, b * ROWS + j] += own.total[m, j]


@compiled
def _gate(matrix: PackedMatrix, layer: Any, x: Any, count: Any, out: Any, adapters: Any, member: Any, size: Any,
          own: Any) -> None:  # fmt: skip
    """out (`Floats` or `Digits`, count rows of intermediate size) = silu(gate) * up. A block makes one group."""
    step, chunks, begin, end = _portion(matrix, count, member, size)
    for item in range(begin, end):
        b, first, last = item // chunks, item % chunks * step, min(item % chunks * step + step, count)
        block_product(matrix, layer, b, x, first, last, own)
        if adapters is not None:
            expand(adapters, layer, GATE_UP, b, first, last, own.total)
        for m in range(last - first):
            gate_group(own.total, m * ROWS)
            set_group(out, first + m, b, own.total, m * ROWS)
            if adapters is not None:
                for j in range(GROUP):
                    adapters.x[first + m, b * GROUP + j] = own.total[m, j]


@compiled
def _norm(hidden: Any, weight: Any, eps: Any, out: Any, adapters: Any, member: Any, size: Any, own: Any) -> None:
    """out (`Floats` or `Digits`) = the norm of each row; adapters keep it as it is, too."""
    first, last = _share(hidden.shape[0], member, size)
    for m in range(first, last):
        normalize(hidden[m], weight, eps, own.row)
        for g in range(hidden.shape[1] // GROUP):
            set_group(out, m, g, own.row, g * GROUP)
        if adapters is not None:
            for i in range(hidden.shape[1]):
                adapters.x[m, i] = own.row[i]


@compiled
def _norm_wanted(hidden: Any, weight: Any, eps: Any, places: Any, out: Any, member: Any, size: Any, own: Any) -> None:
    """The norm of each row, at its place in out."""
    first, last = _share(hidden.shape[0], member, size)
    for m in range(first, last):
        normalize(hidden[m], weight, eps, own.row)
        for g in range(hidden.shape[1] // GROUP):
            set_group(out, places[m], g, own.row, g * GROUP)


@compiled
def _form(values: Any, out: Any, member: Any, size: Any) -> None:
    """out (`Floats` or `Digits`) = values (T, K)."""
    first, last = _share(values.shape[0], member, size)
    for m in range(first, last):
        for g in range(values.shape[1] // GROUP):
            set_group(out, m, g, values, m * values.shape[1] + g * GROUP)


@compiled
def _gather(hidden: Any, wanted: Any) -> None:
    """Wanted rows of hidden (T, hidden) to its beginning, in place: `wanted` rises, so no row is overwritten before its turn."""
    for s in range(wanted.shape[0]):
        if wanted[s] != s:
            for i in range(hidden.shape[1]):
                hidden[s, i] = hidden[wanted[s], i]


@compiled
def _spread(packed: PackedWeights, layer: Any, step: Inputs, buffers: Buffers, keys: Any, values: Any, eps: Any, member: Any,
            size: Any) -> None:  # fmt: skip
    """From the qkv product: rotated queries to their buffer, rotated keys and values to the cache."""
    num_heads, dim = buffers.q.shape[1], buffers.q.shape[2]
    num_kv = keys.shape[2]
    block_size = keys.shape[1]
    per_token = num_heads + 2 * num_kv
    first, last = _share(step.positions.shape[0] * per_token, member, size)
    for item in range(first, last):
        t, h = item // per_token, item % per_token
        head = buffers.qkv[t, h * dim : (h + 1) * dim]
        bias = packed.qkv_bias[layer, h * dim : (h + 1) * dim]
        for i in range(dim):
            head[i] += bias[i]
        block, offset = step.slots[t] // block_size, step.slots[t] % block_size
        if h < num_heads:
            if packed.q_norm.shape[1]:
                normalize_head(head, packed.q_norm[layer], eps)
            rotate_head(head, step.cos[t], step.sin[t], buffers.q[t, h])
        elif h < num_heads + num_kv:
            if packed.k_norm.shape[1]:
                normalize_head(head, packed.k_norm[layer], eps)
            rotate_head(head, step.cos[t], step.sin[t], keys[block, offset, h - num_heads])
        else:
            target = values[block, offset, h - num_heads - num_kv]
            for i in range(dim):
                target[i] = head[i]


@compiled
def _mix(window: Any, step: Inputs, buffers: Buffers, keys: Any, values: Any, member: Any, size: Any) -> None:
    """Attention, a span of tokens at a time: with all heads, or with one where spans are few or contexts long."""
    num_spans, num_heads, scores = step.spans.shape[0], buffers.q.shape[1], buffers.scores[member]
    room = row_room(step.longest)
    at_once = num_heads if num_spans >= 2 * size and SPAN * num_heads * room <= scores.shape[0] else 1
    parts = num_heads // at_once
    # In turns: later tokens of a prompt see more than earlier ones.
    for item in range(member, num_spans * parts, size):
        begin, end = step.spans[item // parts, 0], step.spans[item // parts, 1]
        first = item % parts
        attend(buffers.q[begin:end], first, first + at_once, keys, values, step.tables[step.row_of[begin]],
               step.positions[begin:end], window, room, scores, buffers.mixed[begin:end])  # fmt: skip


@compiled
def _attention(packed: PackedWeights, layer: Any, step: Inputs, buffers: Buffers, adapters: Any, keys: Any, values: Any, eps: Any,
               counter: Any, arrivals: Any, member: Any, size: Any, own: Any) -> Any:  # fmt: skip
    """A layer up to its attention, keys and values in the cache. Returns the count of arrivals at the barrier."""
    hidden = buffers.hidden
    _norm(hidden, packed.input_norm[layer], eps, buffers.to_qkv, adapters, member, size, own)
    arrivals = barrier(counter, arrivals, size)
    if adapters is not None:
        shrink(adapters, layer, QKV, adapters.x, hidden.shape[1], member, size)
        arrivals = barrier(counter, arrivals, size)
    _store(packed.qkv, layer, buffers.to_qkv, buffers.qkv, adapters, QKV, member, size, own)
    arrivals = barrier(counter, arrivals, size)
    _spread(packed, layer, step, buffers, keys[layer], values[layer], eps, member, size)
    arrivals = barrier(counter, arrivals, size)
    _mix(packed.windows[layer], step, buffers, keys[layer], values[layer], member, size)
    return barrier(counter, arrivals, size)


@compiled
def _rest(packed: PackedWeights, layer: Any, hidden: Any, mixed: Any, buffers: Buffers, adapters: Any, eps: Any, counter: Any,
          arrivals: Any, member: Any, size: Any, own: Any) -> Any:  # fmt: skip
    """A layer from its output product on, mixed (rows, heads * dim) to hidden (rows, hidden)."""
    _form(mixed, buffers.to_o, member, size)
    if adapters is not None:
        shrink(adapters, layer, O, mixed, mixed.shape[1], member, size)
    arrivals = barrier(counter, arrivals, size)
    _add(packed.o, layer, buffers.to_o, hidden, adapters, O, member, size, own)
    arrivals = barrier(counter, arrivals, size)
    _norm(hidden, packed.mlp_norm[layer], eps, buffers.to_gate_up, adapters, member, size, own)
    arrivals = barrier(counter, arrivals, size)
    if adapters is not None:
        shrink(adapters, layer, GATE_UP, adapters.x, hidden.shape[1], member, size)
        arrivals = barrier(counter, arrivals, size)
    _gate(packed.gate_up, layer, buffers.to_gate_up, hidden.shape[0], buffers.to_down, adapters, member, size, own)
    arrivals = barrier(counter, arrivals, size)
    if adapters is not None:
        shrink(adapters, layer, DOWN, adapters.x, buffers.to_down[0].shape[1], member, size)
        arrivals = barrier(counter, arrivals, size)
    _add(packed.down, layer, buffers.to_down, hidden, adapters, DOWN, member, size, own)
    return barrier(counter, arrivals, size)


@compiled
def _of_wanted(adapters: Any) -> Any:
    """The same adapters, for the tokens whose logits are wanted alone."""
    if adapters is None:
        return None
    return Adapters(adapters.places, adapters.modules, adapters.wanted_runs, adapters.wanted_runs, adapters.x, adapters.y)


@njit(**OPTIONS, cache=True)  # type: ignore[untyped-decorator]
def forward(packed: PackedWeights, step: Inputs, buffers: Buffers, adapters: Any, keys: Any, values: Any, eps: Any, counter: Any,
            member: Any, size: Any) -> None:  # fmt: skip
    """All layers, then the wanted logits. keys and values: (layers, blocks, block, kv heads, dim).

    adapters: `Adapters`, or None, which compiles to code that knows nothing of them.
    Once the last layer's keys and values are in the cache, a token without logits is done: the rest runs for the wanted ones.
    """
    own, hidden, wanted = _own(buffers.scratch, member), buffers.hidden, step.wanted
    mixed = buffers.mixed.reshape(hidden.shape[0], -1)  # (T, heads * dim)
    arrivals = 0
    last_layer = packed.input_norm.shape[0] - 1
    for layer in range(last_layer):
        arrivals = _attention(packed, layer, step, buffers, adapters, keys, values, eps, counter, arrivals, member, size, own)
        arrivals = _rest(packed, layer, hidden, mixed, buffers, adapters, eps, counter, arrivals, member, size, own)
    arrivals = _attention(packed, last_layer, step, buffers, adapters, keys, values, eps, counter, arrivals, member, size, own)
    if wanted.shape[0] == 0:
        return
    if member == 0:
        _gather(hidden, wanted)
    if member == size - 1:
        _gather(mixed, wanted)
    arrivals = barrier(counter, arrivals, size)
    hidden, mixed, few = hidden[: wanted.shape[0]], mixed[: wanted.shape[0]], _of_wanted(adapters)
    arrivals = _rest(packed, last_layer, hidden, mixed, buffers, few, eps, counter, arrivals, member, size, own)
    _norm_wanted(hidden, packed.final_norm, eps, step.places, buffers.to_head, member, size, own)
    arrivals = barrier(counter, arrivals, size)
    _store(packed.head, 0, buffers.to_head, buffers.logits, None, 0, member, size, own)


@njit(**OPTIONS, cache=True)  # type: ignore[untyped-decorator]
def product(
    matrix: PackedMatrix, layer: Any, x: Any, form: Any, out: Any, scratch: Any, member: Any, size: Any
) -> None:
    """One matrix alone, for measuring and for tests: out (T, blocks * ROWS) = x (T, K) times it.

    form: room for x as the matrix wants it, one for each thread (there is no barrier here).
    """
    _form(x, form, 0, 1)
    _store(matrix, layer, form, out, None, 0, member, size, _own(scratch, member))
