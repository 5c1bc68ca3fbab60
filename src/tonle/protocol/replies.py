"""What OpenAI-compatible servers send, read leniently: replies, chunks of streams (`EventReader`), errors, model lists.

Does: decode the fields that gateway, audit and benchmark look at; all others are skipped without being built. Does not: put
chunks together (`answers.py`), or declare what this server sends (`openai.py`).
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tonle.protocol import sse
from tonle.protocol.adapters import is_digest
from tonle.protocol.sse import DATA, END, EventSplitter, payload


class ReplyDelta(msgspec.Struct, gc=False):
    """A message, or a piece of one."""

    content: str | list[Any] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    function_call: dict[str, Any] | None = None


class ReplyChoice(msgspec.Struct, gc=False):
    index: int = 0
    delta: ReplyDelta | None = None  # chat, streamed
    message: ReplyDelta | None = None  # chat, whole
    text: str | None = None  # completions
    token_ids: list[int] | None = None  # from servers that send them: tokens may be ahead of their text
    finish_reason: str | None = None


class Reply(msgspec.Struct, gc=False):
    """The union of whole replies and chunks, chat and completions; below, the events of /v1/responses and /v1/messages."""

    id: str | None = None
    model: str | None = None
    choices: list[ReplyChoice] | None = None
    usage: dict[str, Any] | None = None
    error: Any = None
    timings: Any = None  # llama-server's

    type: Any = None
    index: Any = None
    output_index: Any = None
    item: Any = None
    content_block: Any = None
    delta: Any = None
    response: Any = None
    message: Any = None


MAX_MESSAGE_CHARS = 300
_THEN_DONE = b"\n\ndata: [DONE]"

# What decoding raises. RecursionError: nested deeper than the interpreter can follow.
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

decode_reply = msgspec.json.Decoder(Reply).decode
_decode_replies = msgspec.json.Decoder(list[Reply]).decode


class _WithUsage(msgspec.Struct):
    usage: msgspec.Raw = msgspec.Raw(b"null")


MAX_USAGE_BYTES = 64 * 1024
_decode_with_usage = msgspec.json.Decoder(_WithUsage).decode


def decode_usage(body: bytes) -> dict[str, Any] | None:
    """The usage in a reply, and nothing else of it is built. None if there is none."""
    try:
        raw = bytes(_decode_with_usage(body).usage)
        usage = msgspec.json.decode(raw) if len(raw) <= MAX_USAGE_BYTES else None
    except UNREADABLE:
        return None
    return usage if isinstance(usage, dict) else None


class EventReader:
    """Reads the events of a stream whose bytes come in pieces, cut anywhere. Never raises."""

    __slots__ = ("_events", "done", "oversized", "problem")

    def __init__(self) -> None:
        self.done = False  # [DONE] was seen
        self.problem: str | None = None  # of the first event that could not be read
        self.oversized = False  # an event was too large: nothing after it is read
        self._events = EventSplitter()

    def feed(self, piece: bytes) -> list[Reply]:
        """The events that end in `piece`."""
        if self.oversized:
            return []
        events = self._events
        if not events.holding and piece.startswith(DATA) and piece.endswith(END):
            # The usual case, several times as fast: whole events of one line each, decoded in one go.
            try:
                if END not in (data := piece[6:-2]):  # between DATA and END
                    return [decode_reply(data)]
                return self._decode_all(data)
            except UNREADABLE:
                pass
        found = events.push(piece)
        if events.oversized:
            self.oversized = True
            self.problem = self.problem or f"an event of more than {sse.MAX_EVENT_BYTES} bytes"
            events.rest()
        return self._decode_each(found)

    def finish(self) -> list[Reply]:
        """The last event, if the stream ended without the empty line after it."""
        problem = self.problem
        replies = self._decode_each([self._events.rest()])
        self.problem = problem  # a broken stream is not an unreadable event
        return replies

    def _decode_all(self, payloads: bytes) -> list[Reply]:
        """Events between the first `data: ` and the last empty line."""
        documents = payloads.removesuffix(_THEN_DONE)
        replies = _decode_replies(b"[%b]" % documents.replace(END + DATA, b","))
        self.done |= len(documents) < len(payloads)
        return replies

    def _decode_each(self, events: list[bytes]) -> list[Reply]:
        replies = []
        for event in events:
            data = payload(event)
            if data == b"[DONE]":
                self.done = True
            elif data:
                try:
                    replies.append(decode_reply(data))
                except UNREADABLE as error:
                    self.problem = self.problem or str(error)
        return replies


def content_text(content: str | list[Any]) -> str:
    """The text of a message's content, which may come in parts."""
    if isinstance(content, str):
        return content
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    return "".join(text for text in texts if isinstance(text, str))


