"""Carry an answer to its caller: whole, or event by event as it grows.

Does: parse, check, translate, run the job, and send what an `Answer` writes. Does not: know chat from completions.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from tonle.engine.messages import ModelCard
from tonle.engine.request import Delta
from tonle.protocol import sse
from tonle.protocol.openai import FieldWarning, Sampling
from tonle.protocol.parse import parse
from tonle.replica.exchange import Exchange
from tonle.replica.job import Job
from tonle.replica.replica import Replica, warning_headers
from tonle.replica.served import Words
from tonle.replica.translate import Order

# A body this large is made into a prompt on a thread: tokenizing it would hold up everybody's streams.
THREAD_BYTES = 32 * 1024

RequestT = TypeVar("RequestT", bound=Sampling)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What every reply and chunk of one answer carries."""

    id: str
    created: int  # unix seconds
    model: str
    warnings: list[FieldWarning]


class Answer(Protocol):
    """Turns deltas into wire bodies of one kind."""

    def opening(self) -> bytes:
        """Events before the first delta's; called when it has come."""
        ...

    def events(self, choice: int, delta: Delta) -> bytes:
        """Empty if there is nothing to tell yet."""
        ...

    def closing(self) -> bytes: ...

    def add(self, choice: int, delta: Delta) -> None: ...

    def whole(self) -> msgspec.Struct: ...


Translate = Callable[[RequestT, Words, ModelCard, int], Order]
MakeAnswer = Callable[[RequestT, Envelope, Job, Words], Answer]


async def answer(
    replica: Replica, exchange: Exchange, request_type: type[RequestT], translate: Translate[RequestT],
    make_answer: MakeAnswer[RequestT],
) -> None:  # fmt: skip
    """The whole life of one generation request."""
    body = await exchange.body()
    request, warnings = parse(body, request_type)
    card = replica.card()
    model = replica.resolve(request.model)
    replica.check_strict(exchange, warnings)
    text = replica.front.text
    if len(body) > THREAD_BYTES:
        order = await asyncio.to_thread(translate, request, text, card, replica.options.max_choices)
    else:
        order = translate(request, text, card, replica.options.max_choices)

    envelope = Envelope(exchange.answer_id, int(time.time()), model, warnings)

    async def work() -> None:
        with Job(
            replica.front, order, request_id=exchange.answer_id, metrics=replica.metrics, salt=exchange.salt
        ) as job:
            reply = make_answer(request, envelope, job, text)
            send = _send_events if request.stream else _send_whole
            headers = [*warning_headers(warnings), ("x-tonle-max-tokens", str(order.max_tokens))]
            try:
                await send(exchange, job, reply, headers)
            finally:
                exchange.usage = job.usage

    await exchange.while_connected(work())


async def _send_whole(exchange: Exchange, job: Job, reply: Answer, headers: list[tuple[str, str]]) -> None:
    async with aclosing(job.deltas()) as deltas:
        async for choice, delta in deltas:
            reply.add(choice, delta)
    await exchange.reply(msgspec.json.encode(reply.whole()), headers=[*headers, *job.timing_headers()])


async def _send_events(exchange: Exchange, job: Job, reply: Answer, headers: list[tuple[str, str]]) -> None:
    async with aclosing(job.deltas()) as deltas:
        # Until the first delta is here an error can still be an HTTP status.
        choice, delta = await anext(deltas)
        await exchange.start_stream(sse.CONTENT_TYPE, headers)
        await exchange.write(reply.opening() + reply.events(choice, delta))
        async for choice, delta in deltas:
            if events := reply.events(choice, delta):
                await exchange.write(events)
    await exchange.write(reply.closing() + sse.DONE, last=True)
