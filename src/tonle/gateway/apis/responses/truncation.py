"""`truncation: auto`: a conversation that is too long for the model loses its oldest turns.

Does: leave out whole turns, by an estimate, and ask the server that answers to cut what is still too long. Does not: count
tokens; a gateway has no tokenizer.
"""

from __future__ import annotations

from typing import Any

from tonle.gateway.parsed_request import DEFAULT_NEW_TOKENS, add_warning, estimate_prompt
from tonle.protocol.history import recent
from tonle.protocol.openai import FieldWarning


def fitted(body: dict[str, Any], context_length: int | None, warnings: list[FieldWarning]) -> None:
    """Change the chat body so that it fits `context_length` tokens. None: not known."""
    if context_length is None:
        add_warning(warnings, "truncation", "auto has no effect: the context length of this model is not known here")
        return
    new_tokens: int = body.get("max_completion_tokens", DEFAULT_NEW_TOKENS)
    room = max(1, context_length - min(new_tokens, context_length // 2))

    def fits(messages: list[dict[str, Any]]) -> bool:
        return estimate_prompt({**body, "messages": messages}) <= room

    *earlier, last = body["messages"]
    kept = recent(
        earlier, role=lambda message: str(message["role"]), window=None, fits=lambda some: fits([*some, last])
    )
    if kept.messages_dropped:
        add_warning(warnings, "truncation", f"oldest messages left out: {kept.messages_dropped}")
        body["messages"] = [*kept.messages, last]
    body[
        "truncate_prompt_tokens"
    ] = -1  # what the estimate missed; servers that tell their context length have this field
