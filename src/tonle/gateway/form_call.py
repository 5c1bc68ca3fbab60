"""`FormCall`: a request that is a form with files in it, such as sound to be transcribed.

Does: read the fields that the gateway acts on. Does not: decode a file; a backend is sent the caller's bytes (`outgoing.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from tonle.edge.exchange import Exchange
from tonle.errors import InvalidRequest
from tonle.gateway.api_keys.key import Key
from tonle.gateway.call import Call
from tonle.gateway.media_use import estimate_media
from tonle.gateway.parsed_request import ParsedRequest, deadline_of, is_strict
from tonle.protocol.multipart import MAX_TEXT_BYTES, Form, parse_form
from tonle.protocol.priority import NORMAL

THREAD_BYTES = 1024**2  # of a form whose files are hashed on a thread
_TRUE = ("true", "1")


class FormCall(Call):
    __slots__ = ("_form", "_hashes", "_wants_hashes")

    def __init__(self, exchange: Exchange, path: str, *, wants_hashes: bool) -> None:
        """`wants_hashes`: a record will have the hashes of its files."""
        super().__init__(exchange, path)
        self._wants_hashes = wants_hashes
        self._form: Form | None = None
        self._hashes: tuple[str, ...] = ()

    async def prepare(self, owner: str) -> None:
        """Large files are hashed on a thread: other requests need not wait. Raises `InvalidRequest`."""
        body = self.exchange.body
        self._form = form = parse_form(body, self.exchange.header("content-type"))
        if self._wants_hashes:
            hashing = len(body) > THREAD_BYTES
            self._hashes = await asyncio.to_thread(_hashes_of, form) if hashing else _hashes_of(form)

    def read(self, key: Key, *, strict: bool, trust_router: bool = False) -> ParsedRequest:
        """Raises `InvalidRequest`."""
        exchange, form = self.exchange, self._form
        assert form is not None, "it is prepared first"
        fields = fields_of(form)
        model, user = form.text("model"), form.text("user")
        num_file_bytes = sum(len(part.data) for part in form.parts if part.filename is not None)
        return ParsedRequest(
            body=fields,
            raw=exchange.body,
            rewritten=False,
            warnings=(),
            asked_model=model or None,
            stream=(form.text("stream") or "").lower() in _TRUE,
            wants_usage=False,
            adds_usage=False,
            prompt_tokens=0,
            new_tokens=0,
            priority=NORMAL,
            deadline_s=deadline_of(exchange),
            user=exchange.header("x-user-id") or user or None,
            strict=is_strict(exchange, strict=strict),
            media=estimate_media(self.path, fields, num_file_bytes=num_file_bytes),
            form=form,
            file_hashes=self._hashes,
        )


def _hashes_of(form: Form) -> tuple[str, ...]:
    return tuple(hashlib.sha256(part.data).hexdigest() for part in form.parts if part.filename is not None)


def fields_of(form: Form) -> dict[str, Any]:
    """By name, as text; a list where one is given several times. Raises `InvalidRequest`."""
    found: dict[str, Any] = {}
    for part in form.parts:
        if part.filename is None and part.name not in found:
            texts = form.texts(part.name)
            found[part.name] = texts[0] if len(texts) == 1 else texts
    if sum(len(part.data) for part in form.parts if part.filename is None) > MAX_TEXT_BYTES:
        raise InvalidRequest(f"the fields of the form are longer than {MAX_TEXT_BYTES} bytes; send long data as a file")
    return found
