"""A body of multipart/form-data, as browsers and OpenAI's clients upload files. Does not: read one."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec


def encode_form(fields: dict[str, Any], *, file: bytes, filename: str, content_type: str) -> tuple[bytes, str]:
    """The body, and the content type of the request. A list becomes several fields of that name."""
    boundary = f"tonle-{hashlib.blake2b(file, digest_size=16).hexdigest()}"
    parts = []
    for name, value in fields.items():
        values = value if isinstance(value, list) else [value]
        parts += [_part(boundary, f'name="{_quoted(name)}"', _text(each).encode()) for each in values]
    place = f'name="file"; filename="{_quoted(filename)}"\r\nContent-Type: {content_type}'
    parts += [_part(boundary, place, file), f"--{boundary}--\r\n".encode()]
    return b"".join(parts), f"multipart/form-data; boundary={boundary}"


def _part(boundary: str, place: str, content: bytes) -> bytes:
    head = f"--{boundary}\r\nContent-Disposition: form-data; {place}\r\n\r\n"
    return head.encode() + content + b"\r\n"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _quoted(name: str) -> str:
    return name.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")
