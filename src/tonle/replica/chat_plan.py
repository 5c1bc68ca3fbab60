"""`plan_chat`: what a chat asks of the model beyond sampling: the prompt, what the answer must be, how it is read.

Does: bring tools, structure and thinking together. Does not: sampling settings, lengths, or checks against the model's size
(`translate.py`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

from tonle.chat_formats.chat_format import ThinkingTags
from tonle.chat_formats.find import opens_thinking
from tonle.engine.request import StructuredOutput, Thinking
from tonle.engine.text import Text
from tonle.errors import InvalidRequest
from tonle.protocol.openai import ChatRequest, FieldWarning
from tonle.replica.answer_reading import AnswerReading
from tonle.replica.chat_prompt import chat_prompt
from tonle.replica.chat_style import ChatStyle
from tonle.replica.read_structured import Structure, read_structured
from tonle.replica.read_thinking import ThinkingWish, read_thinking
from tonle.replica.read_tools import ToolUse, read_tools

_TAIL_TOKENS = 64  # of a prompt: enough to see whether it ends inside of a thought
_START_RULE = re.compile(r"^start:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ChatPlan:
    prompt: list[int]
    structured: StructuredOutput | None = None
    structured_by: str | None = None  # the field that says so
    thinking: Thinking | None = None
    reading: AnswerReading | None = None  # None: the text is the content
    warnings: list[FieldWarning] = field(default_factory=list)


def plan_chat(request: ChatRequest, text: Text, style: ChatStyle) -> ChatPlan:
    """Raises `CallerError`."""
    use, wish = read_tools(request), read_thinking(request)
    structure = _structure(read_structured(request), use, style)
    tools = [] if use is None else use.tools
    prompt = chat_prompt(request, request.messages, tools, text, style, wish.variables)
    plan = ChatPlan(
        prompt,
        structured=None if structure is None else structure.output,
        structured_by=None if structure is None else structure.param,
    )
    tags, unwanted = style.thinking, None if request.skip_special_tokens is False else style.unwanted
    if tags is None:
        warnings = [FieldWarning(name, "has no effect: this model does not think") for name in wish.named]
        reading = None if use is None else AnswerReading(style.format, use, unwanted=unwanted)
        return replace(plan, reading=reading, warnings=warnings)
    is_open = opens_thinking(text.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False), tags)
    end = text.encode(tags.end, add_special_tokens=False)
    thinking = None
    if structure is not None or wish.budget is not None:
        thinking = _thinking(text, tags, wish, is_open, end)
    separate = tags if wish.is_separate else None
    if use is None and separate is None:
        return replace(plan, thinking=thinking)
    reading = AnswerReading(
        style.format, use, separate, is_open=is_open, thinking_end=end, shows_reasoning=wish.is_shown, unwanted=unwanted
    )
    return replace(plan, thinking=thinking, reading=reading)


def _thinking(text: Text, tags: ThinkingTags, wish: ThinkingWish, is_open: bool, end: list[int]) -> Thinking:
    closing = text.encode(f"\n{tags.end}\n\n", add_special_tokens=False) if wish.budget is not None else []
    start = text.encode(tags.start, add_special_tokens=False)
    return Thinking(start=start, end=end, is_open=is_open, budget=wish.budget, closing=closing)


def _structure(asked: Structure | None, use: ToolUse | None, style: ChatStyle) -> Structure | None:
    """What the answer must be. Where a tool must be called, its calls are the answer, whatever else was asked for."""
    if use is None:
        return asked
    if use.choice.must_call or asked is None:
        grammar = style.format.grammar(use.tools, use.choice)
        return None if grammar is None else Structure(StructuredOutput(grammar=grammar), use.param)
    return Structure(StructuredOutput(grammar=_calls_or_json(asked, use, style)), asked.param)


def _calls_or_json(asked: Structure, use: ToolUse, style: ChatStyle) -> str:
    """The model may call a tool, or answer with what was asked for."""
    output = asked.output
    if output.json is None and not output.json_object:
        raise InvalidRequest(
            f"{asked.param} does not go with {use.param} that the model may call or not: an answer can be calls or JSON. Send "
            f"tool_choice none or required, or a JSON schema", param=asked.param,
        )  # fmt: skip
    calls = style.format.grammar(use.tools, replace(use.choice, must_call=True))
    assert calls is not None, "calls that must be made are always bound"
    content = json.dumps(_schema(asked, output))
    return (
        f"start: calls_alone | content_alone\ncontent_alone: %json {content}\n{_START_RULE.sub('calls_alone:', calls)}"
    )


def _schema(asked: Structure, output: StructuredOutput) -> Any:
    if output.json_object:
        return {"type": "object"}
    if not isinstance(output.json, str):
        return output.json
    try:
        return json.loads(output.json)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{asked.param} is not valid JSON", param=asked.param) from None
