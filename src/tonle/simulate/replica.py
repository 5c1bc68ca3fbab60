"""`Replica`: one engine in virtual time. The scheduler is the engine's own; a step takes what `StepTimes` says.

Does: what `engine/loop.py` does, in the same order: take mail, plan, launch, commit the step before, publish. Does not: compute
tokens, wait, or know of other replicas (`cluster.py`).

With `lag` 0 the host waits for each step. With `lag` 1 it launches a step and then reads the one before: the device begins a step
when it is launched and the one before has ended. The host's time for a step lies in two places: before its launch, and, where
`StepTimes` has a `commit_s`, after its tokens are there. Mail is taken after that: what came meanwhile is in the next plan.
"""

from __future__ import annotations

import random
from bisect import insort
from collections import deque
from collections.abc import Callable
from operator import itemgetter
from statistics import median
from typing import NamedTuple

import msgspec

from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import Plan, StepResult
from tonle.engine.request import Request
from tonle.engine.schedule import (
    Controller,
    Scheduler,
    SchedulerLimits,
    Sequence,
    StepWork,
    Targets,
    facts_of,
    work_of,
)
from tonle.errors import ConfigError, InternalError
from tonle.simulate.skipping import SkippingScheduler
from tonle.simulate.step_times import StepTimes
from tonle.simulate.trace import ANSWER_IDS

_NOTHING = Plan()
_SPIN_S = 1e-6  # a batch that is due but for rounding: the loop asks again at once


class Ended(NamedTuple):
    """A request that the engine has answered, or refused."""

    handle: int
    at_s: float
    tokens_s: list[float]  # when the caller sees each token
    cached_tokens: int
    turn_s: float = 0.0  # of the caller, from its last token until it can send its next request
    refusal: str | None = None


class Counts(msgspec.Struct):
    """What a replica has done so far. Sums over steps."""

    steps: int = 0
    rows: int = 0  # sequences in steps
    device_s: float = 0.0
    host_s: float = 0.0
    output_tokens: int = 0
    ended: int = 0
    max_running: int = 0
    max_kv_usage: float = 0.0


class _Launched(NamedTuple):
    plan: Plan
    num_drawn: int
    end_s: float
    commit_s: float  # of the host, once its tokens are there