ForeignKind = Literal["text", "reasoning", "call"]
_REASONING_EVENTS = ("response.reasoning_text.delta", "response.reasoning_summary_text.delta")


def foreign_part(event: Reply) -> tuple[ForeignKind, Any]:
    """What an event of /v1/responses or /v1/messages adds to the answer: a text, or a tool call as chat streams it."""
    for begun in (event.item, event.content_block):
        if isinstance(begun, dict):
            return "call", _foreign_call(event, begun)
    delta = event.delta
    if isinstance(delta, dict):  # /v1/messages
        if (arguments := delta.get("partial_json")) is not None:
            return "call", {"index": event.index, "function": {"arguments": arguments}}
        thought = delta.get("thinking")
        return ("text", delta.get("text")) if thought is None else ("reasoning", thought)
    if event.type == "response.function_call_arguments.delta":
        return "call", {"index": event.output_index, "function": {"arguments": delta}}
    return ("reasoning" if event.type in _REASONING_EVENTS else "text"), delta


def _foreign_call(event: Reply, begun: dict[str, Any]) -> dict[str, Any] | None:
    """None if what begins is no call, or its end is told."""
    if begun.get("type") not in ("function_call", "tool_use") or event.type == "response.output_item.done":
        return None
    index = event.index if event.output_index is None else event.output_index
    call_id = begun.get("call_id") or begun.get("id")
    return {"index": index, "id": call_id, "type": "function", "function": {"name": begun.get("name")}}


def error_text(error: Any) -> str:
    """The message inside an OpenAI-style error object, or what stands in its place, as one printable line."""
    while isinstance(error, dict):
        inner = error.get("message") or error.get("detail") or error.get("error")
        if not inner:
            break
        error = inner
    text = str(error)[: 4 * MAX_MESSAGE_CHARS]
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "…"


def body_message(body: bytes) -> str:
    """The error message in a body, JSON or not."""
    try:
        return error_text(msgspec.json.decode(body))
    except UNREADABLE:
        return error_text(body.decode("utf-8", "replace"))


class ModelEntry(msgspec.Struct):
    """What /v1/models says about one model."""

    id: str
    created: int | float | None = 0
    owned_by: str | None = None
    root: str | None = None
    parent: str | None = None  # of an adapter: the model it is for
    max_model_len: int | None = None
    digest: Any = None  # of an adapter's content; other servers than Tonle do not tell it
    kind: Any = None  # of a worker pool: asr, tts, …; None: a language model
    facts: Any = None  # of a worker pool: what its model tells, such as its voices

    @property
    def adapter_digest(self) -> str | None:
        """As SHA-256, hexadecimal; None if it is no adapter, or its content is not known."""
        digest = self.digest
        return digest if self.parent and isinstance(digest, str) and is_digest(digest) else None

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal as long as it is the same model and length, and of an adapter the same content; times of listing and, if
        its content is known, the folder it came from do not count."""
        if (digest := self.adapter_digest) is not None:
            return (self.id, self.parent, self.max_model_len, digest)
        return (self.id, self.root, self.parent, self.max_model_len)


class _ModelList(msgspec.Struct):
    data: list[ModelEntry]


def read_models(body: bytes) -> list[ModelEntry]:
    """The models in a reply to GET /v1/models. Raises `msgspec.MsgspecError`."""
    return msgspec.json.decode(body, type=_ModelList).data
