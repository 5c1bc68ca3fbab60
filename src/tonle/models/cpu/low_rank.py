"""Adapters inside a compiled step: y = A x once a matrix's input is known, B y added to each block of its output.

Does: the kernels, for tokens that lie sorted by slot ("runs"), so that A and B are read once for all tokens of an adapter.
Does not: hold the numbers (`cpu_adapters.py`, which also lays them out). See `vector.py` for the manner; A and B are found by
their addresses, since every slot has memory of its own, float32 or bfloat16 (in `PAIR`s: see `in_pairs`).

    A  (modules * rank, K)                the A of a joined matrix's modules, one below the other; rank in whole `QUAD`s
    B  (blocks, passes, rank, ROWS)       transposed, in the blocks of the matrix. A half of a block (HALF rows) belongs to one
                                          module in each pass; one pass is enough unless modules meet inside a half
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from tonle.models.cpu.cpu_attention import sum_each
from tonle.models.cpu.products import OPTIONS, compiled
from tonle.models.cpu.vector import F32, GROUP, HALF, I16, I32, I64, LANES, REGISTERS, ROWS, VF, VI, Code

QUAD = 4  # rows of A at a time
PAIR = 2 * LANES  # numbers that two vectors hold
TOKENS = 16  # tokens of a run that one thread takes through rows of A together
# Kinds of matrices, as `places` counts them; not plain numbers, for each of which functions would be compiled again.
QKV, OUT, GATE_UP, DOWN = (np.int64(kind) for kind in range(4))
A, B, RANK, NUM_ROWS, ROW_BYTES, SHORT_A, SHORT_B, NUM_FIELDS = range(8)  # of `places`


class Adapters(NamedTuple):
    """What a step needs to know of adapters."""

    places: Any  # (slots, layers, kinds, NUM_FIELDS) int64: addresses, the rank (0: nothing to add), rows of A and the bytes of
    # one, 1 for bfloat16
    modules: Any  # (kinds, blocks, passes, 2) int64: which module a half of a block belongs to; -1: none
    runs: Any  # (runs, 3) int64: slot, first token, last token + 1
    wanted_runs: Any  # the same of the tokens whose logits are wanted, by their places among those
    x: Any  # (T, widest) float32: what the matrix at hand is multiplied with
    y: Any  # (T, at least modules * rank)


def in_pairs(bits: Any) -> Any:
    """bfloat16 bits (..., whole PAIRs) as they are stored: number i of a PAIR beside number LANES + i, so that one load and one
    operation each make two vectors of float32."""
    apart = bits.reshape(*bits.shape[:-1], -1, 2, LANES)
    return np.ascontiguousarray(apart.swapaxes(-1, -2)).reshape(bits.shape)


def of_wanted(adapters: Any) -> Any:
    """`Adapters` of a step for the tokens whose logits are wanted alone; None of None."""


@overload(of_wanted, jit_options=OPTIONS)  # type: ignore[untyped-decorator]
def _of_wanted(adapters: Any) -> Any:
    if isinstance(adapters, types.NoneType):

        def none(adapters: Any) -> Any:
            return None

        return none

    def wanted(adapters: Any) -> Any:
        runs = adapters.wanted_runs
        return Adapters(adapters.places, adapters.modules, runs, runs, adapters.x, adapters.y)

    return wanted


def _pair(code: Code, short: bool, base: Any, index: Any) -> tuple[Any, Any]:
    """PAIR numbers of A or B as float32, in two vectors."""
    if not short:
        return code.load(base, index, VF), code.load(base, code.at(index, LANES), VF)
    both = code.load(base, index, VI)
    first = code.b.shl(both, ir.Constant(VI, [16] * LANES))
    second = code.b.and_(both, ir.Constant(VI, [0xFFFF0000] * LANES))
    return code.b.bitcast(first, VF), code.b.bitcast(second, VF)


def _memory(code: Code, place: int, short: bool) -> Any:
    return code.b.inttoptr(code.number(place), ir.PointerType(I16 if short else F32))


def _shrink(count: int, *, short: bool) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def shrink(typingctx: Any, a: Any, size: Any, x: Any, at: Any, x_step: Any, y: Any, to: Any, y_step: Any) -> Any:
        """y[count rows, QUAD] = x[count rows, size] times QUAD rows of A."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args)
            rows, source, target, size = _memory(code, 0, short), code.pointer(2), code.pointer(5), code.number(1)
            starts = [builder.mul(size, ir.Constant(I64, r)) for r in range(QUAD)]
            together = min(count, LANES // QUAD)  # tokens whose sums fill one vector
            for first in range(0, count, together):
                tokens = range(first, first + together)
                sums = code.sums(QUAD * together)
                code.clear(sums)
                begins = [builder.mul(code.number(4), ir.Constant(I64, m)) for m in tokens]

                def turn(i: Any, sums: list[Any] = sums, begins: list[Any] = begins) -> None:
                    k = code.times(i, PAIR)
                    weights = [_pair(code, short, rows, builder.add(start, k)) for start in starts]
                    for half in range(2):
                        for m, begin in enumerate(begins):
                            value = code.load(source, code.at(builder.add(begin, k), half * LANES), VF)
                            for r, weight in enumerate(weights):
                                place = sums[m * QUAD + r]
                                builder.store(code.fma(weight[half], value, builder.load(place, typ=VF)), place)

                code.loop(builder.sdiv(size, ir.Constant(I64, PAIR)), turn)
                none = [ir.Constant(VF, [0.0] * LANES)] * (LANES - len(sums))
                total = sum_each(code, [builder.load(place, typ=VF) for place in sums] + none)
                for i, m in enumerate(tokens):
                    lanes = ir.Constant(ir.VectorType(I32, QUAD), list(range(i * QUAD, (i + 1) * QUAD)))
                    part = builder.shuffle_vector(total, ir.Constant(VF, ir.Undefined), lanes)
                    code.store(part, target, builder.mul(code.number(7), ir.Constant(I64, m)))
            return context.get_dummy_value()

        return types.void(a, size, x, at, x_step, y, to, y_step), generate

    return shrink


def _expand(count: int, *, short: bool) -> Any:
    columns = max(PAIR, min(ROWS, (REGISTERS - 8) // count * LANES))  # at once: what registers hold
    while ROWS % columns:
        columns -= PAIR

    @intrinsic  # type: ignore[untyped-decorator]
    def expand(typingctx: Any, b: Any, rank: Any, y: Any, at: Any, y_step: Any, high: Any, total: Any, to: Any) -> Any:
        """total[count rows, ROWS] += y[count rows, rank] times B (rank, ROWS); the upper HALF takes its y `high` further on."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args)
            rows, source, target = _memory(code, 0, short), code.pointer(2), code.pointer(6)
            starts = [builder.mul(code.number(4), ir.Constant(I64, m)) for m in range(count)]
            uppers = [builder.add(start, code.number(5)) for start in starts]
            for first in range(0, ROWS, columns):
                vectors = range(first, first + columns, LANES)
                places = [(m, column) for m in range(count) for column in vectors]
                sums = dict(zip(places, code.sums(len(places)), strict=True))
                for (m, column), place in sums.items():
                    builder.store(code.load(target, ir.Constant(I64, m * ROWS + column), VF), place)

                def turn(r: Any, vectors: range = vectors, sums: Any = sums) -> None:
                    row = code.times(r, ROWS)
                    weights = {}
                    for column in vectors[::2]:
                        weights[column], weights[column + LANES] = _pair(code, short, rows, code.at(row, column))
                    for m in range(count):
                        values = {
                            half: code.broadcast(source, builder.add((uppers if half else starts)[m], r))
                            for half in {column >= HALF for column in vectors}
                        }
                        for column, weight in weights.items():
                            place = sums[m, column]
                            builder.store(code.fma(weight, values[column >= HALF], builder.load(place, typ=VF)), place)

                code.loop(code.number(1), turn)
                for (m, column), place in sums.items():
                    code.store(builder.load(place, typ=VF), target, ir.Constant(I64, m * ROWS + column))
            return context.get_dummy_value()

        return types.void(b, rank, y, at, y_step, high, total, to), generate

    return expand


_shrink_4, _shrink_2, _shrink_1 = (_shrink(count, short=False) for count in (4, 2, 1))
_shrink_4s, _shrink_2s, _shrink_1s = (_shrink(count, short=True) for count in (4, 2, 1))
_expand_4, _expand_2, _expand_1 = (_expand(count, short=False) for count in (4, 2, 1))
_expand_4s, _expand_2s, _expand_1s = (_expand(count, short=True) for count in (4, 2, 1))


@intrinsic  # type: ignore[untyped-decorator]
def copy_group(typingctx: Any, source: Any, s: Any, target: Any, t: Any) -> Any:
    """GROUP float32 from one flat memory to another."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args)
        for first in range(0, GROUP, LANES):
            place = ir.Constant(I64, first)
            code.store(code.load(code.pointer(0), place, VF), code.pointer(2), place)
        return context.get_dummy_value()

    return types.void(source, s, target, t), generate


@compiled
def _shrink_tokens(a: Any, short: Any, size: Any, x: Any, first: Any, last: Any, y: Any, column: Any) -> None:
    """y[first..last, column : column + QUAD] = x[first..last, :size] times QUAD rows of A."""
    wide, step = x.shape[1], y.shape[1]
    m = first
    while m < last:
        at, to = m * wide, m * step + column
        if m + 4 <= last:
            if short:
                _shrink_4s(a, size, x, at, wide, y, to, step)
            else:
                _shrink_4(a, size, x, at, wide, y, to, step)
            m += 4
        elif m + 2 <= last:
            if short:
                _shrink_2s(a, size, x, at, wide, y, to, step)
            else:
                _shrink_2(a, size, x, at, wide, y, to, step)
            m += 2
        else:
            if short:
                _shrink_1s(a, size, x, at, wide, y, to, step)
            else:
                _shrink_1(a, size, x, at, wide, y, to, step)
            m += 1


@compiled
def _expand_tokens(
    b: Any, short: Any, rank: Any, y: Any, first: Any, last: Any, low: Any, high: Any, total: Any, to: Any
) -> None:
    """total rows from `to` on += y[first..last] times B (rank, ROWS); low, high: the columns of y for the halves of ROWS."""
    step = y.shape[1]
    m = first
    while m < last:
        at, place = m * step + low, (to + m - first) * ROWS
        if m + 4 <= last:
            if short:
                _expand_4s(b, rank, y, at, step, high - low, total, place)
            else:
                _expand_4(b, rank, y, at, step, high - low, total, place)
            m += 4
        elif m + 2 <= last:
            if short:
                _expand_2s(b, rank, y, at, step, high - low, total, place)
            else:
                _expand_2(b, rank, y, at, step, high - low, total, place)
            m += 2
        else:
            if short:
                _expand_1s(b, rank, y, at, step, high - low, total, place)
            else:
                _expand_1(b, rank, y, at, step, high - low, total, place)
            m += 1


@compiled
def shrink(adapters: Any, layer: Any, kind: Any, x: Any, size: Any, member: Any, members: Any) -> None:
    """adapters.y = A x of all runs, for one matrix; x (T, at least size). The threads take turns."""
    runs, item = adapters.runs, 0
    for run in range(runs.shape[0]):
        place = adapters.places[runs[run, 0], layer, kind]
        first, last = runs[run, 1], runs[run, 2]
        for row in range(0, place[NUM_ROWS], QUAD):
            for begin in range(first, last, TOKENS):
                if item % members == member:
                    end = min(begin + TOKENS, last)
                    _shrink_tokens(
                        place[A] + row * place[ROW_BYTES], place[SHORT_A], size, x, begin, end, adapters.y, row
                    )
                item += 1


@compiled
def expand(adapters: Any, layer: Any, kind: Any, block: Any, first: Any, last: Any, total: Any) -> None:
    """total (rows first..last, ROWS): block `block` of a matrix's output, += B y."""
    runs, passes = adapters.runs, adapters.modules.shape[2]
    for run in range(runs.shape[0]):
        begin, end = max(first, runs[run, 1]), min(last, runs[run, 2])
        if begin >= end:
            continue
        place = adapters.places[runs[run, 0], layer, kind]
        rank = place[RANK]
        if rank == 0:
            continue
        width = rank * ROWS * (2 if place[SHORT_B] else 4)  # bytes of a pass
        for turn in range(passes):
            low, high = adapters.modules[kind, block, turn, 0], adapters.modules[kind, block, turn, 1]
            if low < 0:
                break
            b = place[B] + (block * passes + turn) * width
            _expand_tokens(
                b, place[SHORT_B], rank, adapters.y, begin, end, low * rank, high * rank, total, begin - first
            )
