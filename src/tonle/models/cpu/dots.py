"""Products of small integers as explicit vector code, for processors with an 8-bit dot product (VNNI).

Such an instruction multiplies four unsigned bytes with four signed ones and adds the four products to a 32-bit sum, in every
lane. Weights are the unsigned side. Numbers of x enter with 16-bit activations as two signed bytes, scale * (high + low / 256),
exact to some 2e-5 of a group's largest number; with 8-bit activations as one, exact to half a percent of it. There, a number that
stands out so far that too much of the others would be rounded away is left out, and multiplied as float32.
Sums of a group are exact integers; scales enter once a group.

Layout of weights: (K / 4, ROWS, 4), so that a lane finds four consecutive k of its row side by side. See `vector.py` for the
manner, `products.py` for the use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tonle.models.cpu.rounding import nan_of, per_unit, rounded
from tonle.models.cpu.vector import (
    CHUNK,
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
CREST = 3.4  # a number stands out if it is more than so many times the root of its group's mean square
BYTES = 4 * LANES  # of a vector

_BYTES = ir.VectorType(I8, BYTES)
_SMALL = ir.VectorType(I8, LANES)
_FIRSTS = range(0, GROUP, LANES)  # of the vectors of float32 that a group has
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


def _two_digits(count: int, *, at_once: bool = True) -> Any:
    """total[count rows, ROWS] += x[count rows, one group] times one group of weights, x in two digits.

    at_once: both digits in one pass over the weights, into sums of their own; otherwise one pass for each.
    """

    @intrinsic  # type: ignore[untyped-decorator]
    def add(
        typingctx: Any, weights: Any, w: Any, high: Any, h: Any, low: Any, l: Any, step: Any,  # noqa: E741
        scale: Any, s: Any, sums: Any, u: Any, groups: Any, factors: Any, f: Any, total: Any, to: Any,
    ) -> Any:  # fmt: skip
        """high and low lie `step` apart from row to row, scale and sums (of x, per group) `groups` apart."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args)
            digits, rest = [code.pointer(2), code.pointer(4)], (code.pointer(place) for place in (7, 9, 12, 14))
            passes = [range(2)] if at_once else [range(1), range(1, 2)]
            _add_products(code, count, weights, digits, passes, code.number(6), code.number(11), *rest)
            return context.get_dummy_value()

        return types.void(weights, w, high, h, low, l, step, scale, s, sums, u, groups, factors, f, total, to), generate

    return add


def _one_byte(count: int) -> Any:
    """The same with x in one byte."""

    @intrinsic  # type: ignore[untyped-decorator]
    def add(
        typingctx: Any, weights: Any, w: Any, x: Any, at: Any, step: Any, scale: Any, s: Any, sums: Any, u: Any, groups: Any,
        factors: Any, f: Any, total: Any, to: Any,
    ) -> Any:  # fmt: skip
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args)
            rest = (code.pointer(place) for place in (5, 7, 10, 12))
            _add_products(code, count, weights, [code.pointer(2)], [range(1)], code.number(4), code.number(9), *rest)
            return context.get_dummy_value()

        return types.void(weights, w, x, at, step, scale, s, sums, u, groups, factors, f, total, to), generate

    return add


