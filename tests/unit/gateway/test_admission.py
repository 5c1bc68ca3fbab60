"""The line in front of a backend: bounded, by priority, fair by tokens."""

from __future__ import annotations

import asyncio
import random

import pytest

from tonle.gateway.admission import Gate, Ticket
from tonle.gateway.refusals import DeadlinePassed, QueueFull


def gate(max_concurrent: int = 1, max_queued: int = 100, max_queued_tokens: int = 10**9) -> Gate:
    return Gate(max_concurrent=max_concurrent, max_queued=max_queued, max_queued_tokens=max_queued_tokens,
                clock=lambda: 1.0)  # fmt: skip


def ticket(key: str = "a", tokens: int = 10, priority: int = 2) -> Ticket:
    return Ticket(key, priority, tokens, 0)


def test_so_many_at_once_and_then_in_turn() -> None:
    async def main() -> None:
        line = gate(max_concurrent=2)
        first, second, third = ticket(), ticket(), ticket()
        assert line.ask(first) and line.ask(second)
        assert not line.ask(third)
        line.leave(first)
        assert third.turn is not None and third.turn.done()
        assert (line.num_inside, line.num_queued) == (2, 0)

    asyncio.run(main())


def test_keys_share_by_tokens_not_by_requests() -> None:
    """One key sends large requests, the other small ones: both get the same tokens."""

    async def main() -> None:
        line = gate(max_queued=1000)
        inside = ticket("z")
        line.ask(inside)
        waiting = [ticket("large", 100) for _ in range(20)] + [ticket("small", 10) for _ in range(200)]
        for each in waiting:
            line.ask(each)
        served = {"large": 0, "small": 0}
        for _ in range(66):
            line.leave(inside)
            (inside,) = (each for each in waiting if each.begun_s)
            waiting.remove(inside)
            served[inside.key_id] += inside.tokens
        assert abs(served["large"] - served["small"]) <= 100

    asyncio.run(main())


def test_priority_goes_first() -> None:
    async def main() -> None:
        line = gate()
        inside, low, high = ticket(), ticket(priority=3), ticket(priority=1)
        line.ask(inside)
        line.ask(low)
        line.ask(high)
        line.leave(inside)
        assert high.turn is not None and high.turn.done()
        assert low.turn is not None and not low.turn.done()

    asyncio.run(main())


def test_a_full_line_refuses_with_the_time_to_come_back() -> None:
    async def main() -> None:
        line = gate(max_queued=2)
        line.service_s = 3.0
        for _ in range(3):
            line.ask(ticket())
        with pytest.raises(QueueFull) as refused:
            line.ask(ticket())
        assert refused.value.retry_after_s == pytest.approx(9.0)
        tokens = gate(max_queued_tokens=25)
        for _ in range(3):
            tokens.ask(ticket())
        with pytest.raises(QueueFull, match="20 tokens"):
            tokens.ask(ticket())

    asyncio.run(main())


def test_who_cannot_be_in_time_is_told_at_once() -> None:
    async def main() -> None:
        line = gate()
        line.service_s = 3.0
        line.ask(ticket())
        with pytest.raises(DeadlinePassed, match=r"3\.0 s"):
            line.ask(ticket(), time_left_s=2.0)
        assert not line.ask(ticket(), time_left_s=4.0)

    asyncio.run(main())


def test_whoever_comes_and_goes_the_counts_are_right() -> None:
    async def main() -> None:
        rng = random.Random(7)
        line = gate(max_concurrent=3, max_queued=10)
        present: list[Ticket] = []
        for _ in range(3000):
            if rng.random() < 0.55:
                each = ticket(rng.choice("abc"), rng.randint(1, 50), rng.randint(1, 3))
                try:
                    line.ask(each)
                except QueueFull:
                    assert line.num_queued == 10
                    continue
                present.append(each)
                for refused in [t for t in present if t.turn is not None and t.turn.done() and t.turn.exception()]:
                    assert refused is not each and isinstance(refused.turn.exception(), QueueFull)  # type: ignore[union-attr]
                    present.remove(refused)  # it gave way to a key that holds less of the queue
                    line.leave(refused)
            elif present:
                line.leave(present.pop(rng.randrange(len(present))), used_tokens=rng.randint(0, 90))
            inside = [t for t in present if t.begun_s]
            assert line.num_inside == len(inside) <= 3
            assert line.num_queued == len(present) - len(inside)
            assert line.queued_tokens == sum(t.tokens for t in present if not t.begun_s)
            assert line.num_inside == 3 or not line.num_queued
        for each in present:
            line.leave(each)
        assert (line.num_inside, line.num_queued, line.queued_tokens) == (0, 0, 0)

    asyncio.run(main())
