"""Random lives of sequences with constraints among others: forced runs, masks, errors and ends, with lag and without."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.constraints import RuleConstraint, random_rule
from tests.property.test_scheduler import EOS, Device, Memory, _random_request, worlds
from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import Plan, StepResult
from tonle.engine.request import Request, ResolvedConfig
from tonle.engine.schedule import Scheduler, SchedulerLimits, Sequence, StepOutcome, postpone, wanted_draws

TOKENS = 4  # beside the end
NOT_DRAWN = -1


class BoundDevice(Device):
    """Draws for bound rows when it is told what they may get. Follows, as penalties do, which tokens each row has seen."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.seen: dict[int, list[int]] = {}  # by row
        self.late_share = 0.0  # of masks that come too late for their step
        self.late: list[Sequence] = []
        self.drawn_at: Counter[frozenset[int] | None] = Counter()  # what was allowed where a token was drawn

    def run(self, plan: Plan) -> StepResult:
        self.seen |= {join.row: join.prompt + join.output for join in plan.joins}
        for row, start, chunk in zip(plan.rows, plan.starts, plan.chunks, strict=True):
            unseen = len(self.seen[row]) - start
            assert unseen >= 0, "penalties would miss a token"
            self.seen[row] += chunk[unseen:] if chunk is not None else []
        result = super().run(plan)
        sampling = [i for i, samples in enumerate(plan.samples) if samples]
        for place, i in enumerate(sampling):
            if i in plan.bound:
                result.tokens[place] = self.last[plan.rows[i]] = NOT_DRAWN
            else:
                self.seen[plan.rows[i]].append(result.tokens[place])
        return result

    def draw_bound(self, plan: Plan, result: StepResult) -> None:
        entries, constraints = wanted_draws(plan)
        places = {i: place for place, i in enumerate(i for i, samples in enumerate(plan.samples) if samples)}
        for i, constraint in zip(entries, constraints, strict=True):
            assert isinstance(constraint, RuleConstraint)
            if self.late_share and self.rng.random() < self.late_share:
                self.late.append(postpone(plan, i))
                continue
            row, sequence = plan.rows[i], plan.sequences[i]
            assert constraint.tokens == sequence.output, "it was not told all tokens, or some twice"
            assert self.seen[row] == sequence.tokens, "penalties have seen other tokens"
            allowed = constraint.allowed
            assert not isinstance(allowed, str)
            self.drawn_at[allowed] += 1
            options = [EOS, 1, 2, 3, 4] if allowed is None else sorted(allowed)
            result.tokens[places[i]] = self.last[row] = self.rng.choice(options)
            self.seen[row].append(self.last[row])


class Life:
    """A scheduler, its requests and what became of them."""

    def __init__(self, limits: SchedulerLimits, num_blocks: int, lag: int, rng: random.Random) -> None:
        self.pool = BlockPool(num_blocks, max_idle=rng.choice([None, 0, 3]))
        self.memory = Memory(rng, most=limits.num_adapter_slots)
        self.scheduler = Scheduler(limits, self.pool, [EOS], self.memory)
        self.device = BoundDevice(num_blocks, limits.block_size)
        self.lag = lag
        self.flights: list[tuple[Plan, StepResult]] = []
        self.requests: dict[int, Request] = {}
        self.constraints: dict[int, RuleConstraint] = {}
        self.outputs: dict[int, list[int]] = {}
        self.ended: dict[int, str] = {}

    def add(self, request: Request, constraint: RuleConstraint | None) -> None:
        self.requests[request.handle], self.outputs[request.handle] = request, []
        if constraint is not None:
            self.constraints[request.handle] = constraint
        if (outcome := self.scheduler.add(request, constraint)) is not None:
            self._take_in(outcome)
            assert request.handle in self.ended

    def step(self, now: float, *, fails: bool) -> None:
        """As `Loop.step` does it."""
        late, self.device.late = self.device.late, []
        for sequence in late:
            if sequence.is_late and self.device.rng.random() < 0.5 and not sequence.done:
                self.device.late.append(sequence)
            else:
                sequence.is_late = False
        plan = self.scheduler.plan(now)
        self.scheduler.verify()
        self.memory.load(plan)
        if plan.rows and fails:
            for handle in self.scheduler.suspect([plan, *(flight for flight, _ in self.flights)]):
                self.ended[handle] = "error"
            self.flights.clear()
            self.device.adapters |= {slot: -1 for slot, _ in plan.adapter_loads}
            self.scheduler.verify()
            return
        if plan.rows:
            self.flights.append((plan, self.device.run(plan)))
        if plan.bound:
            while len(self.flights) > 1:
                self._commit()
            self.device.draw_bound(*self.flights[-1])
        while len(self.flights) > (self.lag if plan.rows else 0):
            self._commit()

    def _commit(self) -> None:
        self._take_in(self.scheduler.commit(*self.flights.pop(0)))
        self.scheduler.verify()

    def _take_in(self, outcome: StepOutcome) -> None:
        offset = 0
        for handle, count in zip(outcome.handles, outcome.counts, strict=True):
            assert handle not in self.ended, "a token after the end"
            self.outputs[handle] += outcome.tokens[offset : offset + count]
            offset += count
        assert offset == len(outcome.tokens)
        self.ended |= {handle: reason for handle, (reason, _) in outcome.finished.items()}
        self.ended |= dict.fromkeys(outcome.refused, "refused")

    def judge(self, handle: int) -> None:
        """What one caller got is what its constraint allows, and ended where it had to."""
        request, output, end = self.requests[handle], self.outputs[handle], self.ended[handle]
        constraint = self.constraints[handle]
        assert len(output) <= request.config.max_length
        for place, token in enumerate(output):
            allowed = constraint.rule(tuple(output[:place]))
            assert allowed is None or token in allowed, f"token {place} of {output} is {token}, allowed: {allowed}"
        after = constraint.rule(tuple(output))
        stops = {EOS} if request.config.early_stopping else set()
        stopped = output[-1:] != [] and output[-1] in stops.union(request.config.stop_token_ids)
        if end == "stop":
            assert after == frozenset() or stopped
        elif end == "length":
            assert len(output) == request.config.max_length and after != frozenset() and not stopped
        elif end == "refused":
            assert isinstance(constraint.rule(tuple(constraint.tokens)), str), constraint.error
            assert output == constraint.tokens[: len(output)]
        else:
            assert end in ("cancelled", "error")


