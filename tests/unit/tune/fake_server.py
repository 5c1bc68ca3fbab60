"""A server that is a formula: what settings come to, in virtual time, so that the search can be tested in milliseconds.

More sequences make each step longer and the queue shorter; larger steps bring first tokens earlier and make gaps longer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from tonle.bench import BenchOptions, BenchReport, Load, Sample
from tonle.bench.measure import Circumstances, LevelReport, report_level
from tonle.bench.report import describe_environment, describe_settings
from tonle.bench.slo import Slo
from tonle.tune.correction import Correction
from tonle.tune.measurer import NotMeasured
from tonle.tune.objective import Goal, Outcome, outcome_of
from tonle.tune.results import TuneResult
from tonle.tune.space import Settings, key_of
from tonle.tune.state import Inputs, Measurement, Stage, Tag, TuneDir

USERS = 16
OUTPUT = 20  # tokens of each answer
SLO = Slo.parse(["ttft-p95=2s", "itl-p99=225ms"])


def level(
    settings: Settings, *, users: int = USERS, requests: int = 64, seed: int = 0, slow: float = 1.0, noise: float = 0.0,
    slo: Slo = SLO,
) -> LevelReport:  # fmt: skip
    """Users in turns: each waits for a place, then for its prompt, then for its tokens."""
    rng = random.Random(seed)
    rows = min(users, int(settings.get("max_num_seqs", 32)))
    tokens = int(settings.get("max_num_batched_tokens", 512))
    faster = 0.7 if settings.get("kv_cache_dtype") == "int8" else 1.0
    step_s = 5 * slow * faster * (0.004 + 0.002 * rows + 0.00004 * tokens)
    prompt_s = 5 * slow * faster * (0.02 + 10.0 / tokens)
    wait_s = step_s * OUTPUT * max(0, users - rows) / rows
    samples = []
    for index in range(requests):
        factor = 1.0 + noise * rng.uniform(-1, 1)
        start_s = (index // users) * (wait_s + prompt_s + OUTPUT * step_s)
        first_s = start_s + (wait_s + prompt_s) * factor
        arrivals = [first_s + place * step_s * factor for place in range(OUTPUT)]
        samples.append(
            Sample(
                index=index, start_s=start_s, end_s=arrivals[-1], arrivals_s=arrivals, last_s=arrivals[-1], prompt_tokens=100,
                output_tokens=OUTPUT,
            )
        )  # fmt: skip
    circumstances = Circumstances(label=f"concurrency {users}", concurrency=users, slo=slo)
    return report_level(samples, circumstances, keep_rows=True)


def report(made: LevelReport) -> BenchReport:
    return BenchReport(
        started_at="2026-01-01T00:00:00", url="http://127.0.0.1:1", model="fake", prompt_kind="ids",
        settings=describe_settings(BenchOptions()), environment=describe_environment("none"), levels=[made], notes=[],
        interrupted=False,
    )  # fmt: skip


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeMeasure:
    """Stands for `Measurer`. `stop_after`: Ctrl-C comes in the measurement after so many."""

    folder: TuneDir
    clock: Clock
    slow: float = 1.0  # than the simulation says
    noise: float = 0.02
    startup_s: float = 8.0
    stop_after: int | None = None
    broken: tuple[str, ...] = ()  # settings with which no server starts
    slo: Slo = SLO
    starts: int = 0
    calls: list[tuple[str, Stage, int]] = field(default_factory=list)
    running: str | None = None
    always_starts: bool = False

    def measure(
        self, settings: Settings, stage: Stage, round: int, *, requests: int | None, load: Load | None = None
    ) -> Measurement:
        if self.stop_after is not None and len(self.calls) >= self.stop_after:
            raise KeyboardInterrupt
        key = key_of(settings)
        starts = self.always_starts or key != self.running
        self.clock.now_s += self.startup_s if starts else 0.0
        self.starts += starts
        self.running = key
        state = self.folder.state
        state.startup_s = self.startup_s
        if key in self.broken:
            state.failed[key] = "it did not start"
            raise NotMeasured(settings, "it did not start")
        users = USERS if load is None else int(load.value)
        seed = round * 100 + len(self.calls)
        made = level(
            settings, users=users, requests=requests or 64, seed=seed, slow=self.slow, noise=self.noise, slo=self.slo
        )
        self.clock.now_s += made.duration_s
        self.calls.append((key, stage, round))
        return self.folder.add(Tag(server=settings, stage=stage, round=round, startup_s=self.startup_s), report(made))

    def close(self) -> None:
        self.running = None


@dataclass
class FakePredict:
    """Stands for `SimulatedServer`: the same formula, and not as slow as the server is."""

    clock: Clock
    slo: Slo = SLO
    seconds: float = 0.05  # that a simulation takes

    def outcome(self, settings: Settings, correction: Correction, load: Load | None = None) -> Outcome:
        self.clock.now_s += self.seconds
        users = USERS if load is None else int(load.value)
        made = level(settings, users=users, requests=max(64, 2 * users), slow=correction.step, slo=self.slo)
        return outcome_of([made], self.slo)

    def knows(self, settings: Settings) -> bool:
        return "kv_cache_dtype" not in settings

    def prefill_tokens_per_s(self, settings: Settings, correction: Correction) -> float:
        return 1000.0


def inputs() -> Inputs:
    return Inputs(
        model=None, server="tonle", command=None, workload={}, load=f"concurrency {USERS}", slo=str(SLO), maximize="goodput",
        allow=[], values={}, config={}, profile=None, seed=0,
    )  # fmt: skip


def folder_at(path: Path) -> TuneDir:
    return TuneDir.open(path, inputs(), "2026-01-01T00:00:00")


def result_for(settings: Settings) -> TuneResult:
    """With nothing but settings."""
    return TuneResult(
        tonle="0", inputs=inputs(), goal=Goal(SLO), settings=settings, compared=None, evidence="made up", verdict=None,
        candidates=[], trials=[],
        correction=None, safe=None, limits=None, failed={}, notes=[], command=None, spent_s=0.0, interrupted=False,
    )  # fmt: skip
