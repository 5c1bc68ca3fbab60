"""The tables of docs/compatibility.md, from the code's own: types of requests, and fields known by name.

python -m tests.house.compatibility_table     # writes them into the page
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from tonle.gateway.apis.messages.request import CountTokensRequest, MessagesRequest
from tonle.gateway.apis.ollama.pages import OllamaShowRequest
from tonle.gateway.apis.ollama.request import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
)
from tonle.gateway.apis.responses.request import PASSED_ON, SAME, UNUSED, ResponsesRequest
from tonle.gateway.parsed_request import OWN_FIELDS
from tonle.protocol.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from tonle.protocol.fields import NO_EFFECT, NO_EFFECT_MESSAGE, REFUSED, STRIPPED, OtherFields, Refusal
from tonle.protocol.images import ImageRequest
from tonle.protocol.known import KNOWN
from tonle.protocol.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tonle.protocol.structured_fields import StructuredFields
from tonle.replica.api_catalog import schemas
from tonle.workers.endpoints.speech import SpeechRequest

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
REQUESTS: dict[str, type[msgspec.Struct]] = {
    CHAT: ChatRequest,
    "/v1/completions": CompletionRequest,
    RESPONSES: ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/embed": OllamaEmbedRequest,
    "/api/embeddings": OllamaEmbeddingsRequest,
    "/api/show": OllamaShowRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
    "/v1/score": ScoreRequest,
    "/v1/audio/speech": SpeechRequest,
    "/v1/images/generations": ImageRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
HONOURED, REFUSED_WORD, IGNORED, SILENT = "honoured", "refused", "ignored, with a warning", "accepted, no effect"
_ORDER = (HONOURED, REFUSED_WORD, IGNORED, SILENT)
# The gateway, which is in `tonle serve` too, acts on these, and the engine does not get to see them.
_OF_GATEWAY = {
    "user": "Keeps a user in one arm of an experiment.",
    "use_cache": "Whether the response cache may answer. The header X-Use-Cache says the same.",
}
AS_IN_A_CHAT = "As in a chat."
_NOT_CACHED = ("/tokenize", "/detokenize")

Row = tuple[str, str]  # what becomes of a field, and a line about it


@functools.cache
def rows(path: str) -> dict[str, Row]:
    """Of each field at `path`. Those honoured come first, as the docs page has them."""
    request = REQUESTS[path]
    names = sorted(request.__struct_fields__, key=lambda name: name in StructuredFields.__struct_fields__)
    found = {name: (HONOURED, description(request, name)) for name in names}
    if path in KNOWN and path not in _NOT_CACHED:
        found |= {name: (HONOURED, _OF_GATEWAY[name]) for name in (*OWN_FIELDS, "user")}
    own = other_fields(request)
    for name in sorted({*KNOWN.get(path, ()), *own.refused, *own.no_effect, *own.silent} - found.keys()):
        found[name] = _of_chat(name) if path == RESPONSES and name in PASSED_ON else _row(name, own)
    found |= {name: row for name, row in inside(request) if name not in found}
    if path == RESPONSES:
        found |= {name: (IGNORED, _told(why)) for name, why in UNUSED.items()}
        found |= {name: (IGNORED, AS_IN_A_CHAT) for name in SAME if name in NO_EFFECT and name not in _OF_GATEWAY}
    return dict(sorted(found.items(), key=lambda row: _ORDER.index(row[1][0])))


def description(request: type[msgspec.Struct], name: str) -> str:
    return str(_schemas()[request.__name__]["properties"][name]["description"])


@functools.cache
def _schemas() -> dict[str, Any]:
    """Those of the docs page, and of what worker pools answer."""
    _, others = msgspec.json.schema_components([SpeechRequest, ImageRequest])
    return {**others, **schemas()}


def other_fields(struct: type) -> OtherFields:
    found: OtherFields = getattr(struct, "other_fields", OtherFields())
    return found


def _row(name: str, own: OtherFields) -> Row:
    if name in own.silent:
        return SILENT, _sentence(own.silent[name])
    if name in own.no_effect:
        return IGNORED, _told(own.no_effect[name])
    if name in own.refused:
        return REFUSED_WORD, _why(own.refused[name])
    if name in NO_EFFECT:
        return IGNORED, "Has no effect."
    if name in STRIPPED:
        return IGNORED, _sentence(STRIPPED[name])
    assert name in REFUSED, f"{name} is known by name: say in protocol/fields.py what becomes of it"
    return REFUSED_WORD, _why(REFUSED[name])


def _of_chat(name: str) -> Row:
    """A field that is passed on to chat completions."""
    return rows(CHAT)[name][0], AS_IN_A_CHAT


def inside(struct: type[msgspec.Struct], path: str = "", seen: tuple[type, ...] = ()) -> Iterator[tuple[str, Row]]:
    """Fields inside others that are known by name and not acted on, such as `tools[].cache_control`."""
    found = inspect.type_info(struct)
    assert isinstance(found, inspect.StructType)
    for field in found.fields:
        for is_list, nested in _structs(field.type):
            if nested in seen:
                continue
            place, own = f"{path}{field.name}{'[]' if is_list else ''}.", other_fields(nested)
            for name in sorted({*own.refused, *own.no_effect, *own.silent}):
                yield place + name, _row(name, own)
            yield from inside(nested, place, (*seen, struct, nested))


def _structs(found: inspect.Type, *, is_list: bool = False) -> Iterator[tuple[bool, type]]:
    if isinstance(found, inspect.Metadata):
        yield from _structs(found.type, is_list=is_list)
    elif isinstance(found, inspect.UnionType):
        for each in found.types:
            yield from _structs(each, is_list=is_list)
    elif isinstance(found, inspect.ListType):
        yield from _structs(found.item_type, is_list=True)
    elif isinstance(found, inspect.StructType):
        yield is_list, found.cls


def _told(message: str) -> str:
    return _sentence("has no effect" if message == NO_EFFECT_MESSAGE else message.removeprefix("accepted, "))


def _why(refusal: Refusal) -> str:
    neutral = ", ".join(f"`{_shown(value)}`" for value in refusal.neutral)
    verb = "is" if len(refusal.neutral) == 1 else "are"
    return _sentence(refusal.why) + (f" {neutral} {verb} let through." if neutral else "")


def _sentence(text: str) -> str:
    first = text.split()[0]
    return f"{text if '_' in first or '.' in first else text[0].upper() + text[1:]}."


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def table(path: str) -> str:
    """Fields with one line about them stand together."""
    names: dict[Row, list[str]] = {}
    for name, row in rows(path).items():
        names.setdefault(row, []).append(f"`{name}`")
    lines = [f"| {', '.join(fields)} | {what} | {about} |" for (what, about), fields in names.items()]
    return "\n".join(["| field | | |", "|---|---|---|", *lines]) + "\n"


def with_tables(page: str) -> str:
    """The page with the tables as they should be, each under the heading that names its path."""
    first, *sections = page.split("\n## ")
    paths = []
    for place, section in enumerate(sections):
        heading, _, body = section.partition("\n")
        if found := re.fullmatch(r"`POST (\S+)`", heading):
            paths.append(found[1])
            prose = body.partition("| field")[0].strip()
            sections[place] = "\n\n".join(filter(None, (heading, prose, table(found[1]))))
    assert paths == list(REQUESTS), "a section for each endpoint"
    return "\n## ".join([first, *sections])


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
