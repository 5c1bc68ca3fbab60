"""`LoggedLoop`: the loop with a clock at each of its stations, for the step log. The plain `Loop` has no part of it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from tonle.engine.loop import Loop
from tonle.engine.plan import Plan, StepResult
from tonle.engine.request import Request
from tonle.engine.run.runner import LaunchedStep
from tonle.engine.schedule import StepOutcome, StepWork, work_of
from tonle.engine.step_log import LoggedRequest, LoggedStep, StepLog


@dataclass(slots=True)
class _Moments:
    """Of a step that has not been published yet."""

    work: StepWork
    planned_s: float
    launching_s: float
    launched_s: float
    waited_s: float = 0.0
    collected_s: float = 0.0


class LoggedLoop(Loop):
    """Owns a step log."""

    def __init__(self, *args: Any, step_log: StepLog, **options: Any) -> None:
        super().__init__(*args, **options)
        self._step_log = step_log
        self._planned_s = 0.0
        self._flying: deque[_Moments] = deque()  # launched; as `_launched`
        self._collected: deque[_Moments] = deque()  # and read, but not published
        # Requests without a token so far: handle -> prompt tokens, when it arrived and when it was taken.
        self._silent: dict[int, tuple[int, float, float]] = {}

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._step_log.close()

    def _take_mail(self) -> bool:
        if not self._launched and self._scheduler.idle:
            self._step_log.flush()  # nothing else is to be done now
        changed = super()._take_mail()
        self._planned_s = time.monotonic()
        return changed

    def _submit(self, request: Request) -> None:
        self._silent[request.handle] = len(request.prompt), request.arrived_s, time.monotonic()
        super()._submit(request)

    def _cancel(self, handle: int) -> None:
        self._silent.pop(handle, None)
        super()._cancel(handle)

    def _launch(self, plan: Plan) -> None:
        launching_s = time.monotonic()
        before = len(self._launched)
        super()._launch(plan)
        launched_s = time.monotonic()
        if len(self._launched) > before:  # else it failed
            self._flying.append(_Moments(work_of(plan), self._planned_s, launching_s, launched_s))

    def _wait(self, launched: LaunchedStep) -> StepResult | None:
        waited_s = time.monotonic()
        result = super()._wait(launched)
        if result is not None:
            moments = self._flying.popleft()
            moments.waited_s, moments.collected_s = waited_s, time.monotonic()
            self._collected.append(moments)
        return result

    def _break(self, plan: Plan) -> None:
        self._flying.clear()
        super()._break(plan)

    def _publish(self, outcome: StepOutcome) -> None:
        ended = (*self._refused, *outcome.refused, *outcome.finished) if self._silent else ()
        super()._publish(outcome)
        if self._collected:
            self._log_step(self._collected.popleft(), outcome, time.monotonic())
        for handle in ended:
            self._silent.pop(handle, None)

    def _log_step(self, moments: _Moments, outcome: StepOutcome, published_s: float) -> None:
        running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
        self._step_log.write(
            LoggedStep(moments.planned_s, moments.launching_s, moments.launched_s, moments.waited_s, moments.collected_s,
                       published_s, *moments.work, running, waiting)
        )  # fmt: skip
        if self._silent:
            for handle in self._silent.keys() & outcome.handles:
                self._step_log.write(LoggedRequest(*self._silent.pop(handle), moments.collected_s))
