"""`Attempt`: one try to have a request answered by the backend of one route.

Does: wait for a slot, run the prefill leg where there is one, send; ask a second backend too if the first has not
begun in time and hedging is on. Does not: choose backends, or try again (`sending.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from tonle.edge.buffered_reply import BufferedReply
from tonle.edge.client import OUT_OF_SOCKETS, TOO_LARGE, Sink, UpstreamError
from tonle.gateway.admission import Ticket
from tonle.gateway.backends.backend import LEFT, Backend
from tonle.gateway.backends.blame import Blame
from tonle.gateway.backends.prefill_leg import LEFT_OUT, PrefillError, prefill_changes, transfer_params
from tonle.gateway.outgoing import body_for, copy_for, headers_for
from tonle.gateway.race import Lane, Race
from tonle.gateway.relay import Relay
from tonle.gateway.stage_results import AcceptedRequest, Hedge, Route
from tonle.gateway.used_tokens import NONE_USED, UsedTokens, used_by_answer, used_until_given_up
from tonle.observe.trace_context import TraceContext, new_span_id
from tonle.observe.trace_facts import SentAttempt

BROKEN = (500, 502)  # the backend failed, or cannot take this request: one other may do better
LATE = 504  # it gave up waiting for a server behind it
BUSY = (429, 503)  # the backend is not at fault and did not begin: another may have room
LOOP = 508  # it is a gateway that the request has passed, or knows only such: nobody is at fault


class StatusSink(Sink, Protocol):
    status: int
    asked: bool  # set when the request is written to the backend: until then it costs nothing


class Attempt:
    """Run it once. What happened is in its attributes, also when it was cancelled."""

    __slots__ = (
        "_accepted", "_blame", "_relay", "_route", "asked", "backend", "failure", "hedge", "hedge_failed", "prefill",
        "queued_s", "sends", "sent_s", "status", "used", "why",
    )  # fmt: skip

    def __init__(self, accepted: AcceptedRequest, route: Route, relay: Relay, blame: Blame, *, queued_s: float) -> None:
        """`queued_s`: how long the request has waited for other backends before."""
        self._accepted = accepted
        self._blame = blame
        self._route = route
        self._relay = relay
        self.backend = route.backend.name  # with a hedge, the one that answered
        self.why = route.why
        self.status = 0  # of the backend's reply; 0: none came
        self.failure: BaseException | None = None
        self.queued_s = queued_s
        self.sent_s: float | None = None  # monotonic
        self.asked = False  # a backend was sent the request
        self.used = NONE_USED
        self.prefill: str | None = None
        self.hedge: Hedge | None = None
        self.hedge_failed: Backend | None = None  # the second backend, if neither answered
        self.sends: tuple[SentAttempt, ...] = ()  # if the request is recorded in a trace

    @property
    def culprit(self) -> Backend:
        """Of a failed attempt: the backend to leave out of the next."""
        if isinstance(self.failure, PrefillError) and self._route.prefill is not None:
            return self._route.prefill  # the decoding backend was not asked, and may work without it
        return self._route.backend

    @property
    def left(self) -> bool:
        """It failed because its backend was removed: another must be asked, and nobody is to blame."""
        if not self.culprit.leaving:
            return False
        if self.failure is None:
            return self.status in (*BROKEN, *BUSY)
        return isinstance(self.failure, UpstreamError) and not (
            self.failure.timed_out or self.failure.kind == TOO_LARGE
        )

    @property
    def was_displaced(self) -> bool:
        """It waited for a backend that was removed meanwhile, and was not sent."""
        return isinstance(self.failure, UpstreamError) and self.failure.kind == LEFT and not self.failure.sent

    async def run(self, hedge_after_s: float | None, choose_second: Callable[[], Route | None]) -> None:
        """Never raises: a failure, or a cancellation, is in `failure`."""
        accepted, backend = self._accepted, self._route.backend
        ticket = _ticket(accepted)
        try:
            await self._wait_turn(backend, ticket)
            if hedge_after_s is not None and accepted.request.stream and self._route.prefill is None:
                self.status = await self._race(hedge_after_s, choose_second)
            else:
                self.status = await self._exchange(self._route, self._relay)
        except (Exception, asyncio.CancelledError) as failure:
            self.failure = failure
        try:
            self.used = self._used()
        except Exception as failure:  # a server may say anything
            self.failure = self.failure or failure
        finally:
            used = self.used if self.backend == backend.name else NONE_USED
            backend.gate.leave(ticket, used_tokens=used.total, new_tokens=used.new)

    def _used(self) -> UsedTokens:
        """By the backend that answered or was asked last. Of one that failed, only what the caller has seen is charged."""
        if not self.asked:
            return NONE_USED
        request, relay = self._accepted.request, self._relay
        if isinstance(self.failure, asyncio.CancelledError):  # the caller left, or its deadline passed
            return used_until_given_up(request, relay.peek(), unseen=self._unseen())
        if relay.status != 200:
            return NONE_USED
        used = used_by_answer(request, relay.peek())
        if self.failure is None and self.hedge is None and self.sent_s is not None:
            took_s = (time.monotonic() - self.sent_s) * request.num_answers
            self._route.backend.gate.observe_pace(took_s, used.new)
        return used

    def _unseen(self) -> int:
        """Tokens that were written when the caller left and would have come with the last: by the backend's pace."""
        accepted, backend = self._accepted, self._route.backend
        if accepted.request.stream or backend.local or self.sent_s is None:
            return 0
        if backend.gate.token_s is None:
            return accepted.model.new_tokens
        each = int((time.monotonic() - self.sent_s) / backend.gate.token_s)
        return min(each * accepted.request.num_answers, accepted.model.new_tokens)

    async def _wait_turn(self, backend: Backend, ticket: Ticket) -> None:
        request = self._accepted.request
        queue = backend.gate
        self._relay.expect(backend, self.queued_s)
        if queue.ask(ticket, time_left_s=request.time_left_s()):
            return
        assert ticket.turn is not None
        self._relay.expect(backend, self.queued_s, lambda: f"queued, {queue.ahead_of(ticket)} others wait")
        began_s = time.monotonic()
        try:
            await asyncio.shield(ticket.turn)
        finally:
            self.queued_s += time.monotonic() - began_s
            self._relay.expect(backend, self.queued_s)

    async def _exchange(self, route: Route, sink: StatusSink) -> int:
        """The status of the reply that `sink` was handed."""
        accepted, backend, extra = self._accepted, route.backend, None
        if route.prefill is not None:
            extra = await self._prefill(route.prefill, sink)
            if extra is None:
                return sink.status
        with self._judged(backend, sink):
            body = body_for(accepted, backend, extra)
            self.sent_s = self.sent_s or time.monotonic()
            await self._send(backend, body, sink)
        return sink.status

    async def _send(self, backend: Backend, body: bytes, sink: StatusSink) -> None:
        """Raises `UpstreamError`. The caller's own deadline is not a bound here: it ends the whole attempt (`deadline.py`), so
        that it cannot be taken for a timeout of the backend."""
        trace: TraceContext | None = self._accepted.call.exchange.trace
        span_id = new_span_id() if trace is not None and trace.is_recorded and not backend.local else ""
        headers, sink.asked = headers_for(self._accepted, backend, span_id), False
        began_s, failure = time.monotonic(), None
        try:
            await backend.send("POST", self._accepted.call.path, body, headers, sink, first_s=backend.timeout_s)
        except BaseException as error:
            failure = error
            raise
        finally:
            self.asked |= sink.asked
            if span_id:
                self._note_send(backend, sink.status, span_id, began_s, failure)

    def _note_send(
        self, backend: Backend, status: int, span_id: str, began_s: float, failure: BaseException | None
    ) -> None:
        """`status` is of an earlier attempt if this one failed before its reply came."""
        arrived_s = self._accepted.call.exchange.arrived_s
        if failure is not None and not (isinstance(failure, UpstreamError) and failure.began):
            status = 0
        sent = SentAttempt(
            span_id=span_id, backend=backend.name, url=backend.row.url, kind=backend.kind, status=status,
            error="" if failure is None else _error_type(failure),
            began_s=began_s - arrived_s, ended_s=time.monotonic() - arrived_s,
        )  # fmt: skip
        self.sends += (sent,)

    @contextlib.contextmanager
    def _judged(self, backend: Backend, sink: StatusSink) -> Iterator[None]:
        """An exchange with a backend: how it ends counts for or against it, unless it says nothing about it."""
        backend.breaker.begin()
        backend.num_sent += 1
        try:
            yield
        except UpstreamError as error:
            if backend.leaving:  # it was expected to end, and says nothing about the request either
                backend.breaker.abandon()
            elif error.sent:
                self._blame.fail(backend)
            elif error.kind == OUT_OF_SOCKETS:
                backend.breaker.abandon()
            else:
                self._blame.unreachable(backend)
            raise
        except BaseException:
            backend.breaker.abandon()
            raise
        if (sink.status in BROKEN or sink.status == LATE) and not backend.leaving:
            self._blame.fail(backend)
        else:
            self._blame.answer(backend, sink.status)

    async def _prefill(self, backend: Backend, sink: StatusSink) -> dict[str, Any] | None:
        """What the second leg must carry; None if the caller is at fault, and `sink` has been handed the error."""
        accepted = self._accepted
        body = copy_for(accepted, backend, prefill_changes(accepted.request.body, accepted.model.name), LEFT_OUT)
        answer, params = BufferedReply(), None
        try:
            with self._judged(backend, answer):
                await self._send(backend, body, answer)
                if answer.status == 200:
                    params = transfer_params(answer.body)
        except UpstreamError as error:
            raise PrefillError(
                error.kind, f"in the prefill leg at {backend.name} ({error})", sent=error.sent
            ) from error
        if params is None and (answer.status in BUSY or not 400 <= answer.status < 500):
            raise PrefillError("prefill refused", f"{backend.name} answers {answer.status}")
        self.prefill = backend.name
        if params is None:
            sink.head(answer.status, answer.headers)
            sink.data(answer.body)
            return None
        return {"kv_transfer_params": params}

    # -- hedging

    async def _race(self, after_s: float, choose_second: Callable[[], Route | None]) -> int:
        """Only streams: the first byte of a whole answer comes with its last, so silence says nothing."""
        race = Race(self._relay)
        self._enter(race, self._route, self._route.why, self._exchange)
        try:
            await race.wait(after_s)
            if race.is_open and (second := choose_second()) is not None:
                self.hedge = Hedge(self._route.backend.name, second.backend.name, after_s)
                self._enter(race, second, "hedge", self._exchange_second)
                await race.wait()
                if race.winner is None:
                    self.hedge_failed = second.backend
            await race.wait()
            return race.settle().status
        finally:
            await race.end()

    def _enter(self, race: Race, route: Route, why: str, exchange: Callable[[Route, StatusSink], Any]) -> None:
        def on_win() -> None:
            self.backend, self.why = route.backend.name, why
            self._relay.expect(route.backend, self.queued_s)

        async def run(lane: Lane) -> None:
            await exchange(route, lane)

        race.enter(run, on_win)

    async def _exchange_second(self, route: Route, sink: StatusSink) -> int:
        ticket, queue = _ticket(self._accepted), route.backend.gate
        queue.ask(ticket, time_left_s=None)
        try:
            return await self._exchange(route, sink)
        finally:
            won = self.backend == route.backend.name
            used = used_by_answer(self._accepted.request, self._relay.peek()) if won else NONE_USED
            queue.leave(ticket, used_tokens=used.total, new_tokens=used.new)


def _error_type(failure: BaseException) -> str:
    """For a span: one of few words."""
    if isinstance(failure, asyncio.CancelledError):
        return "cancelled"
    return failure.kind if isinstance(failure, UpstreamError) else type(failure).__name__


def _ticket(accepted: AcceptedRequest) -> Ticket:
    request = accepted.request
    return Ticket(accepted.key.id, request.priority, request.prompt_tokens, accepted.model.new_tokens)
