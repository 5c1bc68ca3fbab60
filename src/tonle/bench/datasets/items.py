"""What the formats of files have in common: each entry of a file is a prompt, a conversation or a whole request.

Does: hold them; word errors by line or entry. Does not: read files.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tonle.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PromptItem:
    """One request: a text, token ids, or the messages of a chat."""

    content: str | list[int] | list[dict[str, Any]]
    max_tokens: int | None = None  # None: drawn

    @property
    def is_chat(self) -> bool:
        return isinstance(self.content, list) and bool(self.content) and isinstance(self.content[0], dict)

    @property
    def is_ids(self) -> bool:
        return isinstance(self.content, list) and not self.is_chat


@dataclass(frozen=True, slots=True)
class ConversationItem:
    """What a user said, turn by turn; the answers come from the server."""

    opening: list[dict[str, Any]]  # messages before the first question, such as a system prompt
    questions: list[str]
    answer_tokens: list[int | None]  # how long the recorded answers are, about; None: there is none


@dataclass(frozen=True, slots=True)
class RequestItem:
    """A whole request for one path."""

    path: str
    body: dict[str, Any]


Item = PromptItem | ConversationItem | RequestItem


def bad_entry(path: Path, place: str, reason: object) -> ConfigError:
    """`place`: "line 3" or "entry 3"."""
    return ConfigError(f"{path}, {place}: {reason}", param="data")


def bad_json(path: Path, content: bytes, error: msgspec.DecodeError) -> ConfigError:
    """The line of a file that is no JSON as a whole, from the byte that the error names."""
    found = re.search(r"\(byte (\d+)\)", str(error))
    number = content.count(b"\n", 0, int(found[1]) if found else len(content)) + 1
    return bad_entry(path, f"line {number}", error)
