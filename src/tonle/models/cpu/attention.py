"""Attention's inner loops as explicit vector code, for the head sizes in common use; see `vector.py` for the manner."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tonle.models.cpu.vector import I32, I64, LANES, VF, Code

DIMS = (64, 128)  # head sizes with loops of their own; others take the plain ones


def _add_lanes(code: Code, vector: Any) -> Any:
    """The sum of a vector's lanes, by halving."""
    width = LANES
    while width > 1:
        half = width // 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        low, high = (ir.Constant(ir.VectorType(I32, half), list(range(at, at + half))) for at in (0, half))
        vector = code.b.fadd(
            code.b.shuffle_vector(vector, undefined, low), code.b.shuffle_vector(vector, undefined, high)
        )
        width = half
    return code.b.extract_element(vector, ir.Constant(I32, 0))


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

            def one(position: Any) -> None:
                row = builder.mul(position, code.number(4))
                sums = [ir.Constant(VF, [0.0] * LANES)] * 2  # two chains: a product need not wait for the one before
                for i, part in enumerate(parts):
                    sums[i % 2] = code.fma(part, code.load(rows, code.at(row, i * LANES), VF), sums[i % 2])
                total = builder.fmul(_add_lanes(code, builder.fadd(sums[0], sums[1])), code.number(6))
                builder.store(total, builder.gep(target, [position]))

            code.loop(code.number(5), one)
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
            sums = code.sums(len(firsts))
            for place, first in zip(sums, firsts, strict=True):
                builder.store(code.load(target, ir.Constant(I64, first), VF), place)

            def one(position: Any) -> None:
                row = builder.mul(position, code.number(2))
                share = code.broadcast(shares, position)
                for place, first in zip(sums, firsts, strict=True):
                    value = code.load(rows, code.at(row, first), VF)
                    builder.store(code.fma(value, share, builder.load(place, typ=VF)), place)

            code.loop(code.number(3), one)
            for place, first in zip(sums, firsts, strict=True):
                code.store(builder.load(place, typ=VF), target, ir.Constant(I64, first))
            return context.get_dummy_value()

        return types.void(values, v, step, count, scores, s, out, to), generate

    return mix


dots_64, dots_128 = _dots(64), _dots(128)
mix_64, mix_128 = _mix(64), _mix(128)

__all__ = ["DIMS", "dots_64", "dots_128", "mix_64", "mix_128"]
