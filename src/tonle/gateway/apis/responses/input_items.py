"""The items of a conversation: what a request gives, and what earlier responses added; as messages of a chat.

Does: read items in every form that callers send, give each an id, turn them into chat messages. Does not: find what an item
reference means (`context.py`).
"""

from __future__ import annotations

from typing import Any

from tonle.errors import InvalidRequest

ROLES = ("user", "assistant", "system", "developer")
MAX_ID_CHARS = 128
_NOT_READ = "this server reads messages, function calls with their outputs, and reasoning"
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # part -> its field

Item = dict[str, Any]


def read_items(given: str | list[Any], id_of: str) -> list[Item]:
    """Items in their full form, checked. `id_of` begins the ids of those that have none. Raises `InvalidRequest`."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_read_item(item, f"input[{place}]", f"{id_of}{place}") for place, item in enumerate(given)]


def _read_item(item: Any, path: str, own_id: str) -> Item:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{path} must be an object", param=path)
    kind = item.get("type")
    if kind is None:
        kind = "message" if "role" in item else "item_reference"
    if kind == "item_reference":
        return {"type": "item_reference", "id": _text(item, "id", path)}
    given = item.get("id")
    item_id = given if isinstance(given, str) and 0 < len(given) <= MAX_ID_CHARS else own_id
    if kind == "message":
        return _read_message(item, path, item_id)
    if kind == "function_call":
        named = {name: _text(item, name, path) for name in ("call_id", "name")}
        arguments = _text(item, "arguments", path, may_be_empty=True)
        return {"id": item_id, "type": kind, "status": "completed", **named, "arguments": arguments}
    if kind == "function_call_output":
        output = item.get("output")
        if not isinstance(output, str):
            output = _read_parts(output, f"{path}.output", "input_text")
        return {"id": item_id, "type": kind, "status": "completed", "call_id": _text(item, "call_id", path),
                "output": output}  # fmt: skip
    if kind == "reasoning":
        return _read_reasoning(item, path, item_id)
    shown = f"has type {kind!r}"[:200] if isinstance(kind, str) else "has a type that is not a string"
    raise InvalidRequest(f"{path} {shown}, which cannot be served: {_NOT_READ}", param=f"{path}.type")


def _read_message(item: Item, path: str, item_id: str) -> Item:
    role, content = item.get("role"), item.get("content")
    if role not in ROLES:
        raise InvalidRequest(f"{path}.role must be one of {', '.join(ROLES)}", param=f"{path}.role")
    kind = "output_text" if role == "assistant" else "input_text"
    parts = [_text_part(kind, content)] if isinstance(content, str) else _read_parts(content, f"{path}.content", kind)
    return {"id": item_id, "type": "message", "role": role, "status": "completed", "content": parts}


def _read_parts(content: Any, path: str, kind: str) -> list[Item]:
    """`kind` is that of texts."""
    if content is None:
        raise InvalidRequest(f"{path} is missing", param=path)
    if not isinstance(content, list):
        raise InvalidRequest(f"{path} must be a string or a list of parts", param=path)
    return [_read_part(part, f"{path}[{place}]", kind) for place, part in enumerate(content)]


def _read_part(part: Any, path: str, kind: str) -> Item:
    if not isinstance(part, dict):
        raise InvalidRequest(f"{path} must be an object", param=path)
    given = part.get("type")
    if isinstance(given, str) and (name := _TEXTS.get(given)) is not None:
        text = _text(part, name, path, may_be_empty=True)
        return {"type": "refusal", "refusal": text} if given == "refusal" else _text_part(kind, text)
    if given == "input_image" and isinstance(part.get("image_url"), str):
        detail = part.get("detail")
        return {"type": given, "image_url": part["image_url"], "detail": detail if isinstance(detail, str) else "auto"}
    shown = f"has type {given!r}"[:200] if isinstance(given, str) else "has no type"
    raise InvalidRequest(
        f"{path} {shown}, which cannot be served: give text (input_text), or an image (input_image) by its image_url",
        param=f"{path}.type",
    )


def _text_part(kind: str, text: str) -> Item:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def _read_reasoning(item: Item, path: str, item_id: str) -> Item:
    """What is encrypted elsewhere cannot be read here; it stays out of the conversation."""
    found: dict[str, list[Item]] = {}
    for name, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
        parts = item.get(name) or []
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise InvalidRequest(f"{path}.{name} must be a list of parts", param=f"{path}.{name}")
        texts = [_text(part, "text", f"{path}.{name}[{place}]", may_be_empty=True) for place, part in enumerate(parts)]
        found[name] = [{"type": kind, "text": text} for text in texts]
    return {"id": item_id, "type": "reasoning", "status": "completed", **found}


def _text(place: Item, name: str, path: str, *, may_be_empty: bool = False) -> str:
    value = place.get(name)
    if value is None:
        raise InvalidRequest(f"{path}.{name} is missing", param=f"{path}.{name}")
    if not isinstance(value, str):
        raise InvalidRequest(f"{path}.{name} must be a string", param=f"{path}.{name}")
    if not value and not may_be_empty:
        raise InvalidRequest(f"{path}.{name} is empty", param=f"{path}.{name}")
    return value


# -- as messages


def chat_messages(items: list[Item]) -> list[dict[str, Any]]:
    """Of items as `read_items` and responses have them. What an assistant thought, said and called in one turn is one message."""
    last_user = max((place for place, item in enumerate(items) if item.get("role") == "user"), default=-1)
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's message that later items may join
    thoughts: list[str] = []  # that belong to the assistant's next message
    for place, item in enumerate(items):
        kind = item["type"]
        if kind == "reasoning":
            # Templates drop what was thought before the user's last message; so servers need not see it.
            thoughts += _thoughts(item) if place > last_user else []
            if turn is not None and "tool_calls" in turn:
                _think(turn, thoughts)
            else:
                turn = None
        elif kind == "function_call":
            turn = turn or _begin(messages, thoughts)
            call = {"name": item["name"], "arguments": item["arguments"]}
            turn.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": call})
        elif kind == "message" and item["role"] == "assistant":
            if turn is None or turn["content"] is not None:
                turn = _begin(messages, thoughts)
            turn["content"] = _content(item["content"])
        elif kind == "message":
            messages.append({"role": item["role"], "content": _content(item["content"])})
            turn = None
        else:
            output = item["output"]
            content = output if isinstance(output, str) else _content(output)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
            turn = None
    return messages


def _begin(messages: list[dict[str, Any]], thoughts: list[str]) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": "assistant", "content": None}
    _think(turn, thoughts)
    messages.append(turn)
    return turn


def _think(turn: dict[str, Any], thoughts: list[str]) -> None:
    """Move `thoughts` into the message they belong to."""
    if thoughts:
        before = [turn["reasoning_content"]] if "reasoning_content" in turn else []
        turn["reasoning_content"] = "\n".join(before + thoughts)
        thoughts.clear()


def _thoughts(item: Item) -> list[str]:
    """A summary stands in for thoughts that are not told."""
    parts = item.get("content") or item.get("summary") or []
    return [part["text"] for part in parts if part["text"]]


def _content(parts: list[Item]) -> str | list[dict[str, Any]]:
    """One text as a string: every server and template takes that."""
    if len(parts) == 1 and "image_url" not in parts[0]:
        return str(parts[0].get("text", parts[0].get("refusal")))
    return [_chat_part(part) for part in parts] or ""


def _chat_part(part: Item) -> dict[str, Any]:
    if "image_url" in part:
        return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part["detail"]}}
    return {"type": "text", "text": part.get("text", part.get("refusal"))}
