"""How products with 2 to 256 rows are cut into programs, and where cuBLAS takes them instead.

Does: the arithmetic of a cut, and the table of those that won (`benchmarks/gpu_products.py` measures, and writes it).
Does not: need triton or a device.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cut:
    """How one product is cut into programs, and how many blocks of it are under way at a time."""

    block_n: int  # outputs; gated products read twice as many rows of W
    block_m: int  # tokens
    block_k: int  # inputs per turn of the loop
    warps: int
    stages: int  # turns under way at a time
    split: int = 1  # programs that share the inputs of one tile
    ahead: int = 0  # inputs whose weights are asked for in L2 before the kernel ahead has ended
    tma: bool = False  # blocks come by tensor descriptor instead of by pointers

    def num_tiles(self, rows: int, outputs: int) -> int:
        return -(-rows // self.block_m) * -(-outputs // self.block_n)

    def num_parts(self, rows: int, outputs: int, *, glu: bool) -> int:
        """Float32 numbers that split tiles leave behind."""
        if self.split == 1:
            return 0
        return self.num_tiles(rows, outputs) * self.split * self.block_n * self.block_m * (2 if glu else 1)


# (outputs, inputs, glu): the cut for up to so many rows. None = cuBLAS. Estimates, not measured yet.
_CUTS: dict[tuple[int, int, bool], tuple[tuple[int, Cut | None], ...]] = {
    (2048, 1536, False): (  # qwen2.5-1.5b qkv
        (16, Cut(16, 16, 128, warps=4, stages=12, ahead=512)),
        (32, Cut(64, 32, 128, warps=4, stages=3, split=4, ahead=256)),
        (64, Cut(64, 64, 64, warps=4, stages=6, split=4, ahead=256)),
        (128, Cut(64, 128, 64, warps=4, stages=6, split=4, tma=True)),
        (256, None),
    ),
    (1536, 1536, False): (  # qwen2.5-1.5b o
        (16, Cut(16, 16, 128, warps=4, stages=12, ahead=512)),
        (32, Cut(64, 32, 128, warps=4, stages=3, split=4, ahead=256)),
        (64, Cut(64, 64, 64, warps=4, stages=6, split=4, ahead=256)),
        (128, Cut(64, 128, 64, warps=4, stages=6, split=4, tma=True)),
        (256, None),
    ),
    (8960, 1536, True): (  # qwen2.5-1.5b gate_up
        (16, Cut(64, 16, 128, warps=4, stages=3, ahead=256)),
        (32, Cut(64, 32, 64, warps=4, stages=5, ahead=512)),
        (64, Cut(64, 64, 64, warps=8, stages=4, ahead=512)),
        (128, Cut(64, 128, 64, warps=8, stages=3, tma=True)),
        (256, None),
    ),
    (1536, 8960, False): (  # qwen2.5-1.5b down
        (16, Cut(64, 16, 128, warps=4, stages=6, split=5, ahead=512)),
        (32, Cut(64, 32, 128, warps=4, stages=5, split=5, ahead=512)),
        (64, Cut(64, 64, 64, warps=4, stages=7, split=5, ahead=512)),
        (128, Cut(128, 128, 64, warps=8, stages=7, split=10, tma=True)),
        (256, None),
    ),
    (5120, 3072, False): (  # llama-3.2-3b qkv
        (16, Cut(16, 16, 128, warps=4, stages=6, ahead=512)),
        (32, Cut(64, 32, 128, warps=4, stages=7, ahead=512)),
        (64, Cut(64, 64, 64, warps=4, stages=7, ahead=512)),
        (128, Cut(64, 128, 64, warps=4, stages=7, tma=True)),
        (256, None),
    ),
    (3072, 3072, False): (  # llama-3.2-3b o
        (16, Cut(16, 16, 128, warps=4, stages=10, ahead=512)),
        (32, Cut(64, 32, 128, warps=4, stages=6, split=2, ahead=512)),
        (64, Cut(64, 64, 64, warps=4, stages=7, split=2, ahead=512)),
        (128, Cut(64, 128, 64, warps=4, stages=7, split=2, tma=True)),
        (256, None),
    ),
    (8192, 3072, True): (  # llama-3.2-3b gate_up
        (16, Cut(64, 16, 128, warps=4, stages=3, ahead=256)),
        (32, Cut(64, 32, 64, warps=4, stages=5, ahead=512)),
        (64, Cut(64, 64, 64, warps=8, stages=4, ahead=512)),
        (128, Cut(64, 128, 64, warps=8, stages=7, tma=True)),
        (256, None),
    ),
    (3072, 8192, False): (  # llama-3.2-3b down
        (16, Cut(64, 16, 128, warps=4, stages=7, split=2, ahead=512)),
        (32, Cut(64, 32, 128, warps=4, stages=6, split=2, ahead=512)),
        (64, Cut(64, 64, 64, warps=4, stages=7, split=2, ahead=512)),
        (128, Cut(128, 128, 64, warps=8, stages=7, split=4, tma=True)),
        (256, None),
    ),
}


def cut_for(rows: int, outputs: int, inputs: int, *, glu: bool) -> Cut | None:
    """The cut of the next larger number of rows that was measured; None = use cuBLAS, as for every other shape."""
    for max_rows, cut in _CUTS.get((outputs, inputs, glu), ()):
        if rows <= max_rows:
            return cut
    return None
