"""What lies around steps: from the client to the loop, and back.

Does: find the requests of the step log among those that the client sent, and take the differences of their moments: both read the
same clock. Does not: fit steps.

In a closed loop a user's next request follows the step that ended its last one by the way back, the user's turn and the way to
the loop. Whether the loop takes it before or after its next plan depends on fractions of a millisecond: so these are measured one
by one, with their scatter.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tonle.engine.step_log import LoggedRequest, LoggedStep, StepLogFile
from tonle.errors import ConfigError
from tonle.simulate.profile_loads import ProfileLoad

_FEW = 2  # tokens drawn in a step: what lies behind it is `back_s` alone
_BUSY_CLIENT = 0.7  # a client that computes for so much of the time is late by itself
_NUM_SHARES = 40


@dataclass(frozen=True, slots=True)
class Around:
    """Seconds, as `FittedTimes` has them."""

    front_s: float = 0.0
    back_s: float = 0.0
    front_gap_s: float = 0.0
    back_row_s: float = 0.0
    front_scatter_s: list[float] = field(default_factory=list)
    back_scatter_s: list[float] = field(default_factory=list)
    turns_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Pair:
    """One request as the client and the engine saw it."""

    front_s: float
    back_s: float
    drawn: int  # tokens of the step that brought its first one


def time_around(log: StepLogFile, loads: Sequence[ProfileLoad]) -> Around:
    """Raises `ConfigError` if the log has none of the requests."""
    by_length: dict[int, list[LoggedRequest]] = {}
    for request in log.requests:
        by_length.setdefault(request.prompt_tokens, []).append(request)
    drawn = {step.collected_s: step.samples for step in log.steps}
    quiet = [load for load in loads if load.client_share < _BUSY_CLIENT] or loads
    steady = [load for load in quiet if not load.is_burst]
    pairs = [pair for load in steady for pair in _pairs(load, by_length, drawn)]
    if not pairs:
        raise ConfigError("the step log has none of the requests that were sent: is it the log of this server?")
    few = [pair.back_s for pair in pairs if pair.drawn <= _FEW] or [min(pair.back_s for pair in pairs)]
    back_s = float(np.median(few))
    many = [(pair.back_s - back_s) / pair.drawn for pair in pairs if pair.drawn > _FEW]
    back_row_s = max(0.0, float(np.median(many))) if many else 0.0
    front_s = float(np.median([pair.front_s for pair in pairs]))
    gaps = [gap for load in quiet if load.is_burst for gap in _burst_gap(load, log.requests)]
    return Around(
        front_s=front_s + _mailbox_s(log),
        back_s=back_s,
        front_gap_s=float(np.median(gaps)) if gaps else 0.0,
        back_row_s=back_row_s,
        front_scatter_s=_shares([pair.front_s - front_s for pair in pairs]),
        back_scatter_s=_shares([pair.back_s - back_s - back_row_s * pair.drawn for pair in pairs]),
        turns_s=_shares([turn_s for load in steady for turn_s in _turns(load)]),
    )


def _mailbox_s(log: StepLogFile) -> float:
    """From the front to the loop. A loop that computes takes mail between steps, an idle one at once: so only requests that
    found it idle tell how long the way itself takes."""
    ends_s = [step.collected_s for step in log.steps]
    ways_s = [each.taken_s - each.arrived_s for each in log.requests]
    idle_s = [
        way_s for each, way_s in zip(log.requests, ways_s, strict=True) if _is_idle(log.steps, ends_s, each.arrived_s)
    ]
    return float(np.median(idle_s)) if idle_s else float(np.percentile(ways_s, 10))


def _is_idle(steps: Sequence[LoggedStep], ends_s: Sequence[float], at_s: float) -> bool:
    """Nothing is running or about to be: the step before has ended, the next one is planned later."""
    place = bisect_right(ends_s, at_s)
    return bool(place) and not steps[place - 1].running and (place == len(steps) or steps[place].planned_s > at_s)


def _turns(load: ProfileLoad) -> list[float]:
    """Of users, from the last token of an answer to their next request: the end of the stream, and the client itself. A client
    sends that request right after the answer's end, so it is the first that is sent after it."""
    starts_s = sorted(sample.start_s for sample in load.samples)
    turns = []
    for sample in load.samples:
        place = bisect_left(starts_s, sample.end_s)
        if place < len(starts_s) and sample.arrivals_s:
            turns.append(starts_s[place] - sample.arrivals_s[-1])
    return turns


def _shares(values: Sequence[float]) -> list[float]:
    """Means of equal shares, ascending: what a simulation draws from."""
    if not values:
        return []
    return [float(part.mean()) for part in np.array_split(np.sort(values), min(_NUM_SHARES, len(values)))]


def _pairs(load: ProfileLoad, by_length: dict[int, list[LoggedRequest]], drawn: dict[float, int]) -> list[_Pair]:
    """Requests are told apart by their lengths and moments; those that cannot be are left out."""
    pairs = []
    for sample in load.samples:
        if sample.prompt_tokens is None or not sample.arrivals_s:
            continue
        first_s = sample.arrivals_s[0]
        fitting = [
            request
            for request in by_length.get(sample.prompt_tokens, ())
            if sample.start_s <= request.arrived_s and request.first_s <= first_s
        ]
        if len(fitting) == 1:
            request = fitting[0]
            pairs.append(
                _Pair(request.arrived_s - sample.start_s, first_s - request.first_s, drawn.get(request.first_s, 1))
            )
    return pairs


def _burst_gap(load: ProfileLoad, requests: Sequence[LoggedRequest]) -> list[float]:
    """Of requests that were sent at once: between two of them when they arrive. Empty if there are too few."""
    first_s, last_s = min(each.start_s for each in load.samples), max(each.end_s for each in load.samples)
    arrived = sorted(request.arrived_s for request in requests if first_s <= request.arrived_s <= last_s)
    return [(arrived[-1] - arrived[0]) / (len(arrived) - 1)] if len(arrived) > 1 else []
