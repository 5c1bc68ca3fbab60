"""Attention over an int8 cache from products of bytes, a tile of TILE positions at a time; see `vector.py` for the manner.

Scores: a query head is rounded once, to two signed bytes a number (`split_query`): exact to some 2e-5 of its largest. The keys
of a tile and PART numbers of a head are turned, in registers, so that a lane is a position; then one dot product of bytes adds
four products to the scores of all positions, for every query head that shares the keys, of all tokens. Sums are exact integers;
the scales of query and keys enter at the end.
Values: those of a tile and LANES numbers of a head become float32 in registers, for the same query heads and tokens; their scales
enter the weights, once a position.

A tile is always taken whole. Positions that a token does not see have the score LOWEST, which `soften` makes a weight of zero, so
that sums come to the same bits whichever tokens are computed together.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tonle.models.cpu.cpu_attention import LOWEST
from tonle.models.cpu.dots import BYTES, HAS_DOTS, SIGN, TOP_TWO, dot, four_bytes
from tonle.models.cpu.rounding import largest_of, per_unit, rounded
from tonle.models.cpu.vector import F32, I8, I32, I64, LANES, VF, VI, Code, reduce_lanes

TILE = 16  # positions: a lane each
PART = BYTES  # numbers of a head whose scores are added at once: a vector of bytes for each position
HAS_TILES = HAS_DOTS and LANES == TILE
MOST_DIM = 512  # of a head: sums of 32512 * 128 * dim must fit 32 bits

_SMALL = ir.VectorType(I8, LANES)


def _int(value: int) -> Any:
    return ir.Constant(I64, value)


def _every(value: int) -> Any:
    return ir.Constant(VI, [value] * LANES)


def _bytes_at(code: Code, array: Any, index: Any) -> Any:
    """Where an array of float32 has this number, as bytes."""
    return code.b.bitcast(code.b.gep(array, [index]), ir.PointerType(I8))


@intrinsic  # type: ignore[untyped-decorator]
def split_query(typingctx: Any, q: Any, at: Any, digits: Any, to: Any, dim: Any) -> Any:
    """A query head q[at : at + dim], float32, in digits[to : to + dim], memory of float32, too: dim bytes of high digits, dim of
    low ones, what a unit stands for (float32), and the sum that scores begin with (int32), as keys have SIGN added."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, code = builder, Code(context, builder, signature, args)
        source, target, size = code.pointer(0), code.pointer(2), code.number(4)
        highs = _bytes_at(code, target, _int(0))
        lows = b.gep(highs, [size])
        parts = b.sdiv(size, _int(LANES))
        largest = largest_of(code, source, parts)
        factor = per_unit(code, largest, TOP_TWO)
        total = cgutils.alloca_once_value(b, _every(0))

        def put(i: Any) -> None:
            place = code.times(i, LANES)
            number = rounded(code, code.load(source, place, VF), factor)
            below = b.trunc(number, _SMALL)  # -128..127
            code.store(below, lows, place)
            code.store(b.trunc(b.ashr(b.sub(number, b.sext(below, VI)), _every(8)), _SMALL), highs, place)
            b.store(b.add(b.load(total, typ=VI), number), total)

        code.loop(parts, put)
        after = b.sdiv(size, _int(2))
        code.store(b.fmul(largest, ir.Constant(F32, 1.0 / TOP_TWO)), target, after)
        begin = b.mul(reduce_lanes(code, b.load(total, typ=VI), b.add), ir.Constant(I32, -SIGN))
        code.store(begin, target, code.at(after, 1))
        return context.get_dummy_value()

    return types.void(q, at, digits, to, dim), generate


