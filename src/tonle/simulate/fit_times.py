"""From measured steps to `FittedTimes`.

Does: turn moments of the step log into seconds of device and host, fit them, say how good the fit is. Does not: measure.

The device's time is a sum of terms that never fall below zero: a curve over the rows of a decoding step, one over the tokens of a
step with prompts, and so much per chunk, per token read and per token drawn. A token read takes longer in a step of few rows,
whose attention cannot use the whole device. Errors count relative to the expected time, and absolutely rather than squared, so
that the fit passes through the median: one step in a hundred that took five times as long changes nothing of it. Such steps are
in `ratios`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tonle.engine.schedule.step_facts import StepWork
from tonle.engine.step_log import LoggedStep
from tonle.errors import ConfigError
from tonle.simulate.around import Around
from tonle.simulate.fitted_times import WITH_PROMPTS, Curve, FittedTimes, scatter_kind
from tonle.simulate.median_fit import Floats, median_fit

_NUM_RATIOS = 200
_LEAST_OF_KIND = 50  # steps, for a scatter of their own: of prompts alone, a minute on a CPU has fewer than 100
_NOTHING_AROUND = Around()
_WAITED_S = 1.5e-4  # a shorter wait: the device may have been done before the host asked
_HELD_UP_S = 2e-3  # a launch that takes so much longer than usual is not that of a graph
LEAST_STEPS = 60
LEAST_NEAR = 3  # steps between a size and the one before it, for the size to count
_DENSE = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320,
          384, 448, 512)  # fmt: skip
_COARSE = (1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 16384)
_FEW_ROWS = (1, 2, 3, 4, 6, 8)  # reads take longer up to the last but one; from the last on they do not
_DRAWN = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step: what it computed, and how long device and host took for it. None: its moments do not tell.

    The host reads a step late if it is still launching a large one behind it: then only the two together can be timed."""

    work: StepWork
    begin_s: float
    device_s: float | None
    host_s: float | None  # without the next
    launch_s: float = 0.0  # of the host, beside the device: launching what is no single graph
    commit_s: float = 0.0  # of `host_s`: from its tokens until mail has been taken
    is_first: bool = False  # after a time in which nothing was to be computed
    run: tuple[StepWork, ...] = ()  # this step and those right before it that were read late,
    run_s: float = 0.0  # and the device's time for all of them


def timed_steps(steps: Sequence[LoggedStep], lag: int) -> list[TimedStep]:
    """In their order. With `lag` 1 a step begins on the device when it is launched or the one ahead of it ends."""
    # A graph is one call. Of what is launched kernel by kernel the device begins the first as soon, while the host goes on.
    launches = [step.launched_s - step.launching_s for step in steps if not step.prompts]
    call_s = float(np.median(launches)) if launches and lag else 0.0

    def held_up(place: int) -> bool:
        """Its launch, kernel by kernel, held the host up, which read the step before it late."""
        if not lag or place == len(steps):
            return False
        return steps[place].launched_s - steps[place].launching_s - call_s > _HELD_UP_S

    timed: list[TimedStep] = []
    ahead_s = run_begin_s = 0.0
    late: tuple[StepWork, ...] = ()  # right before this step: those that were read late
    for place, step in enumerate(steps):
        launch_s = step.launched_s - step.launching_s - call_s if held_up(place) else 0.0
        ready_s = step.launched_s - launch_s if lag else step.launching_s  # the device can begin
        began_s = max(ready_s, ahead_s)
        was_awaited = not lag or step.collected_s - step.waited_s > _WAITED_S
        commit_s = step.published_s - step.collected_s
        # And the mail before the next plan. It is not asleep there: requests run.
        following = steps[place + 1 + lag] if place + 1 + lag < len(steps) and step.running else None
        if following is not None:
            commit_s += max(0.0, following.planned_s - step.published_s)
        timed.append(
            TimedStep(
                step.work,
                step.planned_s,
                step.collected_s - began_s if was_awaited and not late else None,
                None if following is None else ready_s - step.planned_s + commit_s,
                launch_s,
                commit_s,
                bool(place) and not steps[place - 1].running and step.planned_s > steps[place - 1].collected_s,
                (*late, step.work) if late and was_awaited else (),
                step.collected_s - run_begin_s,
            )
        )
        if was_awaited or not held_up(place + 1):
            late = ()
        else:
            run_begin_s = run_begin_s if late else began_s
            late = (*late, step.work)
        ahead_s = step.collected_s if lag else 0.0
    return timed