@settings(max_examples=100, deadline=None)
@given(worlds(), st.integers(0, 2**32), st.integers(1, 3), st.sampled_from([0.0, 0.2, 0.6]))
def test_random_life_with_constraints(
    world: tuple[SchedulerLimits, int, int], seed: int, min_forced: int, late: float
) -> None:
    limits, num_blocks, lag = world
    limits = replace(limits, min_forced=min_forced)
    rng = random.Random(seed)
    life = Life(limits, num_blocks, lag, rng)
    life.device.late_share = late
    now = 0.0
    for step in range(6000):
        now += rng.choice([0.0, 0.1, 3.0])
        if step < 60 and rng.random() < 0.5:
            request = _random_request(rng, len(life.requests) + 1, now, limits.context_length)
            request.config.stop_token_ids = rng.choice([[], [], [2]])
            # Few rules: sequences with one prompt and one rule are forced to the same tokens, whose blocks are shared.
            bound = RuleConstraint(random_rule(rng.randint(1, 3), TOKENS, error=0.01)) if rng.random() < 0.7 else None
            life.add(request, bound)
        if rng.random() < 0.08 and life.requests:
            victim = rng.choice(list(life.requests))
            if life.scheduler.cancel(victim):
                life.ended[victim] = "cancelled"
        life.step(now, fails=step < 60 and rng.random() < 0.03)
        if step >= 60 and life.scheduler.idle and not life.flights:
            break
    assert life.scheduler.idle, "a request starved"
    assert set(life.ended) == set(life.requests)
    assert life.pool.num_available == num_blocks, "a block leaked"
    for handle in life.constraints:
        life.judge(handle)
    if min_forced == 1:
        assert not any(allowed is not None and len(allowed) == 1 for allowed in life.device.drawn_at), (
            "one was no choice"
        )


@pytest.mark.parametrize("lag", [0, 1])
def test_every_ending_is_met(lag: int) -> None:
    """The random lives above do pass through what they are about."""
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=24, context_length=60, block_size=2, long_prefill_tokens=24
    )
    rng = random.Random(3)
    life = Life(limits, 40, lag, rng)
    for step in range(2000):
        if step < 200:
            request = _random_request(rng, step, float(step), 60)
            request.adapter, request.config.stop_token_ids = 0, rng.choice([[], [2]])
            life.add(request, RuleConstraint(random_rule(rng.randint(1, 9), TOKENS, error=0.02)))
        life.step(float(step), fails=False)
        if life.scheduler.idle and not life.flights:
            break
    for handle in life.constraints:
        life.judge(handle)
    assert {*life.ended.values()} == {"stop", "length", "refused"}
    assert life.scheduler.num_preemptions > 0


@pytest.mark.parametrize("lag", [0, 1])
def test_each_sequence_computes_its_own_forced_tokens(lag: int) -> None:
    """Another may have computed the same: its blocks would do, but penalties must see every token of the row."""
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=64, context_length=60, block_size=2, long_prefill_tokens=64
    )
    life = Life(limits, 80, lag, random.Random(1))
    life.device.rng.choice = lambda options: options[0]  # type: ignore[method-assign,assignment]
    for handle in (1, 2, 3):
        request = Request(handle=handle, prompt=[1, 2, 3], config=ResolvedConfig(max_length=16))
        life.add(request, RuleConstraint(lambda said: frozenset([3] if 0 < len(said) < 9 else [1, 2])))
    for step in range(40):
        life.step(float(step), fails=False)
    assert life.outputs == dict.fromkeys((1, 2, 3), [1] + [3] * 8 + [1] * 7)
