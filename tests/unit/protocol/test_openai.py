"""The shapes that go out: what is left out, what is null, how events are framed."""

from __future__ import annotations

import msgspec

from tonle.protocol import sse
from tonle.protocol.openai import ChatChunk, ChatChunkChoice, ChatDelta, CompletionChoice


def chunk(*choices: ChatChunkChoice) -> ChatChunk:
    return ChatChunk(id="i", created=1, model="m", choices=list(choices))


def test_extensions_are_left_out_unless_set() -> None:
    body = msgspec.to_builtins(chunk(ChatChunkChoice(0, ChatDelta("x"))))
    assert body == {
        "id": "i", "object": "chat.completion.chunk", "created": 1, "model": "m",
        "choices": [{"index": 0, "delta": {"content": "x"}, "logprobs": None, "finish_reason": None}],
    }  # fmt: skip
    assert msgspec.to_builtins(CompletionChoice(index=0, text="x")).keys() == {
        "index", "text", "logprobs", "finish_reason",
    }  # fmt: skip


def test_an_empty_delta_is_an_empty_object() -> None:
    assert msgspec.to_builtins(ChatDelta()) == {}


def test_events_hold_any_text() -> None:
    text = 'line\nbreak\r\n\n "quotes" \u2028 ខ្មែរ 👩‍👩‍👧 \x00'
    event = sse.event(chunk(ChatChunkChoice(0, ChatDelta(text))))
    assert event.startswith(b"data: {") and event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2 and b"\r" not in event, "one data line, whatever the text"
    decoded = msgspec.json.decode(event.removeprefix(b"data: "))
    assert decoded["choices"][0]["delta"]["content"] == text
