"""The last stage: a measurement at the load that the simulation calls safe.

Does: measure there, and at a lower load if it is too much. Does not: search (`safe_load.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import msgspec

from tonle.bench import Load
from tonle.bench.sweep import SweepKind
from tonle.tune.measurer import Measure, NotMeasured
from tonle.tune.objective import Goal, Outcome, one_line, outcome_of
from tonle.tune.safe_load import OutcomeAt, SafeLoad, is_safe
from tonle.tune.space import Settings, describe
from tonle.tune.stage_measured import SAFE_ROUND
from tonle.tune.state import Measurement, TuneDir
from tonle.tune.verdict import Verdict

STEP_DOWN = 0.85  # of a load that a measurement did not confirm
TRIES = 2

Say = Callable[[str], None]


class SafeLoadCheck:
    """Owns the measurements at the safe load."""

    def __init__(self, folder: TuneDir, measure: Measure, goal: Goal, say: Say, *, load: Load, requests: int) -> None:
        """`load`: of the tuning; its gaps between requests are those of the measurements."""
        self._folder = folder
        self._measure = measure
        self._goal = goal
        self._say = say
        self._load = load
        self._requests = requests

    def confirm(
        self, best: Settings, safe: SafeLoad, outcome_at: OutcomeAt, *, fits: Callable[[float], bool]
    ) -> SafeLoad:
        """What is known after measuring. `outcome_at`: what the simulation says of a load. `fits`: whether there is time for a
        measurement of so many seconds."""
        for attempt in range(TRIES):
            if safe.value is None or safe.outcome is None:
                return safe
            users = int(safe.value) if safe.kind == "concurrency" else 0
            requests = max(self._requests, 2 * users)
            load = replace(self._load, value=safe.value)
            run = self._earlier(best, load, SAFE_ROUND + attempt)
            if run is None:
                if not fits(requests / max(safe.outcome.requests_per_s, 1e-6)):
                    self._say(f"no time is left to measure at the safe load, {safe.text}")
                    return safe
                self._say(f"measuring at the safe load, {safe.text}: {describe(best)}")
                try:
                    run = self._measure.measure(best, "safe", SAFE_ROUND + attempt, requests=requests, load=load)
                except NotMeasured:
                    return safe
            outcome = outcome_of([run.level], self._goal.slo)
            self._say(f"  {one_line(outcome, self._goal)}")
            if is_safe(outcome):
                return msgspec.structs.replace(safe, outcome=outcome, confirmed=True)
            lower = safe.value * STEP_DOWN
            lower = float(math.floor(lower)) if safe.kind == "concurrency" else lower
            safe = msgspec.structs.replace(
                safe, value=lower or None, outcome=outcome_at(lower) if lower else None, stepped_down=True
            )
        return safe

    def _earlier(self, settings: Settings, load: Load, number: int) -> Measurement | None:
        """Measured by an earlier run of the same command."""
        runs = (run for run in self._folder.of(settings, "safe") if run.tag.round == number)
        return next((run for run in runs if run.level.label == load.label), None)


def below(load: float, measured: Outcome, outcome_at: OutcomeAt) -> OutcomeAt:
    """What the simulation says of loads below `load`, where `measured` was too much; from there on it is not believed."""
    return lambda value: measured if value >= load else outcome_at(value)


def measured_safe_load(load: Load, verdict: Verdict) -> SafeLoad:
    """Without a simulator only the load that was measured can be called safe."""
    outcome = verdict.best
    kind: SweepKind = "concurrency" if load.kind == "concurrency" else "rate"
    if not is_safe(outcome):
        return SafeLoad(kind=kind, value=None, outcome=None, source="measured")
    return SafeLoad(kind=kind, value=load.value, outcome=outcome, source="measured", confirmed=True)
