"""Fields of a chat request that several other APIs are translated into.

Does: write them as Tonle, vLLM and other servers of chat completions read them. Does not: read the other APIs.
"""

from __future__ import annotations

from typing import Any

import msgspec

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"
TOKENIZE = "/tokenize"


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any], *, strict: bool | None
) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "parameters": parameters}
    if description:
        function["description"] = description
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


def function_call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call that the assistant made earlier: on the wire, its arguments are text."""
    text = msgspec.json.encode(arguments).decode()
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    """`response_format` for an answer that must validate."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def thinking_switch(*, on: bool) -> dict[str, Any]:
    """Whether to think: the variable of chat templates that is known for it, at the place where servers look for it."""
    return {"chat_template_kwargs": {"enable_thinking": on}}


def streamed() -> dict[str, Any]:
    """A stream whose last chunk has the usage."""
    return {"stream": True, "stream_options": {"include_usage": True}}
