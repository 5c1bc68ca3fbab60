"""Attention's inner loops as explicit vector code; see `vector.py` for the manner. Head sizes: multiples of `LANES`."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tonle.models.cpu.exponential import exponential
from tonle.models.cpu.vector import F32, I32, I64, LANES, VF, Code, larger, reduce_lanes

LOWEST = -1e30  # the score of what is not seen: its weight is 0
DIMS = (64, 128)  # head sizes with loops of their own; other multiples of LANES take those of any size


def _zero() -> Any:
    return ir.Constant(VF, [0.0] * LANES)


def sum_each(code: Code, vectors: list[Any]) -> Any:
    """Lane j = the sum of the lanes of vector j, for LANES vectors: neighbours are added, level by level."""
    evens, odds = (ir.Constant(ir.VectorType(I32, LANES), list(range(at, 2 * LANES, 2))) for at in (0, 1))
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            code.b.fadd(code.b.shuffle_vector(a, b, evens), code.b.shuffle_vector(a, b, odds), flags=("contract",))
            for a, b in pairs
        ]
    return vectors[0]


def _dots(dim: int) -> Any:
    @intrinsic
    def dots(
        typingctx: Any, q: Any, at: Any, keys: Any, k: Any, step: Any, count: Any, scale: Any, scores: Any, s: Any
    ) -> Any:
        """scores[s + i] = scale * (q . keys of position i), for `count` positions that lie `step` apart."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args)
            query, rows, target = code.pointer(0), code.pointer(2), code.pointer(7)
            parts = [code.load(query, ir.Constant(I64, first), VF) for first in range(0, dim, LANES)]
            scales = code.spread(code.number(6))

            def products(position: Any) -> Any:
                row = builder.mul(position, code.number(4))
                sums = [_zero(), _zero()]  # two chains: a product need not wait for the one before
                for i, part in enumerate(parts):
                    sums[i % 2] = code.fma(part, code.load(rows, code.at(row, i * LANES), VF), sums[i % 2])
                return builder.fadd(sums[0], sums[1])

            def many(tile: Any) -> None:
                first = code.times(tile, LANES)
                total = sum_each(code, [products(code.at(first, i)) for i in range(LANES)])
                code.store(builder.fmul(total, scales), target, first)

            tiles = builder.sdiv(code.number(5), ir.Constant(I64, LANES))
            done = code.times(tiles, LANES)

            def one(i: Any) -> None:
                position = builder.add(done, i)
                total = reduce_lanes(code, products(position), builder.fadd)
                builder.store(builder.fmul(total, code.number(6)), builder.gep(target, [position]))

            code.loop(tiles, many)
            code.loop(builder.sub(code.number(5), done), one)
            return context.get_dummy_value()

        return types.void(q, at, keys, k, step, count, scale, scores, s), generate

    return dots


def _mix(dim: int) -> Any:
    @intrinsic
    def mix(typingctx: Any, values: Any, v: Any, step: Any, count: Any, scores: Any, s: Any, out: Any, to: Any) -> Any:
        """out[to : to + dim] += the sum of scores[s + i] * values of position i."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args)
            rows, shares, target = code.pointer(0), code.pointer(4), code.pointer(6)
            firsts = range(0, dim, LANES)
            sums = [code.sums(len(firsts)), code.sums(len(firsts))]  # two chains, as above
            code.clear(sums[1])
            for place, first in zip(sums[0], firsts, strict=True):
                builder.store(code.load(target, ir.Constant(I64, first), VF), place)

            def add(position: Any, chain: list[Any]) -> None:
                row = builder.mul(position, code.number(2))
                share = code.broadcast(shares, position)
                for place, first in zip(chain, firsts, strict=True):
                    value = code.load(rows, code.at(row, first), VF)
                    builder.store(code.fma(value, share, builder.load(place, typ=VF)), place)

            def two(pair: Any) -> None:
                add(code.times(pair, 2), sums[0])
                add(code.at(code.times(pair, 2), 1), sums[1])

            pairs = builder.sdiv(code.number(3), ir.Constant(I64, 2))
            done = code.times(pairs, 2)
            code.loop(pairs, two)
            code.loop(builder.sub(code.number(3), done), lambda i: add(builder.add(done, i), sums[0]))
            for place, other, first in zip(*sums, firsts, strict=True):
                total = builder.fadd(builder.load(place, typ=VF), builder.load(other, typ=VF))
                code.store(total, target, ir.Constant(I64, first))
            return context.get_dummy_value()

        return types.void(values, v, step, count, scores, s, out, to), generate

    return mix


@intrinsic
def dots_any(
    typingctx: Any, q: Any, at: Any, keys: Any, k: Any, step: Any, count: Any, scale: Any, scores: Any, s: Any, dim: Any
) -> Any:
    """As `dots` above for heads of any size: four positions at a time, so that a part of the query is read once for them."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args)
        query, rows, target = code.pointer(0), code.pointer(2), code.pointer(7)
        parts = builder.sdiv(code.number(9), ir.Constant(I64, LANES))
        sums = code.sums(4)

        def score(positions: list[Any]) -> None:
            begins = [builder.mul(position, code.number(4)) for position in positions]
            code.clear(sums)

            def add(part: Any) -> None:
                first = code.times(part, LANES)
                one = code.load(query, first, VF)
                for place, begin in zip(sums, begins, strict=False):
                    row = code.load(rows, builder.add(begin, first), VF)
                    builder.store(code.fma(one, row, builder.load(place, typ=VF)), place)

            code.loop(parts, add)
            for place, position in zip(sums, positions, strict=False):
                total = reduce_lanes(code, builder.load(place, typ=VF), builder.fadd)
                builder.store(builder.fmul(total, code.number(6)), builder.gep(target, [position]))

        fours = builder.sdiv(code.number(5), ir.Constant(I64, 4))
        done = code.times(fours, 4)
        code.loop(fours, lambda four: score([code.at(code.times(four, 4), i) for i in range(4)]))
        code.loop(builder.sub(code.number(5), done), lambda i: score([builder.add(done, i)]))
        return context.get_dummy_value()

    return types.void(q, at, keys, k, step, count, scale, scores, s, dim), generate


