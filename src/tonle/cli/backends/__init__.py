"""The back ends of `tonle chat` and `tonle run`: an engine started for the purpose, or a running server.

Does: one interface for both, with the same counts and times. Does not: keep a conversation or print.

    local.LocalBackend      starts an engine in a child process
    remote.RemoteBackend    calls any OpenAI-compatible server
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

Message = dict[str, str]  # role, content
Prompt = str | list[Message]  # text to continue, or a chat


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What the user said about how to answer. None: not given, so the model or the server decides."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


@dataclass(slots=True)
class AnswerStats:
    """One answer in numbers, filled while the answer is read. Times are `time.monotonic()` seconds."""

    asked_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    completion_tokens: int = 0
    max_tokens: int | None = None  # the limit in effect; None: the server's own
    context_length: int | None = None  # None: the server did not say
    finish_reason: str | None = None  # None: not finished
    exact: bool = True  # False: completion_tokens counts pieces of text, because the server did not count

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_s is None else self.first_s - self.asked_s

    @property
    def tokens_per_s(self) -> float | None:
        """Of the tokens after the first: what the reader sees once the answer has begun."""
        if self.first_s is None or self.last_s is None or self.completion_tokens < 2 or self.last_s <= self.first_s:
            return None
        return (self.completion_tokens - 1) / (self.last_s - self.first_s)


class ChatBackend(Protocol):
    """Use from one event loop. Closing the generator that `answer` returns also stops the work behind it."""

    @property
    def name(self) -> str:
        """Of the model."""
        ...

    async def start(self) -> None:
        """Return once it can answer. Raises `TonleError`."""
        ...

    def answer(self, prompt: Prompt, options: AnswerOptions, stats: AnswerStats) -> AsyncGenerator[str, None]:
        """The answer, piece by piece. Raises `ContextOverflow` if the prompt leaves no room for one."""
        ...

    async def close(self) -> None: ...
