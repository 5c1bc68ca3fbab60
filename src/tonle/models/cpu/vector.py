"""The inner loops as explicit vector code, so that sums stay in registers whatever the compiler thinks of aliasing.

Each function below is an LLVM fragment that numba inlines where it is called. Arrays are taken as flat memory: an array and
the offset of the first element. `ROWS`, `GROUP` and the layouts are those of `kernels.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

ROWS = 64  # output rows per block
HALF = ROWS // 2
GROUP = 32  # consecutive k that share a scale, as in the stored formats
LINE = 64  # bytes of a cache line
CHUNK = 64  # rows of x at a time: their sums (16 KiB) stay in the first-level cache


def lanes_for(features: Mapping[str, bool]) -> int:
    """float32 per vector. Where registers are narrower than this (ARM, x86 without AVX2), LLVM splits the vectors."""
    return 16 if features.get("avx512f") else 8


LANES = lanes_for(llvm.get_host_cpu_features())
REGISTERS = 32 if LANES == 16 else 16

I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
VF, VI = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)


class Code:
    """A few words of vector LLVM around a builder."""

    def __init__(self, context: Any, builder: Any, signature: Any, args: Any) -> None:
        self.b = builder
        self._context = context
        self._signature = signature
        self._args = args

    def pointer(self, place: int) -> Any:
        """The memory of array argument `place`, moved on by the offset in the argument after it."""
        array = self._context.make_array(self._signature.args[place])(self._context, self.b, self._args[place])
        return self.b.gep(array.data, [self._args[place + 1]])

    def number(self, place: int) -> Any:
        return self._args[place]

    def load(self, base: Any, index: Any, kind: Any) -> Any:
        address = self.b.bitcast(self.b.gep(base, [index]), ir.PointerType(kind))
        loaded = self.b.load(address, typ=kind)
        loaded.align = 1
        return loaded

    def store(self, value: Any, base: Any, index: Any) -> None:
        address = self.b.bitcast(self.b.gep(base, [index]), ir.PointerType(value.type))
        self.b.store(value, address).align = 1

    def fetch(self, address: Any) -> None:
        """Bring memory near that will be read soon; there need not be any."""
        kinds = ir.FunctionType(ir.VoidType(), [ir.PointerType(I8), I32, I32, I32])
        near = self.b.module.declare_intrinsic("llvm.prefetch.p0", (), kinds)
        read, keep, data = (ir.Constant(I32, value) for value in (0, 3, 1))
        self.b.call(near, [self.b.bitcast(address, ir.PointerType(I8)), read, keep, data])

    def broadcast(self, base: Any, index: Any) -> Any:
        """One float32 of memory in every lane."""
        return self.spread(self.b.load(self.b.gep(base, [index]), typ=F32))

    def spread(self, one: Any) -> Any:
        """One float32 in every lane."""
        first = self.b.insert_element(ir.Constant(VF, ir.Undefined), one, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, ir.Constant(VF, ir.Undefined), ir.Constant(VI, [0] * LANES))

    def spread_int(self, one: Any) -> Any:
        """One int32 in every lane."""
        first = self.b.insert_element(ir.Constant(VI, ir.Undefined), one, ir.Constant(I32, 0))
        return self.b.shuffle_vector(first, ir.Constant(VI, ir.Undefined), ir.Constant(VI, [0] * LANES))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.b.fadd(self.b.fmul(a, b, flags=("contract",)), c, flags=("contract",))

    def at(self, index: Any, more: int) -> Any:
        return self.b.add(index, ir.Constant(I64, more))

    def times(self, index: Any, factor: int) -> Any:
        return self.b.mul(index, ir.Constant(I64, factor))

    def sums(self, count: int) -> list[Any]:
        """Vectors that start at zero and end up in registers."""
        return [cgutils.alloca_once_value(self.b, ir.Constant(VF, [0.0] * LANES)) for _ in range(count)]

    def clear(self, sums: list[Any]) -> None:
        for place in sums:
            self.b.store(ir.Constant(VF, [0.0] * LANES), place)

    def loop(self, count: int | Any, body: Callable[[Any], None], *, unroll: int = 1) -> None:
        number = ir.Constant(I64, count // unroll) if isinstance(count, int) else count
        with cgutils.for_range(self.b, number, intp=I64) as turn:
            first = self.times(turn.index, unroll)
            for i in range(unroll):
                body(self.at(first, i))


def each(code: Code, name: str, vector: Any) -> Any:
    """An LLVM function of one float32, of every lane."""
    kind = ir.FunctionType(VF, [VF])
    return code.b.call(code.b.module.declare_intrinsic(f"llvm.{name}.v{LANES}f32", (), kind), [vector])


def larger(code: Code, one: Any, other: Any) -> Any:
    return code.b.select(code.b.fcmp_ordered(">", one, other), one, other)


def reduce_lanes(code: Code, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
    """One number from a vector's lanes, by halving."""
    width = LANES
    while width > 1:
        width //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        low, high = (ir.Constant(ir.VectorType(I32, width), list(range(at, at + width))) for at in (0, width))
        vector = join(code.b.shuffle_vector(vector, undefined, low), code.b.shuffle_vector(vector, undefined, high))
    return code.b.extract_element(vector, ir.Constant(I32, 0))


