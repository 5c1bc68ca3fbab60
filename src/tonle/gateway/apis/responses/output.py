"""`Output`: the items of a response as a chat answers, and the events that tell of them.

Does: put messages, function calls and thoughts together from the pieces of a chat, in the order in which they come; a whole
answer is one piece. Does not: know the response around them (`reply.py`). A backend may send anything: what cannot be read is
left out, and nothing raises but an answer that is too large.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from tonle.edge.client import TOO_LARGE, UpstreamError
from tonle.protocol.replies import content_text

MAX_CHARS = 64 * 1024**2  # of all texts of a response
MAX_CALLS = 1024
MAX_LOGPROBS = 1024 * 1024

Emit = Callable[[str, dict[str, Any]], None]  # takes an event's type and its fields

# Kind of a part -> its field for the text, and how its events begin.
_PARTS = {
    "output_text": ("text", "response.output_text"),
    "refusal": ("refusal", "response.refusal"),
    "reasoning_text": ("text", "response.reasoning_text"),
}


class _Part:
    """A part of a message or of thoughts that still grows; its item has no other that does."""

    __slots__ = ("index", "item", "kind", "logprobs", "place", "text")

    def __init__(self, kind: str, item: dict[str, Any], place: int) -> None:
        self.kind = kind
        self.item = item
        self.place = place  # of the item in the output
        self.index = len(item["content"])  # of the part in the item
        self.text = io.StringIO()
        self.logprobs: list[Any] = []

    def shown(self) -> dict[str, Any]:
        name, _ = _PARTS[self.kind]
        part: dict[str, Any] = {"type": self.kind, name: self.text.getvalue()}
        return part | ({"annotations": [], "logprobs": self.logprobs} if self.kind == "output_text" else {})

    @property
    def fields(self) -> dict[str, Any]:
        """Of every event about it."""
        return {"item_id": self.item["id"], "output_index": self.place, "content_index": self.index}


class _Call:
    """A function call that still grows. It becomes an item when its name is known."""

    __slots__ = ("arguments", "call_id", "item", "name", "place")

    def __init__(self) -> None:
        self.name = ""
        self.call_id = ""
        self.arguments = io.StringIO()
        self.item: dict[str, Any] | None = None
        self.place = 0


class Output:
    """Add pieces in order, then `finish`; `items` are whole then."""

    def __init__(self, random_part: str, emit: Emit) -> None:
        """`random_part` of the response's id: those of its items have it too."""
        self.items: list[dict[str, Any]] = []
        self._random_part = random_part
        self._emit = emit
        self._part: _Part | None = None
        self._calls: dict[int, _Call] = {}  # by chat's index
        self._call: _Call | None = None  # the one that grows
        self._num_chars = 0

    def add(self, delta: dict[str, Any], logprobs: Any = None) -> None:
        """A chat message, or a piece of one. Raises `UpstreamError` if there is too much of it."""
        if thought := _text(delta.get("reasoning_content")) or _text(delta.get("reasoning")):
            self._add_text("reasoning_text", thought)
        if text := _text(delta.get("content")):
            self._add_text("output_text", text, _logprobs(logprobs))
        if refusal := _text(delta.get("refusal")):
            self._add_text("refusal", refusal)
        calls = delta.get("tool_calls")
        for position, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                self._add_call(call, position)

    def finish(self, *, cut: bool = False) -> None:
        """No more comes. `cut`: what was being written is not complete."""
        if not self.items and self._call is None:
            self._open_part("output_text")  # an empty answer is one
        status = "incomplete" if cut else "completed"
        self._close_part(status)
        self._close_call(status)

    # -- texts

    def _add_text(self, kind: str, text: str, logprobs: list[Any] | None = None) -> None:
        self._count(text)
        part = self._part
        if part is None or part.kind != kind:
            part = self._open_part(kind)
        part.text.write(text)
        fields: dict[str, Any] = {**part.fields, "delta": text}
        if kind == "output_text":
            fields["logprobs"] = logprobs or []
            part.logprobs += (logprobs or [])[: MAX_LOGPROBS - len(part.logprobs)]
        self._emit(f"{_PARTS[kind][1]}.delta", fields)

    def _open_part(self, kind: str) -> _Part:
        self._close_part("completed")
        self._close_call("completed")
        if kind == "reasoning_text":
            item = self._open_item("rs", {"type": "reasoning", "summary": [], "content": []})
        else:
            item = self._open_item("msg", {"type": "message", "role": "assistant", "content": []})
        part = self._part = _Part(kind, item, len(self.items) - 1)
        self._emit("response.content_part.added", {**part.fields, "part": part.shown()})
        return part

    def _open_item(self, prefix: str, item: dict[str, Any]) -> dict[str, Any]:
        place = len(self.items)
        item = {"id": f"{prefix}_{self._random_part}_{place}", "status": "in_progress", **item}
        self.items.append(item)
        self._emit("response.output_item.added", {"output_index": place, "item": item})
        return item

    def _close_part(self, status: str) -> None:
        part, self._part = self._part, None
        if part is None:
            return
        shown = part.shown()
        name, event = _PARTS[part.kind]
        told = {"logprobs": part.logprobs} if part.kind == "output_text" else {}
        self._emit(f"{event}.done", {**part.fields, name: shown[name], **told})
        self._emit("response.content_part.done", {**part.fields, "part": shown})
        part.item["content"].append(shown)
        self._close_item(part.item, part.place, status)

    def _close_item(self, item: dict[str, Any], place: int, status: str) -> None:
        item["status"] = status
        self._emit("response.output_item.done", {"output_index": place, "item": item})

    # -- function calls

    def _add_call(self, piece: dict[str, Any], position: int) -> None:
        index = piece.get("index")
        index = index if isinstance(index, int) else position
        call = self._calls.get(index)
        if call is None:
            if len(self._calls) >= MAX_CALLS:
                return
            call = self._calls[index] = _Call()
        function = piece.get("function")
        function = function if isinstance(function, dict) else {}
        call.call_id = call.call_id or _text(piece.get("id"))
        call.name = call.name or _text(function.get("name"))
        arguments = _text(function.get("arguments"))
        self._count(arguments)
        call.arguments.write(arguments)
        if call.item is None and call.name:
            arguments = call.arguments.getvalue()  # what came before the name, too
            self._open_call(call)
        if call.item is not None and arguments:
            told = {"item_id": call.item["id"], "output_index": call.place, "delta": arguments}
            self._emit("response.function_call_arguments.delta", told)
            if call is not self._call:  # it was taken to be complete: what the response says at last is right
                call.item["arguments"] = call.arguments.getvalue()

    def _open_call(self, call: _Call) -> None:
        self._close_part("completed")
        self._close_call("completed")
        call.place = len(self.items)
        call.call_id = call.call_id or f"call_{self._random_part}_{call.place}"
        own = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": ""}
        call.item, self._call = self._open_item("fc", own), call

    def _close_call(self, status: str) -> None:
        call, self._call = self._call, None
        if call is None or call.item is None:
            return
        item = call.item
        item["arguments"] = call.arguments.getvalue()
        done = {"item_id": item["id"], "output_index": call.place, "name": call.name, "arguments": item["arguments"]}
        self._emit("response.function_call_arguments.done", done)
        self._close_item(item, call.place, status)

    def _count(self, text: str) -> None:
        self._num_chars += len(text)
        if self._num_chars > MAX_CHARS:
            raise UpstreamError(TOO_LARGE, f"more than {MAX_CHARS} characters", began=True)


def _text(value: Any) -> str:
    """Empty if there is none. Some servers send the content in parts."""
    if isinstance(value, str):
        return value
    return content_text(value) if isinstance(value, list) else ""


def _logprobs(logprobs: Any) -> list[Any]:
    found = logprobs.get("content") if isinstance(logprobs, dict) else None
    return [_logprob(each) for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _logprob(each: dict[str, Any]) -> dict[str, Any]:
    """Chat's and this API's are alike, but clients want every field."""
    others = each.get("top_logprobs")
    others = [other for other in others if isinstance(other, dict)] if isinstance(others, list) else []
    top = [
        {"token": other.get("token"), "bytes": other.get("bytes") or [], "logprob": other.get("logprob")}
        for other in others
    ]
    return {"token": each.get("token"), "bytes": each.get("bytes") or [], "logprob": each.get("logprob"),
            "top_logprobs": top}  # fmt: skip
