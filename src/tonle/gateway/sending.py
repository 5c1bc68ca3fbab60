"""Send: a request to one backend after the other, until one answers.

Does: choose again when an attempt failed, never once the caller has seen a part of an answer. Does not: choose
backends (`routing/`), carry out an attempt (`attempt.py`), or watch the answer (`relay.py`).

A backend that could not be reached, or had no room, did not begin: up to `retries` others are tried. One that failed
after it was sent the request may have been brought down by it: one other is tried. One that was waited for too long may
still work on it: no other is. One that was removed does not count: another is tried, whatever was tried before; if there is
none, a request that waited for it is sent there all the same, for as long as it finishes what it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from tonle.edge.client import TOO_LARGE, UpstreamError
from tonle.errors import CapacityError
from tonle.gateway.attempt import BROKEN, BUSY, LATE, LOOP, Attempt
from tonle.gateway.backends.backend import Backend
from tonle.gateway.backends.blame import Blame
from tonle.gateway.hops import VIA_HEADER, read_via
from tonle.gateway.refusals import NoBackend
from tonle.gateway.relay import Relay
from tonle.gateway.stage_results import AcceptedRequest, Hedge, Route, SendResult
from tonle.observe.trace_facts import SentAttempt

Choose = Callable[[AcceptedRequest, list[Backend]], Route]
_RETRIED = (*BROKEN, *BUSY, LOOP)
MAX_LEFT = 32  # backends that may be removed under one request


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
        left: list[str] = []
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
                if not attempt.left:
                    break  # the last reply or failure is the best there is
                if not attempt.was_displaced or route.backend.gone:
                    return SendResult(backend=attempt.backend, why=attempt.why, left=tuple(left), queued_s=queued_s,
                                      sends=sends, failure=error)  # fmt: skip
            last, hedge_after_s = len(failed) >= self._options.retries, self._options.hedge_after_s
            if blame.failed:  # this is the one other backend that gets the request: neither a hedge nor a prefill leg
                route, hedge_after_s = msgspec.structs.replace(route, prefill=None), None
            attempt = Attempt(accepted, route, relay, blame, queued_s=queued_s)
            await attempt.run(hedge_after_s, partial(self._second, accepted, route, failed))
            if attempt.status >= 500 and (via := relay.headers.get(VIA_HEADER)):
                accepted.passed.update(read_via(via))  # gateways that could not answer it either
            queued_s, hedge, sends = attempt.queued_s, attempt.hedge or hedge, sends + attempt.sends
            if attempt.hedge_failed is not None:
                failed += [attempt.hedge_failed, attempt.culprit]
                break
            if attempt.left and len(left) < MAX_LEFT and not relay.began and not accepted.request.is_late:
                left.append(attempt.culprit.name)
                continue
            if last or not _may_retry(attempt, accepted, relay, blame):
                break
            failed.append(attempt.culprit)
        return SendResult(
            backend=attempt.backend,
            why=attempt.why,
            status=attempt.status,
            failed=tuple(backend.name for backend in failed),
            left=tuple(dict.fromkeys(left)),
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


def is_out(sent: SendResult) -> bool:
    """No backend of the model could answer: none can be used, or those that were tried failed."""
    if sent.failure is None:
        return sent.status in (*BROKEN, 503, LATE, LOOP)
    if isinstance(sent.failure, UpstreamError):
        return sent.failure.kind != TOO_LARGE
    return isinstance(sent.failure, NoBackend)


def joined(before: SendResult, sent: SendResult) -> SendResult:
    """`sent`, after a model whose backends were out."""
    asked = (*before.failed, *([before.backend] if before.backend else []))
    return msgspec.structs.replace(
        sent, failed=tuple(dict.fromkeys((*asked, *sent.failed))), left=(*before.left, *sent.left),
        queued_s=before.queued_s + sent.queued_s, sends=before.sends + sent.sends, hedge=sent.hedge or before.hedge,
    )  # fmt: skip


def _may_retry(attempt: Attempt, accepted: AcceptedRequest, relay: Relay, blame: Blame) -> bool:
    if len(blame.failed) > 1 or relay.began or accepted.request.is_late:
        return False
    failure = attempt.failure
    if failure is None:
        return attempt.status in _RETRIED
    return isinstance(failure, UpstreamError) and (
        not failure.sent or not (failure.timed_out or failure.kind == TOO_LARGE)
    )