def _numbers(code: Code, dtype: Any, base: Any, k: Any, column: int) -> Any:
    """Stored numbers of columns column..column + LANES at k, as float32 lanes, without scale."""
    b = code.b
    if dtype == types.uint8:
        row = code.times(k, HALF)
        packed = code.load(base, code.at(row, column % HALF), ir.VectorType(I8, LANES))
        wide = b.zext(packed, VI)
        if column < HALF:
            wide = b.and_(wide, ir.Constant(VI, [15] * LANES))
        else:
            wide = b.lshr(wide, ir.Constant(VI, [4] * LANES))
        return b.uitofp(wide, VF)
    row = code.times(k, ROWS)
    if dtype == types.int8:
        packed = code.load(base, code.at(row, column), ir.VectorType(I8, LANES))
        return b.sitofp(b.sext(packed, VI), VF)
    if dtype == types.uint16:
        packed = code.load(base, code.at(row, column), ir.VectorType(I16, LANES))
        return b.bitcast(b.shl(b.zext(packed, VI), ir.Constant(VI, [16] * LANES)), VF)
    return code.load(base, code.at(row, column), VF)


def _scaled(dtype: Any) -> bool:
    return dtype in (types.uint8, types.int8)


def load_factors(code: Code, dtype: Any, base: Any, place: Any) -> Any:
    """Scales or minimums as stored: float32, or float16 (its bits as uint16)."""
    if dtype == types.uint16:
        return code.b.fpext(code.load(base, place, ir.VectorType(ir.HalfType(), LANES)), VF)
    return code.load(base, place, VF)


def group_bytes(dtype: Any) -> int:
    """Of a group of a block's weights."""
    return GROUP * HALF if dtype == types.uint8 else GROUP * ROWS * int(dtype.bitwidth) // 8


