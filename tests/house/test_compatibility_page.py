"""docs/compatibility.md says of each field what the server does with it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.house.compatibility_table import HONOURED, IGNORED, PAGE, REFUSED_WORD, REQUESTS, rows, with_tables
from tonle.errors import InvalidRequest
from tonle.protocol.embeddings import RerankRequest
from tonle.protocol.openai import ChatRequest, CompletionRequest, DetokenizeRequest
from tonle.protocol.parse import parse


def test_the_page_has_the_tables_of_the_code() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), "run: python -m tests.house.compatibility_table"


@pytest.mark.parametrize("path", REQUESTS)
def test_the_server_does_what_the_tables_say(path: str) -> None:
    request = REQUESTS[path]
    needed: dict[Any, dict[str, Any]] = {
        ChatRequest: {"messages": [{"role": "user", "content": "x"}]},
        CompletionRequest: {"prompt": "x"},
        RerankRequest: {"query": "x", "documents": ["x"]},
        DetokenizeRequest: {"tokens": [1]},
    }
    for name, (what, _) in rows(path).items():
        if "." in name or what == HONOURED:
            continue
        body = msgspec.json.encode({**needed.get(request, {}), name: {"something": "real"}})
        if what == REFUSED_WORD:
            with pytest.raises(InvalidRequest, match="cannot be served"):
                parse(body, request)
        else:
            assert what == IGNORED and [warning.param for warning in parse(body, request)[1]] == [name]
