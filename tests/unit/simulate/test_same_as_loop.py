"""The simulated replica decides as the engine's loop does: the same plans at the same moments, for the same arrivals.

The loop is the real one. Its clock, its mailbox and its runner are virtual: a step takes what the same `StepTimes` says.
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.fakes.linear_times import H200, LinearTimes, limits
from tonle.engine import loop as loop_module
from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.loop import Loop
from tonle.engine.messages import Step, Submit, ToEngine, ToFront
from tonle.engine.plan import Plan, StepResult
from tonle.engine.request import Request, ResolvedConfig
from tonle.engine.schedule import Scheduler, SchedulerLimits, StepWork, work_of
from tonle.simulate.replica import Ended, Replica
from tonle.simulate.trace import answer_id

Decision = list[tuple[int, int, int, int, bool]]  # handle, row, start, tokens, sampled
PAUSE_S = 0.004  # of a user between two requests


class NothingLeftError(Exception):
    """Nothing is left to wait for."""


@dataclass
class Flight:
    plan: Plan
    end_s: float


@dataclass
class World:
    """A virtual clock, and the loop's two neighbours: its mailbox and its runner."""

    times: LinearTimes
    users: list[deque[Request]]  # closed loop: what each of them will send
    lag: int = 0
    profile: Any = None
    kernel_changes: int = 0
    now: float = 0.0
    device_free_s: float = 0.0
    has_read: bool = False  # a step that is not published yet
    mail: list[tuple[float, Request]] = field(default_factory=list)
    plans: list[tuple[float, Decision]] = field(default_factory=list)
    tokens_s: dict[int, list[float]] = field(default_factory=dict)
    ended: dict[int, list[float]] = field(default_factory=dict)

    def monotonic(self) -> float:
        return self.now

    # -- the mailbox

    def take(self, wait_s: float | None) -> list[ToEngine]:
        due = [(at_s, request) for at_s, request in self.mail if at_s <= self.now]
        if not due and wait_s != 0.0:
            if not self.mail and wait_s is None:
                raise NothingLeftError
            next_s = min((at_s for at_s, _ in self.mail), default=math.inf)
            self.now = next_s if wait_s is None else min(next_s, self.now + wait_s)
            return self.take(0.0)
        self.mail = [entry for entry in self.mail if entry not in due]
        return [Submit([request]) for _, request in due]

    def publish(self, message: ToFront) -> None:
        assert isinstance(message, Step) and not message.refused
        for handle in message.handles:
            self.tokens_s.setdefault(handle, []).append(self.now + self.times.back_s)
        for handle in sorted(message.finished):
            self.ended[handle] = self.tokens_s[handle]
            self.send_next(handle, self.now)
        if self.has_read:  # else there is no step, only news of mail
            self.now += self.times.publish_s
        self.has_read = False

    def send_next(self, ended: int, now: float) -> None:
        queue = self.users[ended % len(self.users)]
        if queue:
            request = queue.popleft()
            request.arrived_s = now + PAUSE_S
            self.mail.append((now + PAUSE_S + self.times.front_s, request))

    # -- the runner

    def launch(self, plan: Plan) -> Flight:
        self.plans.append((self.now, decision(plan)))
        work = work_of(plan)
        self.now += self.times.host_s(work) - self.times.commit_s(work)
        self.device_free_s = max(self.now, self.device_free_s) + self.times.device_s(work)
        return Flight(plan, self.device_free_s)

    def collect(self, launched: Flight) -> StepResult:
        plan = launched.plan
        self.now = max(self.now, launched.end_s)
        self.has_read = True
        return StepResult([answer_id(s.request.seed) for s, sampled in zip(plan.sequences, plan.samples, strict=True)
                           if sampled])  # fmt: skip


def decision(plan: Plan) -> Decision:
    sizes = [1 if chunk is None else len(chunk) for chunk in plan.chunks]
    handles = [sequence.request.handle for sequence in plan.sequences]
    return list(zip(handles, plan.rows, plan.starts, sizes, plan.samples, strict=True))


