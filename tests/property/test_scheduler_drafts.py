"""Random lives of sequences whose steps have guesses: what is kept, what is overwritten, and that no one pays for them."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.guesses import Oracle
from tests.property.test_scheduler import EOS, Device, Memory, _random_request, worlds
from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import Plan, StepResult
from tonle.engine.request import Request, ResolvedConfig
from tonle.engine.schedule import Drafts, Scheduler, SchedulerLimits

VOCABULARY = 5


class DraftDevice(Device):
    """Computes guesses, too: what it writes for them is found there later, if they were right."""

    def run(self, plan: Plan) -> StepResult:
        known = replace(plan, chunks=[plan.known_chunk(i) for i in range(len(plan.rows))], drafts={})
        result = super().run(known)
        first = dict(zip((i for i, samples in enumerate(plan.samples) if samples), result.tokens, strict=True))
        for i in plan.drafts:
            row, guesses = plan.rows[i], plan.draft(i)
            for j, guess in enumerate(guesses):
                self._write(row, plan.place(i) + j, guess, plan.sequences[i])
            token, result.more[i] = first[i], []
            for guess in guesses:
                if token != guess:
                    break
                token = self.rng.choice([EOS, 1, 2, 3, 4])
                result.more[i].append(token)
            self.last[row] = token
        return result


@settings(max_examples=100, deadline=None)
@given(worlds(), st.integers(0, 2**32))
def test_random_life_with_drafts(world: tuple[SchedulerLimits, int, int], seed: int) -> None:
    limits, num_blocks, _ = world
    rng = random.Random(seed)
    pool = BlockPool(num_blocks, max_idle=rng.choice([None, 0, 3]), gc_threshold=rng.choice([1.0, 0.5]))
    memory = Memory(rng, most=limits.num_adapter_slots)
    scheduler = Scheduler(limits, pool, [EOS], memory)
    oracle = Oracle(seed, VOCABULARY)
    scheduler.drafts = Drafts(oracle)
    device = DraftDevice(num_blocks, limits.block_size)
    outputs: dict[int, list[int]] = {}
    ended: dict[int, str] = {}
    requests: dict[int, Request] = {}
    now, handle = 0.0, 0
    for step in range(6000):
        now += rng.choice([0.0, 0.1, 3.0])
        if step < 60 and rng.random() < 0.5:
            handle += 1
            requests[handle] = request = _random_request(rng, handle, now, limits.context_length)
            request.config.speculate = rng.random() < 0.9
            scheduler.add(request)
            outputs[handle] = []
        if rng.random() < 0.08 and requests:
            victim = rng.choice(list(requests))
            if scheduler.cancel(victim):
                ended[victim] = "cancelled"
        plan = scheduler.plan(now)
        assert plan.num_tokens <= limits.max_num_batched_tokens
        assert all(plan.sequences[i].request.config.speculate for i in plan.drafts)
        scheduler.verify()
        memory.load(plan)
        if plan.rows and step < 60 and rng.random() < 0.03:
            ended |= dict.fromkeys(scheduler.suspect([plan]), "error")
            device.adapters |= {slot: -1 for slot, _ in plan.adapter_loads}
            scheduler.verify()
            continue
        if plan.rows:
            outcome = scheduler.commit(plan, device.run(plan))
            tokens = iter(outcome.tokens)
            for h, count in zip(outcome.handles, outcome.counts, strict=True):
                assert h not in ended, "a token after the end"
                outputs[h] += [next(tokens) for _ in range(count)]
            ended |= {h: reason for h, (reason, _) in outcome.finished.items()}
            scheduler.verify()
            for s in scheduler.running.values():
                assert s.num_computed <= len(s.tokens), "a guess counts as computed"
        if step >= 60 and scheduler.idle:
            break
    assert scheduler.idle, "a request starved"
    assert set(ended) == set(requests)
    assert pool.num_available == num_blocks, "a block leaked"
    for h, request in requests.items():
        assert len(outputs[h]) <= request.config.max_length
        if ended[h] == "length":
            assert len(outputs[h]) == request.config.max_length
        if request.config.early_stopping:
            assert EOS not in outputs[h][:-1], "tokens after the one that ends it"
            assert ended[h] != "stop" or outputs[h][-1] == EOS
        else:
            assert ended[h] in ("length", "cancelled", "error")


def test_no_sequence_is_preempted_for_guesses() -> None:
    """With as many blocks as the sequences need for themselves, none is set back; guesses get what is left."""
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=64, context_length=40, block_size=4, long_prefill_tokens=64
    )
    for num_blocks in (24, 26, 40):
        scheduler = Scheduler(limits, BlockPool(num_blocks), [EOS])
        device = DraftDevice(num_blocks, 4)
        device.rng.choice = lambda options: 1  # type: ignore[method-assign,assignment]
        scheduler.drafts = Drafts(Oracle(1, 2, {h: [1] * 20 for h in range(4)}))
        for h in range(4):
            scheduler.add(Request(handle=h, prompt=[1, 2 + h, 3, 4], config=ResolvedConfig(max_length=20)))
        steps = 0
        while not scheduler.idle:
            plan = scheduler.plan(0.0)
            scheduler.commit(plan, device.run(plan))
            scheduler.verify()
            steps += 1
        assert scheduler.num_preemptions == 0
        assert scheduler.drafts.num_accepted > 0 and steps < 20, "guesses that were right save steps"
