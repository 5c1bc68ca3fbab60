"""Send: the way of a request to a backend. A turn in its line, the prefill leg, the exchange; another backend if it
fails, and a second one at once if it keeps silent and hedging is on.

Does: try until one answers, never again once the caller has seen a part. Does not: choose backends (`routing/`), or
watch the answer (`relay.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from tonle.edge.client import Sink, UpstreamError
from tonle.errors import CapacityError
from tonle.gateway.admission import Ticket
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.buffered_reply import BufferedReply
from tonle.gateway.backends.prefill_leg import LEFT_OUT, PrefillError, prefill_changes, transfer_params
from tonle.gateway.call import MAX_TOKENS, Call, estimate_tokens
from tonle.gateway.outgoing import body_for, copy_for, headers_for
from tonle.gateway.race import Lane, Race
from tonle.gateway.refusals import DeadlinePassed
from tonle.gateway.relay import Relay
from tonle.protocol.answers import Answer

BROKEN = (500, 502, 504)  # the backend is at fault: another may do better
BUSY = (429, 503)  # so may it now, without being at fault


class Route(Protocol):
    """Where to send, and why."""

    @property
    def backend(self) -> Backend: ...
    @property
    def why(self) -> str: ...
    @property
    def prefill(self) -> Backend | None: ...


class StatusSink(Sink, Protocol):
    status: int


Choose = Callable[[Call, list[Backend]], Route]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    retries: int
    hedge_after_s: float | None = None  # None: a silent backend is waited for


class Sender:
    def __init__(self, choose: Choose, options: SendOptions) -> None:
        self._choose = choose
        self._options = options

    async def send(self, call: Call, relay: Relay, salt: str) -> None:
        """To one backend after the other. Raises `UpstreamError`, or `CapacityError` if nobody can take it."""
        failed: list[Backend] = []
        failure: UpstreamError | None = None
        while True:
            try:
                route = self._choose(call, failed)
            except CapacityError:
                if failure is None and relay.status:
                    break  # the last one's own words are the best we have
                if failure is None:
                    raise
                raise failure from None
            last = len(failed) >= self._options.retries
            try:
                await self._send_to(route, call, relay, salt, failed)
                failure = None
                if relay.status not in BROKEN + BUSY or last:
                    break
            except UpstreamError as error:
                failure = error
                if relay.began or last or _is_late(call):
                    raise
            culprit = route.backend
            if isinstance(failure, PrefillError) and route.prefill is not None:
                culprit = route.prefill  # who was to decode was not asked, and may do without it
            failed.append(culprit)
            call.attempts.append(culprit.name)
        relay.finish()

    async def _send_to(self, route: Route, call: Call, relay: Relay, salt: str, failed: list[Backend]) -> None:
        backend = route.backend
        call.backend, call.why = backend.name, route.why
        ticket = Ticket(call.key.id, call.priority, call.prompt_tokens, call.new_tokens)
        used: int | None = None
        try:
            await self._wait_turn(backend, ticket, call, relay)
            relay.waiting_for = lambda: "working"
            if self._options.hedge_after_s is not None and call.stream and route.prefill is None:
                await self._race(route, call, relay, salt, failed)
            else:
                await self._exchange(route, call, relay, salt)
            used = used_tokens(call, relay.peek()) if call.backend == backend.name else 0
        finally:
            backend.gate.leave(ticket, used_tokens=used)

    async def _wait_turn(self, backend: Backend, ticket: Ticket, call: Call, relay: Relay) -> None:
        if backend.gate.ask(ticket, time_left_s=call.time_left_s()):
            return
        assert ticket.turn is not None
        relay.waiting_for = lambda: f"queued, {backend.gate.ahead_of(ticket)} others wait"
        began_s = time.monotonic()
        try:
            await asyncio.wait_for(asyncio.shield(ticket.turn), call.time_left_s())
        except TimeoutError:
            raise DeadlinePassed("the request's deadline passed while it waited",
                                 retry_after_s=backend.gate.wait_estimate_s()) from None  # fmt: skip
        finally:
            call.queued_s += time.monotonic() - began_s

    async def _exchange(self, route: Route, call: Call, sink: StatusSink, salt: str) -> None:
        backend, extra = route.backend, None
        if route.prefill is not None:
            extra = await self._prefill(route.prefill, call, sink, salt)
            if extra is None:
                return
        first_s = _first_s(backend, call)
        with _judged(backend, call, sink):
            body = body_for(call, backend, salt, extra)
            call.sent_s = call.sent_s if call.hedge is not None else time.monotonic()
            headers = headers_for(call, backend, salt)
            await backend.send("POST", call.path, body, headers, sink, first_s=first_s)

    async def _prefill(self, backend: Backend, call: Call, sink: StatusSink, salt: str) -> dict[str, Any] | None:
        """What the second leg must carry; None if the first found the caller at fault, and `sink` has been told."""
        body = copy_for(call, backend, salt, prefill_changes(call.body, call.model), LEFT_OUT)
        headers = headers_for(call, backend, salt)
        first_s = _first_s(backend, call)
        answer, params = BufferedReply(), None
        try:
            with _judged(backend, call, answer):
                await backend.send("POST", call.path, body, headers, answer, first_s=first_s)
                if answer.status == 200:
                    params = transfer_params(answer.body)
        except UpstreamError as error:
            raise PrefillError(error.kind, f"in the prefill leg at {backend.name} ({error})") from error
        if params is None and (answer.status in BUSY or not 400 <= answer.status < 500):
            raise PrefillError("prefill refused", f"{backend.name} answers {answer.status}")
        call.prefill_backend = backend.name
        if params is None:
            sink.head(answer.status, answer.headers)
            sink.data(answer.body)
            return None
        return {"kv_transfer_params": params}

    # -- hedging

    async def _race(self, route: Route, call: Call, relay: Relay, salt: str, failed: list[Backend]) -> None:
        """Only streams: the first byte of a whole answer comes with its last, so its silence says nothing."""
        race, wait_s = Race(relay), self._options.hedge_after_s

        def on_win(winner: Route, why: str) -> Callable[[], None]:
            def note() -> None:
                call.backend, call.why = winner.backend.name, why

            return note

        race.enter(lambda lane: self._exchange(route, call, lane, salt), on_win(route, route.why))
        try:
            await race.wait(wait_s)
            if race.is_open and (second := self._second(route, call, failed)) is not None:
                call.hedge = {"first": route.backend.name, "second": second.backend.name, "after_s": wait_s}
                race.enter(lambda lane: self._hedge(second, call, lane, salt), on_win(second, "hedge"))
                await race.wait()
                if race.winner is None:
                    failed.append(second.backend)
                    call.attempts.append(second.backend.name)
            await race.wait()
            race.settle()
        finally:
            await race.end()

    def _second(self, route: Route, call: Call, failed: list[Backend]) -> Route | None:
        """Somebody else with room right now; a hedge never waits in a line."""
        try:
            second = self._choose(call, [*failed, route.backend])
        except CapacityError:
            return None
        return second if second.backend.gate.has_room and second.prefill is None else None

    async def _hedge(self, route: Route, call: Call, lane: Lane, salt: str) -> None:
        ticket = Ticket(call.key.id, call.priority, call.prompt_tokens, call.new_tokens)
        route.backend.gate.ask(ticket, time_left_s=None)
        try:
            await self._exchange(route, call, lane, salt)
        finally:
            route.backend.gate.leave(ticket)


@contextlib.contextmanager
def _judged(backend: Backend, call: Call, sink: StatusSink) -> Iterator[None]:
    """An exchange with a backend: how it ends counts for or against that backend, unless it says nothing about it."""
    backend.breaker.begin()
    backend.num_sent += 1
    try:
        yield
    except UpstreamError as error:
        if error.kind == "timeout" and not error.began and _is_late(call):
            backend.breaker.abandon()  # the caller gave it too little time
        else:
            backend.num_failed += 1
            backend.breaker.fail()
        raise
    except BaseException:
        backend.breaker.abandon()
        raise
    if sink.status in BROKEN:
        backend.num_failed += 1
        backend.breaker.fail()
    else:
        backend.breaker.succeed()


def _first_s(backend: Backend, call: Call) -> float:
    """How long the first byte may take. Raises `DeadlinePassed`."""
    if _is_late(call):
        raise DeadlinePassed("the request's deadline passed before it could be sent")
    left_s = call.time_left_s()
    return backend.timeout_s if left_s is None else max(0.0, min(backend.timeout_s, left_s))


def _is_late(call: Call) -> bool:
    left_s = call.time_left_s()
    return left_s is not None and left_s <= 0


def used_tokens(call: Call, answer: Answer) -> int:
    """As the backend counted; else our estimate of what was read and written."""
    if answer.usage is not None and isinstance(total := answer.usage.get("total_tokens"), int):
        return max(0, min(total, MAX_TOKENS))
    if not answer.choices:
        return 0
    return call.prompt_tokens + sum(estimate_tokens(choice.text) for choice in answer.choices.values())
