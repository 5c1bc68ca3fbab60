"""Spells in which a machine was slow, because others used it.

Does: leave out steps of the time in which the machine is known to have been slow (`pace.py`); find steps that took longer than
others of their kind did at other times. Does not: know why, or change a time.

A virtual machine shares cores and memory with others. For half a minute its steps may take 1.4 times as long, which says
nothing of the server, and will not come again at the same moment. What is left are the steps of an undisturbed machine.

Steps with prompts are looked at apart from those without. The former compute, and take longer where others compute on the same
cores; a step of few rows waits for memory, and may notice nothing of that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from tonle.simulate.fit_times import LEAST_STEPS, TimedStep
from tonle.simulate.fitted_times import FittedTimes
from tonle.simulate.median_fit import Floats
from tonle.simulate.pace import Span

_WINDOW_S = 2.0  # of a window, at least,
_WINDOW_STEPS = {True: 8, False: 16}  # with so many steps with prompts, or without
_SLOW = 1.12  # times what windows usually take: a spell
_LEAST_WINDOWS = 4  # to tell what is usual
LEAST_OF_KIND = 20  # steps with prompts, or without: fewer say little of what such steps take
_LEAST_S = 1e-7  # that a step is expected to take


def kind_of(step: TimedStep) -> str:
    """In the words of a profile: what it computes, and for about how many rows."""
    work = step.work
    if not work.prompts:
        power = max(0, (work.rows - 1).bit_length())
        low, high = (work.rows, work.rows) if work.rows <= 2 else (2 ** (power - 1) + 1, 2**power)
        return f"decode, {low:3d} rows" if low == high else f"decode, {low:3d} to {high} rows"
    return "prompts beside rows" if work.rows else "prompts alone"


def outside(steps: Sequence[TimedStep], slow: Sequence[Span]) -> list[TimedStep]:
    """Without those that were computed, in part at least, in one of these spans, which are ascending."""
    ends_s = [span.end_s for span in slow]

    def is_outside(step: TimedStep) -> bool:
        place = bisect_right(ends_s, step.begin_s)  # the first span that ends after it begins
        end_s = step.begin_s + (step.host_s or 0.0) + (step.device_s or 0.0)
        return place == len(slow) or slow[place].begin_s >= end_s

    return _enough(steps, [is_outside(step) for step in steps])


def _enough(steps: Sequence[TimedStep], is_left: Sequence[bool]) -> list[TimedStep]:
    """Too few steps of an undisturbed machine are worse than many of a slow one: of steps with prompts, and of those without."""
    keeps_all = {kind: _are_few(steps, is_left, with_prompts=kind) for kind in (True, False)}
    left = [step for step, stays in zip(steps, is_left, strict=True) if stays or keeps_all[bool(step.work.prompts)]]
    return left if _num_timed(left) >= LEAST_STEPS else list(steps)


def _are_few(steps: Sequence[TimedStep], is_left: Sequence[bool], *, with_prompts: bool) -> bool:
    """Whether less than half of these steps are left, or less than say what such steps take."""
    own = [place for place, step in enumerate(steps) if bool(step.work.prompts) is with_prompts]
    num_left = _num_timed([steps[place] for place in own if is_left[place]])
    return num_left < max(LEAST_OF_KIND, _num_timed([steps[place] for place in own]) // 2)


def _num_timed(steps: Sequence[TimedStep]) -> int:
    return sum(step.device_s is not None for step in steps)


def undisturbed(steps: Sequence[TimedStep], times: FittedTimes, stages: Sequence[int]) -> list[TimedStep]:
    """Without the steps of spells. `times`: fitted to all of them. `stages`: of each step, the load that was sent, which is sent
    again at another time. A step counts relative to others of its kind in that stage, so what the fit misses as a whole is no
    spell; a window by its median, so single steps that were held up stay."""
    timed = [place for place, step in enumerate(steps) if step.device_s]
    ratios = _relative_to_kind([steps[place] for place in timed], times, [stages[place] for place in timed])
    slow: set[int] = set()
    for with_prompts in (True, False):
        chosen = [place for place, index in enumerate(timed) if bool(steps[index].work.prompts) is with_prompts]
        begins_s = [steps[timed[place]].begin_s for place in chosen]
        after = [*(timed[place] for place in chosen), len(steps)]  # places among all steps
        for first, end in _slow(ratios[chosen], _windows(begins_s, _WINDOW_STEPS[with_prompts])):
            # Those in between, too, that could not be timed one by one: several of them are timed together.
            inside = range(after[first], after[end])
            slow.update(place for place in inside if bool(steps[place].work.prompts) is with_prompts)
    return _enough(steps, [place not in slow for place in range(len(steps))])


def _slow(ratios: Floats, windows: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that were slower than the others."""
    if len(windows) < _LEAST_WINDOWS:
        return []
    medians = [float(np.median(ratios[first:end])) for first, end in windows]
    limit = _SLOW * float(np.median(medians))
    return [window for middle, window in zip(medians, windows, strict=True) if middle > limit]


def _relative_to_kind(steps: Sequence[TimedStep], times: FittedTimes, stages: Sequence[int]) -> Floats:
    """Measured to expected, of each, to the median of its kind and stage."""
    ratios = np.array([(step.device_s or 0.0) / max(times.device_s(step.work), _LEAST_S) for step in steps])
    groups: dict[tuple[str, int], list[int]] = {}
    for place, (step, stage) in enumerate(zip(steps, stages, strict=True)):
        groups.setdefault((kind_of(step), stage), []).append(place)
    for places in groups.values():
        ratios[places] /= np.median(ratios[places])
    return ratios


def _windows(begins_s: Sequence[float], least_steps: int) -> list[tuple[int, int]]:
    """From one step up to another, not included. Steps at the end that are too few are of the last window."""
    windows, first = [], 0
    for place, begin_s in enumerate(begins_s):
        if place - first >= least_steps and begin_s - begins_s[first] >= _WINDOW_S:
            windows.append((first, place))
            first = place
    if windows:
        windows[-1] = (windows[-1][0], len(begins_s))
    return windows
