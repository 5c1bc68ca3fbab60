"""Steps without a model: the real scheduler and the real controller, with a clock that a formula moves on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import Plan, StepResult
from tonle.engine.request import Request, ResolvedConfig
from tonle.engine.schedule import Controller, Scheduler, SchedulerLimits, StepNotes, facts_of
from tonle.engine.schedule.limits import TunedLimits
from tonle.telemetry.time_spent import TimeSpent


def limits(**changes: object) -> SchedulerLimits:
    """A small machine: 512 tokens a step, 32 rows."""
    settings: dict[str, object] = {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 512,
        "context_length": 4096,
        "block_size": 16,
        "long_prefill_tokens": 512,
        **changes,
    }
    return SchedulerLimits(**settings)  # type: ignore[arg-type]


@dataclass
class Machine:
    """What a step takes, seconds. `noise` is the relative spread, `hiccups` the share of steps that take thrice as long.
    The first `num_cold` steps of each kind (decoding, prompts, both) take 20 times as long, and each one `slower` times."""

    fixed_s: float = 0.006
    row_s: float = 0.001
    token_s: float = 0.0008
    read_s: float = 1e-6
    noise: float = 0.0
    hiccups: float = 0.0
    num_cold: int = 0
    slower: float = 1.0
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    seen: Counter[frozenset[bool]] = field(default_factory=Counter)  # steps of each kind

    def seconds(self, plan: Plan) -> float:
        total = self.fixed_s
        for start, chunk in zip(plan.starts, plan.chunks, strict=True):
            count = 1 if chunk is None else len(chunk)
            total += count * (self.token_s if count > 1 else self.row_s)
            total += self.read_s * sum(range(start, start + count))
        kind = frozenset(chunk is not None and len(chunk) > 1 for chunk in plan.chunks)
        self.seen[kind] += 1
        total *= self.slower * (20 if self.seen[kind] <= self.num_cold else 1)
        total *= 1 + self.noise * abs(self.rng.gauss(0, 1))
        return total * (3 if self.rng.random() < self.hiccups else 1)


class Simulation:
    """Runs as the engine's loop does: take what came, plan, launch, commit the step before."""

    def __init__(
        self,
        machine: Machine,
        bounds: SchedulerLimits,
        controller: Controller | None = None,
        *,
        lag: int = 0,
        num_blocks: int = 8000,
    ) -> None:
        self.machine, self.controller, self.lag = machine, controller, lag
        self.scheduler = Scheduler(bounds, BlockPool(num_blocks), [0])
        self.notes = self.scheduler.notes = StepNotes()
        self.spent: dict[int, TimeSpent] = {}  # of those that ended
        if controller is not None:
            self.scheduler.tuned = controller.limits
        self.now = 0.0
        self.arrivals: list[Request] = []  # still to come, by time
        self.gaps: list[tuple[float, float]] = []  # when, seconds between two tokens of one answer
        self.ttfts: dict[int, float] = {}
        self.changes: list[tuple[float, TunedLimits]] = []
        self.num_mixed = 0
        self._last_token: dict[int, float] = {}
        self._arrived: dict[int, float] = {}
        self._flights: list[tuple[Plan, float]] = []  # plan, when its step is done
        self._device_free_s = 0.0
        self._handles = 0

    def ask(self, at: float, size: int, new: int) -> int:
        """A request to come. No two prompts share a prefix."""
        self._handles += 1
        prompt = [self._handles, *range(1, size)]
        self.arrivals.append(
            Request(handle=self._handles, prompt=prompt, config=ResolvedConfig(max_length=new), arrived_s=at)
        )
        self._arrived[self._handles] = at
        return self._handles

    def run(self, until: float = float("inf"), *, watch: Callable[[Plan], None] = lambda plan: None) -> None:
        """Until that time, or until all is done."""
        self.arrivals.sort(key=lambda request: request.arrived_s)
        while self.now < until and (self.arrivals or not self.scheduler.idle or self._flights):
            self._step(watch)

    def _step(self, watch: Callable[[Plan], None]) -> None:
        scheduler = self.scheduler
        if scheduler.idle and not self._flights:
            self.now = max(self.now, self.arrivals[0].arrived_s)
        while self.arrivals and self.arrivals[0].arrived_s <= self.now:
            scheduler.add(self.arrivals.pop(0))
        plan = scheduler.plan(self.now)
        if plan.rows:
            watch(plan)
            if self.controller is not None:
                first = scheduler.waiting.peek()
                waiting_s = 0.0 if first is None else self.now - first.request.arrived_s
                demand = len(scheduler.running) + len(scheduler.waiting)
                self.controller.planned(facts_of(plan, self.now, waiting_s=waiting_s, demand=demand))
            self._device_free_s = max(self._device_free_s, self.now) + self.machine.seconds(plan)
            self._flights.append((plan, self._device_free_s))
        while len(self._flights) > (self.lag if plan.rows else 0):
            self._commit(*self._flights.pop(0))

    def _commit(self, plan: Plan, done_s: float) -> None:
        self.now = max(self.now, done_s)
        self.notes.step_ended(plan, self.now)
        outcome = self.scheduler.commit(plan, StepResult([1] * sum(plan.samples)))
        self.spent |= outcome.spent
        for handle in outcome.handles:
            if handle in self._last_token:
                self.gaps.append((self.now, self.now - self._last_token[handle]))
            else:
                self.ttfts[handle] = self.now - self._arrived[handle]
            self._last_token[handle] = self.now
        if self.controller is not None and (tuned := self.controller.committed(self.now)) is not None:
            self.scheduler.tuned = tuned
            self.changes.append((self.now, tuned))

    def gap_ms(self, share: float = 0.99, *, after: float = 0.0) -> float:
        """A percentile of the gaps between tokens."""
        gaps = sorted(gap for when, gap in self.gaps if when >= after)
        return gaps[int(share * (len(gaps) - 1))] * 1e3
