"""Send: a request to one backend after the other, until one answers.

Does: choose again when an attempt failed, never once the caller has seen a part of an answer. Does not: choose
backends (`routing/`), carry out an attempt (`attempt.py`), or watch the answer (`relay.py`).

A backend that could not be reached, or had no room, did not begin: up to `retries` others are tried. One that failed
after it was sent the request may have been brought down by it: one other is tried. One that was waited for too long may
still work on it: no other is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from tonle.edge.client import TOO_LARGE, UpstreamError
from tonle.errors import CapacityError
from tonle.gateway.attempt import BROKEN, BUSY, Attempt
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.blame import Blame
from tonle.gateway.relay import Relay
from tonle.gateway.stage_results import AcceptedRequest, Hedge, Route, SendResult
from tonle.observe.trace_facts import SentAttempt

Choose = Callable[[AcceptedRequest, list[Backend]], Route]
_RETRIED = (*BROKEN, *BUSY)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    retries: int
    hedge_after_s: float | None = None  # None: a backend that has not begun is waited for


class Sender:
    def __init__(self, choose: Choose, options: SendOptions) -> None:
        self._choose = choose
        self._options = options

    async def send(self, accepted: AcceptedRequest, relay: Relay) -> SendResult:
        """Never raises: a failure, or a cancellation, is in the result. The caller's reply is not ended here."""
        failed: list[Backend] = []
        blame = Blame(accepted.owner)
        hedge: Hedge | None = None
        sends: tuple[SentAttempt, ...] = ()
        queued_s = 0.0
        attempt: Attempt | None = None
        while True:
            try:
                route = self._choose(accepted, failed)
            except CapacityError as error:
                if attempt is None:
                    return SendResult(failure=error)
                break  # the last reply or failure is the best there is
            last, hedge_after_s = len(failed) >= self._options.retries, self._options.hedge_after_s
            if blame.failed:  # this is the one other backend that gets the request: neither a hedge nor a prefill leg
                route, hedge_after_s = msgspec.structs.replace(route, prefill=None), None
            attempt = Attempt(accepted, route, relay, blame, queued_s=queued_s)
            await attempt.run(hedge_after_s, partial(self._second, accepted, route, failed))
            queued_s, hedge, sends = attempt.queued_s, attempt.hedge or hedge, sends + attempt.sends
            if attempt.hedge_failed is not None:
                failed += [attempt.hedge_failed, attempt.culprit]
                break
            if last or not _may_retry(attempt, accepted, relay, blame):
                break
            failed.append(attempt.culprit)
        return SendResult(
            backend=attempt.backend,
            why=attempt.why,
            status=attempt.status,
            failed=tuple(backend.name for backend in failed),
            hedge=hedge,
            prefill=attempt.prefill,
            queued_s=queued_s,
            sent_s=attempt.sent_s,
            first_byte_s=relay.first_byte_s,
            used=attempt.used,
            sends=sends,
            failure=attempt.failure,
        )

    def _second(self, accepted: AcceptedRequest, route: Route, failed: list[Backend]) -> Route | None:
        """Another backend with room right now; a hedge is never queued."""
        try:
            second = self._choose(accepted, [*failed, route.backend])
        except CapacityError:
            return None
        return second if second.backend.gate.has_room and second.prefill is None else None


def _may_retry(attempt: Attempt, accepted: AcceptedRequest, relay: Relay, blame: Blame) -> bool:
    if len(blame.failed) > 1 or relay.began or accepted.request.is_late:
        return False
    failure = attempt.failure
    if failure is None:
        return attempt.status in _RETRIED
    return isinstance(failure, UpstreamError) and (
        not failure.sent or not (failure.timed_out or failure.kind == TOO_LARGE)
    )
