"""The parts of an answer, in the order in which they come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """A piece of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A tool is called; its arguments follow."""

    index: int  # of the call in this answer, from 0
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of a call: JSON, when all pieces are joined."""

    index: int
    text: str


Part = ReasoningText | ContentText | CallBegins | CallArguments
