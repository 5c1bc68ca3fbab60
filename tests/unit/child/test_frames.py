"""Framing: whatever the pieces, the same messages come out; what is no frame is refused."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from tonle.child import frames
from tonle.child.frames import FrameError, FrameProtocol, Frames, frame, read_frame, write_frame

BODIES = [b"", b"a", b"hello" * 30, b"\x00\xff" * 5, b"end"]
STREAM = b"".join(map(frame, BODIES))
TOO_LONG = struct.pack("<I", frames.MAX_FRAME_BYTES + 1)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_a_stream_cut_anywhere_gives_the_same_messages(cut: int) -> None:
    split = Frames()
    assert split.feed(STREAM[:cut]) + split.feed(STREAM[cut:]) == BODIES
    assert split.feed(STREAM) == BODIES, "nothing is left over"


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
def test_small_pieces_give_the_same_messages(size: int) -> None:
    pieces, reader = [STREAM[start : start + size] for start in range(0, len(STREAM), size)], Frames()
    assert [body for piece in pieces for body in reader.feed(piece)] == BODIES


def test_a_message_comes_out_as_soon_as_its_last_byte_is_in() -> None:
    reader, data = Frames(), frame(b"hello")
    assert reader.feed(data[:-1]) == []
    assert reader.feed(data[-1:] + data[:2]) == [b"hello"]


@pytest.mark.parametrize("before", [b"", frame(b"fine"), frame(b"fine")[:3]])
def test_a_corrupt_length_is_refused_before_anything_is_reserved(before: bytes) -> None:
    reader = Frames()
    reader.feed(before)
    rest = frame(b"fine")[3:] if len(before) == 3 else b""
    with pytest.raises(FrameError, match="corrupt"):
        reader.feed(rest + TOO_LONG)


def test_the_longest_message_passes_and_a_longer_one_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 10)
    assert Frames().feed(frame(b"x" * 10)) == [b"x" * 10]
    with pytest.raises(ValueError, match="11 bytes"):
        frame(b"x" * 11)


def test_blocking_ends_understand_each_other(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    large = b"x" * 3_000_000  # more than a socket holds: it is read in pieces
    sender = threading.Thread(target=lambda: [write_frame(ours, body) for body in (*BODIES, large)])
    sender.start()
    assert [read_frame(theirs) for _ in BODIES] == BODIES
    assert read_frame(theirs) == large
    sender.join()
    ours.close()
    assert read_frame(theirs) is None


@pytest.mark.parametrize("sent", range(1, len(frame(b"hello"))))
def test_an_end_in_the_middle_of_a_message_is_an_error(pair: tuple[socket.socket, socket.socket], sent: int) -> None:
    ours, theirs = pair
    ours.sendall(frame(b"hello")[:sent])
    ours.close()
    with pytest.raises(FrameError, match="closed"):
        read_frame(theirs)


def test_a_corrupt_length_on_a_blocking_socket(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    ours.sendall(TOO_LONG)
    with pytest.raises(FrameError, match="corrupt"):
        read_frame(theirs)


def test_the_protocol_delivers_messages_and_closes_after_a_corrupt_one(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    received: list[bytes] = []

    async def run() -> None:
        lost = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda *_: None)  # the loop reports the error; here it is expected
        await loop.create_connection(lambda: FrameProtocol(received.append, lost.set), sock=theirs)
        await loop.run_in_executor(None, ours.sendall, STREAM)
        await loop.run_in_executor(None, ours.sendall, TOO_LONG)
        await asyncio.wait_for(lost.wait(), 60)

    asyncio.run(run())
    assert received == BODIES
    assert ours.recv(1) == b""
