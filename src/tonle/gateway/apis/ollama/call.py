"""Ollama's API on top of chat completions, completions and embeddings.

    POST /api/chat, /api/generate, /api/embed, /api/embeddings

Does: connect body and reply to the pipeline, find a model under its name with `:latest`. Does not: translate either
(`request.py`, `reply.py`), or answer what needs no model (`pages.py`).
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import msgspec

from tonle.edge.exchange import Exchange
from tonle.gateway.apis.chat_body import CHAT, COMPLETIONS, EMBEDDINGS, TOKENIZE
from tonle.gateway.apis.ollama.reply import Kind, OllamaReply
from tonle.gateway.apis.ollama.request import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    chat_body,
    embed_body,
    generate_body,
)
from tonle.gateway.call import Call, Outlet, ReplyFacts
from tonle.gateway.parsed_request import DecodedBody, ParsedRequest
from tonle.gateway.services import Services
from tonle.protocol.openai import FieldWarning
from tonle.protocol.parse import parse

LOAD = {"prompt": ""}  # the least that a backend can be asked about a model: whether it is there
LATEST = ":latest"  # the tag of a model whose name has none
PATHS: dict[Kind, str] = {
    "chat": CHAT, "generate": CHAT, "raw": COMPLETIONS, "load": TOKENIZE, "embed": EMBEDDINGS, "embeddings": EMBEDDINGS,
}  # fmt: skip


def served_name(asked: str, served: Container[str]) -> str:
    short = asked.removesuffix(LATEST)
    return short if asked not in served and short in served else asked


class OllamaCall(Call):
    __slots__ = ("_asked", "_kind", "_services")

    def __init__(self, exchange: Exchange, services: Services) -> None:
        super().__init__(exchange, CHAT)
        self._services = services
        self._asked = ""
        self._kind: Kind = "chat"

    def decode(self) -> DecodedBody:
        """Sets `path` too: what a backend is asked depends on the body."""
        self._kind, asked, body, warnings = self._translated()
        self.path = PATHS[self._kind]
        if asked:
            self._asked = asked
            body["model"] = served_name(asked, self._services.router.public_models())
        return DecodedBody(body, msgspec.json.encode(body), warnings)

    def _translated(self) -> tuple[Kind, str | None, dict[str, Any], list[FieldWarning]]:
        raw = self.exchange.body
        match self.exchange.path:
            case "/api/chat":
                chat, warnings = parse(raw, OllamaChatRequest)
                if not chat.messages:
                    return "load", chat.model, dict(LOAD), warnings
                return "chat", chat.model, chat_body(chat, warnings), warnings
            case "/api/generate":
                one, warnings = parse(raw, OllamaGenerateRequest)
                if not one.prompt and not one.raw:
                    return "load", one.model, dict(LOAD), warnings
                return "raw" if one.raw else "generate", one.model, generate_body(one, warnings), warnings
            case "/api/embeddings":
                old, warnings = parse(raw, OllamaEmbeddingsRequest)
                return "embeddings", old.model, embed_body(OllamaEmbedRequest(input=old.prompt)), warnings
            case _:
                embed, warnings = parse(raw, OllamaEmbedRequest)
                return "embed", embed.model, embed_body(embed), warnings

    def outlet(self, request: ParsedRequest | None, facts: ReplyFacts) -> Outlet:
        return OllamaReply(self.exchange, self._kind, self._asked, facts)