class Replica:
    """`next_s` is when it does something next, and `advance` does it. A request's `seed` must be its place in the trace: it says
    which tokens its answer has."""

    def __init__(
        self,
        limits: SchedulerLimits,
        num_blocks: int,
        times: StepTimes,
        *,
        rng: random.Random,
        on_end: Callable[[Ended], None],
        jitter: bool = True,
        skip: bool = True,
        now: float = 0.0,
        targets: Targets | None = None,
        watch: Callable[[Plan, StepWork], None] | None = None,
    ) -> None:
        """`targets`: of adaptive tuning. `skip`: leave sequences out of steps that change nothing else; not with `targets`, and
        not with `watch`, which is told each plan."""
        if num_blocks * limits.block_size < limits.context_length:
            raise ConfigError(
                f"{num_blocks} blocks of {limits.block_size} tokens do not hold one context of {limits.context_length} tokens; "
                "the engine needs at least as many",
                param="num_blocks",
            )
        self.next_s: float | None = None
        self.counts = Counts()
        self.times = times
        self._lag, self._on_end, self._rng, self._watch = times.lag, on_end, rng, watch
        self._jitter: Callable[[StepWork, float], float] | None = getattr(times, "jitter", None) if jitter else None
        self._launching_s: Callable[[StepWork], float] | None = getattr(times, "launching_s", None)
        self._commit_s: Callable[[StepWork], float] | None = getattr(times, "commit_s", None)
        self._skipping: SkippingScheduler | None = None
        if skip and targets is None and watch is None:
            self._skipping = SkippingScheduler(limits, BlockPool(num_blocks), lag=times.lag, on_tokens=self._add_tokens)
        self.scheduler: Scheduler = self._skipping or Scheduler(limits, BlockPool(num_blocks), ())
        self._controller = None if targets is None else Controller(targets, limits)
        if self._controller is not None:
            self.scheduler.tuned = self._controller.limits
        self._mail: list[tuple[float, Request]] = []  # by the time at which the loop can take it
        self._launched: deque[_Launched] = deque()
        self._num_due = 0  # of those, to be read before the next plan
        self._device_free_s = self._front_free_s = self._host_free_s = now
        self._wake_s: float = getattr(times, "wake_s", 0.0)  # of the host, for the first step after a rest
        self._front_gap_s: float = getattr(times, "front_gap_s", 0.0)  # what lies between requests that come at once
        self._back_row_s: float = getattr(times, "back_row_s", 0.0)  # on top of `back_s`, per token of the same step
        self._front_scatter_s: list[float] = getattr(times, "front_scatter_s", []) if jitter else []
        turns_s: list[float] = getattr(times, "turns_s", [])
        self._turns_s = turns_s if jitter or not turns_s else [median(turns_s)]
        self._seen_s: list[float] = []  # by step: when callers see its tokens
        self._tokens_s: dict[int, list[float]] = {}  # by handle: when its caller sees them
        self._cached: dict[int, int] = {}

    # -- what comes in

    def submit(self, request: Request, now: float) -> None:
        """Its front gets the request now, and the engine's mailbox after `front_s`, one after the other. Calls come in order."""
        at_s = self._front_free_s = max(now + self.times.front_s, self._front_free_s + self._front_gap_s)
        if self._front_scatter_s:
            at_s = max(now, at_s + self._rng.choice(self._front_scatter_s))
        insort(self._mail, (at_s, request), key=itemgetter(0))
        if self.next_s is None or (not self._launched and not self.scheduler.running):
            wake_s = max(at_s, self._host_free_s)
            self.next_s = wake_s if self.next_s is None else min(self.next_s, wake_s)

    def receive_blocks(self, request: Request) -> int:
        """Keys and values of its prompt have come from another replica: its full blocks can be found in the prefix cache from now
        on. Returns how many tokens they hold; fewer than the prompt where the pool has no room."""
        scheduler, pool, size = self.scheduler, self.scheduler.pool, self.scheduler.limits.block_size
        named, held = Sequence(request, key=0.0, stops=frozenset()), []
        if not scheduler.limits.prefix_caching:
            return 0
        for digest in named.digests(len(request.prompt) // size, size):
            block = pool.lookup(digest)
            if block is not None:
                pool.hold(block)
            elif pool.num_available:
                block = pool.take()
                pool.publish(block, digest)
            else:
                break
            held.append(block)
        pool.release(held)
        return len(held) * size

    # -- state

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting) + len(self._mail)

    @property
    def kv_usage(self) -> float:
        return self.scheduler.pool.num_held / self.scheduler.pool.num_blocks

    def tokens_until_now(self) -> dict[int, list[float]]:
        """By handle, of all that it has: when callers see the tokens published so far."""
        left_out = {} if self._skipping is None else self._skipping.left_out_since
        return {
            handle: tokens_s + self._seen_s[left_out[handle] :] if handle in left_out else tokens_s
            for handle, tokens_s in self._tokens_s.items()
        }

    def stop(self) -> None:
        """It does nothing any more."""
        self._note_most()
        self.next_s = None

    def verify(self) -> None:
        """Recount rows and blocks. Raises AssertionError."""
        self.scheduler.verify()

    # -- time

    def advance(self) -> None:
        """Do what is next, at `next_s`."""
        now = self.next_s
        assert now is not None
        if self._num_due:
            self._num_due -= 1
            launched = self._launched.popleft()
            self._host_free_s = now + launched.commit_s
            self._commit(launched, now)
            if self._num_due:
                self.next_s = max(self._host_free_s, self._launched[0].end_s)
                return
            if launched.commit_s:
                self.next_s = self._host_free_s
                return
        self._plan(now)

    def _plan(self, now: float) -> None:
        scheduler, mail = self.scheduler, self._mail
        was_idle = not self._launched and scheduler.idle
        while mail and mail[0][0] <= now:
            self._take(mail.pop(0)[1], now)
        if self._skipping is not None:
            plan, work = self._plan_some(self._skipping, now)
        else:
            self._note_most()
            plan = scheduler.plan(now)
            self._note_most()
            work = work_of(plan)
            if self._watch is not None and plan.rows:
                self._watch(plan, work)
        has_rows = work.rows + work.prompts > 0
        if has_rows:
            if self._controller is not None:
                self._tell_planned(self._controller, plan, now)
            now = self._launch(plan, work, now + self._wake_s if was_idle else now)
        self._num_due = max(0, len(self._launched) - (self._lag if has_rows else 0))
        if self._num_due:
            self.next_s = max(now, self._launched[0].end_s)
        else:
            self.next_s = now if has_rows else self._next_mail_s(now)

    def _plan_some(self, scheduler: SkippingScheduler, now: float) -> tuple[Plan, StepWork]:
        """A plan without those left out, and the work of all."""
        scheduler.begin_step(self._launched[-1].plan if self._launched else None)
        if scheduler.is_quiet:
            num_left_out = scheduler.num_left_out
            plan = Plan() if self._lag else _NOTHING  # with `lag` 1 those taken up meanwhile are put into it
            return plan, StepWork(num_left_out, 0, 0, scheduler.left_out_reads, 0, num_left_out)
        self._note_most()  # blocks are only taken until then
        plan = scheduler.plan(now)
        self._note_most()
        work = work_of(plan)
        if num_left_out := scheduler.num_left_out:
            rows, prompts, tokens, reads, prompt_reads, samples = work
            reads += scheduler.left_out_reads
            work = StepWork(rows + num_left_out, prompts, tokens, reads, prompt_reads, samples + num_left_out)
        return plan, work

    def _launch(self, plan: Plan, work: StepWork, now: float) -> float:
        """When the host can go on."""
        host_s, device_s = self.times.host_s(work), self.times.device_s(work)
        if self._jitter is not None:
            device_s *= self._jitter(work, self._rng.random())
        commit_s = 0.0 if self._commit_s is None else self._commit_s(work)
        now += host_s - commit_s
        end_s = max(now, self._device_free_s) + device_s
        if self._launching_s is not None:  # the host goes on launching while the device computes
            now += self._launching_s(work)
        self._device_free_s = max(now, end_s)
        self._launched.append(_Launched(plan, work.samples, self._device_free_s, commit_s))
        if self._skipping is not None:
            self._skipping.launched_step()
        counts = self.counts
        counts.steps += 1
        counts.rows += work.rows + work.prompts
        counts.device_s += device_s
        counts.host_s += host_s
        return now

    def _note_most(self) -> None:
        counts = self.counts
        counts.max_running = max(counts.max_running, len(self.scheduler.running))
        counts.max_kv_usage = max(counts.max_kv_usage, self.kv_usage)

    def _next_mail_s(self, now: float) -> float | None:
        """Nothing runs: the next mail, or the time at which a batch is due that is not full."""
        mail_s = self._mail[0][0] if self._mail else None
        if self.scheduler.idle:
            return mail_s
        wait_s = self.scheduler.wake_s(now)
        if wait_s == 0.0 and self.scheduler.limits.continuous:
            raise InternalError("a request waits, nothing runs, and the scheduler does not admit it")
        due_s = None if wait_s is None else now + max(wait_s, _SPIN_S)
        return min((at_s for at_s in (mail_s, due_s) if at_s is not None), default=None)

    def _take(self, request: Request, now: float) -> None:
        if (why := self.scheduler.refusal(request)) is not None:
            self._on_end(Ended(request.handle, now, [], 0, refusal=why))
            return
        self._tokens_s[request.handle] = []
        self.scheduler.add(request)

    def _commit(self, launched: _Launched, now: float) -> None:
        scheduler, plan = self.scheduler, launched.plan
        seen_s = now + self.times.back_s + self._back_row_s * launched.num_drawn
        if self._seen_s and seen_s < self._seen_s[-1]:
            seen_s = self._seen_s[-1]  # what follows on a connection does not overtake
        self._seen_s.append(seen_s)
        if plan.sequences:
            samples = zip(plan.sequences, plan.samples, strict=True)
            tokens = [ANSWER_IDS + sequence.request.seed for sequence, sampled in samples if sampled]
            outcome = scheduler.commit(plan, StepResult(tokens))
            tokens_s = self._tokens_s
            for handle in outcome.handles:
                tokens_s[handle].append(seen_s)
            if scheduler.started:
                self._cached |= {handle: cached for handle, (_, cached) in scheduler.started.items()}
                scheduler.started = {}
            for handle in sorted(outcome.finished):  # so that their order does not depend on who was left out
                self._end(handle, now)
        if self._controller is not None and (tuned := self._controller.committed(now)) is not None:
            scheduler.tuned = tuned

    def _end(self, handle: int, now: float) -> None:
        tokens_s = self._tokens_s.pop(handle)
        self.counts.ended += 1
        self.counts.output_tokens += len(tokens_s)
        turn_s = self._rng.choice(self._turns_s) if self._turns_s else 0.0
        self._on_end(Ended(handle, now, tokens_s, self._cached.pop(handle, 0), turn_s))

    def _add_tokens(self, handle: int, first: int, end: int) -> None:
        self._tokens_s[handle] += self._seen_s[first:end]

    def _tell_planned(self, controller: Controller, plan: Plan, now: float) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        waiting_s = 0.0 if (first := waiting.peek()) is None else now - first.request.arrived_s
        controller.planned(facts_of(plan, now, waiting_s=waiting_s, demand=len(running) + len(waiting)))
