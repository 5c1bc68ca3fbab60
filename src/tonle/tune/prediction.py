"""`SimulatedServer`: what the simulator says of settings, as an `Outcome`. The seam between the search and `tonle.simulate`.

Does: turn settings into limits of a scheduler, a workload into a trace, a simulation into an outcome.
Does not: search or measure.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from tonle.bench import BenchOptions, Load
from tonle.bench.slo import Slo
from tonle.config.engine import EngineConfig
from tonle.config.serve import SETTINGS
from tonle.engine.schedule import SchedulerLimits, StepWork, Targets
from tonle.simulate.fleet import Fleet, fleet_of
from tonle.simulate.profile import Profile
from tonle.simulate.run import simulate
from tonle.simulate.trace import Trace
from tonle.tune.correction import Correction, corrected
from tonle.tune.objective import Outcome, outcome_of
from tonle.tune.space import Settings, simulated_part

SIMULATED_REQUESTS = 160  # of a trial, or four per user: enough for a p95, few enough for hundreds of trials
MOST_REQUESTS = 2000

TraceOf = Callable[[BenchOptions, int], Trace]


class Predict(Protocol):
    """What the search needs. Tests have one that only computes."""

    def outcome(self, settings: Settings, correction: Correction, load: Load | None = None) -> Outcome: ...
    def knows(self, settings: Settings) -> bool: ...
    def prefill_tokens_per_s(self, settings: Settings, correction: Correction) -> float: ...


class SimulatedServer:
    """One server of a profile under the workload of a benchmark."""

    def __init__(
        self,
        profile: Profile,
        bench: BenchOptions,
        slo: Slo,
        config: dict[str, Any],
        trace_of: TraceOf,
        *,
        seed: int = 0,
    ) -> None:
        """`config`: what the user's settings file says. `trace_of`: the first so many requests of the benchmark."""
        self._profile = profile
        self._bench = bench
        self._slo = slo
        self._config = config
        self._trace_of = trace_of
        self._seed = seed
        self._traces: dict[str, Trace] = {}

    def outcome(self, settings: Settings, correction: Correction, load: Load | None = None) -> Outcome:
        log, before = logging.getLogger("tonle.engine"), logging.getLogger("tonle.engine").level
        log.setLevel(logging.ERROR)  # the scheduler's warnings are for operators of a real server
        try:
            result = simulate(self._trace(load), self._fleet(settings, correction), seed=self._seed)
        finally:
            log.setLevel(before)
        return outcome_of([result.level(slo=self._slo, keep_rows=True)], self._slo)

    def knows(self, settings: Settings) -> bool:
        return simulated_part(settings) == settings

    def prefill_tokens_per_s(self, settings: Settings, correction: Correction) -> float:
        """Of full steps with nothing but one prompt."""
        tokens = self._limits(settings).max_num_batched_tokens
        work = StepWork(0, 1, tokens, 0, tokens * tokens // 2, 1)
        times = corrected(self._profile.times, correction)
        host_s = 0.0 if times.lag else times.host_s(work)
        return tokens / max(times.device_s(work) + host_s, 1e-9)

    def _fleet(self, settings: Settings, correction: Correction) -> Fleet:
        profile = msgspec.structs.replace(self._profile, times=corrected(self._profile.times, correction))
        limits = self._limits(settings)
        fleet = fleet_of(
            profile,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            long_prefill_tokens=limits.long_prefill_tokens,
        )
        one = dataclasses.replace(fleet.replicas[0], targets=_targets(self._engine(settings)))
        return dataclasses.replace(fleet, replicas=[one])

    def _engine(self, settings: Settings) -> EngineConfig:
        given = {**self._config, **simulated_part(settings)}
        fields = {
            SETTINGS[name].engine: SETTINGS[name].type.read(value)
            for name, value in given.items()
            if name in SETTINGS and SETTINGS[name].engine
        }
        fields.setdefault("max_batch_size", None)
        return EngineConfig(**{name: value for name, value in fields.items() if name is not None and name != "lora"})

    def _limits(self, settings: Settings) -> SchedulerLimits:
        """As `engine/build.py` makes them."""
        engine = self._engine(settings)
        rows, tokens = engine.batch_limits(gpu=self._profile.server.device == "cuda")
        cap = engine.long_prefill_token_threshold or max(1, tokens // (1 if engine.tunes_itself else 2))
        return self._profile.limits(max_num_seqs=rows, max_num_batched_tokens=tokens, long_prefill_tokens=cap)

    def _trace(self, load: Load | None) -> Trace:
        """Of the benchmark under `load`, with as many requests as a prediction takes."""
        options = self._bench
        if load is not None:
            users = (load.users,) if load.users is not None else (1,)
            options = dataclasses.replace(options, concurrency=users, rates=() if load.users else (load.value,))
        level = options.levels[0]
        if level.label not in self._traces:
            wanted = 4 * (level.users or 0) or int(20 * (level.rate or 0))
            requests = min(MOST_REQUESTS, max(SIMULATED_REQUESTS, wanted))
            self._traces[level.label] = self._trace_of(options, requests)
        return self._traces[level.label]


def _targets(engine: EngineConfig) -> Targets | None:
    """As `engine/build.py` makes them."""
    if not engine.tunes_itself:
        return None
    itl_s = None if engine.target_itl_ms is None else engine.target_itl_ms / 1e3
    ttft_s = None if engine.target_ttft_ms is None else engine.target_ttft_ms / 1e3
    return Targets(itl_s, ttft_s)
