"""`ChatAnswer`: the answers of `POST /v1/chat/completions`.

Does: put deltas into OpenAI's chat shapes. Does not: template, tokenize or send.
"""

from __future__ import annotations

from msgspec import UNSET

from tonle.engine.request import Delta
from tonle.protocol import sse
from tonle.protocol.openai import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
)
from tonle.replica.answer_parts import AnswerFormat, ChoiceDraft
from tonle.replica.wire_logprobs import chat_logprobs, prompt_logprobs


class ChatAnswer(AnswerFormat):
    # -- as events

    def opening(self) -> bytes:
        """The role of each choice, and in the first chunk what there is to say once."""
        chunks = [self._chunk([ChatChunkChoice(choice, self._first_delta())]) for choice in range(len(self._drafts))]
        if self._envelope.warnings:
            chunks[0].warnings = self._envelope.warnings
        if self._want_ids:
            chunks[0].prompt_token_ids = self._submission.generation(0).prompt
        return b"".join(sse.event(chunk) for chunk in chunks)

    def _first_delta(self) -> ChatDelta:
        return ChatDelta("", "assistant")

    def _other_events(self, choice: int, delta: Delta) -> bytes:
        logprobs = self._logprobs(delta)
        token_ids = delta.tokens if self._want_ids else UNSET
        events = b""
        if delta.text or delta.logprobs or token_ids:
            content = ChatChunkChoice(choice, ChatDelta(delta.text), logprobs, token_ids=token_ids)
            events = sse.event(self._chunk([content]))
        if delta.finish_reason is not None:
            stop_reason = UNSET if delta.stop_reason is None else delta.stop_reason
            end = ChatChunkChoice(choice, ChatDelta(), None, self.reason(choice, delta), stop_reason)
            events += sse.event(self._chunk([end]))
        return events

    def _text_chunk(self, choice: int, text: str) -> ChatChunk:
        return self._chunk([ChatChunkChoice(choice, ChatDelta(text))])

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        envelope = self._envelope
        return ChatChunk(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=choices,
            usage=self._usage.in_chunk(),
        )

    # -- whole

    def whole(self) -> ChatCompletion:
        envelope, generation = self._envelope, self._submission.generation(0)
        records = generation.prompt_logprobs
        return ChatCompletion(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=[self._choice(index, draft) for index, draft in enumerate(self._drafts)],
            usage=self._submission.wire_usage,
            prompt_logprobs=UNSET if records is None else prompt_logprobs(records, self._text),
            prompt_token_ids=generation.prompt if self._want_ids else UNSET,
            warnings=envelope.warnings or UNSET,
        )

    def _choice(self, index: int, draft: ChoiceDraft) -> ChatChoice:
        delta = draft.delta()
        return ChatChoice(
            index=index,
            message=self._message(index, delta),
            logprobs=self._logprobs(delta),
            finish_reason=self.reason(index, delta),
            stop_reason=UNSET if delta.stop_reason is None else delta.stop_reason,
            token_ids=delta.tokens if self._want_ids else UNSET,
        )

    def _message(self, choice: int, delta: Delta) -> ChatMessage:
        return ChatMessage(delta.text)

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        return None if delta.logprobs is None else chat_logprobs(delta.logprobs, self._text)
