"""`plan_chat`: what a chat asks of the model beyond sampling: the prompt, what the answer must be, how it is read.

Does: bring tools, structure and thinking together. Does not: sampling settings, lengths, or checks against the model's size
(`translate.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from tonle.chat_formats.chat_format import ThinkingTags
from tonle.chat_formats.find import opens_thinking
from tonle.engine.grammar.json_schema import embedded_json, json_grammar
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
    is_plain = use is None and style.format.thinking is None  # some formats mark content as well
    if tags is None:
        warnings = [FieldWarning(name, "has no effect: this model does not think") for name in wish.named]
        reading = None if is_plain else AnswerReading(style.format, use, unwanted=unwanted)
        return replace(plan, reading=reading, warnings=warnings)
    is_open = opens_thinking(text.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False), tags)
    end = text.encode(tags.end, add_special_tokens=False)
    thinking = None
    if (structure is not None or wish.budget is not None) and (is_open or not wish.is_off):
        thinking = _thinking(text, tags, wish, is_open, end)
    separate = tags if wish.is_separate else None
    if is_plain and separate is None:
        return replace(plan, thinking=thinking)
    reading = AnswerReading(
        style.format, use, separate, is_open=is_open, thinking_end=end, shows_reasoning=wish.is_shown, unwanted=unwanted
    )
    return replace(plan, thinking=thinking, reading=reading)


def _thinking(text: Text, tags: ThinkingTags, wish: ThinkingWish, is_open: bool, end: list[int]) -> Thinking:
    closing = [] if wish.budget is None else text.encode(tags.closing, add_special_tokens=False)
    start = text.encode(tags.start, add_special_tokens=False)
    return Thinking(start=start, end=end, is_open=is_open, budget=wish.budget, closing=closing)


def _structure(asked: Structure | None, use: ToolUse | None, style: ChatStyle) -> Structure | None:
    """What the answer must be. Where a tool must be called, its calls are the answer, whatever else was asked for."""
    if use is None:
        return asked
    _check_schemas(use)
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
    try:
        content = embedded_json({"type": "object"} if output.json is None else output.json)
    except InvalidRequest as refusal:
        raise InvalidRequest(f"{asked.param}: {refusal.message}", param=asked.param) from None
    return f"start: calls_alone | content_alone\ncontent_alone: {content}\n{_START_RULE.sub('calls_alone:', calls)}"


def _check_schemas(use: ToolUse) -> None:
    """Of the tools whose calls are bound: what a grammar cannot hold arguments to is told under the tool's own name."""
    for tool in use.tools:
        if not (tool.strict or (use.choice.must_call and use.choice.name in (None, tool.name))):
            continue
        try:
            json_grammar(tool.parameters)
        except InvalidRequest as refusal:
            path = f"{use.paths[tool.name]}.parameters"
            raise InvalidRequest(f"{path}: {refusal.message}", param=path) from None
