"""What a record holds of media: names, types, sizes and hashes in place of sound and pictures.

Does: replace files of forms, and base64 inside JSON, by descriptions; hand over the bytes that are to be kept. Does not: write
(`audit/media_store.py`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any

import msgspec

from tonle.gateway.parsed_request import ParsedRequest
from tonle.protocol.media_paths import IMAGES, WORKERS

_encode = msgspec.json.Encoder().encode


class MediaNotes:
    """Of one request. `kept` has the bytes by hash, if they are to be kept."""

    __slots__ = ("_hashes", "_keeps", "kept")

    def __init__(self, *, hashes: bool, keeps: bool) -> None:
        self._hashes = hashes or keeps
        self._keeps = keeps
        self.kept: dict[str, bytes] = {}

    def form(self, request: ParsedRequest) -> bytes:
        """The fields of a form as JSON, files described. A name that is given several times has a list."""
        assert request.form is not None
        found: dict[str, Any] = dict(request.body)
        files: dict[str, list[Any]] = {}
        digests = iter(request.file_hashes)
        for part in request.form.parts:
            if part.filename is not None:
                about = {"filename": part.filename, "content_type": part.content_type}
                files.setdefault(part.name, []).append(about | self._described(part.data, next(digests, None)))
        for name, several in files.items():
            found[name] = several[0] if len(several) == 1 else several
        return _encode(found)

    def json(self, path: str, value: Any) -> Any:
        """A body or a reply of one of the paths that carry base64, with that described; else `value` itself."""
        if not isinstance(value, dict):
            return value
        if path == IMAGES and isinstance(value.get("data"), list):
            return {**value, "data": [self._picture(each) for each in value["data"]]}
        if path.startswith(WORKERS) and isinstance(value.get("media"), list):
            return {**value, "media": [self._decoded(each) for each in value["media"]]}
        return value

    def made(self, data: bytes | None, about: Any) -> None:
        """An answer that is media, and its description."""
        if data is not None and self._keeps and isinstance(about, dict) and isinstance(about.get("sha256"), str):
            self.kept[about["sha256"]] = data

    def _picture(self, item: Any) -> Any:
        if isinstance(item, dict) and isinstance(item.get("b64_json"), str):
            return {**item, "b64_json": self._decoded(item["b64_json"])}
        return item

    def _decoded(self, text: Any) -> Any:
        if not isinstance(text, str):
            return text
        try:
            return self._described(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError):
            return {"size": len(text), "problem": "it is no base64"}

    def _described(self, data: bytes | memoryview, digest: str | None = None) -> dict[str, Any]:
        about: dict[str, Any] = {"size": len(data)}
        if self._hashes:
            about["sha256"] = digest or hashlib.sha256(data).hexdigest()
            if self._keeps:
                self.kept[about["sha256"]] = bytes(data)
        return about