def groups_ahead(dtype: Any) -> int:
    """How many groups before one is multiplied it is fetched: some kilobytes, which is what is on its way from memory at a time.
    Processors fetch ahead by themselves, but not across a page, which is four groups of 4-bit weights."""
    return max(1, 8192 // group_bytes(dtype))


def fetch_later(code: Code, base: Any, group: Any, size: int, ahead: int) -> None:
    """Fetch what belongs to the group `ahead` of `group`, `size` bytes for each."""
    first = code.b.gep(code.b.bitcast(base, ir.PointerType(I8)), [code.times(code.at(group, ahead), size)])
    for line in range(0, size, LINE):
        code.fetch(code.b.gep(first, [ir.Constant(I64, line)]))


@intrinsic  # type: ignore[untyped-decorator]
def fetch_group(typingctx: Any, weights: Any, w: Any, scale: Any, s: Any, minimum: Any, m: Any) -> Any:
    """Fetch the group that is multiplied some groups after the one at these places. It may lie beyond the end."""
    dtype, offset_free = weights.dtype, minimum.dtype == types.boolean

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code, here, ahead = Code(context, builder, signature, args), ir.Constant(I64, 0), groups_ahead(dtype)
        fetch_later(code, code.pointer(0), here, group_bytes(dtype), ahead)
        if _scaled(dtype):
            fetch_later(code, code.pointer(2), here, ROWS * scale.dtype.bitwidth // 8, ahead)
            if not offset_free:
                fetch_later(code, code.pointer(4), here, ROWS * minimum.dtype.bitwidth // 8, ahead)
        return context.get_dummy_value()

    return types.void(weights, w, scale, s, minimum, m), generate


@intrinsic  # type: ignore[untyped-decorator]
def unpack(typingctx: Any, weights: Any, w: Any, scale: Any, s: Any, minimum: Any, m: Any, tile: Any, t: Any) -> Any:
    """tile (GROUP, ROWS) = one group of weights as float32."""
    dtype = weights.dtype
    offset_free = minimum.dtype == types.boolean  # all minimums are zero

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args)
        source, target = code.pointer(0), code.pointer(6)
        scales, minimums = code.pointer(2), code.pointer(4)
        for column in range(0, ROWS, LANES):
            place = ir.Constant(I64, column)
            if _scaled(dtype):
                factor = load_factors(code, scale.dtype, scales, place)
                offset = None if offset_free else load_factors(code, minimum.dtype, minimums, place)

            def row(k: Any, column: int = column) -> None:
                values = _numbers(code, dtype, source, k, column)
                if _scaled(dtype):  # used before the next column changes factor and offset
                    values = builder.fmul(values, factor) if offset_free else code.fma(values, factor, offset)  # noqa: B023
                code.store(values, target, code.at(code.times(k, ROWS), column))

            code.loop(GROUP, row, unroll=4)
        return context.get_dummy_value()

    return types.void(weights, w, scale, s, minimum, m, tile, t), generate


def _tile_product(count: int) -> Any:
    """total[count rows, ROWS] += x[count rows, GROUP] times tile (GROUP, ROWS)."""
    # As many columns at once as the registers hold beside one vector of weights and one of x.
    columns = max(LANES, min(ROWS, (REGISTERS - 4) // count * LANES // LANES * LANES))
    while ROWS % columns:
        columns -= LANES

    @intrinsic  # type: ignore[untyped-decorator]
    def add(typingctx: Any, tile: Any, t: Any, x: Any, at: Any, x_step: Any, total: Any, to: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            code = Code(context, builder, signature, args)
            source, rows, target = code.pointer(0), code.pointer(2), code.pointer(5)
            step = code.number(4)
            starts = [builder.mul(step, ir.Constant(I64, r)) for r in range(count)]
            for first in range(0, ROWS, columns):
                vectors = range(first, first + columns, LANES)
                sums = code.sums(count * len(vectors))
                for r in range(count):
                    for v, column in enumerate(vectors):
                        old = code.load(target, ir.Constant(I64, r * ROWS + column), VF)
                        builder.store(old, sums[r * len(vectors) + v])

                def turn(k: Any, vectors: range = vectors, sums: list[Any] = sums) -> None:
                    weights = [code.load(source, code.at(code.times(k, ROWS), column), VF) for column in vectors]
                    for r in range(count):
                        value = code.broadcast(rows, builder.add(starts[r], k))
                        for v, weight in enumerate(weights):
                            place = sums[r * len(weights) + v]
                            builder.store(code.fma(weight, value, builder.load(place, typ=VF)), place)

                code.loop(GROUP, turn, unroll=4)
                for r in range(count):
                    for v, column in enumerate(vectors):
                        new = builder.load(sums[r * len(vectors) + v], typ=VF)
                        code.store(new, target, ir.Constant(I64, r * ROWS + column))
            return context.get_dummy_value()

        return types.void(tile, t, x, at, x_step, total, to), generate

    return add


add_tile_1, add_tile_2, add_tile_4 = _tile_product(1), _tile_product(2), _tile_product(4)


@intrinsic  # type: ignore[untyped-decorator]
def row_product(
    typingctx: Any, weights: Any, w: Any, scale: Any, s: Any, minimum: Any, m: Any, x: Any, at: Any, sums_x: Any, sx: Any,
    total: Any, to: Any, groups: Any,
) -> Any:  # fmt: skip
    """total (ROWS,) = one row x (K,) times one block; sums_x: the sum of x over each group. The case of a single user.

    Sums of number * x come first; a group's scale and minimum enter once.
    """
    dtype = weights.dtype
    offset_free = minimum.dtype == types.boolean
    # Sums of the group and of the whole must both stay in registers.
    columns = ROWS if LANES == 16 or not _scaled(dtype) else HALF

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        code = Code(context, builder, signature, args)
        source, row, target = code.pointer(0), code.pointer(6), code.pointer(10)
        scales, minimums, x_sums = code.pointer(2), code.pointer(4), code.pointer(8)
        for first in range(0, ROWS, columns):
            vectors = range(first, first + columns, LANES)
            totals = code.sums(len(vectors))
            code.clear(totals)
            parts = code.sums(len(vectors)) if _scaled(dtype) else totals

            def group(g: Any, vectors: range = vectors, totals: list[Any] = totals, parts: list[Any] = parts) -> None:
                start = code.times(g, GROUP)
                if vectors.start == 0:
                    fetch_later(code, source, g, group_bytes(dtype), groups_ahead(dtype))
                if _scaled(dtype):
                    code.clear(parts)

                def turn(i: Any) -> None:
                    k = builder.add(start, i)
                    value = code.broadcast(row, k)
                    for part, column in zip(parts, vectors, strict=True):
                        numbers = _numbers(code, dtype, source, k, column)
                        builder.store(code.fma(numbers, value, builder.load(part, typ=VF)), part)

                code.loop(GROUP, turn, unroll=4)
                if _scaled(dtype):
                    sum_x = code.broadcast(x_sums, g)
                    for part, whole, column in zip(parts, totals, vectors, strict=True):
                        place = code.at(code.times(g, ROWS), column)
                        so_far = builder.load(whole, typ=VF)
                        if not offset_free:
                            so_far = code.fma(load_factors(code, minimum.dtype, minimums, place), sum_x, so_far)
                        factor = load_factors(code, scale.dtype, scales, place)
                        builder.store(code.fma(builder.load(part, typ=VF), factor, so_far), whole)

            code.loop(code.number(12), group)
            for whole, column in zip(totals, vectors, strict=True):
                code.store(builder.load(whole, typ=VF), target, ir.Constant(I64, column))
        return context.get_dummy_value()

    return types.void(weights, w, scale, s, minimum, m, x, at, sums_x, sx, total, to, groups), generate
