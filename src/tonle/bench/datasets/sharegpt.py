"""ShareGPT: a JSON list, or JSON lines, of {"conversations": [{"from": "human", "value": …}, …]}, or of {"messages": […]}.

The questions are sent turn by turn, each with the server's own answers before it. The file's answers say how long an answer may
be, at four bytes a token. A conversation without a question, or whose first question comes after an answer, is passed over.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tonle.bench.datasets.items import ConversationItem, bad_entry
from tonle.protocol.replies import content_text

BYTES_PER_TOKEN = 4
MAX_ANSWER_TOKENS = 2048  # for an estimate
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "assistant": "assistant", "model": "assistant", "system": "system", "developer": "system",
}  # fmt: skip


class _Said(msgspec.Struct):
    """One thing that was said, in either of the two namings."""

    speaker: str | None = msgspec.field(default=None, name="from")
    value: str | None = None
    role: str | None = None
    content: str | list[Any] | None = None


class _Entry(msgspec.Struct):
    conversations: list[_Said] | None = None
    conversation: list[_Said] | None = None
    messages: list[_Said] | None = None


def read_sharegpt(path: Path, entries: list[tuple[str, bytes]]) -> tuple[list[ConversationItem], int]:
    """`entries` with their places ("entry 3"). The conversations, and how many were passed over."""
    items: list[ConversationItem] = []
    for place, text in entries:
        try:
            entry = msgspec.json.decode(text, type=_Entry)
        except msgspec.MsgspecError as error:
            raise bad_entry(path, place, error) from None
        said = entry.conversations or entry.conversation or entry.messages
        if said is None and entry.conversations is None and entry.messages is None:
            raise bad_entry(path, place, "needs conversations, a list of what was said, or messages")
        item = _conversation(path, place, said or [])
        if item is not None:
            items.append(item)
    return items, len(entries) - len(items)


def _conversation(path: Path, place: str, said: list[_Said]) -> ConversationItem | None:
    """None if it does not begin with a question."""
    item = ConversationItem([], [], [])
    for number, each in enumerate(said, 1):
        name = each.speaker or each.role
        text = each.value if each.value is not None else content_text(each.content or "")
        if name is None:
            raise bad_entry(path, place, f'number {number} of what was said has no "from" (or "role")')
        role = _ROLES.get(name.lower())
        if role == "user" and text.strip():
            item.questions.append(text)
            item.answer_tokens.append(None)
        elif role == "system" and not item.questions and text.strip():
            item.opening.append({"role": "system", "content": text})
        elif role == "assistant":
            if not item.questions:
                return None
            item.answer_tokens[-1] = _tokens(text)
    return item if item.questions else None


def _tokens(answer: str) -> int:
    return max(1, min(MAX_ANSWER_TOKENS, -(-len(answer.encode()) // BYTES_PER_TOKEN)))