def fit_times(
    steps: Sequence[TimedStep], *, lag: int, sizes: dict[str, list[int]], around: Around = _NOTHING_AROUND
) -> FittedTimes:
    """`sizes`: as in the step log. Raises `ConfigError` if there are too few steps."""
    known = [step for step in steps if step.device_s is not None and step.device_s > 0]
    if len(known) < LEAST_STEPS:
        raise ConfigError(
            f"only {len(known)} steps could be timed; at least {LEAST_STEPS} are needed: measure for longer"
        )
    works = np.array([step.work for step in known], dtype=np.float64)  # (N, 6)
    seconds = np.array([step.device_s for step in known])
    runs = [step for step in steps if step.run and step.run_s > 0]
    run_works = np.array([work for step in runs for work in step.run], dtype=np.float64).reshape(-1, works.shape[1])
    model = _Features(np.concatenate([works, run_works]), sizes)
    columns = model.columns(works)
    # The time of a run is the sum of its steps' times: so are its columns.
    first = np.cumsum([0, *(len(step.run) for step in runs)])[:-1]
    run_columns = np.add.reduceat(model.columns(run_works), first) if runs else columns[:0]
    all_seconds = np.concatenate([seconds, [step.run_s for step in runs]])
    coefficients = median_fit(np.concatenate([columns, run_columns]), all_seconds)
    expected = columns @ coefficients
    decode, mixed, draw = model.curves(coefficients)
    more = len(model.few_rows) - 1
    chunk_s, decode_read_s, prompt_read_s = (
        float(value) for value in coefficients[-3 - more : len(coefficients) - more]
    )
    few_rows = [*(float(value) for value in coefficients[len(coefficients) - more :]), 0.0]
    no_graph = [each.launch_s for each in steps if each.work.rows + each.work.tokens > mixed.padded_to]
    return FittedTimes(
        lag=lag, **asdict(around), decode=decode, mixed=mixed, draw=draw,
        chunk_s=chunk_s, decode_read_s=decode_read_s, prompt_read_s=prompt_read_s,
        few_rows_read_s=Curve(model.few_rows, few_rows) if any(few_rows) else None,
        **_fit_host(steps),
        launch_large_s=float(np.median(no_graph)) if no_graph and mixed.padded_to else 0.0,
        ratios=_ratios(seconds, expected), kind_ratios=_by_kind(known, seconds, expected),
    )  # fmt: skip


class _Features:
    """Columns of the fit: sizes of the three curves; chunk, decode reads, prompt reads; decode reads of few rows."""

    def __init__(self, works: Floats, sizes: dict[str, list[int]]) -> None:
        rows, prompts, tokens, samples = works[:, 0], works[:, 1], works[:, 2], works[:, 5]
        is_mixed = prompts > 0
        decode, mixed, head = (sizes.get(name, []) for name in ("decode", "mixed", "head"))
        self.decode = _Knots(rows[~is_mixed], decode, _DENSE, rising=not decode)
        self.mixed = _Knots((rows + tokens)[is_mixed], mixed, _COARSE, rising=not mixed)
        self.draw = _Knots(samples[is_mixed], head, _DRAWN, rising=True)
        seen = _shares(rows[~is_mixed], _FEW_ROWS).sum(axis=0)
        self.few_rows = [size for size, near in zip(_FEW_ROWS[:-1], seen[:-1], strict=True) if near >= LEAST_NEAR]
        self.few_rows.append(_FEW_ROWS[-1])

    def columns(self, works: Floats) -> Floats:
        rows, prompts, tokens, decode_reads, prompt_reads, samples = works.T
        is_mixed = (prompts > 0)[:, None]
        return np.hstack(
            [
                self.decode.columns(rows) * ~is_mixed,
                self.mixed.columns(rows + tokens) * is_mixed,
                self.draw.columns(samples)[:, 1:] * is_mixed,  # the first would be the same as that of `mixed`
                np.stack([prompts, decode_reads, prompt_reads], axis=1),
                _shares(rows, self.few_rows)[:, :-1] * (decode_reads[:, None] * ~is_mixed),
            ]
        )

    def curves(self, coefficients: Floats) -> tuple[Curve, Curve, Curve]:
        first = len(self.decode.sizes)
        second = first + len(self.mixed.sizes)
        third = second + len(self.draw.sizes) - 1
        return (
            self.decode.curve(coefficients[:first]),
            self.mixed.curve(coefficients[first:second]),
            self.draw.curve(np.concatenate([[0.0], coefficients[second:third]])),
        )


def _shares(values: Floats, sizes: Sequence[int]) -> Floats:
    """(N, sizes): how much of each of the two sizes that a value lies between; all of the first or last one, if it is outside."""
    return np.stack([np.interp(values, sizes, each) for each in np.eye(len(sizes))], axis=1)