def requests(seed: int, users: int, each: int, context: int) -> list[deque[Request]]:
    """Of different lengths; some prompts begin alike."""
    rng = random.Random(seed)
    shared = [9] * 100
    queues: list[deque[Request]] = [deque() for _ in range(users)]
    for handle in range(users * each):
        size = rng.choice([3, 40, 200, 600])
        prompt = (shared if rng.random() < 0.5 else []) + [rng.randrange(1000) for _ in range(size)]
        config = ResolvedConfig(max_length=min(rng.randint(1, 150), context - len(prompt)), early_stopping=False)
        queues[handle % users].append(
            Request(handle=handle, prompt=prompt, config=config, seed=handle, priority=rng.choice([1, 2, 2, 3]))
        )
    return queues


def run_loop(times: LinearTimes, bounds: SchedulerLimits, num_blocks: int, seed: int, users: int) -> World:
    world = World(times, requests(seed, users, 5, bounds.context_length), lag=times.lag)
    scheduler = Scheduler(bounds, BlockPool(num_blocks), ())
    loop = Loop(scheduler, world, world)  # type: ignore[arg-type]
    for handle in range(users):
        world.send_next(handle, 0.0)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(NothingLeftError):
        patch.setattr(loop_module, "time", world)
        loop.run()
    return world


def run_replica(
    times: LinearTimes, bounds: SchedulerLimits, num_blocks: int, seed: int, users: int, *, skip: bool
) -> tuple[list[tuple[float, Decision]], dict[int, list[float]]]:
    queues = requests(seed, users, 5, bounds.context_length)
    plans: list[tuple[float, Decision]] = []
    ended: dict[int, list[float]] = {}

    def watch(plan: Plan, work: StepWork) -> None:
        assert replica.next_s is not None
        plans.append((replica.next_s, decision(plan)))

    def send_next(handle: int, now: float) -> None:
        if queue := queues[handle % users]:
            request = queue.popleft()
            request.arrived_s = now + PAUSE_S
            replica.submit(request, now + PAUSE_S)

    def on_end(answer: Ended) -> None:
        ended[answer.handle] = answer.tokens_s
        send_next(answer.handle, answer.at_s)

    replica = Replica(bounds, num_blocks, times, rng=random.Random(0), on_end=on_end, skip=skip,
                      watch=None if skip else watch)  # fmt: skip
    for handle in range(users):
        send_next(handle, 0.0)
    while replica.next_s is not None:
        replica.advance()
        if replica.counts.steps % 16 == 0:
            replica.verify()
    replica.verify()
    return plans, ended


CASES = {
    "roomy": (limits(), 600, 8),
    "few rows": (limits(max_num_seqs=4), 300, 12),
    "few blocks": (limits(context_length=800), 60, 8),  # sequences are preempted
    "small steps": (limits(max_num_seqs=6, max_num_batched_tokens=24, long_prefill_tokens=10), 600, 8),
    "no prefix cache": (limits(prefix_caching=False), 600, 8),
    "static batches": (limits(max_num_seqs=4, continuous=False, batch_timeout_s=0.0625), 300, 6),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "times",
    [
        LinearTimes(read_s=1e-8, launch_s=0.0002),
        LinearTimes(read_s=1e-8, launch_s=0.0002, publish_s=0.0007),
        H200,
        replace(H200, publish_s=0.0005),
        replace(H200, launch_s=0.0013, publish_s=0.0011),  # the host is slower than the device
    ],
    ids=["lag 0", "lag 0, publishing", "lag 1", "lag 1, publishing", "lag 1, a slow host"],
)
def test_the_loop_and_the_replica_make_the_same_plans(times: LinearTimes, name: str) -> None:
    bounds, num_blocks, users = CASES[name]
    world = run_loop(times, bounds, num_blocks, 3, users)
    assert len(world.ended) == users * 5
    plans, ended = run_replica(times, bounds, num_blocks, 3, users, skip=False)
    assert plans == world.plans
    assert ended == world.ended
    _, skipped = run_replica(times, bounds, num_blocks, 3, users, skip=True)
    assert skipped == world.ended


def test_the_case_with_few_blocks_preempts() -> None:
    bounds, num_blocks, users = CASES["few blocks"]
    plans, _ = run_replica(LinearTimes(), bounds, num_blocks, 3, users, skip=False)
    starts = [(handle, start) for _, plan in plans for handle, _, start, _, _ in plan]
    assert len(set(starts)) < len(starts), "no token was computed twice"
