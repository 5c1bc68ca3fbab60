"""`SimulationResult`: what came of a simulation, in the terms of a benchmark.

Does: hold samples and what replicas did; make a level's report and the cost from them. Does not: print.
"""

from __future__ import annotations

import msgspec

from tonle.bench.measure import Circumstances, LevelReport, Sample, report_level
from tonle.bench.slo import Slo


class ReplicaReport(msgspec.Struct, frozen=True, kw_only=True):
    """One replica over a simulation."""

    name: str
    role: str
    length: str
    begin_s: float  # when it could take requests first
    up_s: float  # how long it could: until it was removed, died, or all was over
    requests: int  # that it answered, prefill legs too
    steps: int
    rows_per_step: float
    busy_share: float  # of `up_s` in which the device computed
    output_tokens: int
    prompt_tokens: int  # computed, not counting cached ones
    cached_tokens: int
    preemptions: int
    max_running: int
    max_kv_usage: float  # 0..1
    cost: float  # in the currency of `price_per_hour`: from the moment it was asked for until it was removed


class SimulationResult(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    users: int | None  # closed loop
    rate: float | None  # open loop: requests per second that came
    samples: list[Sample]
    replicas: list[ReplicaReport]
    counts: list[tuple[float, int]]  # when so many replicas could take requests, from then on
    duration_s: float  # virtual: until the last answer ended
    wall_s: float  # that the simulation took

    @property
    def speed(self) -> float:
        """Virtual seconds per second."""
        return self.duration_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def cost(self) -> float:
        return sum(replica.cost for replica in self.replicas)

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Of output tokens that callers got. None: there are none, or no price is known."""
        tokens = sum(sample.output_tokens for sample in self.samples if sample.failure is None)
        return self.cost * 1e6 / tokens if tokens and self.cost else None

    def level(self, label: str | None = None, slo: Slo | None = None, *, keep_rows: bool = False) -> LevelReport:
        circumstances = Circumstances(
            label=self.label if label is None else label, concurrency=self.users, rate=self.rate, slo=slo or Slo()
        )
        return report_level(self.samples, circumstances, keep_rows=keep_rows)
