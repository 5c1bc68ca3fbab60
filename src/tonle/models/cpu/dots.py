"""Products of small integers as explicit vector code, for processors with an 8-bit dot product (VNNI).

Such an instruction multiplies four unsigned bytes with four signed ones and adds the four products to a 32-bit sum, in every
lane. Weights are the unsigned side. Numbers of x enter as one or two signed bytes: x = scale * (high + low / 256). Two bytes are
exact to some 2e-5 of a group's largest number, one byte to half a percent. With 8-bit activations one byte must do, except in
*wide* groups: those whose largest number stands out so far that too much of the rest would be rounded away.
Sums of a group are exact integers; scales enter once a group.

Layout of weights: (K / 4, ROWS, 4), so that a lane finds four consecutive k of its row side by side. See `vector.py` for the
manner, `products.py` for the use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tonle.models.cpu.vector import (
    F32,
    GROUP,
    HALF,
    I8,
    I32,
    I64,
    LANES,
    ROWS,
    VF,
    VI,
    Code,
    each,
    larger,
    load_factors,
    reduce_lanes,
)

QUADS = GROUP // 4  # dot products along k in one group
SIGN = 128  # 8-bit weights are stored with this added, to be unsigned
TOP_ONE, TOP_TWO = 127, 127 * 256  # largest number in one byte; in two, whose digits both fit a signed byte
CREST = 4.0  # a group is wide if its largest number is more than so many times the root of the mean square
BYTES = 4 * LANES  # of a vector

_BYTES = ir.VectorType(I8, BYTES)
_SUMS = 16 if LANES == 16 else 8  # vectors of sums that stay in registers beside weights and x


def has_dots(features: Mapping[str, bool]) -> bool:
    return bool(features.get("avx512vnni") or features.get("avxvnni"))


HAS_DOTS = has_dots(llvm.get_host_cpu_features())


def _int(value: int) -> Any:
    return ir.Constant(I64, value)


def _every(value: int) -> Any:
    return ir.Constant(VI, [value] * LANES)


def dot(code: Code, total: Any, weights: Any, x: Any) -> Any:
    """total + four products of unsigned bytes of weights with signed ones of x, in every lane."""
    name = f"llvm.x86.avx512.vpdpbusd.{LANES * 32}"
    return code.b.call(
        code.b.module.declare_intrinsic(name, (), ir.FunctionType(VI, [VI, VI, VI])), [total, weights, x]
    )


def four_bytes(code: Code, base: Any, index: Any) -> Any:
    """Four bytes of memory in every lane."""
    address = code.b.bitcast(code.b.gep(base, [index]), ir.PointerType(I32))
    one = code.b.load(address, typ=I32)
    one.align = 1
    return code.spread_int(one)


@intrinsic  # type: ignore[untyped-decorator]
def unpack_bytes(typingctx: Any, weights: Any, w: Any, tile: Any, t: Any) -> Any:
    """tile (QUADS, ROWS, 4) bytes = one group of 4-bit weights (QUADS, HALF, 4)."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args)
        source, target = code.pointer(0), code.pointer(2)

        def quad(i: Any) -> None:
            for at in range(0, 4 * HALF, BYTES):
                packed = code.load(source, code.at(code.times(i, 4 * HALF), at), _BYTES)
                place = code.at(code.times(i, 4 * ROWS), at)
                code.store(builder.and_(packed, ir.Constant(_BYTES, [15] * BYTES)), target, place)
                code.store(builder.lshr(packed, ir.Constant(_BYTES, [4] * BYTES)), target, code.at(place, 4 * HALF))

        code.loop(QUADS, quad)
        return context.get_dummy_value()

    return types.void(weights, w, tile, t), generate


@intrinsic  # type: ignore[untyped-decorator]
def read_factors(typingctx: Any, weights: Any, scale: Any, s: Any, minimum: Any, m: Any, factors: Any, f: Any) -> Any:
    """factors (2, ROWS) = one group's scales and what to add per unit of x, as float32."""
    offset_free = minimum.dtype == types.boolean
    signed = weights.dtype == types.int8

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args)
        scales, minimums, target = code.pointer(1), code.pointer(3), code.pointer(5)
        for column in range(0, ROWS, LANES):
            factor = load_factors(code, scale.dtype, scales, _int(column))
            offset = ir.Constant(VF, [0.0] * LANES)
            if not offset_free:
                offset = load_factors(code, minimum.dtype, minimums, _int(column))
            if signed:
                offset = code.fma(factor, ir.Constant(VF, [-float(SIGN)] * LANES), offset)
            code.store(factor, target, _int(column))
            code.store(offset, target, _int(ROWS + column))
        return context.get_dummy_value()

    return types.void(weights, scale, s, minimum, m, factors, f), generate


