"""Streams of events cut anywhere: the same events come out, whatever the bytes are and wherever they are cut."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.bodies import ANYTHING, mangled, written
from tests.fuzz.target import FunctionTarget
from tonle.gateway.call import ReplyFacts
from tonle.gateway.inference_service import WrappedReply
from tonle.protocol.replies import EventReader

_ENDS = st.sampled_from([b"\n\n", b"\n\n", b"\r\n\r\n", b"\r\r", b"\n", b"\r\n", b"\n\r\n"])
_CHOICES = st.lists(st.fixed_dictionaries({"index": st.integers(0, 2), "delta": st.just({"content": "a"})}), max_size=2)
_CHUNKS = st.one_of(
    st.fixed_dictionaries({"choices": _CHOICES}, optional={"usage": st.just({"total_tokens": 3}), "id": st.just("1")}),
    st.fixed_dictionaries({"choices": st.lists(ANYTHING, max_size=2)}, optional={"usage": ANYTHING, "error": ANYTHING}),
)


@st.composite
def _streams(draw: st.DrawFn) -> tuple[bytes, list[int]]:
    """The bytes, and where they are cut."""
    stream = b""
    for _ in range(draw(st.integers(0, 4))):
        data = draw(st.one_of(_CHUNKS.map(written), ANYTHING.map(written), st.sampled_from([b"[DONE]", b"x"])))
        prefix = draw(st.sampled_from([b"data: ", b"data: ", b"data:", b": ", b"event: x\ndata: ", b"id", b""]))
        stream += prefix + data + draw(_ENDS)
    stream = draw(mangled(stream))
    return stream, sorted(draw(st.lists(st.integers(0, len(stream)), max_size=8)))


def _pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *cuts, len(stream)]
    return [stream[begin:end] for begin, end in itertools.pairwise(places)]


def _read(pieces: list[bytes]) -> tuple[str, bool]:
    reader = EventReader()
    replies = [reply for piece in pieces for reply in reader.feed(piece)]
    done = reader.done
    return repr([*replies, *reader.finish()]), done or reader.done


def check_events(case: tuple[bytes, list[int]], folder: Path) -> str:
    stream, cuts = case
    whole = _read([stream])
    assert _read(_pieces(stream, cuts)) == whole
    assert _read([bytes([byte]) for byte in stream]) == whole
    return "events" if whole[0] != "[]" else "none"


class _Exchange:
    elapsed_s = 1.0
    request_id = "r"

    def __init__(self) -> None:
        self.written = b""

    def write(self, piece: bytes) -> None:
        self.written += piece

    def end(self) -> None:
        pass


def wrapped(pieces: list[bytes]) -> bytes:
    exchange: Any = _Exchange()
    request: Any = SimpleNamespace(history_dropped=0)
    reply = WrappedReply(exchange, request, ReplyFacts())
    for piece in pieces:
        reply.write(piece)
    reply.end()
    return bytes(exchange.written)


def check_wrapped(case: tuple[bytes, list[int]], folder: Path) -> str:
    stream, cuts = case
    whole = wrapped([stream])
    assert wrapped(_pieces(stream, cuts)) == whole
    for event in whole.split(b"\n\n"):
        if event.startswith(b'data: {"response"'):
            json.loads(event[6:])
    return "error" if b'"metadata"' not in whole else "whole"


STREAM_TARGETS = [
    FunctionTarget("events cut anywhere", 10, _streams(), check_events),
    FunctionTarget("inference stream", 6, _streams(), check_wrapped),
]
