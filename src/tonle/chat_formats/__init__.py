"""How models write tool calls and thoughts into their text, and how to read them again.

Does: formats by name (Hermes, Llama 3, Mistral, …): which one a chat template speaks, the grammar of its calls, a parser that
reads an answer while it grows, messages for templates that know no tools. Does not: know tokens, HTTP or the engine; texts in,
parts out.
"""

from tonle.chat_formats.chat_format import ChatFormat, MessageParser, ThinkingTags, Tool, ToolChoice
from tonle.chat_formats.find import find_format, find_thinking, opens_thinking
from tonle.chat_formats.plain_messages import plain_tool_messages

__all__ = [
    "ChatFormat",
    "MessageParser",
    "ThinkingTags",
    "Tool",
    "ToolChoice",
    "find_format",
    "find_thinking",
    "opens_thinking",
    "plain_tool_messages",
]
