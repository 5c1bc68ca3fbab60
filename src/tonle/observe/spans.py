"""`spans_of`: one request's time as spans that follow each other without a gap, from its arrival to the end of its reply.

    accept · gateway queue · send · engine queue · prefill · decode · deliver
    accept · gateway queue · worker · deliver                                     of a worker pool

Does: lay what the gateway saw and what the engine told side by side; where the two disagree by a little, the gateway's clock
wins. Does not: put it into words (`sentences.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from tonle.observe.seen_request import SeenRequest
from tonle.protocol.media_paths import is_media
from tonle.telemetry.time_spent import TimeSpent

ACCEPT, GATEWAY_QUEUE, SEND = "accept", "gateway queue", "send"
ENGINE_QUEUE, PREFILL, DECODE, DELIVER = "engine queue", "prefill", "decode", "deliver"
WORKER = "worker"
SPAN_NAMES = (ACCEPT, GATEWAY_QUEUE, SEND, ENGINE_QUEUE, PREFILL, DECODE, WORKER, DELIVER)  # in this order
STALLED, PREEMPTED = "stalled", "preempted"  # inside decode

NEGLIGIBLE_SHARE, NEGLIGIBLE_S = 0.01, 0.005  # what is below both is not worth a word,
LEAST_SHARE = 0.001  # and neither is what is below this


class Span(msgspec.Struct, frozen=True):
    """Seconds since the request's arrival. `children` lie inside, from its start; they say how much, not when."""

    name: str
    start_s: float
    seconds: float
    detail: str = ""
    children: list[Span] = []


def matters(seconds: float, total_s: float) -> bool:
    least_s = min(NEGLIGIBLE_SHARE * total_s, max(NEGLIGIBLE_S, LEAST_SHARE * total_s))
    return seconds > 0 and seconds >= least_s


def stands_out(seconds: float, total_s: float) -> bool:
    """For what every request has a little of."""
    return seconds >= NEGLIGIBLE_S and seconds >= NEGLIGIBLE_SHARE * total_s


def is_for_workers(seen: SeenRequest) -> bool:
    """No language model answered, or would have: there are no tokens to tell of."""
    return bool(seen.pool) or is_media(seen.path)


class EngineTimes(NamedTuple):
    """Seconds; None: the request ended before, or in, that part."""

    queue_s: float | None
    prefill_s: float | None
    decode_s: float | None


def engine_times(seen: SeenRequest, spent: TimeSpent | None) -> EngineTimes | None:
    """None: the engine told nothing."""
    if spent is not None:
        return EngineTimes(spent.queue_s, spent.prefill_s, spent.decode_s)
    if (told := seen.engine_s) is None:
        return None
    return EngineTimes(told.get("queue"), told.get("prefill"), told.get("decode"))


def spans_of(seen: SeenRequest, spent: TimeSpent | None) -> list[Span]:
    """They tile 0..`seen.total_s`; those of no length are left out."""
    tiles = _Tiles(seen.total_s)
    if seen.sent_s is None:
        _lay_unsent(tiles, seen)
    else:
        _lay_gateway(tiles, seen, seen.sent_s)
        times = engine_times(seen, spent)
        if times is None:
            _lay_seen_from_outside(tiles, seen)
        else:
            _lay_engine(tiles, seen, times, spent)
    return tiles.spans


class _Tiles:
    """Lays one span behind the other."""

    def __init__(self, total_s: float) -> None:
        self.total_s = max(0.0, total_s)
        self.spans: list[Span] = []
        self._at_s = 0.0

    def until(self, name: str, end_s: float) -> Span | None:
        """Up to that moment, or to the end of the request; None if that is past."""
        end_s = min(end_s, self.total_s)
        if end_s <= self._at_s:
            return None
        span = Span(name, self._at_s, end_s - self._at_s)
        self.spans.append(span)
        self._at_s = end_s
        return span

    def rest(self, name: str) -> None:
        self.until(name, self.total_s)


def _lay_unsent(tiles: _Tiles, seen: SeenRequest) -> None:
    """No backend has it: it was refused, answered from the cache, or its caller left before."""
    if seen.accepted_s is None:
        tiles.rest(ACCEPT)
        return
    if seen.status == "cached":
        tiles.until(ACCEPT, seen.accepted_s)
        if seen.ttft_s is not None and stands_out(seen.ttft_s - seen.accepted_s, seen.total_s):
            tiles.until(GATEWAY_QUEUE, seen.ttft_s)  # for the cache, or for the identical request that fills it
        tiles.rest(DELIVER)
    elif waited_s(seen) or seen.failed:
        tiles.until(ACCEPT, seen.accepted_s)
        tiles.rest(GATEWAY_QUEUE)
    else:
        tiles.rest(ACCEPT)


