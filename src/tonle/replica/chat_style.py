"""`ChatStyle`: how the served model is told about tools, and how it writes calls and thoughts.

Does: choose the format from the settings and the chat template, once per server. Does not: read answers (`answer_reading.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tonle.chat_formats.chat_format import ChatFormat, ThinkingTags, Tool
from tonle.chat_formats.find import find_format, find_thinking
from tonle.engine.text import Text
from tonle.engine.text.marks import any_of

AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ChatStyle:
    format: ChatFormat
    thinking: ThinkingTags | None  # None: the model does not think, or its thoughts are content
    renders_tools: bool  # the chat template writes tools, calls and their results itself
    unwanted: re.Pattern[str] | None = None  # special tokens in the text of answers that are no tags of the format


def chat_style(text: Text, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO) -> ChatStyle:
    """Raises `ConfigError` if there is no such parser."""
    special_tokens = text.special_tokens
    chat_format = find_format(text.tool_template, tool_call_parser, special_tokens=special_tokens)
    thinking = chat_format.thinking if reasoning_parser == AUTO else None
    thinking = thinking or find_thinking(text.tool_template, reasoning_parser)
    unwanted = None
    if chat_format.reads_special_tokens:
        tags = {*chat_format.tags, *((thinking.start, thinking.end) if thinking is not None else ())}
        unwanted = any_of(name for name in special_tokens if name not in tags)
    renders_tools = chat_format.system_prompt([Tool("f")]) is None
    return ChatStyle(chat_format, thinking, renders_tools, unwanted)