@intrinsic
def mix_any(
    typingctx: Any, values: Any, v: Any, step: Any, count: Any, scores: Any, s: Any, out: Any, to: Any, dim: Any
) -> Any:
    """As `mix` above for heads of any size, a part of the head at a time."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args)
        rows, shares, target = code.pointer(0), code.pointer(4), code.pointer(6)
        sums = code.sums(2)  # two chains, as above
        pairs = builder.sdiv(code.number(3), ir.Constant(I64, 2))
        done = code.times(pairs, 2)

        def mix_part(part: Any) -> None:
            first = code.times(part, LANES)
            builder.store(code.load(target, first, VF), sums[0])
            builder.store(_zero(), sums[1])

            def add(position: Any, place: Any) -> None:
                row = builder.add(builder.mul(position, code.number(2)), first)
                value = code.fma(
                    code.load(rows, row, VF), code.broadcast(shares, position), builder.load(place, typ=VF)
                )
                builder.store(value, place)

            def two(pair: Any) -> None:
                add(code.times(pair, 2), sums[0])
                add(code.at(code.times(pair, 2), 1), sums[1])

            code.loop(pairs, two)
            code.loop(builder.sub(code.number(3), done), lambda i: add(builder.add(done, i), sums[0]))
            code.store(builder.fadd(builder.load(sums[0], typ=VF), builder.load(sums[1], typ=VF)), target, first)

        code.loop(builder.sdiv(code.number(8), ir.Constant(I64, LANES)), mix_part)
        return context.get_dummy_value()

    return types.void(values, v, step, count, scores, s, out, to, dim), generate


@intrinsic
def soften(typingctx: Any, scores: Any, s: Any, count: Any) -> Any:
    """scores[s : s + count] = exp(score - the best of them), 0 for LOWEST; returns their sum.

    Writes up to the next multiple of LANES: there must be room.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args)
        places, unseen = code.pointer(0), ir.Constant(VF, [LOWEST] * LANES)
        lowest = ir.Constant(F32, LOWEST)
        rounded = builder.sdiv(code.at(code.number(2), LANES - 1), ir.Constant(I64, LANES))
        rest = builder.sub(code.times(rounded, LANES), code.number(2))
        code.loop(rest, lambda i: builder.store(lowest, builder.gep(places, [builder.add(code.number(2), i)])) and None)
        best, total = code.sums(2)
        builder.store(code.spread(lowest), best)
        builder.store(_zero(), total)

        def find(i: Any) -> None:
            builder.store(larger(code, builder.load(best, typ=VF), code.load(places, code.times(i, LANES), VF)), best)

        def power(i: Any) -> None:
            at = code.times(i, LANES)
            score = code.load(places, at, VF)
            value = exponential(code, builder.fsub(score, highest))
            value = builder.select(builder.fcmp_ordered(">", score, unseen), value, _zero())
            value = builder.select(builder.fcmp_unordered("uno", score, score), score, value)  # NaN stays NaN
            builder.store(builder.fadd(builder.load(total, typ=VF), value), total)
            code.store(value, places, at)

        code.loop(rounded, find)
        highest = code.spread(reduce_lanes(code, builder.load(best, typ=VF), lambda a, b: larger(code, a, b)))
        code.loop(rounded, power)
        return reduce_lanes(code, builder.load(total, typ=VF), builder.fadd)

    return types.float32(scores, s, count), generate


@intrinsic
def cap_scores(typingctx: Any, scores: Any, s: Any, count: Any, cap: Any) -> Any:
    """scores[s : s + count] = cap * tanh(score / cap), but LOWEST stays. Writes up to the next multiple of LANES: there must be
    room."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args)
        places, one = code.pointer(0), ir.Constant(VF, [1.0] * LANES)
        unseen = ir.Constant(VF, [LOWEST] * LANES)
        whole = code.spread(code.number(3))
        twice = code.spread(builder.fdiv(ir.Constant(F32, 2.0), code.number(3)))
        rounded = builder.sdiv(code.at(code.number(2), LANES - 1), ir.Constant(I64, LANES))

        def keep(i: Any) -> None:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            at = code.times(i, LANES)
            score = code.load(places, at, VF)
            power = builder.fmul(score, twice)
            grown = exponential(code, builder.fneg(larger(code, builder.fneg(power), ir.Constant(VF, [-80.0] * LANES))))
            share = builder.fdiv(ir.Constant(VF, [2.0] * LANES), builder.fadd(grown, one))
            kept = builder.fmul(whole, builder.fsub(one, share))
            code.store(builder.select(builder.fcmp_ordered(">", score, unseen), kept, score), places, at)

        code.loop(rounded, keep)
        return context.get_dummy_value()

    return types.void(scores, s, count, cap), generate


dots_64, dots_128 = _dots(64), _dots(128)
mix_64, mix_128 = _mix(64), _mix(128)

__all__ = [
    "DIMS",
    "LOWEST",
    "cap_scores",
    "dots_64",
    "dots_128",
    "dots_any",
    "mix_64",
    "mix_128",
    "mix_any",
    "soften",
    "sum_each",
]
