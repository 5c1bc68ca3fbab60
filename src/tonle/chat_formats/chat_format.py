"""`ChatFormat`: what differs between the formats in which models write calls and thoughts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tonle.chat_formats.parts import Part


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the caller offers."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)  # a JSON schema; empty: any object
    strict: bool = False  # arguments must be what the schema says, also where the model may choose to call


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """What the caller wants of an answer."""

    must_call: bool = False  # at least one call, and no other text
    name: str | None = None  # of the one tool to call
    parallel: bool = True  # more than one call may be made


@dataclass(frozen=True, slots=True)
class ThinkingTags:
    """Between these a model thinks."""

    start: str = "<think>"
    end: str = "</think>"
    closing: str = "\n</think>\n\n"  # what to write for a model that has thought enough


class MessageParser(Protocol):
    """Reads one answer while it grows. What may still become a tag or a call is held back."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """All that is left: no more text comes. A call that broke off keeps what came of its arguments."""


class ChatFormat(Protocol):
    name: str
    reads_special_tokens: bool  # some of its tags are special tokens: the text must have them in it
    tags: tuple[str, ...]  # that may be special tokens
    thinking: ThinkingTags | None  # how its models mark thoughts, if the format itself says so
    call_id_chars: int | None  # how many letters and digits the ids of calls must have for its templates; None: any

    def parser(self, tools: Sequence[Tool], *, thinking: ThinkingTags | None, is_open: bool = False) -> MessageParser:
        """`thinking`: thoughts are told apart; None: they are content. `is_open`: the prompt ends inside of them.
        No tools: calls are content."""

    def grammar(self, tools: Sequence[Tool], choice: ToolChoice) -> str | None:
        """Lark, as llguidance reads it, of an answer with calls: with `must_call`, calls and nothing else; without, free text
        in which calls of strict tools are what their schemas say. None: nothing is bound."""

    def write_calls(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls as the format's models write them: names and arguments (values, not JSON)."""

    def system_prompt(self, tools: Sequence[Tool]) -> str | None:
        """What to tell the model about the tools where its template does not; None: the template does. If it is not None, the
        template is to be given no tools, and messages as `plain_tool_messages` makes them."""
