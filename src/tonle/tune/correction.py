"""`Correction`: what measurements say about the model of step times, as one factor for steps and seconds around them.

Does: fit it, apply it to a profile's `FittedTimes`. Does not: measure or simulate; both are handed in.

A profile is taken in a minute under loads of its own; the server under the load that matters may be a few per cent slower or
faster, and more so on a shared machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

import msgspec

from tonle.simulate.fitted_times import Curve, FittedTimes
from tonle.tune.objective import Outcome
from tonle.tune.space import Settings

_ROUNDS = 3
_LEAST, _MOST = 0.1, 10.0  # of the factor: beyond it, the profile is of another machine


class Correction(msgspec.Struct, frozen=True, kw_only=True):
    step: float = 1.0  # times the steps' own
    front_s: float = 0.0  # on top of what lies around a step, for the first token
    error_before: float | None = None  # mean deviation of throughput, TTFT and TPOT, as a share
    error_after: float | None = None

    def __str__(self) -> str:
        return f"steps × {self.step:.2f}, first tokens {self.front_s * 1e3:+.0f} ms"


def corrected(times: FittedTimes, correction: Correction) -> FittedTimes:
    """Every part of a step times the factor; the first token's part after that."""
    factor = correction.step

    def curve(own: Curve) -> Curve:
        return msgspec.structs.replace(own, seconds=[factor * seconds for seconds in own.seconds])

    names = ("chunk_s", "decode_read_s", "prompt_read_s", "host_step_s", "host_row_s", "host_token_s", "host_mixed_s",
             "commit_step_s", "commit_row_s", "wake_s", "launch_large_s")  # fmt: skip
    return msgspec.structs.replace(
        times,
        decode=curve(times.decode),
        mixed=curve(times.mixed),
        draw=curve(times.draw),
        few_rows_read_s=None if times.few_rows_read_s is None else curve(times.few_rows_read_s),
        front_s=max(0.0, times.front_s + correction.front_s),
        **{name: factor * getattr(times, name) for name in names},
    )


CorrectedOutcomeOf = Callable[[Settings, Correction], Outcome]


def fit_correction(measured: Sequence[tuple[Settings, Outcome]], predict: CorrectedOutcomeOf) -> Correction:
    """The correction with which `predict` comes closest to what was measured; none if it cannot be improved."""
    best = Correction()
    predicted = [predict(settings, best) for settings, _ in measured]
    outcomes = [outcome for _, outcome in measured]
    before = error = _error(predicted, outcomes)
    current = best
    for _ in range(_ROUNDS):
        current = _next(current, predicted, outcomes)
        predicted = [predict(settings, current) for settings, _ in measured]
        if (now := _error(predicted, outcomes)) >= error:
            break
        best, error = current, now
    return msgspec.structs.replace(best, error_before=before, error_after=error)


def _next(current: Correction, predicted: Sequence[Outcome], measured: Sequence[Outcome]) -> Correction:
    """Steps by the ratio of times per token and of throughput, the first token by what is then left of its median."""
    ratios = []
    for ours, theirs in zip(predicted, measured, strict=True):
        if ours.tpot_ms and theirs.tpot_ms and min(ours.tpot_ms.p50, theirs.tpot_ms.p50) > 0:
            ratios.append(math.log(theirs.tpot_ms.p50 / ours.tpot_ms.p50))
        if ours.output_tokens_per_s > 0 and theirs.output_tokens_per_s > 0:
            ratios.append(math.log(ours.output_tokens_per_s / theirs.output_tokens_per_s))
    factor = math.exp(math.fsum(ratios) / len(ratios)) if ratios else 1.0
    missing_s = [
        (theirs.ttft_ms.p50 - ours.ttft_ms.p50 * factor) / 1e3
        for ours, theirs in zip(predicted, measured, strict=True)
        if ours.ttft_ms and theirs.ttft_ms
    ]
    return Correction(
        step=min(_MOST, max(_LEAST, current.step * factor)),
        front_s=current.front_s + (median(missing_s) if missing_s else 0.0),
    )


def _error(predicted: Sequence[Outcome], measured: Sequence[Outcome]) -> float:
    """Mean of the absolute logarithms of ratios: 0.05 is about 5 %."""
    found = []
    for ours, theirs in zip(predicted, measured, strict=True):
        pairs = [(ours.output_tokens_per_s, theirs.output_tokens_per_s)]
        for name in ("ttft_ms", "tpot_ms"):
            mine, other = getattr(ours, name), getattr(theirs, name)
            if mine is not None and other is not None:
                pairs.append((mine.p50, other.p50))
        found += [abs(math.log(a / b)) for a, b in pairs if a > 0 and b > 0]
    return math.fsum(found) / len(found) if found else math.inf
