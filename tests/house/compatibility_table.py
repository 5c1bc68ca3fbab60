"""The tables of docs/compatibility.md, from the code's own: types of requests, and fields known by name.

python -m tests.house.compatibility_table     # writes them into the page
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from tonle.protocol.embeddings import EmbeddingRequest, RerankRequest, ScoreRequest
from tonle.protocol.fields import CHAT_ONLY, NO_EFFECT, NO_EFFECT_INSIDE, REFUSED, STRIPPED, Refusal
from tonle.protocol.known import KNOWN
from tonle.protocol.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from tonle.protocol.structured_fields import StructuredFields
from tonle.replica.api_catalog import schemas

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
REQUESTS: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/v1/rerank": RerankRequest,
    "/v1/score": ScoreRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
HONOURED, REFUSED_WORD, IGNORED = "honoured", "refused", "ignored, with a warning"


def rows(path: str) -> dict[str, tuple[str, str]]:
    """Of each field at `path`: what becomes of it, and a line about it. Those honoured come first, as the docs page has them."""
    request = REQUESTS[path]
    described = schemas()[request.__name__]["properties"]
    names = sorted(request.__struct_fields__, key=lambda name: name in StructuredFields.__struct_fields__)
    found = {name: (HONOURED, described[name]["description"]) for name in names}
    for name in sorted(KNOWN[path] - found.keys()):
        refusal = REFUSED.get(name) or (CHAT_ONLY.get(name) if request is CompletionRequest else None)
        if name in NO_EFFECT:
            found[name] = (IGNORED, "Has no effect.")
        elif name in STRIPPED:
            found[name] = (IGNORED, _sentence(STRIPPED[name]))
        elif refusal is not None:
            found[name] = (REFUSED_WORD, _why(refusal))
        else:
            found[name] = (IGNORED, "Of other servers; not known here.")
    for name in sorted(NO_EFFECT_INSIDE):
        if name.split(".")[0] in request.__struct_fields__:
            found[name] = (IGNORED, "Has no effect.")
    return dict(sorted(found.items(), key=lambda row: (HONOURED, REFUSED_WORD, IGNORED).index(row[1][0])))


def _why(refusal: Refusal) -> str:
    neutral = ", ".join(f"`{_shown(value)}`" for value in refusal.neutral)
    return _sentence(refusal.why) + (f" {neutral} is let through." if neutral else "")


def _sentence(text: str) -> str:
    first = text.split()[0]
    return f"{text if '_' in first else text[0].upper() + text[1:]}."


def _shown(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def table(path: str) -> str:
    lines = [f"| `{name}` | {what} | {about} |" for name, (what, about) in rows(path).items()]
    return "\n".join(["| field | | |", "|---|---|---|", *lines]) + "\n"


def with_tables(page: str) -> str:
    """The page with the tables as they should be, each under the heading that names its path."""
    first, *sections = page.split("\n## ")
    paths = []
    for place, section in enumerate(sections):
        heading, _, body = section.partition("\n")
        if found := re.fullmatch(r"`POST (\S+)`", heading):
            paths.append(found[1])
            prose = body.partition("|")[0].strip()
            sections[place] = "\n\n".join(filter(None, (heading, prose, table(found[1]))))
    assert paths == list(REQUESTS), "a section for each endpoint"
    return "\n## ".join([first, *sections])


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