def _weights(code: Code, kind: Any, base: Any, quad: Any, vector: int) -> Any:
    """Four k of LANES rows: bytes of a tile or of 8-bit weights, or half-bytes of 4-bit ones as they are stored."""
    if kind.dtype != types.uint8 or kind.ndim == 1:
        return code.load(base, code.at(code.times(quad, 4 * ROWS), vector * BYTES), VI)
    place = code.at(code.times(quad, 4 * HALF), vector * BYTES % (4 * HALF))
    packed = code.load(base, place, _BYTES)
    if vector * BYTES < 4 * HALF:
        return code.b.bitcast(code.b.and_(packed, ir.Constant(_BYTES, [15] * BYTES)), VI)
    return code.b.bitcast(code.b.lshr(packed, ir.Constant(_BYTES, [4] * BYTES)), VI)


def _dot_product(count: int, which: Literal["both", "high", "low"], *, at_once: bool = True) -> Any:
    """total[count rows, ROWS] += x[count rows, one group] times one group of weights; of x both digits, or the high or low ones.

    at_once: both digits of x in one pass over the weights, into sums of their own; otherwise one pass for each. What a weight
    has beside number times scale is added with the high digits, for both.
    """
    num_digits = 2 if which == "both" else 1

    @intrinsic  # type: ignore[untyped-decorator]
    def add(
        typingctx: Any, weights: Any, w: Any, high: Any, h: Any, low: Any, l: Any, step: Any,  # noqa: E741
        scale: Any, s: Any, sums: Any, u: Any, groups: Any, factors: Any, f: Any, total: Any, to: Any,
    ) -> Any:  # fmt: skip
        """high and low lie `step` apart from row to row, scale and sums (of x, per group) `groups` apart."""
        passes = [range(num_digits)] if at_once else [range(d, d + 1) for d in range(num_digits)]
        columns = min(ROWS // LANES, _SUMS // (count * len(passes[0])))  # vectors at once

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args)
            source, digits = code.pointer(0), [code.pointer(place) for place in (2, 4)]
            if which == "low":
                digits.reverse()
            starts = [builder.mul(code.number(6), _int(r)) for r in range(count)]
            # QUADS; but were that known, LLVM would unroll the loop, and decoding so much code takes longer than running it
            quads = builder.sdiv(code.number(6), builder.mul(code.number(11), _int(4)))
            for first in range(0, ROWS // LANES, columns):
                vectors = range(first, first + columns)
                places = [(d, r, v) for d in passes[0] for r in range(count) for v in vectors]
                parts = {place: cgutils.alloca_once_value(builder, _every(0)) for place in places}
                for part in parts.values():
                    builder.store(_every(0), part)
                for turn in passes:
                    if turn.start:
                        for part in parts.values():
                            builder.store(builder.shl(builder.load(part), _every(8)), part)

                    def quad(i: Any, turn: range = turn, vectors: range = vectors, parts: Any = parts) -> None:
                        loaded = [_weights(code, weights, source, i, v) for v in vectors]
                        for r in range(count):
                            for d in turn:
                                x = four_bytes(code, digits[d], builder.add(starts[r], code.times(i, 4)))
                                for v, weight in zip(vectors, loaded, strict=True):
                                    part = parts[d - turn.start, r, v]
                                    builder.store(dot(code, builder.load(part), weight, x), part)

                    code.loop(quads, quad)
                _finish(code, count, vectors, parts, which)
            return context.get_dummy_value()

        return types.void(weights, w, high, h, low, l, step, scale, s, sums, u, groups, factors, f, total, to), generate

    return add


def _finish(code: Code, count: int, vectors: range, parts: Any, which: str) -> None:
    """total += sums * scale of rows * scale of x + offset * sum of x."""
    b, scales, x_sums, factor, target = code.b, *(code.pointer(place) for place in (7, 9, 12, 14))
    places = [b.mul(code.number(11), _int(r)) for r in range(count)]
    units = [b.load(b.gep(scales, [place]), typ=F32) for place in places]
    if which != "high":
        units = [b.fmul(unit, ir.Constant(F32, TOP_ONE / TOP_TWO)) for unit in units]
    for v in vectors:
        scale_of_rows = code.load(factor, _int(v * LANES), VF)
        offset = code.load(factor, _int(ROWS + v * LANES), VF)
        for r in range(count):
            number = b.load(parts[0, r, v])
            if (1, r, v) in parts:
                number = b.add(b.shl(number, _every(8)), b.load(parts[1, r, v]))
            at = _int(r * ROWS + v * LANES)
            so_far = code.load(target, at, VF)
            if which != "low":
                so_far = code.fma(offset, code.broadcast(x_sums, places[r]), so_far)
            both = b.fmul(scale_of_rows, code.spread(units[r]))
            code.store(code.fma(b.sitofp(number, VF), both, so_far), target, at)


add_dots_1, add_dots_2 = _dot_product(1, "both"), _dot_product(2, "both")
add_dots_4 = _dot_product(4, "both", at_once=False)
add_high_1, add_high_2, add_high_4 = _dot_product(1, "high"), _dot_product(2, "high"), _dot_product(4, "high")
add_low_1 = _dot_product(1, "low")


@intrinsic  # type: ignore[untyped-decorator]
def any_of_four(typingctx: Any, wide: Any, at: Any) -> Any:
    """Whether any of four bytes is not zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.bitcast(Code(context, builder, signature, args).pointer(0), ir.PointerType(I32))
        found = builder.load(address, typ=I32)
        found.align = 1
        return builder.icmp_unsigned("!=", found, ir.Constant(I32, 0))

    return types.boolean(wide, at), generate


def _largest_and_square(code: Code, floats: list[Any]) -> tuple[Any, Any]:
    """The largest size of any number, and the sum of all squares."""
    b = code.b
    sizes = [each(code, "fabs", value) for value in floats]
    squares = [b.fmul(value, value) for value in floats]
    most, square = sizes[0], squares[0]
    for size, more in zip(sizes[1:], squares[1:], strict=True):
        most, square = larger(code, most, size), b.fadd(square, more)
    largest = reduce_lanes(code, most, lambda one, other: larger(code, one, other))
    return largest, reduce_lanes(code, square, b.fadd)


@intrinsic  # type: ignore[untyped-decorator]
def split_group(
    typingctx: Any, values: Any, v: Any, high: Any, h: Any, low: Any, l: Any, scale: Any, s: Any, sums: Any,  # noqa: E741
    u: Any, wide: Any, f: Any,
) -> Any:  # fmt: skip
    """One group of float32 as digits with a scale; sums: of what the digits stand for. wide: bool, every group is; otherwise
    whether this one is, is written."""
    all_wide = wide.dtype == types.boolean

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, code = builder, Code(context, builder, signature, args)
        source, highs, lows, scales, x_sums = (code.pointer(place) for place in (0, 2, 4, 6, 8))
        firsts = range(0, GROUP, LANES)
        floats = [code.load(source, _int(first), VF) for first in firsts]
        largest, square = _largest_and_square(code, floats)
        top, shift = ir.Constant(F32, float(TOP_TWO)), ir.Constant(I32, 0)
        if not all_wide:
            usual = b.fmul(square, ir.Constant(F32, CREST**2 / GROUP))
            is_wide = b.fcmp_ordered(">", b.fmul(largest, largest), usual)
            b.store(b.zext(is_wide, I8), code.pointer(10))
            top = b.select(is_wide, top, ir.Constant(F32, float(TOP_ONE)))
            shift = b.select(is_wide, shift, ir.Constant(I32, 8))
        zero = b.fcmp_ordered("<", largest, ir.Constant(F32, 1e-30))  # smaller ones have no inverse
        inverse = code.spread(b.select(zero, ir.Constant(F32, 0.0), b.fdiv(top, largest)))
        total, small = ir.Constant(VI, [0] * LANES), ir.VectorType(I8, LANES)
        for first, value in zip(firsts, floats, strict=True):
            number = b.fptosi(each(code, "rint", b.fmul(value, inverse)), VI)
            if not all_wide:
                number = b.shl(number, code.spread_int(shift))
            total = b.add(total, number)
            below = b.trunc(number, small)  # -128..127
            rest = b.ashr(b.sub(number, b.sext(below, VI)), _every(8))
            code.store(below, lows, _int(first))
            code.store(b.trunc(rest, small), highs, _int(first))
        b.store(b.fmul(largest, ir.Constant(F32, 1.0 / TOP_ONE)), scales)
        unit = b.fmul(largest, ir.Constant(F32, 1.0 / TOP_TWO))
        b.store(b.fmul(b.sitofp(reduce_lanes(code, total, b.add), F32), unit), x_sums)
        return context.get_dummy_value()

    return types.void(values, v, high, h, low, l, scale, s, sums, u, wide, f), generate
