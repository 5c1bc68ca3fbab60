"""`ModelCatalog`: what a wrapped server says about its models, so that records can tell model, configuration and adapter.

Does: ask the server's own /v1/models, once per unknown model and with the rights of a caller it has just answered.
Does not: ask for callers that were refused.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import msgspec

PATH = "/v1/models"
RETRY_S = 60.0  # until a model that is not listed is looked for again


@dataclass(frozen=True, slots=True)
class ListedModel:
    config: dict[str, Any]
    adapter: str | None  # the model's own name, if it is one on top of another


class ModelCatalog:
    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._entries: dict[str, ListedModel] = {}
        self._asked_s: float | None = None

    def entry(self, model: str | None) -> ListedModel | None:
        return self._entries.get(model) if model is not None else None

    def forget(self) -> None:
        """The server's models may have changed."""
        self._entries.clear()
        self._asked_s = None

    async def learn(self, model: str | None, scope: MutableMapping[str, Any]) -> None:
        """Ask, unless the model is known or was just looked for. Never raises: a record can do without."""
        now = time.monotonic()
        if model is None or model in self._entries or (self._asked_s is not None and now - self._asked_s < RETRY_S):
            return
        self._asked_s = now
        body: list[bytes] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: MutableMapping[str, Any]) -> None:
            body.append(message.get("body", b""))

        kept = (b"authorization", b"host", b"x-api-key")
        headers = [pair for pair in scope["headers"] if pair[0].lower() in kept]
        question = {
            **scope, "method": "GET", "path": PATH, "raw_path": PATH.encode(), "query_string": b"", "headers": headers,
            "state": dict(scope.get("state") or {}), "extensions": {},
        }  # fmt: skip
        try:
            await self._app(question, receive, send)
            self._read(b"".join(body))
        except Exception:
            return

    def _read(self, body: bytes) -> None:
        for entry in msgspec.json.decode(body)["data"]:
            config = {name: entry[name] for name in ("root", "parent", "max_model_len", "owned_by") if name in entry}
            adapter = entry["id"] if entry.get("parent") else None
            self._entries[entry["id"]] = ListedModel(config, adapter)
