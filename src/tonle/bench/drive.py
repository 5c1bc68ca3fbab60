"""Push: send one job and judge its answer; keep N under way (closed loop) or send each at its own time (open loop).

Does: turn jobs into samples; a failure is a sample too. Does not: choose prompts, summarize or print.
Runs: on the event loop of the caller; cancel it to stop early, samples taken so far have been handed to `keep`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from http import HTTPStatus
from time import perf_counter
from typing import Any, TypeVar

from tonle.bench.answer_reader import AnswerReader
from tonle.bench.measure import Sample
from tonle.bench.underway import Underway
from tonle.bench.workload import Job
from tonle.edge.buffered_reply import BufferedReply, fetch
from tonle.edge.client import HttpClient, UpstreamError
from tonle.protocol.replies import body_message

TRUNCATED = "truncated stream"

Work = TypeVar("Work")  # what one request is made from: a `Job`, or a question of a scenario
Send = Callable[[Work], Awaitable[Sample]]
Keep = Callable[[Sample], None]

PAUSE_AFTER_FAILURE_S = 0.05  # a server that is gone must not be hammered


async def send_job(client: HttpClient, job: Job, *, timeout_s: float, underway: Underway | None = None) -> Sample:
    """Send one job. Any failure is in the sample's `failure`; while it runs, it is among those `underway`."""
    headers = {} if job.content_type is None else {"content-type": job.content_type}
    request = client.request("POST", job.path, job.body, headers)
    answer = job.new_answer()
    on_data = (lambda piece: answer.feed(piece, perf_counter())) if job.is_streamed else None
    if underway is not None:
        underway.begin(answer)
    start_s = perf_counter()
    try:
        reply = await fetch(client, request, timeout_s=timeout_s, on_data=on_data, max_bytes=job.max_reply_bytes)
        if job.is_streamed:
            answer.finish(perf_counter(), reply.headers)
        elif reply.status == HTTPStatus.OK:
            answer.take_whole(reply.body, reply.content_type, perf_counter())
        failure = _judge(reply, answer)
    except UpstreamError as error:
        failure = str(error)
        if error.began and error.kind == "connection closed":
            # A server that closes the connection right after [DONE] has sent everything.
            failure = None if answer.done else f"{TRUNCATED}: {error}"
    finally:  # also if it is cancelled
        end_s = perf_counter()
        if underway is not None:
            underway.end(answer)
    output_tokens, counted_by = answer.count_output()
    if failure is None and counted_by == "usage" and job.exact_tokens not in (None, output_tokens):
        failure = f"wrong token count: {output_tokens} instead of {job.exact_tokens}"
    sample = Sample(
        index=job.index,
        start_s=start_s,
        end_s=end_s,
        arrivals_s=answer.arrivals_s,
        last_s=answer.last_s,
        prompt_tokens=answer.prompt_tokens,
        cached_tokens=answer.cached_tokens,
        output_tokens=output_tokens,
        counted_by=counted_by,
        finish_reason=answer.finish_reason,
        items=answer.items,
        audio_s=answer.audio_s,
        failure=failure,
    )
    job.answered(sample, answer.collected())
    return sample


def _judge(reply: BufferedReply, answer: AnswerReader) -> str | None:
    """What is wrong with an answer that arrived whole; None = nothing."""
    if reply.status != HTTPStatus.OK:
        return f"HTTP {reply.status}: {body_message(reply.body)}"
    if answer.failure is not None:
        return answer.failure
    if answer.complete:
        return None
    if answer.last_s is None and "event-stream" not in reply.content_type:
        return f"unreadable answer: not an event stream but {reply.content_type or 'of no content type'}"
    return f"{TRUNCATED}: ended without finish reason or [DONE]"


async def closed_loop(
    jobs: Iterator[Work], *, users: int, send: Send[Work], keep: Keep, duration_s: float | None = None
) -> None:
    """`users` workers; each sends its next job when its last one is answered, until the jobs or the time run out.

    The next job is the next turn of the conversation that the last one was part of, if there is one.
    """
    until_s = float("inf") if duration_s is None else perf_counter() + duration_s

    async def work() -> None:
        following: Any = None  # of a `Job`; the questions of a scenario have no turns
        while perf_counter() < until_s:
            job: Work | None = next(jobs, None) if following is None else following
            if job is None:
                return
            sample = await send(job)
            keep(sample)
            following = getattr(job, "following", None)
            if sample.failure is not None:
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)
            elif following is not None:
                await asyncio.sleep(following.pause_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(users):
            group.create_task(work())


async def open_loop(timed: Iterable[tuple[float, Job]], *, begin_s: float, send: Send[Job], keep: Keep) -> None:
    """Each job leaves so many seconds after `begin_s`, whether or not earlier ones are answered; all answers are awaited.

    A client that is held up sends what was due meanwhile at once: samples keep the moment at which each was due.
    """

    async def work(job: Job, due_s: float) -> None:
        turn: Job | None = job
        while turn is not None:
            sample = await send(turn)
            sample.due_s = due_s
            keep(sample)
            turn = turn.following
            if turn is not None:
                due_s = sample.end_s + turn.pause_s
                await asyncio.sleep(due_s - perf_counter())

    async with asyncio.TaskGroup() as group:
        for offset_s, job in timed:
            due_s = begin_s + offset_s
            await _sleep_until(due_s)
            group.create_task(work(job, due_s))


async def _sleep_until(moment_s: float) -> None:
    """Never less: timers may fire up to a millisecond early."""
    await asyncio.sleep(moment_s - perf_counter())
    while moment_s > perf_counter():  # noqa: ASYNC110  (the clock sets no event)
        await asyncio.sleep(0)
