"""Spells in which a machine was slow, because others used it.

Does: find steps that took longer than others of their kind did at other times. Does not: know why, or change a time.

A virtual machine shares cores and memory with others. For half a minute all its steps may take 1.4 times as long, which says
nothing of the server, and will not come again at the same moment. What is left are the steps of an undisturbed machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tonle.simulate.fit_times import TimedStep
from tonle.simulate.fitted_times import FittedTimes

_WINDOW_S = 2.0
_SLOW = 1.12  # times what a window of this kind of steps usually takes: a spell
_LEAST_WINDOWS = 4  # of a kind, to tell what is usual


def kind_of(step: TimedStep) -> str:
    """In the words of a profile: what it computes, and for about how many rows."""
    work = step.work
    if not work.prompts:
        power = max(0, (work.rows - 1).bit_length())
        low, high = (work.rows, work.rows) if work.rows <= 2 else (2 ** (power - 1) + 1, 2**power)
        return f"decode, {low:3d} rows" if low == high else f"decode, {low:3d} to {high} rows"
    return "prompts beside rows" if work.rows else "prompts alone"


def undisturbed(steps: Sequence[TimedStep], times: FittedTimes) -> list[TimedStep]:
    """Without the steps of spells. `times`: fitted to all of them. Of each kind at least half of the windows stay, so a kind
    that the fit misses as a whole is no spell."""
    windows: dict[str, dict[int, list[int]]] = {}
    for place, step in enumerate(steps):
        if step.device_s is not None:
            windows.setdefault(kind_of(step), {}).setdefault(int(step.begin_s / _WINDOW_S), []).append(place)
    slow: set[int] = set()
    for by_window in windows.values():
        ratios = [_ratio([steps[place] for place in places], times) for places in by_window.values()]
        if len(ratios) < _LEAST_WINDOWS:
            continue
        limit = _SLOW * float(np.median(ratios))
        for ratio, places in zip(ratios, by_window.values(), strict=True):
            if ratio > limit:
                slow.update(places)
    return [step for place, step in enumerate(steps) if place not in slow]


def _ratio(steps: Sequence[TimedStep], times: FittedTimes) -> float:
    """Measured to expected, of all of them together."""
    return sum(step.device_s or 0.0 for step in steps) / sum(times.device_s(step.work) for step in steps)
