"""OpenAI's batch files: JSON lines of {"custom_id": …, "method": "POST", "url": "/v1/chat/completions", "body": {…}}.

The body is sent as it is, made to stream where the path can. `--model` replaces the model that it names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from tonle.bench.datasets.items import RequestItem, bad_entry


class _Line(msgspec.Struct):
    url: str
    body: dict[str, Any]
    custom_id: str | None = None
    method: str = "POST"


def read_batch_file(path: Path, lines: list[tuple[int, bytes]]) -> list[RequestItem]:
    """`lines` with their numbers. The first bad one raises `ConfigError` with its number."""
    return [_read_line(path, number, line) for number, line in lines]


def _read_line(path: Path, number: int, text: bytes) -> RequestItem:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except msgspec.MsgspecError as error:
        raise bad_entry(path, f"line {number}", error) from None
    if line.method.upper() != "POST":
        raise bad_entry(path, f"line {number}", f"method must be POST, not {line.method}")
    if not line.url.startswith("/"):
        raise bad_entry(path, f"line {number}", f"url must be a path such as /v1/chat/completions, not {line.url!r}")
    return RequestItem(line.url, line.body)
