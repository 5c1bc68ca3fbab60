"""docs/compatibility.md says of each field what the server does with it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.house.compatibility_table import (
    AS_IN_A_CHAT,
    HONOURED,
    IGNORED,
    PAGE,
    REFUSED_WORD,
    REQUESTS,
    RESPONSES,
    SILENT,
    rows,
    with_tables,
)
from tonle.errors import InvalidRequest
from tonle.gateway.apis.responses.request import read_request
from tonle.protocol.openai import FieldWarning
from tonle.protocol.parse import parse

REAL = {"something": "real"}
_CONVERSATION = {"messages": [{"role": "user", "content": "x"}]}
# The least that each endpoint takes.
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _CONVERSATION,
    "/v1/completions": {"prompt": "x"},
    RESPONSES: {"input": "x"},
    "/v1/messages": {"max_tokens": 1, **_CONVERSATION},
    "/v1/messages/count_tokens": _CONVERSATION,
    "/api/embed": {"input": "x"},
    "/api/embeddings": {"prompt": "x"},
    "/v1/rerank": {"query": "x", "documents": ["x"]},
    "/v1/audio/speech": {"input": "x"},
    "/detokenize": {"tokens": [1]},
}
# The same of objects that hold other fields.
_TOOL = {"name": "f", "input_schema": {}}
_CALL = {"function": {"name": "f"}}
NEEDED_INSIDE: dict[str, dict[str, Any]] = {
    "messages[]": {"role": "user", "content": "x"},
    "messages[].content[]": {"type": "text", "text": "x"},
    "messages[].tool_calls[]": _CALL,
    "messages[].tool_calls[].function": {"name": "f"},
    "system[]": {"type": "text", "text": "x"},
    "tools[]": _TOOL,
    "output_config.format": {"type": "json_schema", "schema": {}},
    "output_format": {"type": "json_schema", "schema": {}},
}


def test_the_page_has_the_tables_of_the_code() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), "run: python -m tests.house.compatibility_table"


@pytest.mark.parametrize("path", REQUESTS)
def test_the_server_does_what_the_tables_say(path: str) -> None:
    for name, (what, about) in rows(path).items():
        if what == HONOURED or about == AS_IN_A_CHAT:
            continue
        body = msgspec.json.encode(_with(NEEDED.get(path, {}), name))
        place = name.replace("[]", "[0]")
        if what == REFUSED_WORD:
            with pytest.raises(InvalidRequest, match="cannot be served") as error:
                _warnings(path, body)
            assert error.value.param == place
        else:
            assert what in (IGNORED, SILENT)
            assert [each.param for each in _warnings(path, body)] == ([place] if what == IGNORED else []), name


def _warnings(path: str, body: bytes) -> list[FieldWarning]:
    return read_request(body).warnings if path == RESPONSES else parse(body, REQUESTS[path])[1]


def _with(needed: dict[str, Any], name: str) -> dict[str, Any]:
    """A body that has this field, which may be inside of others: `tools[].cache_control`."""
    body: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(needed))
    place, path = body, ""
    *outer, last = name.split(".")
    for part in outer:
        path += f".{part}" if path else part
        inner = dict(NEEDED_INSIDE.get(path, {}))
        place[part.removesuffix("[]")] = [inner] if part.endswith("[]") else inner
        place = inner
    place[last] = {"max_tool_calls": 1, "summary": "auto", "generate_summary": "auto"}.get(last, REAL)
    return body
