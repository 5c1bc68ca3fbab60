"""What Ollama's API tells without asking a model: which there are, and that a server runs.

    GET /api/tags, /api/ps, /api/version, /        POST /api/show

Does: reply from the list of models; refuse what manages models. Does not: generate (`call.py`).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

import msgspec

from tonle import __version__
from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.exchange import Exchange
from tonle.errors import InvalidRequest, UnknownModel
from tonle.gateway.apis.ollama.call import served_name
from tonle.gateway.services import Services
from tonle.protocol.errors import ErrorReply
from tonle.protocol.fields import OtherFields
from tonle.protocol.openai import ErrorBody, ErrorDetail, about
from tonle.protocol.parse import parse
from tonle.protocol.replies import ModelEntry, read_models

API_VERSION = "0.13.0"  # of Ollama, whose API this is: clients ask for a lowest one
RUNNING = b"Ollama is running"  # what clients look for
PLAIN_TEXT = "text/plain; charset=utf-8"
NEVER = "9999-12-31T23:59:59Z"  # models stay loaded
ARCHITECTURE = "transformer"  # the gateway does not know more; names of other fields begin with it
CAPABILITIES = ["completion", "tools"]

_MANAGING = ("pull", "push", "create", "delete", "copy", "blobs")
_NO_MANAGING = (
    "this server does not download, change or remove models: start it with the model it should have, as in "
    "`tonle serve MODEL`; GET /api/tags lists those there are"
)


class OllamaShowRequest(msgspec.Struct, kw_only=True):
    other_fields: ClassVar = OtherFields(silent={"verbose": "all that is known is told"})
    model: Annotated[str | None, about("Name of the model.")] = None
    name: Annotated[str | None, about("Older name for model.")] = None


class OllamaPages:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def _models(self, exchange: Exchange) -> dict[str, ModelEntry]:
        """Those the key may use."""
        models = self._services.router.public_models()
        if self._services.is_local:
            models = {**models, **await self._told_by_engine()}
        return {name: entry for name, entry in models.items() if exchange.key.may_use(name)}

    async def _told_by_engine(self) -> dict[str, ModelEntry]:
        """With the length of the context, which is not known before the model is loaded; until then, none."""
        (backend,) = self._services.pool.backends
        answer = BufferedReply()
        await backend.send("GET", "/v1/models", b"", {}, answer, first_s=backend.timeout_s)
        return {entry.id: entry for entry in read_models(answer.body)} if answer.status == 200 else {}

    async def root(self, exchange: Exchange) -> None:
        text = RUNNING
        if "text/html" in exchange.header("accept"):  # a person with a browser
            is_local = self._services.is_local
            text = f"Tonle is running; {'/docs lists what there is' if is_local else '/v1/models lists the models'}".encode()
        exchange.reply(text, content_type=PLAIN_TEXT)

    async def version(self, exchange: Exchange) -> None:
        exchange.reply(msgspec.json.encode({"version": API_VERSION, "tonle": __version__}))

    async def tags(self, exchange: Exchange) -> None:
        models = [_listed(name, entry) for name, entry in (await self._models(exchange)).items()]
        exchange.reply(msgspec.json.encode({"models": models}))

    async def running(self, exchange: Exchange) -> None:
        models = [
            {**_listed(name, entry), "expires_at": NEVER, "size_vram": 0, "context_length": entry.max_model_len or 0}
            for name, entry in (await self._models(exchange)).items()
        ]
        exchange.reply(msgspec.json.encode({"models": models}))

    async def show(self, exchange: Exchange) -> None:
        request, _ = parse(exchange.body, OllamaShowRequest)
        asked = request.model or request.name
        if not asked:
            raise InvalidRequest("model is missing", param="model")
        models = await self._models(exchange)
        entry = models.get(served_name(asked, models))
        if entry is None:
            raise UnknownModel(f"there is no model {asked!r} for this key; GET /api/tags lists those there are")
        info: dict[str, Any] = {"general.architecture": ARCHITECTURE, "general.basename": entry.root or entry.id}
        if entry.max_model_len:
            info[f"{ARCHITECTURE}.context_length"] = entry.max_model_len
        told = {
            "modelfile": "", "parameters": "", "template": "", "license": "", "details": _details(entry),
            "model_info": info, "capabilities": CAPABILITIES, "modified_at": _time(entry),
        }  # fmt: skip
        exchange.reply(msgspec.json.encode(told))


def managing_refusal(path: str) -> ErrorReply | None:
    """For Ollama's paths that manage models; None for any other."""
    first = path.removeprefix("/api/").partition("/")[0]
    if not path.startswith("/api/") or first not in _MANAGING:
        return None
    return ErrorReply(501, ErrorBody(ErrorDetail(_NO_MANAGING, "invalid_request_error", None, "not_supported")), [])


def _listed(name: str, entry: ModelEntry) -> dict[str, Any]:
    """The gateway knows no sizes: 0."""
    return {
        "name": name, "model": name, "modified_at": _time(entry), "size": 0, "digest": entry.adapter_digest or "",
        "details": _details(entry),
    }  # fmt: skip


def _details(entry: ModelEntry) -> dict[str, Any]:
    return {
        "parent_model": entry.parent or "", "format": "", "family": ARCHITECTURE, "families": [ARCHITECTURE],
        "parameter_size": "", "quantization_level": "",
    }  # fmt: skip


def _time(entry: ModelEntry) -> str:
    try:
        return datetime.fromtimestamp(entry.created or 0, UTC).isoformat().replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):  # a backend may say anything
        return datetime.fromtimestamp(0, UTC).isoformat().replace("+00:00", "Z")
