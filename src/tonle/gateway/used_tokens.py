"""`UsedTokens`: what a request cost a backend, as far as it came. Limits and the fair queue are settled by it.

Does: read the counts a backend gives, under OpenAI's names and Anthropic's; estimate where it gives none. Does not: charge
(`limits/`), or estimate what a request will cost (`parsed_request.py`).
"""

from __future__ import annotations

from typing import Any

import msgspec

from tonle.gateway.parsed_request import MAX_TOKENS, ParsedRequest, estimate_tokens
from tonle.protocol.answers import Answer, Choice


class UsedTokens(msgspec.Struct, frozen=True):
    prompt: int = 0
    new: int = 0  # written, in all answers

    @property
    def total(self) -> int:
        return min(self.prompt + self.new, MAX_TOKENS)


NONE_USED = UsedTokens()


def used_by_answer(request: ParsedRequest, answer: Answer) -> UsedTokens:
    """Of a reply with status 200 that has ended, or broke off after it had begun."""
    told = counted(answer.usage)
    if told is not None:
        return told if answer.complete else UsedTokens(told.prompt, max(told.new, _since(answer)))
    if not answer.choices and not answer.complete:
        return NONE_USED
    return UsedTokens(request.prompt_tokens, _written(answer))


def used_until_given_up(request: ParsedRequest, answer: Answer, *, unseen: int) -> UsedTokens:
    """Of a request whose caller left, or whose deadline passed, while a backend worked on it. `unseen`: tokens that it
    has presumably written and not sent yet."""
    told = counted(answer.usage)
    if told is not None:
        return UsedTokens(told.prompt, max(told.new, _since(answer)))
    return UsedTokens(request.prompt_tokens, max(_written(answer), unseen))


def counted(usage: dict[str, Any] | None) -> UsedTokens | None:
    """As a backend counts. A server may say anything: what is not a number is not counted, and numbers are bounded."""
    if usage is None:
        return None
    total, new = usage.get("total_tokens"), usage.get("completion_tokens")
    if type(total) is int and type(new) is int and 0 <= new <= total <= MAX_TOKENS:  # as nearly all do
        return UsedTokens(total - new, new)
    total = _number(usage, "total_tokens")
    prompt = _number(usage, "prompt_tokens", "input_tokens")
    new = _number(usage, "completion_tokens", "output_tokens")
    if total is None and prompt is None and new is None:
        return None
    if total is None:
        return UsedTokens(prompt or 0, new or 0)
    new = min(new or 0, total)
    return UsedTokens(total - new, new)


def _number(usage: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = usage.get(name)
        if isinstance(value, int):
            return max(0, min(value, MAX_TOKENS))
    return None


def _since(answer: Answer) -> int:
    """Tokens written, where a server counts at the beginning of a stream and again at its end, as Anthropic's do."""
    assert answer.usage is not None
    return _written(answer) if "output_tokens" in answer.usage else 0


def _written(answer: Answer) -> int:
    return sum(_of_choice(choice) for choice in answer.choices.values())


def _of_choice(choice: Choice) -> int:
    """Each piece of a stream has at least one token."""
    texts = list(choice.all_pieces())
    return max(estimate_tokens("".join(texts)), len(texts)) if texts else 0
