"""Which paths are translations of another API, and the `Call` that reads each.

Does: list them. Does not: route (`gateway/routes.py`) or translate.
"""

from __future__ import annotations

from collections.abc import Callable

from tonle.edge.exchange import Exchange
from tonle.gateway.apis.messages.call import CountTokensCall, MessagesCall
from tonle.gateway.apis.ollama.call import OllamaCall
from tonle.gateway.call import Call
from tonle.gateway.form_call import FormCall
from tonle.gateway.inference_service import InferenceCall
from tonle.gateway.services import Services
from tonle.protocol.media_paths import FORM_PATHS


def _inference(exchange: Exchange, services: Services) -> Call:
    window, max_tokens = services.config.context_window, services.config.max_context_length
    return InferenceCall(exchange, context_window=window, max_context_length=max_tokens)


# Path -> its call. Each is asked with POST and a JSON body, and has a record.
TRANSLATED: dict[str, Callable[[Exchange, Services], Call]] = {
    "/api/v1/inference": _inference,
    "/v1/responses": lambda exchange, services: services.responses.call(exchange),
    "/v1/messages": lambda exchange, _: MessagesCall(exchange),
    "/v1/messages/count_tokens": lambda exchange, _: CountTokensCall(exchange),
    **dict.fromkeys(("/api/chat", "/api/generate", "/api/embed", "/api/embeddings"), OllamaCall),
}


def call_for(exchange: Exchange, services: Services) -> Call:
    """A path that is not translated is asked of a backend under its own name."""
    if exchange.path in FORM_PATHS:
        trail = services.trail
        return FormCall(exchange, exchange.path, wants_hashes=trail is not None and trail.options.media != "none")
    make = TRANSLATED.get(exchange.path)
    return Call(exchange, exchange.path) if make is None else make(exchange, services)
