"""float32 as small integers with a scale: the largest number, what makes integers of the others; see `vector.py` for the manner.

Does: keep NaN, which integers cannot say, in what scales are made of. Does not: choose what shares a scale.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from tonle.models.cpu.vector import F32, LANES, VF, VI, Code, each, larger, reduce_lanes

SMALLEST = 1e-30  # if the largest number is below that, all count as zero: it has no inverse


def largest_of(code: Code, source: Any, count: Any) -> Any:
    """The largest size of a number in `count` vectors of float32 in memory; NaN if one of the numbers is none."""
    b = code.b
    most, square = code.sums(2)
    code.clear([most, square])

    def find(i: Any) -> None:
        value = code.load(source, code.times(i, LANES), VF)
        b.store(larger(code, b.load(most, typ=VF), each(code, "fabs", value)), most)
        b.store(code.fma(value, value, b.load(square, typ=VF)), square)

    code.loop(count, find)
    largest = reduce_lanes(code, b.load(most, typ=VF), lambda one, other: larger(code, one, other))
    return nan_of(code, reduce_lanes(code, b.load(square, typ=VF), b.fadd), largest)


def per_unit(code: Code, largest: Any, top: int) -> Any:
    """In every lane: what numbers are multiplied with, so that `top` stands for the largest."""
    b = code.b
    zero = b.fcmp_ordered("<", largest, ir.Constant(F32, SMALLEST))
    return code.spread(b.select(zero, ir.Constant(F32, 0.0), b.fdiv(ir.Constant(F32, float(top)), largest)))


def rounded(code: Code, value: Any, factor: Any) -> Any:
    """value * factor as integers."""
    return code.b.fptosi(each(code, "rint", code.b.fmul(value, factor)), VI)


def nan_of(code: Code, total: Any, otherwise: Any) -> Any:
    """NaN if `total`, to which all numbers have been added, is one: integers cannot say so, and comparisons pass it over."""
    return code.b.select(code.b.fcmp_unordered("uno", total, total), ir.Constant(F32, float("nan")), otherwise)
