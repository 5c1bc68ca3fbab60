"""`CountedBytes`: bytes that count how many of them are copied or searched, to tell linear work from quadratic.

Time says little on a machine that others use; the number of bytes touched is always the same.
"""

from __future__ import annotations

from typing import Any


class CountedBytes(bytes):
    """What is made from it by joining counts too. What is sliced or split from it does not."""

    touched = 0

    @classmethod
    def _count(cls, number: int) -> None:
        CountedBytes.touched += number

    def __add__(self, other: Any) -> CountedBytes:
        joined = CountedBytes(bytes(self) + bytes(other))
        self._count(len(joined))
        return joined

    def __radd__(self, other: Any) -> CountedBytes:
        joined = CountedBytes(bytes(other) + bytes(self))
        self._count(len(joined))
        return joined

    def split(self, *args: Any) -> list[bytes]:  # type: ignore[override]
        self._count(len(self))
        return bytes(self).split(*args)

    def replace(self, *args: Any) -> CountedBytes:  # type: ignore[override]
        self._count(len(self))
        return CountedBytes(bytes(self).replace(*args))

    def find(self, sub: Any, start: int = 0, *args: int) -> int:  # type: ignore[override]
        found = bytes(self).find(sub, start, *args)
        self._count((len(self) if found < 0 else found) - start)
        return found

    def __contains__(self, sub: Any) -> bool:
        self._count(len(self))
        return bytes(self).__contains__(sub)


def counted(stream: bytes, size: int) -> list[bytes]:
    """`stream` in pieces of `size` bytes; what is done with them from now on is counted."""
    CountedBytes.touched = 0
    return [CountedBytes(stream[place : place + size]) for place in range(0, len(stream), size)]
