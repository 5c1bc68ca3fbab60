"""One generation request: from its body to the engine, and its answer to a sink, whole or event by event.

Does: parse, check, translate, submit, and hand on what the engine delivers in the callback it is delivered in: no task
is woken per token. Frees what is left however it ends; observes the metrics of requests. Does not: know chat from
completions (`EndpointKind` does), or HTTP.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from tonle.edge.client import Sink, UpstreamError
from tonle.engine.generation import Generation
from tonle.engine.request import Delta
from tonle.engine.text import Text
from tonle.errors import CapacityError, InternalError, TonleError
from tonle.protocol import sse
from tonle.protocol.answers import Answer, Choice
from tonle.protocol.errors import error_reply
from tonle.protocol.openai import (
    FieldWarning,
    SamplingFields,
)
from tonle.protocol.parse import parse, warning_headers
from tonle.replica.answer_parts import AnswerFormat
from tonle.replica.prompt_blocks import block_headers
from tonle.replica.read_transfer import parse_from_router, read_transfer
from tonle.replica.replica import Replica, ReplicaRequest
from tonle.replica.submission import Submission
from tonle.replica.translate import EngineRequest, ServedModel
from tonle.telemetry.metrics import Metrics

# A body this large is made into a prompt on a thread: tokenizing it would hold up all other streams.
THREAD_BYTES = 32 * 1024


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every reply and chunk of one answer carries."""

    id: str
    created: int  # unix seconds
    model: str
    warnings: list[FieldWarning]


@dataclass(frozen=True, slots=True)
class EndpointKind:
    """What differs between chat and completions."""

    request_type: type[SamplingFields]
    translate: Callable[[Any, ServedModel], EngineRequest]
    make_format: Callable[[Any, Envelope, Submission, Text], AnswerFormat]
    id_prefix: str


async def generate(
    replica: Replica, request: ReplicaRequest, kind: EndpointKind, sink: Sink, *, first_s: float
) -> None:
    """The whole life of one generation request. Raises `TonleError` as long as nothing was handed to the sink."""
    params: dict[str, Any] | None = None
    if replica.options.trust_router:
        asked, warnings, params = parse_from_router(request.body, kind.request_type)
    else:
        asked, warnings = parse(request.body, kind.request_type)
    card = replica.card()
    model = replica.resolve(asked.model)
    adapter = replica.adapter(model)  # now: while the prompt is translated it may be unloaded, which `submit` reports
    replica.check_strict(request, warnings)
    served = ServedModel(replica.front.text, card, replica.options.max_choices, replica.chat_style)
    if len(request.body) > THREAD_BYTES:
        order = await asyncio.to_thread(kind.translate, asked, served)
    else:
        order = kind.translate(asked, served)
    if order.warnings:
        warnings = warnings + order.warnings
        replica.check_strict(request, warnings)
    envelope = Envelope(request.answer_id(kind.id_prefix), int(time.time()), model, warnings)
    headers = {**warning_headers(warnings), "x-tonle-max-tokens": str(order.max_tokens)}
    headers |= block_headers(replica, request, [part.prompt for part in order.parts], adapter)
    request_id = request.header("x-request-id") or envelope.id
    transfer = read_transfer(params, asked, card.role, num_prompts=len(order.parts))
    submission = Submission(
        replica.front, order, request_id=request_id, salt=request.salt, adapter=adapter, transfer=transfer
    )
    answer_format = kind.make_format(asked, envelope, submission, served.text)
    delivery = Delivery(submission, answer_format, sink, replica.metrics, headers, stream=bool(asked.stream))
    await delivery.run(envelope, first_s)


class _Progress:
    """Of one choice: when its deltas came, and how it ended."""

    __slots__ = ("first_s", "last_s", "num_tokens", "reason")

    def __init__(self) -> None:
        self.first_s = 0.0
        self.last_s = 0.0
        self.num_tokens = 0
        self.reason = "abort"  # until it ends otherwise


