"""Random lives, with every part of each request's time recounted from all that happened."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import approx

from tests.property.test_scheduler import EOS, Device, Memory, _random_request, worlds
from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import Plan, StepResult
from tonle.engine.request import Request
from tonle.engine.schedule import Scheduler, SchedulerLimits, StepNotes, StepOutcome, sequence_notes, step_notes
from tonle.telemetry.time_spent import OtherPrompt, TimeSpent


@dataclass
class Step:
    """One that ended."""

    began_s: float
    ended_s: float
    parts: dict[int, tuple[int, int]]  # handle -> first place, tokens
    prompts: set[int]  # handles; empty if none has more than one token
    largest: int | None  # of them, if they took half of its time
    added_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


@dataclass
class Story:
    """Of one request."""

    request: Request
    compiled_s: float
    scheduled_s: float | None = None
    cached: int = 0
    first: int | None = None  # number of the step that brought its first token
    last: int | None = None
    num_tokens: int = 0
    lost: list[tuple[float, float]] = field(default_factory=list)
    lost_since_s: float | None = None

    def without_row(self, step: Step) -> bool:
        return any(begin < step.ended_s <= end for begin, end in self.lost)


class Life:
    """A scheduler and its notes, beside a record of everything."""

    def __init__(self, limits: SchedulerLimits, num_blocks: int, lag: int, rng: random.Random) -> None:
        self.rng, self.lag, self.limits = rng, lag, limits
        self.memory = Memory(rng, most=limits.num_adapter_slots)
        self.scheduler = Scheduler(limits, BlockPool(num_blocks), [EOS], self.memory)
        self.notes = self.scheduler.notes = StepNotes()
        self.device = Device(num_blocks, limits.block_size)
        self.now = self.device_free_s = 0.0
        self.flights: list[tuple[Plan, StepResult, float, float]] = []  # and when it was planned, when it is done
        self.steps: list[Step] = []
        self.stories: dict[int, Story] = {}
        self.num_requests = 0
        self.spent: dict[int, TimeSpent] = {}

    def add(self) -> None:
        self.num_requests += 1
        handle = self.num_requests
        compiled_s = self.rng.choice([0.0, 0.0, 0.01])
        arrived_s = max(0.0, self.now - compiled_s - self.rng.random() * 0.05)
        request = _random_request(self.rng, handle, arrived_s, self.limits.context_length)
        compiled_s = min(compiled_s, self.now - arrived_s)
        self.stories[handle] = Story(request, compiled_s)
        self.scheduler.add(request, compiled_s=compiled_s)

    def step(self, *, fails: bool) -> None:
        plan = self.scheduler.plan(self.now)
        self.memory.load(plan)
        self._note_places()
        if plan.rows and fails:
            ended = self.scheduler.suspect([plan, *(flight[0] for flight in self.flights)])
            self.notes.forget_planned()
            self.flights.clear()
            self.device.adapters |= {slot: -1 for slot, _ in plan.adapter_loads}
            for handle in ended:
                del self.stories[handle]
            self._note_places()
            return
        if plan.rows:
            self.device_free_s = max(self.device_free_s, self.now) + self.rng.uniform(0.001, 0.05)
            self.flights.append((plan, self.device.run(plan), self.now, self.device_free_s))
            self.now += self.rng.uniform(0.0, 0.001)
        while len(self.flights) > (self.lag if plan.rows else 0):
            self._commit(*self.flights.pop(0))
        self.now += self.rng.uniform(0.0001, 0.001)

    def _note_places(self) -> None:
        for handle, story in self.stories.items():
            runs = handle in self.scheduler.running
            if runs and story.scheduled_s is None:
                story.scheduled_s = self.now
                story.cached = self.scheduler.started.pop(handle)[1]
            elif runs and story.lost_since_s is not None:
                story.lost.append((story.lost_since_s, self.now))
                story.lost_since_s = None
            elif not runs and story.scheduled_s is not None and story.last is None and story.lost_since_s is None:
                story.lost_since_s = self.now

    def _commit(self, plan: Plan, result: StepResult, planned_s: float, done_s: float) -> None:
        self.now = max(self.now, done_s)
        began_s = max(planned_s, self.steps[-1].ended_s if self.steps else 0.0)
        before_s = self.notes.sums()[2]
        self.notes.step_ended(plan, self.now)
        handles = [sequence.request.handle for sequence in plan.sequences]
        sizes = [1 if chunk is None else len(chunk) for chunk in plan.chunks]
        parts = dict(zip(handles, zip(plan.starts, sizes, strict=True), strict=True))
        prompts = {handles[i] for i in plan.prompts} if any(sizes[i] > 1 for i in plan.prompts) else set()
        added_s = self.notes.sums()[2] - before_s
        kept = self.notes._prompt_steps
        largest = kept[-1].largest[0] if kept and kept[-1].ended_s == self.now else None
        self.steps.append(Step(began_s, self.now, parts, prompts, largest, added_s))
        assert 0 <= added_s <= self.now - began_s + 1e-9 and (prompts or not added_s)
        if largest is not None:
            assert parts[largest][1] == max(parts[handle][1] for handle in prompts)
            assert kept[-1].seconds == approx(self.now - began_s) and kept[-1].added_s == approx(added_s, abs=1e-9)
        else:
            assert 2 * added_s < self.now - began_s + 1e-9
        self._take_in(self.scheduler.commit(plan, result))

    def _take_in(self, outcome: StepOutcome) -> None:
        number = len(self.steps) - 1
        for handle in outcome.handles:
            story = self.stories[handle]
            story.num_tokens += 1
            story.first = number if story.first is None else story.first
        for handle in outcome.finished:
            story = self.stories[handle]
            story.last = number
            if story.lost_since_s is not None:
                story.lost.append((story.lost_since_s, self.now))
        assert outcome.spent.keys() == outcome.finished.keys()
        self.spent |= outcome.spent

    # -- judged

    def judge(self, handle: int) -> None:
        story, spent = self.stories[handle], self.spent[handle]
        assert story.scheduled_s is not None and story.first is not None and story.last is not None
        first, last, arrived_s = self.steps[story.first], self.steps[story.last], story.request.arrived_s
        assert spent.queue_s == approx(story.scheduled_s - arrived_s)
        assert spent.prefill_s == approx(first.ended_s - story.scheduled_s)
        assert spent.decode_s == approx(last.ended_s - first.ended_s)
        assert spent.total_s == approx(last.ended_s - arrived_s)
        assert spent.num_steps == story.num_tokens
        assert spent.preempted_s == approx(sum(end - begin for begin, end in story.lost))
        assert spent.num_preemptions > 0 or not story.lost  # it may get a row again in the plan that took its own
        self._judge_waits(story, spent)
        self._judge_prompt(handle, story, spent)
        self._judge_others(handle, story, spent)

    def _judge_waits(self, story: Story, spent: TimeSpent) -> None:
        waits = {wait.why: wait.seconds for wait in spent.waits}
        assert sum(waits.values()) == approx(spent.queue_s) and all(seconds > 0 for seconds in waits.values())
        assert waits.get("grammar", 0.0) == approx(story.compiled_s)
        assert "adapter" not in waits or story.request.adapter
        assert "batch" not in waits or not self.limits.continuous
        assert "tuned" not in waits

    def _judge_prompt(self, handle: int, story: Story, spent: TimeSpent) -> None:
        size = len(story.request.prompt)
        assert spent.cached_tokens == story.cached
        assert spent.cached_tokens + sum(spent.missed.values()) == size
        assert story.first is not None and story.scheduled_s is not None
        chunks = [step.parts[handle] for step in self.steps if handle in step.parts and step.parts[handle][0] < size]
        tokens = sum(min(start + count, size) - start for start, count in chunks)
        # After a preemption the last token of a prompt may be computed alone again, which is not seen.
        assert spent.computed_tokens <= tokens <= spent.computed_tokens + len(story.lost)
        assert spent.num_chunks <= len(chunks) <= spent.num_chunks + len(story.lost)
        if not story.lost:
            before = [step for step in self.steps[: story.first + 1] if handle not in step.parts]
            waited = sum(max(0.0, step.ended_s - max(step.began_s, story.scheduled_s)) for step in before)
            assert spent.prefill_waited_s == approx(waited, abs=1e-9)
        assert spent.prefill_waited_s <= spent.prefill_s + 1e-9

    def _judge_others(self, handle: int, story: Story, spent: TimeSpent) -> None:
        assert story.first is not None and story.last is not None
        arrived_s = story.request.arrived_s
        before, after = self.steps[: story.first + 1], self.steps[story.first + 1 : story.last + 1]
        behind: dict[int, float] = {}
        for step in before:
            if step.largest is None or handle in step.prompts or story.without_row(step):
                continue
            if step.ended_s > arrived_s:
                seconds = min(step.seconds, step.ended_s - arrived_s)
                behind[step.largest] = behind.get(step.largest, 0.0) + seconds
        waited_s = spent.queue_s + spent.prefill_waited_s
        if waited_s <= sequence_notes._WORTH_NAMING * (spent.queue_s + spent.prefill_s):
            behind = {}  # not looked into
        self._judge_list(behind, spent.behind, before)
        stalls = [s for s in after if s.prompts and handle not in s.prompts and not story.without_row(s)]
        stalled_by: dict[int, float] = {}
        for step in stalls:
            if step.largest is not None:
                stalled_by[step.largest] = stalled_by.get(step.largest, 0.0) + step.added_s
        if spent.stalled_s <= sequence_notes._WORTH_NAMING * spent.decode_s:
            stalled_by = {}
        self._judge_list(stalled_by, spent.stalled_by, after)
        assert spent.num_stalled == len(stalls)
        assert spent.stalled_s == approx(sum(step.added_s for step in stalls), abs=1e-9)
        assert spent.stalled_s <= spent.decode_s - sum(s.seconds for s in after if story.without_row(s)) + 1e-9
        shares = [step.seconds / len(step.parts) for step in before if handle in step.parts]
        shares += [step.seconds / len(step.parts) for step in after if not story.without_row(step)]
        assert spent.device_s == approx(sum(shares), abs=1e-9)

    def _judge_list(self, expected: dict[int, float], told: list[OtherPrompt], steps: list[Step]) -> None:
        if sum(step.largest is not None for step in steps) > step_notes._MAX_WALK:
            return  # more than are looked at
        most = sorted(expected.values(), reverse=True)[:3]
        assert [each.seconds for each in told] == approx(most, abs=1e-9)
        for each in told:
            assert expected[each.handle] == approx(each.seconds, abs=1e-9)
            if (story := self.stories.get(each.handle)) is not None:
                assert each.prompt_tokens == len(story.request.prompt)


@settings(max_examples=60, deadline=None)
@given(worlds(), st.integers(0, 2**32))
def test_the_parts_of_a_requests_time_add_up(world: tuple[SchedulerLimits, int, int], seed: int) -> None:
    limits, num_blocks, lag = world
    rng = random.Random(seed)
    assert step_notes._MAX_WALK <= step_notes._MAX_STEPS
    life = Life(limits, num_blocks, lag, rng)
    for step in range(3000):
        if step < 40 and rng.random() < 0.5:
            life.add()
        if rng.random() < 0.03 and life.stories:
            victim = rng.choice(list(life.stories))
            if life.scheduler.cancel(victim):
                del life.stories[victim]
        life.step(fails=step < 40 and rng.random() < 0.02)
        if step >= 40 and life.scheduler.idle and not life.flights:
            break
    assert life.scheduler.idle and not life.notes.without_token and not life.notes._in_flight
    assert life.spent.keys() == {handle for handle, story in life.stories.items() if story.last is not None}
    for handle in life.spent:
        life.judge(handle)