def _add_products(
    code: Code, count: int, kind: Any, digits: list[Any], passes: list[range], step: Any, groups: Any, scales: Any, x_sums: Any,
    factors: Any, total: Any,
) -> None:  # fmt: skip
    """total[count rows, ROWS] += x times one group of weights, whose type is `kind`, for as many vectors of outputs at once as
    registers hold. digits: of x, one array or two; passes: which of them are multiplied in each pass over the weights."""
    b, weights = code.b, code.pointer(0)
    columns = min(ROWS // LANES, _SUMS // (count * len(passes[0])))
    starts = [b.mul(step, _int(r)) for r in range(count)]
    # QUADS; but were that known, LLVM would unroll the loop, and decoding so much code takes longer than running it
    quads = b.sdiv(step, b.mul(groups, _int(4)))
    for first in range(0, ROWS // LANES, columns):
        vectors = range(first, first + columns)
        places = [(d, r, v) for d in passes[0] for r in range(count) for v in vectors]
        parts = {place: cgutils.alloca_once_value(b, _every(0)) for place in places}
        for turn in passes:
            if turn.start:
                for part in parts.values():
                    b.store(b.shl(b.load(part), _every(8)), part)

            def quad(i: Any, turn: range = turn, vectors: range = vectors, parts: Any = parts) -> None:
                loaded = [_weights(code, kind, weights, i, v) for v in vectors]
                for r in range(count):
                    for d in turn:
                        x = four_bytes(code, digits[d], b.add(starts[r], code.times(i, 4)))
                        for v, weight in zip(vectors, loaded, strict=True):
                            part = parts[d - turn.start, r, v]
                            b.store(dot(code, b.load(part), weight, x), part)

            code.loop(quads, quad)
        unit = 1.0 if len(digits) == 1 else TOP_ONE / TOP_TWO
        _finish(code, count, vectors, parts, unit, groups, scales, x_sums, factors, total)


def _finish(
    code: Code, count: int, vectors: range, parts: Any, unit: float, groups: Any, scales: Any, x_sums: Any, factors: Any,
    total: Any,
) -> None:  # fmt: skip
    """total += sums * scale of rows * scale of x + offset * sum of x."""
    b = code.b
    places = [b.mul(groups, _int(r)) for r in range(count)]
    units = [b.load(b.gep(scales, [place]), typ=F32) for place in places]
    if unit != 1:
        units = [b.fmul(each_unit, ir.Constant(F32, unit)) for each_unit in units]
    for v in vectors:
        scale_of_rows = code.load(factors, _int(v * LANES), VF)
        offset = code.load(factors, _int(ROWS + v * LANES), VF)
        for r in range(count):
            number = b.load(parts[0, r, v])
            if (1, r, v) in parts:
                number = b.add(b.shl(number, _every(8)), b.load(parts[1, r, v]))
            at = _int(r * ROWS + v * LANES)
            so_far = code.fma(offset, code.broadcast(x_sums, places[r]), code.load(total, at, VF))
            both = b.fmul(scale_of_rows, code.spread(units[r]))
            code.store(code.fma(b.sitofp(number, VF), both, so_far), total, at)


add_digits_1, add_digits_2, add_digits_4 = _two_digits(1), _two_digits(2), _two_digits(4, at_once=False)
add_bytes_1, add_bytes_2, add_bytes_4 = _one_byte(1), _one_byte(2), _one_byte(4)


@intrinsic  # type: ignore[untyped-decorator]
def add_outlier(
    typingctx: Any, weights: Any, w: Any, place: Any, value: Any, factors: Any, f: Any, total: Any, to: Any
) -> Any:
    """total[ROWS] += value times the weights of the number at `place` in a group. What a weight has beside number times scale
    is in the group's sum of x."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, code = builder, Code(context, builder, signature, args)
        base, factor, target = code.pointer(0), code.pointer(4), code.pointer(6)
        quad, bits = b.lshr(code.number(2), _int(2)), b.shl(b.and_(code.number(2), _int(3)), _int(3))
        shift, x = code.spread_int(b.trunc(bits, I32)), code.spread(code.number(3))
        for v in range(ROWS // LANES):
            four = _weights(code, weights, base, quad, v)
            number = b.uitofp(b.and_(b.lshr(four, shift), _every(255)), VF)
            column = _int(v * LANES)
            scaled = b.fmul(code.load(factor, column, VF), x)
            code.store(code.fma(number, scaled, code.load(target, column, VF)), target, column)
        return context.get_dummy_value()

    return types.void(weights, w, place, value, factors, f, total, to), generate


@intrinsic  # type: ignore[untyped-decorator]
def rows_with_outliers(typingctx: Any, which: Any, at: Any, count: Any) -> Any:
    """Bit i is set if which[at + i] is not 0, for i < count, 1 to CHUNK. Reads CHUNK bytes: there must be so many."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, code = builder, Code(context, builder, signature, args)
        flags = code.load(code.pointer(0), _int(0), ir.VectorType(I8, CHUNK))
        found = b.bitcast(b.icmp_unsigned("!=", flags, ir.Constant(flags.type, [0] * CHUNK)), I64)
        return b.and_(found, b.lshr(_int(-1), b.sub(_int(CHUNK), code.number(2))))

    return types.uint64(which, at, count), generate


@intrinsic  # type: ignore[untyped-decorator]
def lowest_bit(typingctx: Any, mask: Any) -> Any:
    """Its place in a mask that is not zero."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.cttz(args[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(mask), generate


@intrinsic  # type: ignore[untyped-decorator]
def split_group(
    typingctx: Any, values: Any, v: Any, high: Any, h: Any, low: Any, l: Any, scale: Any, s: Any, sums: Any, u: Any  # noqa: E741
) -> Any:  # fmt: skip
    """One group of float32 as two digits with a scale; sums: of what the digits stand for."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, code = builder, Code(context, builder, signature, args)
        source, highs, lows, scales, x_sums = (code.pointer(place) for place in (0, 2, 4, 6, 8))
        floats = [code.load(source, _int(first), VF) for first in _FIRSTS]
        largest = _largest(code, [each(code, "fabs", value) for value in floats])
        largest = nan_of(code, _square(code, floats), largest)
        factor = per_unit(code, largest, TOP_TWO)
        numbers = [rounded(code, value, factor) for value in floats]
        for first, number in zip(_FIRSTS, numbers, strict=True):
            below = b.trunc(number, _SMALL)  # -128..127
            rest = b.ashr(b.sub(number, b.sext(below, VI)), _every(8))
            code.store(below, lows, _int(first))
            code.store(b.trunc(rest, _SMALL), highs, _int(first))
        b.store(b.fmul(largest, ir.Constant(F32, 1.0 / TOP_ONE)), scales)
        unit = b.fmul(largest, ir.Constant(F32, 1.0 / TOP_TWO))
        b.store(b.fmul(_sum(code, numbers), unit), x_sums)
        return context.get_dummy_value()

    return types.void(values, v, high, h, low, l, scale, s, sums, u), generate


@intrinsic  # type: ignore[untyped-decorator]
def round_group(
    typingctx: Any, values: Any, v: Any, to_bytes: Any, t: Any, scale: Any, s: Any, sums: Any, u: Any, outlier: Any, o: Any,
    which: Any, w: Any,
) -> Any:  # fmt: skip
    """One group of float32 as bytes with a scale. A number that stands out is not among them (its byte is 0), but in `outlier`;
    `which`: its place in the group + 1, or 0. sums: of what the bytes stand for, and the outlier."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, code = builder, Code(context, builder, signature, args)
        source, target, scales, x_sums, outliers, places = (code.pointer(place) for place in (0, 2, 4, 6, 8, 10))
        floats = [code.load(source, _int(first), VF) for first in _FIRSTS]
        kept = [cgutils.alloca_once_value(b, value) for value in floats]
        sizes = [each(code, "fabs", value) for value in floats]
        most, square = _largest(code, sizes), _square(code, floats)
        largest = cgutils.alloca_once_value(b, nan_of(code, square, most))
        apart = cgutils.alloca_once_value(b, ir.Constant(F32, 0.0))
        b.store(ir.Constant(I8, 0), places)
        usual = b.fmul(square, ir.Constant(F32, CREST**2 / GROUP))
        with b.if_then(b.fcmp_ordered(">", b.fmul(most, most), usual), likely=False):
            at = _first_of(code, sizes, most)
            for first, place, value in zip(_FIRSTS, kept, floats, strict=True):
                here = b.icmp_signed("==", ir.Constant(VI, list(range(first, first + LANES))), code.spread_int(at))
                b.store(b.select(here, ir.Constant(VF, [0.0] * LANES), value), place)
            value = b.load(b.gep(source, [b.zext(at, I64)]), typ=F32)
            b.store(b.trunc(b.add(at, ir.Constant(I32, 1)), I8), places)
            b.store(value, outliers)
            b.store(value, apart)
            b.store(_largest(code, [each(code, "fabs", b.load(place, typ=VF)) for place in kept]), largest)
        factor = per_unit(code, b.load(largest, typ=F32), TOP_ONE)
        numbers = [rounded(code, b.load(place, typ=VF), factor) for place in kept]
        for first, number in zip(_FIRSTS, numbers, strict=True):
            code.store(b.trunc(number, _SMALL), target, _int(first))
        unit = b.fmul(b.load(largest, typ=F32), ir.Constant(F32, 1.0 / TOP_ONE))
        b.store(unit, scales)
        b.store(b.fadd(b.fmul(_sum(code, numbers), unit), b.load(apart, typ=F32)), x_sums)
        return context.get_dummy_value()

    return types.void(values, v, to_bytes, t, scale, s, sums, u, outlier, o, which, w), generate


def _largest(code: Code, sizes: list[Any]) -> Any:
    most = sizes[0]
    for size in sizes[1:]:
        most = larger(code, most, size)
    return reduce_lanes(code, most, lambda one, other: larger(code, one, other))


def _first_of(code: Code, sizes: list[Any], size: Any) -> Any:
    """Which number of a group is the first of this size, int32."""
    b, bits = code.b, ir.IntType(GROUP)
    mask = ir.Constant(bits, 0)
    for first, vector in zip(_FIRSTS, sizes, strict=True):
        found = b.bitcast(b.fcmp_ordered("==", vector, code.spread(size)), ir.IntType(LANES))
        mask = b.or_(mask, b.shl(b.zext(found, bits), ir.Constant(bits, first)))
    return b.cttz(mask, ir.Constant(ir.IntType(1), 1))


def _square(code: Code, floats: list[Any]) -> Any:
    """The sum of all squares."""
    square = code.b.fmul(floats[0], floats[0])
    for value in floats[1:]:
        square = code.fma(value, value, square)
    return reduce_lanes(code, square, code.b.fadd)


def _sum(code: Code, numbers: list[Any]) -> Any:
    total = numbers[0]
    for number in numbers[1:]:
        total = code.b.add(total, number)
    return code.b.sitofp(reduce_lanes(code, total, code.b.add), F32)
