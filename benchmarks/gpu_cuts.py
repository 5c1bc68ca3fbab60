"""Which cuts of `tonle.models.cuda.skinny` are worth trying for a product, and how many stages of each fit.

Does: arithmetic. All programs of a product should be on the device at once, with enough weights under way: 40 to 64 KB per
SM. Does not: need a GPU, or know which cut is best; `gpu_products.py` measures that.
"""

from __future__ import annotations

from dataclasses import dataclass

from tonle.models.cuda.skinny_cuts import Cut

NUM_SMS = 132
_SM_BYTES = 228 * 1024  # shared memory of an SM; each program costs 1 KB more than it asks for
_PROGRAM_BYTES = 227 * 1024


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix of a model: what it multiplies, and what rides along."""

    model: str
    name: str
    outputs: int
    inputs: int
    bias: bool = False
    add: bool = False
    glu: bool = False

    @property
    def weight_rows(self) -> int:
        return self.outputs * (2 if self.glu else 1)

    def num_bytes(self, rows: int) -> int:
        """What must move at least: weights, x and out once each, and out's old value where it is added to."""
        activations = rows * (self.inputs + self.outputs * (2 if self.add else 1))
        return 2 * (self.weight_rows * self.inputs + activations)


@dataclass(frozen=True, slots=True)
class _Sketch:
    """A cut before it is known how many stages and parts there are room for."""

    block_n: int
    block_m: int
    block_k: int
    warps: int
    programs: int = 0  # split until there are about so many; 0 = never
    ahead: int = 0
    tma: bool = False


_DENSE = {
    16: (
        _Sketch(16, 16, 128, 4, ahead=512),
        _Sketch(16, 16, 256, 4),
        _Sketch(16, 16, 128, 4, programs=264, ahead=512),
        _Sketch(32, 16, 128, 4, programs=132, ahead=512),
        _Sketch(64, 16, 128, 4, programs=132, ahead=512),
        _Sketch(64, 16, 128, 4, programs=264),
        _Sketch(64, 16, 128, 4, programs=132, tma=True),
        _Sketch(128, 16, 128, 8, programs=132, ahead=256),
    ),
    32: (
        _Sketch(16, 32, 128, 4, ahead=512),
        _Sketch(32, 32, 128, 4, programs=132, ahead=512),
        _Sketch(64, 32, 128, 4, programs=132, ahead=512),
        _Sketch(64, 32, 128, 4, programs=264),
        _Sketch(64, 32, 64, 4, programs=264, tma=True),
        _Sketch(64, 32, 128, 4, programs=132, tma=True),
        _Sketch(128, 32, 128, 8, programs=132, ahead=256),
    ),
    64: (
        _Sketch(32, 64, 128, 4, programs=132, ahead=512),
        _Sketch(64, 64, 64, 4, programs=132, ahead=512),
        _Sketch(64, 64, 128, 4, programs=132),
        _Sketch(64, 64, 64, 4, programs=264),
        _Sketch(64, 64, 64, 4, programs=132, tma=True),
        _Sketch(128, 64, 64, 8, programs=132, ahead=256),
        _Sketch(128, 64, 64, 8, programs=132, tma=True),
    ),
    128: (
        _Sketch(64, 128, 64, 4, programs=132, ahead=512),
        _Sketch(64, 128, 64, 8, programs=264),
        _Sketch(64, 128, 64, 4, programs=132, tma=True),
        _Sketch(64, 128, 128, 4, programs=132, tma=True),
        _Sketch(128, 128, 64, 8, programs=132, ahead=256),
        _Sketch(128, 128, 64, 8, programs=132, tma=True),
        _Sketch(128, 128, 128, 8, programs=132, tma=True),
    ),
    256: (
        _Sketch(64, 256, 64, 4, programs=132, tma=True),
        _Sketch(128, 256, 64, 8, programs=132, tma=True),
        _Sketch(128, 256, 64, 8, programs=132),
        _Sketch(64, 128, 64, 4, programs=264, tma=True),
        _Sketch(128, 128, 64, 8, programs=132, tma=True),
        _Sketch(128, 128, 64, 8, programs=132, ahead=256),
        _Sketch(128, 64, 64, 8, programs=132, tma=True),
    ),
}
_GATED = {  # twice as many rows of W as outputs
    16: (
        _Sketch(64, 16, 128, 4),
        _Sketch(64, 16, 128, 4, ahead=256),
        _Sketch(64, 16, 64, 4, ahead=512),
        _Sketch(64, 16, 128, 8, ahead=256),
        _Sketch(32, 16, 128, 4, ahead=256),
        _Sketch(32, 16, 64, 4),
        _Sketch(64, 16, 128, 4, tma=True),
        _Sketch(16, 16, 128, 4),
    ),
    32: (
        _Sketch(64, 32, 64, 4),
        _Sketch(64, 32, 64, 4, ahead=512),
        _Sketch(64, 32, 64, 8, ahead=256),
        _Sketch(32, 32, 64, 4, ahead=256),
        _Sketch(32, 32, 128, 4),
        _Sketch(64, 32, 64, 4, tma=True),
        _Sketch(64, 32, 128, 4, tma=True),
    ),
    64: (
        _Sketch(64, 64, 64, 4),
        _Sketch(64, 64, 64, 8, ahead=512),
        _Sketch(64, 64, 64, 4, ahead=256),
        _Sketch(32, 64, 64, 4, ahead=256),
        _Sketch(64, 64, 64, 4, tma=True),
        _Sketch(64, 64, 64, 8, tma=True),
        _Sketch(128, 64, 64, 8, tma=True),
    ),
    128: (
        _Sketch(64, 128, 64, 8),
        _Sketch(64, 128, 64, 8, ahead=512),
        _Sketch(64, 128, 32, 8, ahead=512),
        _Sketch(64, 128, 64, 4, tma=True),
        _Sketch(64, 128, 64, 8, tma=True),
        _Sketch(64, 128, 32, 8, tma=True),
        _Sketch(128, 128, 64, 8, tma=True),
    ),
    256: (
        _Sketch(64, 256, 64, 8),
        _Sketch(64, 256, 64, 8, tma=True),
        _Sketch(64, 128, 64, 8, ahead=256),
        _Sketch(64, 128, 64, 8, tma=True),
        _Sketch(64, 128, 64, 4, tma=True),
        _Sketch(128, 128, 64, 8, tma=True),
        _Sketch(64, 64, 64, 4, tma=True),
    ),
}  # fmt: skip


