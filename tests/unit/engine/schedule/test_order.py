"""Priorities, ageing, chunking and static batches, seen through plans."""

import pytest

from tonle.engine.kv.block_pool import BlockPool
from tonle.engine.plan import StepResult
from tonle.engine.request import Request, RequestPriority, ResolvedConfig
from tonle.engine.schedule import Scheduler, SchedulerLimits, sequence


def make(**changes: object) -> Scheduler:
    settings: dict[str, object] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "context_length": 256,
                                   "block_size": 4, "long_prefill_tokens": 16, **changes}  # fmt: skip
    return Scheduler(SchedulerLimits(**settings), BlockPool(200), [0])  # type: ignore[arg-type]


def ask(handle: int, size: int = 4, *, at: float = 0.0, priority: int = RequestPriority.NORMAL, salt: bytes = b"",
        new: int = 4) -> Request:  # fmt: skip
    return Request(handle=handle, prompt=[handle % 50 + 1] * size, config=ResolvedConfig(max_length=new),
                   priority=priority, arrived_s=at, salt=salt)  # fmt: skip


def order(scheduler: Scheduler) -> list[int]:
    return [s.request.handle for s in scheduler.plan(0.0).sequences]


def test_critical_first_then_arrival() -> None:
    scheduler = make(max_num_seqs=3)
    scheduler.add(ask(1, at=0.0))
    scheduler.add(ask(2, at=0.1, priority=RequestPriority.LOW))
    scheduler.add(ask(3, at=0.2, priority=RequestPriority.CRITICAL))
    scheduler.add(ask(4, at=0.3, priority=RequestPriority.HIGH))
    assert order(scheduler) == [3, 4, 1]


def test_waiting_ages() -> None:
    """A LOW request is overtaken by CRITICAL ones only for 3 * ageing_s."""
    scheduler = make(max_num_seqs=1, ageing_s=5.0)
    scheduler.add(ask(1, at=0.0, priority=RequestPriority.LOW))
    scheduler.add(ask(2, at=16.0, priority=RequestPriority.CRITICAL))
    assert order(scheduler) == [1]


def test_a_long_prompt_is_capped_only_while_others_are_present() -> None:
    alone = make()
    alone.add(ask(1, size=100))
    assert alone.plan(0.0).num_tokens == 32
    shared = make()
    shared.add(ask(1, size=100))
    shared.add(ask(2, size=4))
    assert [len(chunk or "x") for chunk in shared.plan(0.0).chunks] == [16, 4]


def test_running_rows_advance_while_a_long_prompt_is_computed() -> None:
    scheduler = make()
    scheduler.add(ask(1, size=4))
    scheduler.commit(scheduler.plan(0.0), StepResult([9]))
    scheduler.add(ask(2, size=200, at=-100.0))  # far more important, and long
    plan = scheduler.plan(0.0)
    assert [s.request.handle for s in plan.sequences] == [1, 2]
    assert plan.samples == [True, False]
    assert plan.chunks[0] == [9]


def test_equal_prompts_in_one_step_share_blocks_but_not_across_salts() -> None:
    scheduler = make(max_num_batched_tokens=100, long_prefill_tokens=100)
    for handle, salt in ((1, b""), (2, b""), (3, b"other")):
        request = ask(handle, size=20, salt=salt)
        request.prompt = list(range(1, 21))
        scheduler.add(request)
    plan = scheduler.plan(0.0)
    assert plan.starts == [0, 16, 0]  # one token at least is always computed
    first, second, third = plan.sequences
    assert first.blocks[:4] == second.blocks[:4] and not set(first.blocks) & set(third.blocks)


def test_static_batches_wait_and_run_to_their_end() -> None:
    scheduler = make(max_num_seqs=2, continuous=False, batch_timeout_s=1.0)
    scheduler.add(ask(1, at=0.0, new=1))
    assert not scheduler.plan(0.5).rows
    assert scheduler.wake_s(0.5) == 0.5
    plan = scheduler.plan(1.0)  # the wait is over
    assert [s.request.handle for s in plan.sequences] == [1]
    for handle in (2, 3, 4):
        scheduler.add(ask(handle, at=1.0, new=1))
    assert not scheduler.plan(1.1).rows  # the first batch still runs
    scheduler.commit(plan, StepResult([9]))
    assert [s.request.handle for s in scheduler.plan(1.1).sequences] == [2, 3]  # full: no wait


def test_what_can_never_fit_is_refused_by_name() -> None:
    scheduler = make()
    assert "exceed the context of 256" in (scheduler.refusal(ask(1, size=255, new=2)) or "")
    assert scheduler.refusal(ask(1, size=254, new=2)) is None


def test_a_broken_step_ends_its_sequences_and_hides_what_it_wrote() -> None:
    scheduler = make()
    scheduler.add(ask(1, size=16))
    plan = scheduler.plan(0.0)
    assert scheduler.fail([plan]) == [1]
    scheduler.verify()
    assert scheduler.idle and scheduler.pool.num_idle == 0


def test_prompt_tokens_are_counted_once_and_decoding_is_not() -> None:
    scheduler = make()
    scheduler.add(ask(1, size=40))
    for _ in range(4):
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, StepResult([9] * sum(plan.samples)))
    assert scheduler.prompt_tokens == 40


def test_a_prompt_that_waits_for_blocks_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried in every step, with all of its prefix that is cached; at 128k tokens hashing that takes 20 ms."""
    num_hashed = 0
    real = sequence.block_digests

    def count(parent: bytes, tokens: list[int], block_size: int) -> list[bytes]:
        nonlocal num_hashed
        digests = real(parent, tokens, block_size)
        num_hashed += len(digests)
        return digests

    monkeypatch.setattr(sequence, "block_digests", count)
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=400, context_length=256, block_size=4, long_prefill_tokens=400
    )
    scheduler = Scheduler(limits, BlockPool(60), [0])
    scheduler.add(ask(1, size=80, new=1))
    scheduler.commit(scheduler.plan(0.0), StepResult(tokens=[7]))  # its 20 full blocks stay, idle
    scheduler.add(ask(2, size=120, new=40))
    assert order(scheduler) == [2]  # holds 30 of the 60 blocks
    num_hashed = 0
    waiting = ask(3, size=160)
    waiting.prompt = [2] * 80 + [9] * 80  # begins as 1 did: 20 blocks are cached, and there are no 20 more
    scheduler.add(waiting)
    for _ in range(5):
        assert 3 not in order(scheduler)
        scheduler.verify()
    assert num_hashed <= 21 + 1, "its cached blocks, the first that is not, and the other's next one"
