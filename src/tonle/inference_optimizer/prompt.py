"""From a question and its history to a prompt's tokens.

Does: check the messages, leave out old turns, count with the model's own tokenizer and chat template. Does not: cut a message;
a question that is too long is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tonle.engine.text import Text
from tonle.engine.text.template import check_role
from tonle.errors import ContextOverflow, InvalidRequest
from tonle.protocol.history import INSTRUCTIONS, RecentHistory, recent

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    history: list[Message]  # instructions first, if there are any
    question: Message

    @property
    def messages(self) -> list[Message]:
        return [*self.history, self.question]


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: list[int]
    history_dropped: int  # messages
    truncation: str | None  # the same in words, with the reason


def conversation(user_input: object, history: object, system_prompt: str | None) -> Conversation:
    """Checked. Raises `InvalidRequest`."""
    if not isinstance(user_input, str) or not user_input:
        raise InvalidRequest(
            f"user_input must be a string that is not empty, not {user_input!r:.60}", param="user_input"
        )
    given = [] if history is None else history
    if not isinstance(given, list | tuple):
        raise InvalidRequest(
            f"conversation_history must be a list of messages, not {given!r:.60}", param="conversation_history"
        )
    messages = [_message(message, f"conversation_history[{place}]") for place, message in enumerate(given)]
    if system_prompt and not (messages and messages[0]["role"] in INSTRUCTIONS):
        messages.insert(0, {"role": "system", "content": system_prompt})
    return Conversation(messages, {"role": "user", "content": user_input})


def _message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
        raise InvalidRequest(
            f'{where} must be a message like {{"role": "user", "content": "Hello"}}, not {message!r:.60}', param=where
        )
    check_role(message["role"], f"{where}.role")
    if not isinstance(message["content"], str | list | None):
        raise InvalidRequest(f"{where}: content must be a string, not {message['content']!r:.60}", param=where)
    return dict(message)


class PromptBuilder:
    """For one model and one pair of limits. Used from any thread."""

    def __init__(self, text: Text, *, context_length: int, max_context_length: int | None, window: int | None) -> None:
        """`context_length`: of the engine, prompt and answer together, tokens."""
        self._text = text
        self._context_length = context_length
        self._max_context_length = max_context_length
        self._window = window

    def build(self, talk: Conversation, max_tokens: int) -> Prompt:
        """The prompt of as much of the conversation as leaves `max_tokens` for the answer. Raises `CallerError`."""
        limit, why = self._limit(max_tokens)
        encoded: dict[int, list[int]] = {}  # by the number of messages kept

        def fits(kept: list[Message]) -> bool:
            try:
                tokens = encoded[len(kept)] = self._text.encode_chat([*kept, talk.question])
            except ContextOverflow:  # so long that it was not tokenized
                return False
            return len(tokens) <= limit

        found = recent(talk.history, role=lambda message: message["role"], window=self._window, fits=fits)
        tokens = encoded.get(len(found.messages)) or self._encode_last(found.messages, talk.question)
        if len(tokens) > limit:
            with_it = " together with the system message" if found.messages else ""
            raise ContextOverflow(
                f"user_input is too long: its prompt has {len(tokens)} tokens{with_it}, and {why}; shorten it, or raise that",
                param="user_input",
            )
        return Prompt(tokens, found.messages_dropped, _in_words(found, window=self._window, why=why))

    def _encode_last(self, instructions: list[Message], question: Message) -> list[int]:
        """With nothing left to drop. Raises `ContextOverflow`."""
        try:
            return self._text.encode_chat([*instructions, question])
        except ContextOverflow as error:  # by far
            raise ContextOverflow(f"user_input is too long: {error.message}", param="user_input") from None

    def _limit(self, max_tokens: int) -> tuple[int, str]:
        """Most tokens of a prompt, and where that comes from."""
        room = self._context_length - max_tokens
        if room < 1:
            raise ContextOverflow(
                f"max_tokens={max_tokens} leaves no room for a prompt: the context holds {self._context_length} tokens, "
                "prompt and answer together (max_sequence_length and the model decide)",
                param="max_tokens",
            )
        if self._max_context_length is not None and self._max_context_length <= room:
            return self._max_context_length, f"max_context_length is {self._max_context_length}"
        return room, (
            f"the context of {self._context_length} tokens (max_sequence_length, and the model's) less max_tokens={max_tokens} "
            f"leaves {room}"
        )


def _in_words(found: RecentHistory[Message], *, window: int | None, why: str) -> str | None:
    if not found.messages_dropped:
        return None
    reasons = [f"context_window is {window}"] if found.over_window else []
    reasons += [why] if found.over_length else []
    turns, messages = found.turns_dropped, found.messages_dropped
    return (
        f"the oldest {messages} message{'s' * (messages != 1)} of the history ({turns} turn{'s' * (turns != 1)}) "
        f"left out: {'; '.join(reasons)}"
    )