def row_class(rows: int) -> int:
    """The smallest block of tokens that holds so many rows."""
    return next(size for size in (16, 32, 64, 128, 256) if rows <= size)


def cuts_to_try(product: Product, rows: int) -> list[Cut]:
    """Without those that come out alike."""
    size = row_class(rows)
    sketches = (_GATED if product.glu else _DENSE)[size]
    return list(dict.fromkeys(cut for sketch in sketches if (cut := _filled(sketch, product, size)) is not None))


def _filled(sketch: _Sketch, product: Product, rows: int) -> Cut | None:
    """As many parts and stages as there is room for, or None where that is fewer than three stages."""
    turns = -(-product.inputs // sketch.block_k)
    tiles = -(-product.outputs // sketch.block_n) * -(-rows // sketch.block_m)
    split = _split(turns, max(1, sketch.programs // tiles))
    share = -(-turns // split)  # turns of one part
    stages = _stages(sketch, product, tiles * split)
    if stages < 3:
        return None
    stages = min(stages, max(3, share), 12 if sketch.block_n == 16 else 7)
    ahead = min(sketch.ahead, 1 << (share * sketch.block_k).bit_length() - 1)
    return Cut(sketch.block_n, sketch.block_m, sketch.block_k, sketch.warps, stages, split, ahead, sketch.tma)


def _split(turns: int, wanted: int) -> int:
    """About as many parts as wanted: of the same length if that costs less than a quarter of them, else nearly so."""
    even = max(parts for parts in range(1, wanted + 1) if turns % parts == 0)
    return even if even * 4 >= wanted * 3 else -(-turns // -(-turns // wanted))


def _stages(sketch: _Sketch, product: Product, programs: int) -> int:
    """How many fit in shared memory with all programs on the device at once; where that is too few, one at a time.

    Programs that ask for weights ahead must be on the device beside those of the kernel ahead: they get half of it.
    """
    weight_rows = sketch.block_n * (2 if product.glu else 1)
    per_stage = 2 * sketch.block_k * (weight_rows + sketch.block_m)
    spare = 1 if weight_rows < 64 and not sketch.tma else 0  # mma.sync needs one buffer less than stages
    beside = _SM_BYTES // -(-programs // NUM_SMS)
    half = min(beside, _SM_BYTES // 2 * NUM_SMS // programs)
    for room in (*([half] if sketch.ahead else []), beside, _SM_BYTES // 2, _SM_BYTES):
        stages = (min(_PROGRAM_BYTES, room - 1024) - 256) // per_stage + spare
        if stages >= 3:
            return stages
    return 0
