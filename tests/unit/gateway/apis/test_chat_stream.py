"""Chunks of a chat stream, whatever a backend sends and however it is cut."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tonle.gateway.apis.chat_stream import ChatChunks

CHUNK = {"model": "m", "choices": [{"index": 0, "delta": {"content": "ខ្មែរ"}}]}


def read(stream: bytes, size: int) -> tuple[ChatChunks, list[dict[str, Any]]]:
    chunks = ChatChunks()
    found = [chunk for start in range(0, len(stream), size) for chunk in chunks.feed(stream[start : start + size])]
    return chunks, found + chunks.finish()


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_a_stream_is_read_however_it_is_cut(size: int, end: bytes) -> None:
    text = msgspec.json.encode(CHUNK)
    events = [b": queued, 3 others wait", b"data: " + text, b"data:" + text, b"event: x" + end + b"data: [1]",
              b"data: {", b'data: {"comment": "x"}', b'data: {"error": {"message": "no"}}', b"data: [DONE]"]  # fmt: skip
    chunks, found = read(b"".join(event + end + end for event in events), size)
    assert found == [{"comment": "queued, 3 others wait"}, CHUNK, CHUNK, {}, {"error": {"message": "no"}}]
    assert chunks.done and chunks.failed


def test_the_last_event_may_lack_its_empty_line() -> None:
    chunks, found = read(b"data: " + msgspec.json.encode(CHUNK), 5)
    assert found == [CHUNK] and not chunks.done and not chunks.failed


@pytest.mark.parametrize("data", [b"\xff\xfe", b"[" * 5000, b"", b"null", b"\x00", b'{"error": null}'])
def test_nothing_raises(data: bytes) -> None:
    chunks, found = read(b"data: " + data + b"\n\n" + b":\n\n", 3)
    assert found[-1] == {"comment": ""} and not chunks.failed