class Delivery:
    """One answer on its way from the engine to a sink. `_take` runs in the callback that brings the engine's step."""

    def __init__(
        self, submission: Submission, answer_format: AnswerFormat, sink: Sink, metrics: Metrics,
        headers: dict[str, str], *, stream: bool,
    ) -> None:  # fmt: skip
        self._submission = submission
        self._format = answer_format
        self._sink = sink
        self._metrics = metrics
        self._headers = headers
        self._stream = stream
        self._answer = Answer()
        self._progress = [_Progress() for _ in range(submission.num_choices)]
        self._num_open = submission.num_choices
        self._began = False  # the sink has seen a part
        self._full = False  # the caller reads more slowly than the engine writes
        self._held: list[bytes] = []  # events that wait for the caller to read
        self._failure: Exception | None = None  # raised in a callback, where nothing can be raised
        self._first: asyncio.TimerHandle | None = None
        self._done: asyncio.Future[None]

    async def run(self, envelope: Envelope, first_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        self._answer.response_id, self._answer.model = envelope.id, envelope.model
        self._sink.attach(self._press)
        self._sink.know(self._answer)
        error: BaseException | None = None
        try:
            self._submission.submit()
            self._headers |= self._submission.headers
            for place, generation in enumerate(self._submission.generations):
                self._listen(place, generation)
            if first_s < math.inf:  # the request has a deadline
                self._first = loop.call_later(first_s, self._time_out, first_s)
            await self._done
            if self._stream:
                self._press(False)  # all that is left goes into the connection's buffer
            else:
                self._send_whole()
        except TonleError as failure:
            error = failure
            if not self._began:
                raise
            self._send_error(failure)
        except BaseException as failure:
            error = failure
            raise
        finally:
            if self._first is not None:
                self._first.cancel()
            self._submission.cancel()
            self._finish_answer()
            self._observe(failed=isinstance(error, Exception))

    def _listen(self, place: int, generation: Generation) -> None:
        offset = place * self._submission.order.n

        def on_delta(delta: Delta) -> None:
            self._take(offset + delta.index, delta)

        def on_end(ended: asyncio.Future[None]) -> None:
            if ended.cancelled():
                return
            own = self._progress[offset : offset + self._submission.order.n]
            if (failure := ended.exception()) is not None:
                self._fail(self._submission.in_callers_words(failure))
            elif any(progress.reason == "abort" for progress in own):
                self._fail(CapacityError("the engine dropped this request; try again"))

        generation.listen(on_delta, whole=not self._stream).add_done_callback(on_end)

    def _fail(self, failure: BaseException) -> None:
        if not self._done.done():
            self._done.set_exception(failure)

    def _time_out(self, first_s: float) -> None:
        if not self._began:
            self._fail(UpstreamError("timeout", f"nothing came for {first_s:g} s"))

    # -- in the engine's callback

    def _take(self, choice: int, delta: Delta) -> None:
        if self._done.done():
            return
        try:
            self._note(choice, delta)
            if self._stream:
                self._send_events(choice, delta)
            else:
                self._format.add(choice, delta)
        except Exception as failure:
            self._fail(failure)
            return
        if delta.finish_reason is not None and not self._num_open:
            self._done.set_result(None)

    def _note(self, choice: int, delta: Delta) -> None:
        progress, now = self._progress[choice], time.monotonic()
        if delta.tokens:
            if progress.num_tokens == 0:
                progress.first_s = now
            elif self._stream:
                self._metrics.itl.add(now - progress.last_s)
            progress.last_s = now
            progress.num_tokens += len(delta.tokens)
        self._format.note(self._answer, choice, delta, now)
        if delta.finish_reason is None:
            return
        self._num_open -= 1
        if delta.finish_reason == "error":
            raise InternalError("the engine could not finish this request")
        if delta.finish_reason == "cancelled":
            raise CapacityError("the engine dropped this request; try again")
        progress.reason = delta.finish_reason
        self._answer.choices.setdefault(choice, Choice()).finish_reason = self._format.reason(choice, delta)

    def _send_events(self, choice: int, delta: Delta) -> None:
        events = b""
        if not self._began:  # until now an error could still be an HTTP status
            self._began = True
            self._sink.head(200, {"content-type": sse.CONTENT_TYPE, **self._headers})
            events = self._format.opening()
        events += self._format.events(choice, delta)
        if not self._num_open:
            events += self._format.closing() + sse.DONE
        if not events:
            return
        if self._full:
            self._held.append(events)
        else:
            self._sink.data(events)

    def _press(self, full: bool) -> None:
        self._full = full
        if not full and self._held:
            held, self._held = b"".join(self._held), []
            self._sink.data(held)

    # -- the end

    def _send_whole(self) -> None:
        self._began = True
        headers = {"content-type": "application/json", **self._headers}
        headers |= {f"x-{name}-time": f"{seconds:.6f}" for name, seconds in self._submission.engine_s.items()}
        headers |= {f"x-{name.replace('_', '-')}": str(count) for name, count in self._submission.guesses.items()}
        self._sink.head(200, headers)
        whole = self._format.whole()
        if (params := self._submission.transfer_params) is not None:
            whole.kv_transfer_params = params
        self._sink.data(msgspec.json.encode(whole))

    def _send_error(self, failure: TonleError) -> None:
        """In a stream that has begun, as an event."""
        self._press(False)
        body = error_reply(failure).body
        self._answer.error = msgspec.to_builtins(body.error)
        self._sink.data(sse.event(body))

    def _finish_answer(self) -> None:
        answer = self._answer
        answer.complete = answer.error is None and not self._num_open
        answer.finish()
        if self._submission.generations:
            answer.usage = msgspec.to_builtins(self._submission.wire_usage)
            answer.engine_s, answer.spent = self._submission.engine_s, self._submission.spent
            answer.usage |= self._submission.guesses

    def _observe(self, *, failed: bool) -> None:
        metrics, order = self._metrics, self._submission.order
        for progress in self._progress:
            metrics.count_finished("error" if failed and progress.reason == "abort" else progress.reason)
        metrics.num_answers.observe(order.n)
        metrics.max_tokens.observe(order.max_tokens)
        for place, generation in enumerate(self._submission.generations):
            own = self._progress[place * order.n : (place + 1) * order.n]
            self._observe_generation(generation, own, finished=all(each.reason != "abort" for each in own))

    def _observe_generation(self, generation: Generation, own: list[_Progress], *, finished: bool) -> None:
        metrics, timings, usage = self._metrics, generation.timings, generation.usage
        if timings.queue_s is not None:
            metrics.queue.observe(timings.queue_s)
        if timings.ttft_s is not None:
            metrics.ttft.observe(timings.ttft_s)
        if timings.scheduled_s is None or timings.first_token_s is None or timings.finished_s is None or not finished:
            return  # durations of answers that were cut short would flatter us
        for progress in own:
            if progress.num_tokens > 1:
                # Of an answer sent whole all deltas come at its end: only the mean gap is known.
                first_s = progress.first_s if self._stream else timings.first_token_s
                gap_s = (progress.last_s - first_s) / (progress.num_tokens - 1)
                metrics.tpot.observe(gap_s)
                if not self._stream:
                    metrics.itl.add(gap_s, progress.num_tokens - 1)
        metrics.itl.flush()
        metrics.e2e.observe(timings.finished_s - timings.arrived_s)
        metrics.prefill.observe(timings.first_token_s - timings.scheduled_s)
        metrics.decode.observe(timings.finished_s - timings.first_token_s)
        metrics.inference.observe(timings.finished_s - timings.scheduled_s)
        metrics.prompt_tokens.observe(usage.prompt_tokens)
        metrics.computed_tokens.observe(usage.prompt_tokens - usage.cached_tokens)
        metrics.generation_tokens.observe(usage.completion_tokens)
        metrics.longest_answer.observe(max(each.num_tokens for each in own))
