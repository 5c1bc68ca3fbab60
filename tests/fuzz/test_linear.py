"""Work on a stream grows with its bytes, into however many pieces it is cut, and however long one event is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fuzz.counted import CountedBytes, counted
from tests.fuzz.stream_targets import wrapped
from tonle.protocol.replies import EventReader

SIZE = 60_000
LONG_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"a" * SIZE + b'"}}]}\n\n'
MANY_LINES = b"data: 1\n" * (SIZE // 8) + b"\n"
NO_END = b"data: " + b"x" * SIZE
RETURNS = b"data: 1\r" * (SIZE // 8)


def read(pieces: list[bytes]) -> None:
    reader = EventReader()
    for piece in pieces:
        reader.feed(piece)
    reader.finish()


@pytest.mark.parametrize(
    "stream", [LONG_EVENT, MANY_LINES, NO_END, RETURNS], ids=["long", "lines", "no end", "returns"]
)
@pytest.mark.parametrize("reader", [read, wrapped], ids=["events", "inference"])
def test_work_is_linear(reader: Callable[[list[bytes]], Any], stream: bytes) -> None:
    reader(counted(stream, 50))
    assert CountedBytes.touched < 20 * len(stream)