class _Knots:
    """The sizes between which a curve is straight. What was not measured near a size cannot tell it from its neighbours: only the
    others are fitted (`sizes`); the rest lies on the line between them, or costs what the first of them costs.
    `rising`: larger sizes cost no less. Not so between graphs: kernels of one may suit the device less than those of the next."""

    def __init__(self, measured: Floats, ladder: list[int], usual: Sequence[int], *, rising: bool) -> None:
        self._ladder = ladder
        self._rising = rising
        most = int(self._padded(measured).max(initial=1))
        end = ladder[-1] if ladder else 0
        candidates = [*self._ladder, *(size for size in usual if size > end)]
        self._all = [size for size in candidates if size < most] + [most]
        seen = np.bincount(np.searchsorted(self._all, self._padded(measured)), minlength=len(self._all))
        ends = (0, len(self._all) - 1) if rising else (len(self._all) - 1,)
        self.sizes = [size for place, size in enumerate(self._all) if seen[place] >= LEAST_NEAR or place in ends]

    def _padded(self, values: Floats) -> Floats:
        """Up to the end of the ladder each value counts as the next size of it."""
        if not self._ladder:
            return values
        ladder = np.array(self._ladder, dtype=np.float64)
        inside = values <= ladder[-1]
        places = np.minimum(np.searchsorted(ladder, values), len(ladder) - 1)
        return np.where(inside, ladder[places], values)

    def columns(self, values: Floats) -> Floats:
        """(N, sizes). Rising: 1 in the first column; in each other one, how far the value is from one size to the next, 0 to 1.
        Else, up to the last graph, the shares of the two sizes that the value lies between."""
        values = self._padded(values)
        risen = [np.ones(len(values))]
        for low, high in pairwise(self.sizes):
            risen.append(np.clip((values - low) / (high - low), 0.0, 1.0))
        columns = np.stack(risen, axis=1)
        if not self._rising:
            graphs = sum(size in self._ladder for size in self.sizes)  # beyond them it rises
            columns[:, : graphs - 1] -= columns[:, 1:graphs]
        return columns

    def curve(self, coefficients: Floats) -> Curve:
        seconds = self.columns(np.array(self._all, dtype=np.float64)) @ coefficients
        padded_to = max((size for size in self._all if size in self._ladder), default=0)
        return Curve(list(self._all), [float(value) for value in seconds], padded_to)


def _fit_host(steps: Sequence[TimedStep]) -> dict[str, Any]:
    """The fields of `FittedTimes` that are about the host. What lies before a launch and what follows a step's tokens is fitted
    apart, so that neither falls below zero."""
    known = [step for step in steps if step.host_s is not None and step.host_s > 0]
    usual, first = [step for step in known if not step.is_first], [step for step in known if step.is_first]
    if not usual:
        usual, first = first, []
    if not usual:
        return {"host_step_s": 0.0, "host_row_s": 0.0, "host_token_s": 0.0}
    columns, before_s, commit_s = _host_columns(usual)
    before = median_fit(columns, before_s)
    commit = median_fit(columns[:, :2], commit_s)
    wake_s = 0.0
    if first:
        columns, before_s, _ = _host_columns(first)
        wake_s = max(0.0, float(np.median(before_s - columns @ before)))
    return {
        "host_step_s": float(before[0] + commit[0]),
        "host_row_s": float(before[1] + commit[1]),
        "host_token_s": float(before[2]),
        "host_mixed_s": float(before[3]),
        "commit_step_s": float(commit[0]),
        "commit_row_s": float(commit[1]),
        "wake_s": wake_s,
    }


def _host_columns(steps: Sequence[TimedStep]) -> tuple[Floats, Floats, Floats]:
    """Per step: 1, rows and chunks, tokens of chunks, whether it has any; seconds before the launch; seconds after the tokens."""
    works = np.array([step.work for step in steps], dtype=np.float64)
    columns = np.stack([np.ones(len(works)), works[:, 0] + works[:, 1], works[:, 2], works[:, 1] > 0], axis=1)
    commit_s = np.array([step.commit_s for step in steps])
    return columns, np.array([step.host_s for step in steps]) - commit_s, commit_s


def _by_kind(steps: Sequence[TimedStep], seconds: Floats, expected: Floats) -> dict[int, list[float]]:
    kinds = np.array([scatter_kind(step.work) for step in steps])
    chosen = [(int(kind), kinds == kind) for kind in np.unique(kinds)] + [(WITH_PROMPTS, kinds < WITH_PROMPTS)]
    return {kind: _ratios(seconds[own], expected[own]) for kind, own in chosen if own.sum() >= _LEAST_OF_KIND}


def _ratios(seconds: Floats, expected: Floats) -> list[float]:
    """Of equal shares of the expected time, ascending. Their mean is that of all of it: it keeps the sum of all times."""
    order = np.argsort(seconds / expected)
    expected_until, until = (np.concatenate([[0.0], np.cumsum(values[order])]) for values in (expected, seconds))
    count = min(_NUM_RATIOS, len(order))
    ends = np.linspace(0.0, expected_until[-1], count + 1)
    return [float(share) for share in np.diff(np.interp(ends, expected_until, until)) * count / expected_until[-1]]
