"""The last stage: a measurement at the load that the simulation calls safe.

Does: measure there, and at a lower load if the SLO does not hold. Does not: search (`safe_load.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from tonle.bench import Load
from tonle.tune.measurer import Measure, NotMeasured
from tonle.tune.objective import Goal, one_line, outcome_of
from tonle.tune.safe_load import LoadKind, SafeLoad
from tonle.tune.space import Settings, describe
from tonle.tune.stage_measured import SAFE_ROUND
from tonle.tune.state import Measurement, TuneDir
from tonle.tune.verdict import Verdict

STEP_DOWN = 0.85  # of a load that a measurement did not confirm
TRIES = 2

Say = Callable[[str], None]


class SafeLoadCheck:
    """Owns the measurements at the safe load."""

    def __init__(self, folder: TuneDir, measure: Measure, goal: Goal, say: Say, *, requests: int) -> None:
        self._folder = folder
        self._measure = measure
        self._goal = goal
        self._say = say
        self._requests = requests

    def confirm(self, best: Settings, safe: SafeLoad, *, fits: Callable[[float], bool]) -> SafeLoad:
        """What is known after measuring. `fits`: whether there is time for a measurement of so many seconds."""
        for attempt in range(TRIES):
            if safe.value is None or safe.outcome is None:
                return safe
            users = int(safe.value) if safe.kind == "concurrency" else 0
            requests = max(self._requests, 2 * users)
            if not fits(requests / max(safe.outcome.requests_per_s, 1e-6)):
                self._say(f"no time is left to measure at the safe load, {safe.text}")
                return safe
            self._say(f"measuring at the safe load, {safe.text}: {describe(best)}")
            try:
                run = self._at(best, safe, SAFE_ROUND + attempt, requests)
            except NotMeasured:
                return safe
            outcome = outcome_of([run.level], self._goal.slo)
            self._say(f"  {one_line(outcome, self._goal)}")
            if outcome.holds:
                return msgspec.structs.replace(safe, outcome=outcome, confirmed=True)
            lower = safe.value * STEP_DOWN
            lower = float(math.floor(lower)) if safe.kind == "concurrency" else lower
            safe = msgspec.structs.replace(safe, value=lower or None, confirmed=None, stepped_down=True)
        return safe

    def _at(self, settings: Settings, safe: SafeLoad, number: int, requests: int) -> Measurement:
        """Measured now, or by an earlier run of the same command."""
        load = Load(safe.kind, safe.value or 1.0)
        for run in self._folder.of(settings, "safe"):
            if run.tag.round == number and run.level.label == load.label:
                return run
        return self._measure.measure(settings, "safe", number, requests=requests, load=load)


def measured_safe_load(load: Load, verdict: Verdict) -> SafeLoad:
    """Without a simulator only the load that was measured can be called safe."""
    outcome = verdict.tuned if verdict.is_better else verdict.default
    kind: LoadKind = "concurrency" if load.kind == "concurrency" else "rate"
    if not outcome.holds:
        return SafeLoad(kind=kind, value=None, outcome=None, source="measured")
    return SafeLoad(kind=kind, value=load.value, outcome=outcome, source="measured", confirmed=True)
