"""What a replica needs of an engine's front: the seam that tests fill with a scripted twin.

Does: declare. `tonle.engine.front.Front` is the real one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from tonle.engine.messages import LoopStats, ModelCard
from tonle.engine.request import Delta, GenerationConfig, RequestPriority, Timings, TokenLogprob, Usage
from tonle.errors import TonleError


class Words(Protocol):
    """The model's tokenizer and chat template. Must bear being called from several threads."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...
    def token_bytes(self, token: int) -> bytes: ...
    def token_text(self, token: int) -> str: ...
    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        extra: dict[str, Any] | None = None,
    ) -> list[int]: ...


class Running(Protocol):
    """One submitted request: iterate for deltas; whoever stops early must `cancel()`, which is safe at any time."""

    @property
    def prompt(self) -> list[int]: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def timings(self) -> Timings: ...
    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None: ...
    def cancel(self) -> None: ...
    def __aiter__(self) -> AsyncIterator[Delta]: ...


class Served(Protocol):
    """An engine's front, with the name it serves under."""

    @property
    def name(self) -> str: ...
    @property
    def created(self) -> int: ...  # unix seconds
    @property
    def text(self) -> Words: ...
    @property
    def card(self) -> ModelCard | None: ...  # None until ready
    @property
    def stats(self) -> LoopStats: ...
    @property
    def ready(self) -> bool: ...
    @property
    def failure(self) -> TonleError | None: ...  # why it is not ready
    def submit(
        self,
        prompt: list[int],
        config: GenerationConfig,
        *,
        priority: RequestPriority = RequestPriority.NORMAL,
        salt: bytes = b"",
        request_id: str | None = None,
    ) -> Running:
        """Raises `CallerError` or `CapacityError` at once."""
        ...
