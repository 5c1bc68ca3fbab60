"""JSON lines of our own: {"prompt": …} or {"messages": […]} on each, optionally "max_tokens"."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tonle.bench.datasets.items import PromptItem, bad_entry


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None


def read_jsonl(path: Path, lines: list[tuple[int, bytes]]) -> list[PromptItem]:
    """`lines` with their numbers. The first bad one raises `ConfigError` with its number."""
    return [_read_line(path, number, line) for number, line in lines]


def _read_line(path: Path, number: int, text: bytes) -> PromptItem:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.MsgspecError as error:
        raise bad_entry(path, f"line {number}", error) from None
    problem = _problem(line)
    if problem is not None:
        raise bad_entry(path, f"line {number}", problem)
    return PromptItem(line.prompt or line.messages or "", line.max_tokens)


def _problem(line: _Line) -> str | None:
    if (line.prompt is None) == (line.messages is None):
        return "needs either prompt or messages"
    if not line.prompt and not line.messages:
        return "the prompt is empty"
    if line.max_tokens is not None and line.max_tokens < 1:
        return f"max_tokens must be at least 1, not {line.max_tokens}"
    return None
