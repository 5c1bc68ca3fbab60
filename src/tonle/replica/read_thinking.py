"""How a model is to think before it answers, from the fields by which servers let a caller say it.

Does: turn them into variables of the chat template, a budget, and where thoughts go. Does not: know how a model marks its
thoughts (`tonle.chat_formats`), or hold it to the budget (the engine does).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tonle.errors import InvalidRequest
from tonle.protocol.openai import ChatRequest, ReasoningOption, ThinkingOption

# The words that templates know, which are those of gpt-oss.
_TEMPLATE_EFFORTS = {
    "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high",
}  # fmt: skip
_FIELDS = ("reasoning_effort", "enable_thinking", "thinking_token_budget", "thinking", "reasoning")


@dataclass(frozen=True, slots=True)
class ThinkingWish:
    """What a request says about thoughts."""

    variables: Mapping[str, Any] = field(default_factory=dict)  # for the chat template
    is_off: bool = False  # the model is told not to think
    budget: int | None = None  # tokens
    is_shown: bool = True  # False: the reply leaves thoughts out
    is_separate: bool = True  # False: thoughts are content
    named: tuple[str, ...] = ()  # the fields that said so


def read_thinking(request: ChatRequest) -> ThinkingWish:
    """Raises `InvalidRequest`."""
    option = request.thinking if isinstance(request.thinking, ThinkingOption) else ThinkingOption()
    reasoning = request.reasoning or ReasoningOption()
    effort = request.reasoning_effort or reasoning.effort
    variables: dict[str, Any] = {}
    enabled = _first(request.enable_thinking, _enabled(request.thinking), reasoning.enabled)
    if effort is not None:
        enabled = effort != "none" if enabled is None else enabled
        if effort in _TEMPLATE_EFFORTS:
            variables["reasoning_effort"] = _TEMPLATE_EFFORTS[effort]
    if enabled is not None:
        variables |= {"enable_thinking": enabled, "thinking": enabled}
    variables |= request.chat_template_kwargs or {}
    return ThinkingWish(
        variables,
        is_off=variables.get("enable_thinking") is False or variables.get("thinking") is False,
        budget=_budget(request.thinking_token_budget, option.budget_tokens, reasoning.max_tokens),
        is_shown=request.include_reasoning is not False and not reasoning.exclude,
        is_separate=request.separate_reasoning is not False,
        named=tuple(name for name in _FIELDS if getattr(request, name) is not None),
    )


def _enabled(thinking: bool | ThinkingOption | None) -> bool | None:
    if not isinstance(thinking, ThinkingOption):
        return thinking
    return {"enabled": True, "disabled": False}.get(thinking.type)  # adaptive, auto: the template's own choice


def _first(*values: bool | None) -> bool | None:
    return next((value for value in values if value is not None), None)


def _budget(*given: int | None) -> int | None:
    names = ("thinking_token_budget", "thinking.budget_tokens", "reasoning.max_tokens")
    for name, value in zip(names, given, strict=True):
        if value is not None and value < 0:
            raise InvalidRequest(f"{name} must be at least 0, not {value}", param=name)
    return next((value for value in given if value is not None), None)