def waited_s(seen: SeenRequest) -> float:
    """For a backend's turn; never below zero."""
    return max(0.0, seen.queued_s)


def _lay_gateway(tiles: _Tiles, seen: SeenRequest, sent_s: float) -> None:
    """Up to the moment it was sent to the backend that answered: failed attempts before that count as waiting."""
    accepted_s = sent_s if seen.accepted_s is None else min(seen.accepted_s, sent_s)
    queued_s = waited_s(seen)
    if not seen.failed and not stands_out(sent_s - accepted_s - queued_s, seen.total_s):
        accepted_s = sent_s - queued_s
    tiles.until(ACCEPT, accepted_s)
    tiles.until(GATEWAY_QUEUE, sent_s)


def _lay_engine(tiles: _Tiles, seen: SeenRequest, times: EngineTimes, spent: TimeSpent | None) -> None:
    if times.decode_s is None or times.prefill_s is None or times.queue_s is None:
        _lay_cut_short(tiles, seen, times)
        return
    start_s = _engine_start(seen, times.queue_s, times.prefill_s, times.decode_s)
    tiles.until(SEND, start_s)
    tiles.until(ENGINE_QUEUE, start_s + times.queue_s)
    tiles.until(PREFILL, start_s + times.queue_s + times.prefill_s)
    decode = tiles.until(DECODE, start_s + times.queue_s + times.prefill_s + times.decode_s)
    if decode is not None and spent is not None:
        tiles.spans[-1] = msgspec.structs.replace(decode, children=_inside(decode, spent))
    tiles.rest(DELIVER)


def _engine_start(seen: SeenRequest, queue_s: float, prefill_s: float, decode_s: float) -> float:
    """When the engine got it, on the gateway's clock: an engine tells how long its parts took, and not when they were.

    Before that lies the way to it, and making tokens of the prompt. The first token tells best where the parts belong; of an
    answer that came whole there is only the moment it came.
    """
    ended_s = seen.last_s if seen.stream else seen.first_byte_s
    end_s = seen.total_s if ended_s is None else min(ended_s, seen.total_s)
    start_s = end_s - queue_s - prefill_s - decode_s
    if seen.stream and seen.ttft_s is not None:
        start_s = min(start_s, seen.ttft_s - queue_s - prefill_s)
    return max(seen.sent_s or 0.0, start_s)


def _lay_cut_short(tiles: _Tiles, seen: SeenRequest, times: EngineTimes) -> None:
    """It ended inside the engine: its last part reaches to the end of the request."""
    if times.queue_s is None:
        tiles.rest(ENGINE_QUEUE)
        return
    start_s = seen.sent_s or 0.0
    if times.prefill_s is None:
        tiles.until(ENGINE_QUEUE, start_s + times.queue_s)
        tiles.rest(PREFILL)
        return
    if seen.stream and seen.ttft_s is not None:
        start_s = max(start_s, seen.ttft_s - times.queue_s - times.prefill_s)
    tiles.until(SEND, start_s)
    tiles.until(ENGINE_QUEUE, start_s + times.queue_s)
    tiles.until(PREFILL, start_s + times.queue_s + times.prefill_s)
    tiles.rest(DECODE)


def _inside(decode: Span, spent: TimeSpent) -> list[Span]:
    """What held up decoding; together no more than all of it."""
    stalled_s = min(max(0.0, spent.stalled_s), decode.seconds)
    preempted_s = min(max(0.0, spent.preempted_s), decode.seconds - stalled_s)
    found = [
        Span(STALLED, decode.start_s, stalled_s),
        Span(PREEMPTED, decode.start_s + stalled_s, preempted_s),
    ]
    return [child for child in found if child.seconds > 0]


def _lay_seen_from_outside(tiles: _Tiles, seen: SeenRequest) -> None:
    """A backend that tells nothing of its time: its queue and the way to it are in what comes before its first token."""
    if is_for_workers(seen):
        tiles.until(WORKER, seen.total_s if seen.first_byte_s is None else seen.first_byte_s)
        tiles.rest(DELIVER)
    elif seen.stream and seen.ttft_s is not None:
        tiles.until(PREFILL, seen.ttft_s)
        tiles.until(DECODE, seen.ttft_s if seen.last_s is None else seen.last_s)
        tiles.rest(DELIVER)
    elif not seen.stream and seen.first_byte_s is not None and seen.http_status == 200:
        # The whole answer, whose parts are not known; without tokens, as of an embedding, there is only a prompt.
        tiles.until(DECODE if seen.completion_tokens else PREFILL, seen.first_byte_s)
        tiles.rest(DELIVER)
    else:
        tiles.rest(SEND)  # no answer came, or one that is none
