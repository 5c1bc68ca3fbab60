"""How decode attention is cut into stretches of context: the arithmetic that the host, the buffers and the kernel share.

Does: lengths and bounds. Does not: need triton or a device.
"""

from __future__ import annotations

from dataclasses import dataclass

_GRAIN = 64  # stretches are multiples of this, tokens


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work of a step is cut, by its number of rows."""

    block_keys: int  # keys per turn of the loop
    warps: int
    stages: int
    programs: int  # about so many for the whole step, if contexts are long enough
    eager: bool  # the first keys and values are read before the queries are there


_FEW = Cut(block_keys=64, warps=8, stages=3, programs=264, eager=True)
_MANY = Cut(block_keys=32, warps=1, stages=4, programs=1056, eager=False)


def cut_for(rows: int) -> Cut:
    """Few rows: as little latency as possible. Many: as many reads in flight as possible."""
    return _FEW if rows <= 4 else _MANY


def max_items(rows: int, kv_heads: int) -> int:
    """Most stretches `rows` rows are cut into. See `stretch_tokens`."""
    return rows + cut_for(rows).programs // kv_heads


def stretch_tokens(rows: int, total_context: int, kv_heads: int) -> int:
    """How long a stretch is so that all rows together fill the device."""
    wanted = -(-total_context * kv_heads // cut_for(rows).programs)
    return max(1, -(-wanted // _GRAIN)) * _GRAIN
