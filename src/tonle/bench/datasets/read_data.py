"""`read_data`: a file of prompts, whatever its format.

Does: find the format by looking at the file, read it, refuse what the endpoint cannot take. Does not: build requests.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tonle.bench.datasets.batch_file import read_batch_file
from tonle.bench.datasets.items import ConversationItem, Item, PromptItem, bad_entry, bad_json
from tonle.bench.datasets.jsonl import read_jsonl
from tonle.bench.datasets.sharegpt import read_sharegpt
from tonle.bench.datasets.shipped import SHIPPED, data_path
from tonle.bench.options import DataFormat, Endpoint
from tonle.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Data:
    """A file's entries, in its order."""

    format: DataFormat
    items: list[Item]
    notes: list[str]


def read_data(file: Path, data_format: DataFormat | None = None, endpoint: Endpoint | None = None) -> Data:
    """Raises `ConfigError` that names the line, or the entry of a list, and the reason."""
    path = data_path(file)
    content = _content(path)
    data_format = data_format or _format_of(path, content)
    notes: list[str] = []
    items: list[Item] = []
    places: list[str] = []
    if data_format == "sharegpt":
        entries = _entries(path, content)
        conversations, num_passed = read_sharegpt(path, entries)
        items += conversations
        if num_passed:
            notes.append(f"{num_passed} of {len(entries)} conversations do not begin with a question and are not sent")
    else:
        lines = _lines(content)
        items += (read_jsonl if data_format == "jsonl" else read_batch_file)(path, lines)
        places = [f"line {number}" for number, _ in lines]
    if not items:
        what = "no conversation with a question" if data_format == "sharegpt" else "no lines"
        raise ConfigError(f"{path} has {what}; {_WANTED[data_format]}", param="data")
    for number, item in enumerate(items):
        problem = _endpoint_problem(item, endpoint)
        if problem is not None:
            raise bad_entry(path, places[number] if places else "a conversation", problem)
    return Data(data_format, items, notes)


_WANTED: dict[DataFormat, str] = {
    "jsonl": 'each is {"prompt": …} or {"messages": […]}',
    "sharegpt": 'each has {"conversations": [{"from": "human", "value": …}, …]}',
    "openai-batch": 'each is {"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}',
}


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        sets = ", ".join(SHIPPED)
        raise ConfigError(f"cannot read {path}: no such file, and no set that comes with Tonle ({sets})",
                          param="data") from None  # fmt: skip
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", param="data") from None
    content = content.removeprefix(b"\xef\xbb\xbf")
    try:
        content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error}", param="data") from None
    return content


def _format_of(path: Path, content: bytes) -> DataFormat:
    """A list is ShareGPT's; of lines, the fields of the first one tell."""
    if content.lstrip().startswith(b"["):
        return "sharegpt"
    lines = _lines(content)
    try:
        first = msgspec.json.decode(lines[0][1], type=dict[str, msgspec.Raw]) if lines else {}
    except msgspec.MsgspecError as error:
        if _is_object(content):
            raise ConfigError(
                f"{path} is one JSON object over several lines; a data file is a JSON list or has one object on each line",
                param="data",
            ) from None
        raise bad_entry(path, f"line {lines[0][0]}", error) from None
    if "conversations" in first or "conversation" in first:
        return "sharegpt"
    return "openai-batch" if {"custom_id", "body"} & first.keys() else "jsonl"


def _is_object(content: bytes) -> bool:
    try:
        return isinstance(json.loads(content), dict) and len(_lines(content)) > 1
    except ValueError:
        return False


def _lines(content: bytes) -> list[tuple[int, bytes]]:
    return [(number, line) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]


def _entries(path: Path, content: bytes) -> list[tuple[str, bytes]]:
    """Of a list, or one on each line; with their places."""
    if not content.lstrip().startswith(b"["):
        return [(f"line {number}", line) for number, line in _lines(content)]
    try:
        entries = msgspec.json.decode(content, type=list[msgspec.Raw])
    except msgspec.DecodeError as error:
        raise bad_json(path, content, error) from None
    return [(f"entry {number}", bytes(entry)) for number, entry in enumerate(entries, 1)]


def _endpoint_problem(item: Item, endpoint: Endpoint | None) -> str | None:
    if endpoint == "completions" and isinstance(item, ConversationItem):
        return "conversations need the chat endpoint"
    if isinstance(item, PromptItem):
        if endpoint == "completions" and item.is_chat:
            return "has messages, which the completions endpoint does not take; use the chat endpoint"
        if endpoint == "chat" and item.is_ids:
            return "has token ids, which the chat endpoint does not take; use the completions endpoint"
    return None