def _interleaved(code: Code, vectors: list[Any], units: int, apart: int) -> list[Any]:
    """Of vectors i and i + apart, in every 128 bits: the lower halves in turns, `units` lanes at a time, and the upper halves."""
    masks = []
    for half in (0, 1):
        mask = []
        for quarter in range(0, LANES, 4):
            for unit in range(2 // units):
                lane = quarter + 2 * half + unit * units
                mask += [*range(lane, lane + units), *range(LANES + lane, LANES + lane + units)]
        masks.append(mask)
    return _in_pairs(code, vectors, apart, masks)


def _quarters(code: Code, vectors: list[Any], apart: int) -> list[Any]:
    """Of vectors i and i + apart: the even quarters of both, and the odd ones."""
    masks = []
    for first in (0, 4):
        lanes = [lane for quarter in (first, first + 8) for lane in range(quarter, quarter + 4)]
        masks.append([*lanes, *(LANES + lane for lane in lanes)])
    return _in_pairs(code, vectors, apart, masks)


def _in_pairs(code: Code, vectors: list[Any], apart: int, masks: list[list[int]]) -> list[Any]:
    """In place of vectors i and i + apart: what each of two masks takes of their lanes."""
    found = list(vectors)
    for i in range(len(vectors)):
        if i & apart == 0:
            for to, mask in zip((i, i + apart), masks, strict=True):
                found[to] = code.b.shuffle_vector(vectors[i], vectors[i + apart], ir.Constant(VI, mask))
    return found


def turned(code: Code, rows: list[Any]) -> list[Any]:
    """16 vectors of 16 int32, transposed: lane i of vector j = lane j of row i."""
    fours = _interleaved(code, _interleaved(code, rows, 1, 1), 2, 2)
    whole = _quarters(code, _quarters(code, fours, 4), 8)
    return [whole[j & 12 | (j & 1) << 1 | (j & 2) >> 1] for j in range(TILE)]  # _interleaved swaps the two lowest bits


@intrinsic  # type: ignore[untyped-decorator]
def score_tile(
    typingctx: Any, keys: Any, k: Any, step: Any, later: Any, key_scales: Any, ks: Any, digits: Any, d: Any, digit_step: Any,
    dim: Any, part: Any, scores: Any, s: Any, score_step: Any, room: Any, positions: Any, p: Any, first: Any, window: Any,
    scale: Any, tokens: Any, heads: Any,
) -> Any:  # fmt: skip
    """Scores of a tile from PART numbers of a head, added to those of the parts before; the last part makes them float32.

    Keys lie `step` bytes apart; those of a later tile, which are fetched, `later` bytes behind these. digits and scores of
    a token's heads are dim and room apart, of tokens digit_step and score_step. positions: of the tokens; first: of the tile.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, code = builder, Code(context, builder, signature, args)
        source, scales, queries, target, places = (code.pointer(place) for place in (0, 4, 6, 11, 15))
        step, dim, part, first = code.number(2), code.number(9), code.number(10), code.number(17)
        begin = b.mul(part, _int(PART))
        rows = []
        for i in range(TILE):
            place = b.add(b.mul(step, _int(i)), begin)
            code.fetch(b.gep(source, [b.add(place, code.number(3))]))
            rows.append(b.xor(code.load(source, place, VI), ir.Constant(VI, [-0x7F7F7F80] * LANES)))
        quads = turned(code, rows)
        factors = b.fmul(code.load(scales, _int(0), VF), code.spread(code.number(19)))
        is_first = b.icmp_signed("==", part, _int(0))
        is_last = b.icmp_signed("==", b.add(begin, _int(PART)), dim)

        def token(t: Any) -> None:
            seen = _seen(code, b.load(b.gep(places, [t]), typ=I64), first, code.number(18))

            def head(h: Any) -> None:
                query = b.gep(queries, [b.add(b.mul(t, code.number(8)), b.mul(h, dim))])
                score = b.add(b.mul(t, code.number(13)), b.mul(h, code.number(14)))
                unit = b.sdiv(dim, _int(2))
                start = code.spread_int(code.load(query, code.at(unit, 1), I32))
                start = b.select(is_first, start, code.load(target, score, VI))
                number = _dots_of(code, quads, b.gep(_bytes_at(code, query, _int(0)), [begin]), dim, start)
                with b.if_else(is_last) as (then, otherwise):
                    with then:
                        factor = b.fmul(factors, code.broadcast(query, unit))
                        value = b.fmul(b.sitofp(number, VF), factor)
                        code.store(b.select(seen, value, ir.Constant(VF, [LOWEST] * LANES)), target, score)
                    with otherwise:
                        code.store(number, target, score)

            code.loop(code.number(21), head)

        code.loop(code.number(20), token)
        return context.get_dummy_value()

    return types.void(
        keys, k, step, later, key_scales, ks, digits, d, digit_step, dim, part, scores, s, score_step, room, positions, p, first,
        window, scale, tokens, heads,
    ), generate  # fmt: skip


def _seen(code: Code, position: Any, first: Any, window: Any) -> Any:
    """Which lanes of a tile that begins at `first` a token at `position` sees."""
    b = code.b
    lanes = ir.Constant(VI, list(range(LANES)))
    last = b.trunc(b.sub(position, first), I32)
    windowed = b.icmp_signed(">", window, _int(0))
    start = b.select(windowed, b.add(b.sub(last, b.trunc(window, I32)), ir.Constant(I32, 1)), ir.Constant(I32, 0))
    return b.and_(b.icmp_signed("<=", lanes, code.spread_int(last)), b.icmp_signed(">=", lanes, code.spread_int(start)))


def _dots_of(code: Code, quads: list[Any], high: Any, dim: Any, start: Any) -> Any:
    """start + the dot products of turned keys with a query's digits, the low ones of which lie dim bytes after the high ones."""
    b = code.b
    low = b.gep(high, [dim])
    highs, lows = [_every(0)] * 2, [start, _every(0)]  # two chains each: a product need not wait for the one before
    for i, quad in enumerate(quads):
        for sums, digits in ((highs, high), (lows, low)):
            sums[i % 2] = dot(code, sums[i % 2], quad, four_bytes(code, digits, _int(4 * i)))
    return b.add(b.shl(b.add(*highs), _every(8)), b.add(*lows))


@intrinsic  # type: ignore[untyped-decorator]
def scale_tile(
    typingctx: Any, value_scales: Any, vs: Any, scores: Any, s: Any, score_step: Any, room: Any, tokens: Any, heads: Any
) -> Any:
    """Weights of a tile's positions times the scales of their values; those that are zero stay so, whatever the scale."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, code = builder, Code(context, builder, signature, args)
        target, zero = code.pointer(2), ir.Constant(VF, [0.0] * LANES)
        scales = code.load(code.pointer(0), _int(0), VF)

        def head(t: Any, h: Any) -> None:
            place = b.add(b.mul(t, code.number(4)), b.mul(h, code.number(5)))
            weight = code.load(target, place, VF)
            some = b.fcmp_unordered(">", weight, zero)
            code.store(b.select(some, b.fmul(weight, scales), zero), target, place)

        code.loop(code.number(6), lambda t: code.loop(code.number(7), lambda h: head(t, h)))
        return context.get_dummy_value()

    return types.void(value_scales, vs, scores, s, score_step, room, tokens, heads), generate


@intrinsic  # type: ignore[untyped-decorator]
def mix_tile(
    typingctx: Any, values: Any, v: Any, step: Any, later: Any, scores: Any, s: Any, score_step: Any, room: Any, out: Any, o: Any,
    out_step: Any, dim: Any, tokens: Any, heads: Any,
) -> Any:  # fmt: skip
    """out += weights (scores, scaled) times the values of a tile, LANES numbers of a head at a time. Steps as in `score_tile`."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, code = builder, Code(context, builder, signature, args)
        source, weights, target = (code.pointer(place) for place in (0, 4, 8))
        dim = code.number(11)
        starts = [b.mul(code.number(2), _int(i)) for i in range(TILE)]

        def ahead(line: Any) -> None:
            for start in starts:
                code.fetch(b.gep(source, [b.add(b.add(start, code.number(3)), code.times(line, PART))]))

        def column(i: Any) -> None:
            first = code.times(i, LANES)
            numbers = [code.load(source, b.add(start, first), _SMALL) for start in starts]
            floats = [b.sitofp(b.sext(number, VI), VF) for number in numbers]

            def head(t: Any, h: Any) -> None:
                weight = b.add(b.mul(t, code.number(6)), b.mul(h, code.number(7)))
                to = b.add(b.add(b.mul(t, code.number(10)), b.mul(h, dim)), first)
                sums = [code.load(target, to, VF), ir.Constant(VF, [0.0] * LANES)]  # two chains, as above
                for k, value in enumerate(floats):
                    sums[k % 2] = code.fma(value, code.broadcast(weights, code.at(weight, k)), sums[k % 2])
                code.store(b.fadd(*sums), target, to)

            code.loop(code.number(12), lambda t: code.loop(code.number(13), lambda h: head(t, h)))

        code.loop(b.sdiv(dim, _int(PART)), ahead)
        code.loop(b.sdiv(dim, _int(LANES)), column)
        return context.get_dummy_value()

    return types.void(
        values, v, step, later, scores, s, score_step, room, out, o, out_step, dim, tokens, heads
    ), generate
