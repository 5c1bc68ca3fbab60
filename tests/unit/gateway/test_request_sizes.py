"""What a request reserves: every answer it asks for is counted, under whatever name its length is given."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tonle.edge.exchange import Exchange
from tonle.errors import InvalidRequest
from tonle.gateway.api_keys.key import Key
from tonle.gateway.parsed_request import DEFAULT_NEW_TOKENS, MAX_TOKENS, DecodedBody, ParsedRequest, parse_request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "a" * 36}]}  # 10 tokens


class NoLine:
    """An exchange that is never answered needs no connection."""


def parsed(path: str = CHAT, **body: Any) -> ParsedRequest:
    exchange = Exchange(NoLine(), client="", loopback=True)  # type: ignore[arg-type]
    key = Key(id="k", name="", digest="", created=0)
    raw = msgspec.json.encode(body)
    return parse_request(DecodedBody(body, raw), exchange, path, key, strict=False)


@pytest.mark.parametrize(
    ("path", "body", "total"),
    [
        (CHAT, HELLO | {"max_tokens": 50}, 60),
        (CHAT, HELLO, 10 + DEFAULT_NEW_TOKENS),
        (CHAT, HELLO | {"max_tokens": 50, "n": 100}, 10 + 50 * 100),
        (CHAT, HELLO | {"max_tokens": 50, "n": 100.0}, 10 + 50 * 100),
        (CHAT, HELLO | {"n": 4}, 10 + DEFAULT_NEW_TOKENS * 4),
        (CHAT, HELLO | {"max_tokens": 50, "n": -3}, 60),
        (CHAT, HELLO | {"max_tokens": 50, "n": None, "best_of": None}, 60),
        (CHAT, HELLO | {"max_tokens": MAX_TOKENS, "n": 10**400}, MAX_TOKENS),
        (CHAT, HELLO | {"max_tokens": 4096, "max_completion_tokens": 1}, 10 + 4096),
        (CHAT, HELLO | {"max_tokens": 1, "n_predict": 4096}, 10 + 4096),
        (CHAT, HELLO | {"max_tokens": 4096.0}, 10 + 4096),
        (CHAT, HELLO | {"max_tokens": -5}, 10 + DEFAULT_NEW_TOKENS),
        (COMPLETIONS, {"prompt": "a" * 36, "max_tokens": 4096, "max_completion_tokens": 1}, 10 + 4096),
        (COMPLETIONS, {"prompt": "a" * 36, "max_tokens": 50, "n": 2, "best_of": 8}, 10 + 50 * 8),
        (COMPLETIONS, {"prompt": ["a" * 36, "b" * 36], "max_tokens": 50, "n": 3}, 20 + 50 * 6),
        (COMPLETIONS, {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 50}, 5 + 50 * 2),
        (COMPLETIONS, {"prompt": [1, 2, 3], "max_tokens": 50}, 3 + 50),
        (COMPLETIONS, {"prompt": [], "max_tokens": 50}, 50),
        ("/tokenize", {"prompt": "a" * 400}, 0),
        ("/detokenize", {"tokens": [1] * 400}, 0),
    ],
)
def test_what_is_reserved(path: str, body: dict[str, Any], total: int) -> None:
    assert parsed(path, **body).total_tokens == total


@pytest.mark.parametrize(
    ("path", "body", "new"),
    [
        ("/v1/responses", {"input": "x" * 4000, "max_output_tokens": 77}, 77),
        ("/v1/embeddings", {"input": ["x" * 2000, "y" * 2000]}, 0),
        ("/v1/embeddings", {"input": [[12345] * 800]}, 0),
        ("/v1/rerank", {"query": "x", "documents": ["x" * 4000]}, 0),
        ("/v1/score", {"text_1": "x", "text_2": ["x" * 4000]}, 0),
    ],
)
def test_prompts_in_other_fields_are_counted_too(path: str, body: dict[str, Any], new: int) -> None:
    request = parsed(path, **body)
    assert 900 <= request.prompt_tokens <= 1300
    assert request.total_tokens == request.prompt_tokens + new


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens", "n", "best_of"])
@pytest.mark.parametrize("value", ["4096", 1.5, [1], {}])
def test_a_length_that_servers_may_read_differently_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"{name} must be an integer") as refused:
        parsed(**HELLO, **{name: value})
    assert refused.value.param == name
