"""What lies around steps: from the client to the loop, and back.

Does: find the requests of the step log among those that the client sent, and take the differences of their moments: both read the
same clock. Does not: know steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tonle.engine.step_log import LoggedRequest, StepLogFile
from tonle.errors import ConfigError
from tonle.simulate.profile_loads import ProfileLoad

_FEW = 2  # tokens drawn in a step: what lies behind it is `back_s` alone
_BUSY_CLIENT = 0.7  # a client that computes for so much of the time is late by itself


@dataclass(frozen=True, slots=True)
class Around:
    """Seconds, as `FittedTimes` has them."""

    front_s: float = 0.0
    back_s: float = 0.0
    front_gap_s: float = 0.0
    back_row_s: float = 0.0


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
    pairs = [pair for load in quiet if not load.is_burst for pair in _pairs(load, by_length, drawn)]
    if not pairs:
        raise ConfigError("the step log has none of the requests that were sent: is it the log of this server?")
    few = [pair.back_s for pair in pairs if pair.drawn <= _FEW] or [min(pair.back_s for pair in pairs)]
    back_s = float(np.median(few))
    many = [(pair.back_s - back_s) / pair.drawn for pair in pairs if pair.drawn > _FEW]
    # Every request waits for the loop to take it; the quickest of them waited for nothing but the way there.
    on_the_way_s = float(np.percentile([request.taken_s - request.arrived_s for request in log.requests], 10))
    gaps = [gap for load in quiet if load.is_burst for gap in _burst_gap(load, log.requests)]
    return Around(
        front_s=float(np.median([pair.front_s for pair in pairs])) + on_the_way_s,
        back_s=back_s,
        front_gap_s=float(np.median(gaps)) if gaps else 0.0,
        back_row_s=max(0.0, float(np.median(many))) if many else 0.0,
    )


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
