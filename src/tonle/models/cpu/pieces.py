"""The pieces of a layer (`layer_order.py`) as compiled functions that every thread of a team runs.

Work is divided by output rows (products), by token (norms) and by token and head (attention); the threads wait for
each other where one part needs all of another. Every piece ends with such a wait. `step.py` has the types of what is passed.
"""

from __future__ import annotations

from typing import Any

from tonle.models.cpu.cpu_cache import keep_head
from tonle.models.cpu.exponential import gate_group
from tonle.models.cpu.kernels import attend, normalize, normalize_head, rotate_head, row_room
from tonle.models.cpu.low_rank import DOWN, GATE_UP, OUT, QKV, copy_group, expand, shrink
from tonle.models.cpu.products import (
    PackedMatrix,
    Scratch,
    block_product,
    compiled,
    f32,
    inlined,
    rows_at_once,
    set_group,
)
from tonle.models.cpu.team import barrier
from tonle.models.cpu.vector import GROUP, ROWS

SPAN = 8  # tokens of one row whose attention is computed together: keys and values are read once for them
# What is different from layer to layer, as integers, in `PackedWeights.how`.
# ROTATED: how many numbers of a head, the first ones; HEAD_NORMS: 0, PER_HEAD or WHOLE.
ROPE, ROTATED, WINDOW, NORM_BEFORE, NORM_AFTER, HEAD_NORMS, ACTIVATION, PERCEPTRON, EXPERTS, NUM_SETTINGS = range(10)
PER_HEAD, WHOLE = 1, 2


@compiled
def share(count: Any, member: Any, size: Any) -> Any:
    return count * member // size, count * (member + 1) // size


@compiled
def own_scratch(scratch: Any, member: Any) -> Any:
    return Scratch(scratch.total[member], scratch.tile[member], scratch.small[member], scratch.factors[member],
                   scratch.row[member])  # fmt: skip


