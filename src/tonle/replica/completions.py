"""`POST /v1/completions`.

Does: put deltas into OpenAI's text completion shapes, behind the prompt if asked to echo. Does not: tokenize or send.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from tonle.engine.request import Delta
from tonle.protocol import sse
from tonle.protocol.openai import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    PromptLogprobs,
)
from tonle.replica.delivery import Envelope, answer
from tonle.replica.draft import Draft, wire_reason
from tonle.replica.exchange import Exchange
from tonle.replica.job import Job
from tonle.replica.logprobs import CompletionScribe, prompt_logprobs
from tonle.replica.replica import Replica
from tonle.replica.served import Words
from tonle.replica.stream_usage import StreamUsage
from tonle.replica.translate import completion_order


async def completions(replica: Replica, exchange: Exchange) -> None:
    await answer(replica, exchange, CompletionRequest, completion_order, CompletionAnswer)


class CompletionAnswer:
    def __init__(self, request: CompletionRequest, envelope: Envelope, job: Job, text: Words) -> None:
        self._request = request
        self._envelope = envelope
        self._job = job
        self._text = text
        self._want_ids = bool(request.return_token_ids)
        self._usage = StreamUsage(request.stream_options, job)
        skip = request.skip_special_tokens is not False
        self._scribes = [CompletionScribe(text, skip_special_tokens=skip) for _ in range(job.num_choices)]
        self._drafts = [Draft() for _ in range(job.num_choices)]

    # -- as events

    def opening(self) -> bytes:
        """The echoed prompts, and in the first chunk what there is to say once."""
        if not (self._request.echo or self._want_ids or self._envelope.warnings):
            return b""
        chunks = [self._chunk([self._head(choice)]) for choice in range(len(self._drafts))]
        chunks[0].warnings = self._envelope.warnings or UNSET
        return b"".join(sse.event(chunk) for chunk in chunks)

    def events(self, choice: int, delta: Delta) -> bytes:
        tail = self._tail(choice, delta)
        if not (tail.text or tail.logprobs or tail.token_ids or tail.finish_reason):
            return b""
        return sse.event(self._chunk([tail]))

    def closing(self) -> bytes:
        if not self._usage.at_end:
            return b""
        chunk = self._chunk([])
        chunk.usage = self._job.wire_usage
        return sse.event(chunk)

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

    def add(self, choice: int, delta: Delta) -> None:
        self._drafts[choice].add(delta)

    def whole(self) -> Completion:
        envelope = self._envelope
        return Completion(
            id=envelope.id,
            created=envelope.created,
            model=envelope.model,
            choices=[self._choice(index, draft.delta()) for index, draft in enumerate(self._drafts)],
            usage=self._job.wire_usage,
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
        running = self._job.running(choice)
        head = CompletionChoice(index=choice, text="", prompt_token_ids=running.prompt if self._want_ids else UNSET)
        if self._request.echo:
            head.text = self._prompt_text(choice)
            if self._request.logprobs is not None and running.prompt_logprobs is not None:
                head.logprobs = self._scribes[choice].write(running.prompt, running.prompt_logprobs)
        return head

    def _tail(self, choice: int, delta: Delta) -> CompletionChoice:
        """The answer's part."""
        tail = CompletionChoice(index=choice, text="")
        if not self._job.order.prompt_only:
            tail.text = delta.text
            if delta.logprobs is not None:
                tail.logprobs = self._scribes[choice].write(delta.tokens, delta.logprobs)
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
        text = prompt[choice // self._job.order.n] if isinstance(prompt[0], str) else None
        if isinstance(text, str):
            return text
        skip = self._request.skip_special_tokens is not False
        return self._text.decode(self._job.running(choice).prompt, skip_special_tokens=skip)

    def _prompt_logprobs(self, choice: int) -> PromptLogprobs | UnsetType:
        records = self._job.running(choice).prompt_logprobs
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
