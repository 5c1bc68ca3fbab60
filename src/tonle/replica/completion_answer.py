"""`CompletionAnswer`: the answers of `POST /v1/completions`.

Does: put deltas into OpenAI's text completion shapes, behind the prompt if asked to echo. Does not: tokenize or send.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from tonle.engine.request import Delta
from tonle.engine.text import Text
from tonle.protocol import sse
from tonle.protocol.openai import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    PromptLogprobs,
)
from tonle.replica.answer_parts import AnswerFormat, wire_reason
from tonle.replica.generate import Envelope
from tonle.replica.submission import Submission
from tonle.replica.wire_logprobs import CompletionLogprobWriter, prompt_logprobs


class CompletionAnswer(AnswerFormat):
    def __init__(self, request: CompletionRequest, envelope: Envelope, submission: Submission, text: Text) -> None:
        super().__init__(request, envelope, submission, text)
        self._request = request
        skip = request.skip_special_tokens is not False
        self._writers = [CompletionLogprobWriter(text, skip_special_tokens=skip) for _ in range(submission.num_choices)]

    # -- as events

    def opening(self) -> bytes:
        """The echoed prompts, and in the first chunk what there is to say once."""
        if not (self._request.echo or self._want_ids or self._envelope.warnings):
            return b""
        chunks = [self._chunk([self._head(choice)]) for choice in range(len(self._drafts))]
        chunks[0].warnings = self._envelope.warnings or UNSET
        return b"".join(sse.event(chunk) for chunk in chunks)

    def _other_events(self, choice: int, delta: Delta) -> bytes:
        tail = self._tail(choice, delta)
        if not (tail.text or tail.logprobs or tail.token_ids or tail.finish_reason):
            return b""
        return sse.event(self._chunk([tail]))

    def _text_chunk(self, choice: int, text: str) -> Completion:
        return self._chunk([CompletionChoice(index=choice, text=text)])

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        envelope = self._envelope
        return Completion(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=choices,
            usage=self._usage.in_chunk(),
        )

    # -- whole

    def whole(self) -> Completion:
        envelope = self._envelope
        return Completion(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=[self._choice(index, draft.delta()) for index, draft in enumerate(self._drafts)],
            usage=self._submission.wire_usage,
            warnings=envelope.warnings or UNSET,
        )

    def _choice(self, index: int, delta: Delta) -> CompletionChoice:
        head = self._head(index)
        choice = self._tail(index, delta)
        choice.text = head.text + choice.text
        choice.logprobs = _joined(head.logprobs, choice.logprobs)
        choice.prompt_token_ids = head.prompt_token_ids
        choice.prompt_logprobs = self._prompt_logprobs(index)
        return choice

    # -- the two ends of a choice

    def _head(self, choice: int) -> CompletionChoice:
        """The prompt's part. Comes before the tail: the offsets of tokens run through both."""
        generation = self._submission.generation(choice)
        head = CompletionChoice(index=choice, text="", prompt_token_ids=generation.prompt if self._want_ids else UNSET)
        if self._request.echo:
            head.text = self._prompt_text(choice)
            if self._request.logprobs is not None and generation.prompt_logprobs is not None:
                head.logprobs = self._writers[choice].write(generation.prompt, generation.prompt_logprobs)
        return head

    def _tail(self, choice: int, delta: Delta) -> CompletionChoice:
        """The answer's part."""
        tail = CompletionChoice(index=choice, text="")
        if not self._submission.order.prompt_only:
            tail.text = delta.text
            if delta.logprobs is not None:
                tail.logprobs = self._writers[choice].write(delta.tokens, delta.logprobs)
            if self._want_ids:
                tail.token_ids = delta.tokens
        if delta.finish_reason is not None:
            tail.finish_reason = wire_reason(delta)
            tail.stop_reason = UNSET if delta.stop_reason is None else delta.stop_reason
        return tail

    def _prompt_text(self, choice: int) -> str:
        prompt = self._request.prompt
        if isinstance(prompt, str):
            return prompt
        text = prompt[choice // self._submission.order.n] if isinstance(prompt[0], str) else None
        if isinstance(text, str):
            return text
        skip = self._request.skip_special_tokens is not False
        return self._text.decode(self._submission.generation(choice).prompt, skip_special_tokens=skip)

    def _prompt_logprobs(self, choice: int) -> PromptLogprobs | UnsetType:
        records = self._submission.generation(choice).prompt_logprobs
        if self._request.prompt_logprobs is None or records is None:
            return UNSET
        return prompt_logprobs(records, self._text)


def _joined(head: CompletionLogprobs | None, tail: CompletionLogprobs | None) -> CompletionLogprobs | None:
    if head is None or tail is None:
        return head or tail
    return CompletionLogprobs(
        head.tokens + tail.tokens,
        head.token_logprobs + tail.token_logprobs,
        head.top_logprobs + tail.top_logprobs,
        head.text_offset + tail.text_offset,
    )