@compiled
def _portion(matrix: PackedMatrix, count: Any, member: Any, size: Any) -> Any:
    """A thread's part of a product with `count` rows: rows at a time, chunks of rows, first and last (block, chunk)."""
    blocks = matrix.weights.shape[1]
    step = rows_at_once(count, blocks, size)
    chunks = -(-count // step)
    begin, end = share(blocks * chunks, member, size)
    return step, chunks, begin, end


@compiled
def store(matrix: PackedMatrix, layer: Any, x: Any, out: Any, adapters: Any, kind: Any, member: Any, size: Any,
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
def _add(matrix: PackedMatrix, layer: Any, x: Any, bias: Any, out: Any, adapters: Any, kind: Any, member: Any, size: Any,
         own: Any) -> None:  # fmt: skip
    """out (T, rows) += x times the matrix + bias (rows,) or (0,); rows need not fill the last block."""
    count = out.shape[0]
    step, chunks, begin, end = _portion(matrix, count, member, size)
    for item in range(begin, end):
        b, first, last = item // chunks, item % chunks * step, min(item % chunks * step + step, count)
        block_product(matrix, layer, b, x, first, last, own)
        if adapters is not None:
            expand(adapters, layer, kind, b, first, last, own.total)
        width = min(ROWS, out.shape[1] - b * ROWS)
        _add_bias(own.total, last - first, bias, b)
        for m in range(last - first):
            for j in range(width):
                out[first + m, b * ROWS + j] += own.total[m, j]


@compiled
def _add_bias(total: Any, count: Any, bias: Any, b: Any) -> None:
    """To the first rows of a block's output; bias: in the order of the blocks, or (0,)."""
    if bias.shape[0]:
        for m in range(count):
            for j in range(ROWS):
                total[m, j] += bias[b * ROWS + j]


@compiled
def _gate(matrix: PackedMatrix, layer: Any, x: Any, bias: Any, activation: Any, count: Any, out: Any, adapters: Any, member: Any,
          size: Any, own: Any) -> None:  # fmt: skip
    """out (`Floats`, `Digits` or `Bytes`, count rows of intermediate size) = activation(gate) * up. A block makes one group."""
    step, chunks, begin, end = _portion(matrix, count, member, size)
    for item in range(begin, end):
        b, first, last = item // chunks, item % chunks * step, min(item % chunks * step + step, count)
        block_product(matrix, layer, b, x, first, last, own)
        if adapters is not None:
            expand(adapters, layer, GATE_UP, b, first, last, own.total)
        _add_bias(own.total, last - first, bias, b)
        for m in range(last - first):
            gate_group(own.total, m * ROWS, activation, f32(0))
            set_group(out, first + m, b, own.total, m * ROWS)
            if adapters is not None:
                copy_group(own.total, m * ROWS, adapters.x, (first + m) * adapters.x.shape[1] + b * GROUP)


@compiled
def norm_rows(hidden: Any, normed: Any, weight: Any, eps: Any, out: Any, adapters: Any, member: Any, size: Any,
              own: Any) -> None:  # fmt: skip
    """out (`Floats`, `Digits` or `Bytes`) = the norm of each row, or the row; adapters keep it in float32, too."""
    first, last = share(hidden.shape[0], member, size)
    for m in range(first, last):
        if normed:
            normalize(hidden[m], weight, eps, own.row)
        else:
            for i in range(hidden.shape[1]):
                own.row[i] = hidden[m, i]
        for g in range(hidden.shape[1] // GROUP):
            set_group(out, m, g, own.row, g * GROUP)
            if adapters is not None:
                copy_group(own.row, g * GROUP, adapters.x, m * adapters.x.shape[1] + g * GROUP)


@compiled
def _add_normed(added: Any, bias: Any, weight: Any, eps: Any, hidden: Any, member: Any, size: Any, own: Any) -> None:
    """hidden (T, hidden) += the norm of each row of added (T, at least hidden), with its bias."""
    first, last = share(hidden.shape[0], member, size)
    width = hidden.shape[1]
    for m in range(first, last):
        row = added[m, :width]
        if bias.shape[0]:
            for i in range(width):
                row[i] += bias[i]
        normalize(row, weight, eps, own.row)
        for i in range(width):
            hidden[m, i] += own.row[i]


@compiled
def to_form(values: Any, out: Any, member: Any, size: Any) -> None:
    """out (`Floats`, `Digits` or `Bytes`) = values (T, K)."""
    first, last = share(values.shape[0], member, size)
    for m in range(first, last):
        for g in range(values.shape[1] // GROUP):
            set_group(out, m, g, values, m * values.shape[1] + g * GROUP)


@compiled
def _turn(head: Any, step: Any, rope: Any, rotated: Any, t: Any, out: Any) -> None:
    """One head of token t, its first numbers rotated by the angles of `rope`, the rest as it is."""
    turned = 0
    if rope >= 0:
        turned = rotated
        rotate_head(head, rotated, step.cos[rope, t], step.sin[rope, t], out)
    for i in range(turned, head.shape[0]):
        out[i] = head[i]


@compiled
def _norm_whole(packed: Any, layer: Any, qkv: Any, q_size: Any, kv_size: Any, eps: Any, member: Any, size: Any) -> None:
    """Norms over all heads together, in place: of each token's queries, and of its keys, with their biases."""
    first, last = share(2 * qkv.shape[0], member, size)
    for item in range(first, last):
        begin, end = (0, q_size) if item % 2 == 0 else (q_size, q_size + kv_size)
        row = qkv[item // 2, begin:end]
        bias = packed.qkv_bias[layer, begin:end]
        for i in range(end - begin):
            row[i] += bias[i]
        if item % 2 == 0:
            normalize_head(row, packed.q_norm[layer, :q_size], eps)
        else:
            normalize_head(row, packed.k_norm[layer, :kv_size], eps)


@inlined
def _spread(packed: Any, layer: Any, step: Any, buffers: Any, cache: Any, eps: Any, member: Any, size: Any) -> None:
    """From the qkv product: rotated queries to their buffer, rotated keys and values to the cache."""
    num_heads, dim = buffers.q.shape[1], buffers.q.shape[2]
    keys, values = cache.keys[layer], cache.values[layer]
    block_size, num_kv = keys.shape[1], keys.shape[2]
    per_token = num_heads + 2 * num_kv
    rope, rotated, norms = packed.how[layer, ROPE], packed.how[layer, ROTATED], packed.how[layer, HEAD_NORMS]
    first, last = share(step.positions.shape[0] * per_token, member, size)
    for item in range(first, last):
        t, h = item // per_token, item % per_token
        head = buffers.qkv[t, h * dim : (h + 1) * dim]
        bias = packed.qkv_bias[layer, h * dim : (h + 1) * dim]
        if norms != WHOLE or h >= num_heads + num_kv:  # else they are in
            for i in range(dim):
                head[i] += bias[i]
        block, offset = step.slots[t] // block_size, step.slots[t] % block_size
        if h < num_heads:
            if norms == PER_HEAD:
                normalize_head(head, packed.q_norm[layer, :dim], eps)
            _turn(head, step, rope, rotated, t, buffers.q[t, h])
        elif h < num_heads + num_kv:
            if norms == PER_HEAD:
                normalize_head(head, packed.k_norm[layer, :dim], eps)
            turned = buffers.mixed[t, h - num_heads]  # room: attention's output comes later
            _turn(head, step, rope, rotated, t, turned)
            keep_head(turned, keys, cache.key_scales[layer], block, offset, h - num_heads)
        else:
            keep_head(head, values, cache.value_scales[layer], block, offset, h - num_heads - num_kv)


@compiled
def _heads_at_once(spans: Any, num_heads: Any, num_kv: Any, rows: Any, size: Any) -> Any:
    """How many heads of a span a thread takes together: all, those that share keys, or one. rows: of scores, that there is room
    for."""
    widest = 1
    for i in range(spans.shape[0]):
        widest = max(widest, spans[i, 1] - spans[i, 0])
    group = num_heads // num_kv
    if (spans.shape[0] >= 2 * size or size == 1) and widest * num_heads <= rows:
        return num_heads
    return group if spans.shape[0] * num_kv >= size and widest * group <= rows else 1


@inlined
def _mix(packed: Any, layer: Any, step: Any, buffers: Any, cache: Any, member: Any, size: Any) -> None:
    """Attention, a span of tokens at a time: with all heads, or with fewer where spans are few or contexts long."""
    num_spans, num_heads, scores = step.spans.shape[0], buffers.q.shape[1], buffers.scores[member]
    window, scale, cap, sinks = (
        packed.how[layer, WINDOW],
        packed.scores[layer, 0],
        packed.scores[layer, 1],
        packed.sinks[layer],
    )
    room = row_room(step.longest)
    at_once = _heads_at_once(step.spans, num_heads, cache.keys.shape[3], scores.shape[0] // room, size)
    parts = num_heads // at_once
    # In turns: later tokens of a prompt see more than earlier ones.
    for item in range(member, num_spans * parts, size):
        begin, end = step.spans[item // parts, 0], step.spans[item // parts, 1]
        first = item % parts * at_once
        attend(buffers.q[begin:end], first, first + at_once, cache.keys[layer], cache.values[layer], cache.key_scales[layer],
               cache.value_scales[layer], cache.unpacked[member], step.tables[step.row_of[begin]], step.positions[begin:end],
               window, scale, cap, sinks, room, scores, buffers.mixed[begin:end])  # fmt: skip


@compiled
def norm_wanted(hidden: Any, weight: Any, eps: Any, places: Any, out: Any, member: Any, size: Any, own: Any) -> None:
    """The norm of each row, at its place in out."""
    first, last = share(hidden.shape[0], member, size)
    for m in range(first, last):
        normalize(hidden[m], weight, eps, own.row)
        for g in range(hidden.shape[1] // GROUP):
            set_group(out, places[m], g, own.row, g * GROUP)


@compiled
def gather(hidden: Any, wanted: Any) -> None:
    """Wanted rows of hidden (T, hidden) to its beginning, in place: `wanted` rises, so no row is overwritten before its turn."""
    for s in range(wanted.shape[0]):
        if wanted[s] != s:
            for i in range(hidden.shape[1]):
                hidden[s, i] = hidden[wanted[s], i]


@compiled
def _shrink_input(
    adapters: Any, layer: Any, kind: Any, width: Any, counter: Any, arrivals: Any, member: Any, size: Any
) -> Any:
    """What adapters make of a matrix's input, which they kept, before that matrix is multiplied."""
    if adapters is None:
        return arrivals
    shrink(adapters, layer, kind, adapters.x, width, member, size)
    return barrier(counter, arrivals, size)


@compiled
def _shrink_mixed(adapters: Any, layer: Any, mixed: Any, member: Any, size: Any) -> None:
    """Likewise of attention's output, which is there in float32; the caller waits for all."""
    if adapters is not None:
        shrink(adapters, layer, OUT, mixed, mixed.shape[1], member, size)


@inlined
def project(packed: Any, layer: Any, hidden: Any, buffers: Any, adapters: Any, eps: Any, counter: Any, arrivals: Any, member: Any,
            size: Any, own: Any) -> Any:  # fmt: skip
    """Norm before; queries, keys and values. Returns the count of arrivals at the barrier, as all pieces do."""
    before = packed.how[layer, NORM_BEFORE]
    norm_rows(hidden, before, packed.input_norm[layer], eps, buffers.to_qkv, adapters, member, size, own)
    arrivals = barrier(counter, arrivals, size)
    arrivals = _shrink_input(adapters, layer, QKV, hidden.shape[1], counter, arrivals, member, size)
    store(packed.qkv, layer, buffers.to_qkv, buffers.qkv, adapters, QKV, member, size, own)
    return barrier(counter, arrivals, size)


@inlined
def attend_all(packed: Any, layer: Any, step: Any, buffers: Any, cache: Any, eps: Any, counter: Any, arrivals: Any,
               member: Any, size: Any) -> Any:  # fmt: skip
    """Norms of queries and keys, rotation, keys and values to the cache, attention."""
    if packed.how[layer, HEAD_NORMS] == WHOLE:
        dim = buffers.q.shape[2]
        _norm_whole(packed, layer, buffers.qkv, buffers.q.shape[1] * dim, cache.keys.shape[3] * dim, eps, member, size)
        arrivals = barrier(counter, arrivals, size)
    _spread(packed, layer, step, buffers, cache, eps, member, size)
    arrivals = barrier(counter, arrivals, size)
    _mix(packed, layer, step, buffers, cache, member, size)
    return barrier(counter, arrivals, size)


@inlined
def add_attended(packed: Any, layer: Any, hidden: Any, mixed: Any, buffers: Any, adapters: Any, eps: Any, counter: Any,
                 arrivals: Any, member: Any, size: Any, own: Any) -> Any:  # fmt: skip
    """Output product of mixed (rows, heads * dim), norm after; added to hidden (rows, hidden)."""
    to_form(mixed, buffers.to_o, member, size)
    _shrink_mixed(adapters, layer, mixed, member, size)
    arrivals = barrier(counter, arrivals, size)
    normed = packed.how[layer, NORM_AFTER]
    return _add_output(packed.o, layer, buffers.to_o, packed.o_bias[layer], normed, packed.attention_after,
                       buffers.added, hidden, adapters, OUT, eps, counter, arrivals, member, size, own)  # fmt: skip


@inlined
def mix(packed: Any, layer: Any, hidden: Any, buffers: Any, adapters: Any, eps: Any, counter: Any, arrivals: Any, member: Any,
        size: Any, own: Any) -> Any:  # fmt: skip
    """Norm before; gate and up, activation."""
    how = packed.how[layer]
    norm_rows(hidden, how[NORM_BEFORE], packed.mlp_norm[layer], eps, buffers.to_gate_up, adapters, member, size, own)
    arrivals = barrier(counter, arrivals, size)
    arrivals = _shrink_input(adapters, layer, GATE_UP, hidden.shape[1], counter, arrivals, member, size)
    _gate(packed.gate_up, layer, buffers.to_gate_up, packed.gate_up_bias[layer], how[ACTIVATION], hidden.shape[0],
          buffers.to_down, adapters, member, size, own)  # fmt: skip
    return barrier(counter, arrivals, size)


@inlined
def add_mixed(packed: Any, layer: Any, hidden: Any, buffers: Any, adapters: Any, eps: Any, counter: Any, arrivals: Any,
              member: Any, size: Any, own: Any) -> Any:  # fmt: skip
    """Second product of the mixer, norm after; added to hidden."""
    arrivals = _shrink_input(adapters, layer, DOWN, buffers.to_down[0].shape[1], counter, arrivals, member, size)
    normed = packed.how[layer, NORM_AFTER]
    return _add_output(packed.down, layer, buffers.to_down, packed.down_bias[layer], normed, packed.mlp_after,
                       buffers.added, hidden, adapters, DOWN, eps, counter, arrivals, member, size, own)  # fmt: skip


@compiled
def _add_output(matrix: PackedMatrix, layer: Any, x: Any, bias: Any, normed: Any, after: Any, added: Any, hidden: Any,
                adapters: Any, kind: Any, eps: Any, counter: Any, arrivals: Any, member: Any, size: Any,
                own: Any) -> Any:  # fmt: skip
    """hidden += x times the matrix, normed or not. added: room for what is to be normed."""
    if not normed:
        _add(matrix, layer, x, bias, hidden, adapters, kind, member, size, own)
        return barrier(counter, arrivals, size)
    few = added[: hidden.shape[0]]
    store(matrix, layer, x, few, adapters, kind, member, size, own)
    arrivals = barrier(counter, arrivals, size)
    _add_normed(few, bias, after[layer], eps, hidden, member, size, own)
    return barrier(counter, arrivals, size)
