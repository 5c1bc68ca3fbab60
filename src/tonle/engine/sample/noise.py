"""Randomness that depends on the request alone: one uniform number from (seed, position), whatever else is in the batch."""

from __future__ import annotations

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """splitmix64's finalizer: every input bit moves every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """In [0, 1), with 53 random bits."""
    return (mix(mix(seed & _MASK) ^ position) >> 11) * 2.0**-53


def child_seed(seed: int, index: int) -> int:
    """The seed of the index-th of n continuations; the first keeps the caller's."""
    return seed if index == 0 else mix((seed & _MASK) ^ mix(index)) >> 1
