"""Fair service, driven through the real gate: equal keys get equal tokens, whatever `max_tokens` they ask for.

Each simulation keeps every key's requests queued at all times, ends the request that is due next on a clock of its own, and
counts what each key was served: requests, and tokens as the gate weighs them (one written token = `OUTPUT_WEIGHT` read ones).
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass

import pytest

from tonle.gateway.admission import OUTPUT_WEIGHT, Gate, Ticket
from tonle.gateway.refusals import QueueFull

TOKEN_S = 0.02
BACKLOG = 20  # queued requests of each key


@dataclass
class Caller:
    """A key that always has requests queued. Its answers are `writes` tokens long, or `asks` if that is less."""

    name: str
    asks: int
    prompt: int = 30
    writes: int = 10
    priority: int = 2
    served: int = 0  # requests that have ended
    weight: int = 0  # of their tokens


def simulate(callers: list[Caller], *, slots: int, num_requests: int) -> None:
    async def main() -> None:
        now_s = 1.0
        gate = Gate(max_concurrent=slots, max_queued=10**6, max_queued_tokens=10**12, clock=lambda: now_s)
        queued: dict[str, list[Ticket]] = {caller.name: [] for caller in callers}
        running: list[tuple[float, int, Caller, Ticket]] = []
        number = 0

        def enter(caller: Caller, ticket: Ticket) -> None:
            nonlocal number
            number += 1
            took_s = TOKEN_S * min(caller.writes, caller.asks)
            heapq.heappush(running, (now_s + took_s, number, caller, ticket))

        def fill() -> None:
            for caller in callers:
                while len(queued[caller.name]) < BACKLOG:
                    ticket = Ticket(caller.name, caller.priority, caller.prompt, caller.asks)
                    if gate.ask(ticket):
                        enter(caller, ticket)
                    else:
                        queued[caller.name].append(ticket)

        fill()
        for _ in range(num_requests):
            now_s, _, caller, ticket = heapq.heappop(running)
            written = min(caller.writes, caller.asks)
            caller.served += 1
            caller.weight += caller.prompt + OUTPUT_WEIGHT * written
            gate.leave(ticket, used_tokens=caller.prompt + written)
            for other in callers:
                entered = [each for each in queued[other.name] if each.begun_s]
                queued[other.name] = [each for each in queued[other.name] if not each.begun_s]
                for each in entered:
                    enter(other, each)
            fill()

    asyncio.run(main())


def spread(callers: list[Caller]) -> float:
    """How far the least served is behind the most served."""
    weights = [caller.weight for caller in callers]
    return 1 - min(weights) / max(weights)


@pytest.mark.parametrize("slots", [1, 4, 48])
@pytest.mark.parametrize("num_requests", [300, 3000])
def test_two_equal_keys_are_served_alike_whatever_max_tokens_they_ask_for(slots: int, num_requests: int) -> None:
    large, small = Caller("large", asks=4096), Caller("small", asks=10)
    simulate([large, small], slots=slots, num_requests=num_requests)
    few = 0.05 if num_requests > 1000 or slots < 10 else 0.2  # with 48 at once, the first 48 are a large part of 300
    assert spread([large, small]) <= few, (large, small)
    assert abs(large.served - small.served) <= few * num_requests


def test_three_keys_with_answers_of_other_lengths_get_equal_tokens() -> None:
    callers = [
        Caller("chat", asks=4096, prompt=200, writes=300),
        Caller("labels", asks=4096, prompt=50, writes=5),
        Caller("summaries", asks=256, prompt=3000, writes=200),
    ]
    simulate(callers, slots=8, num_requests=6000)
    assert spread(callers) <= 0.05, callers
    assert callers[1].served > 5 * callers[0].served  # tokens are shared, not requests


def test_a_key_that_writes_all_it_asks_for_gains_nothing_over_one_that_does_not() -> None:
    callers = [Caller("modest", asks=100, writes=100), Caller("boastful", asks=100_000, writes=100)]
    simulate(callers, slots=16, num_requests=3000)
    assert spread(callers) <= 0.05, callers


def test_higher_priority_goes_first_and_keys_of_one_priority_share() -> None:
    high = [Caller("a", asks=4096, priority=1), Caller("b", asks=10, priority=1)]
    low = Caller("c", asks=10, priority=3)
    simulate([*high, low], slots=4, num_requests=1000)
    assert spread(high) <= 0.05
    assert low.served <= 4  # only what was let in before the others came


def test_charge_and_refund_are_one_formula() -> None:
    """Requests that used exactly what was expected of them leave the count where it was put."""

    async def main() -> None:
        gate = Gate(max_concurrent=2, max_queued=10, max_queued_tokens=10**9, clock=lambda: 1.0)
        other = Ticket("other", 2, 1, 1)
        gate.ask(other)  # the gate never becomes empty, which would forget what was served
        for _ in range(100):
            ticket = Ticket("a", 2, 100, 50)
            gate.ask(ticket)
            gate.leave(ticket, used_tokens=150)
        assert gate._served["a"] - gate._served["other"] == pytest.approx(100 * (100 + OUTPUT_WEIGHT * 50), rel=0.01)
        for _ in range(100):  # hung up before the backend was asked
            ticket = Ticket("b", 2, 100, 50)
            gate.ask(ticket)
            gate.leave(ticket, used_tokens=0)
        assert gate._served["b"] <= gate._served["other"]

    asyncio.run(main())


def full_gate(**limits: int) -> tuple[Gate, list[Ticket]]:
    """One request inside, and a queue that the key `greedy` has filled."""
    gate = Gate(**{"max_concurrent": 1, "max_queued": 10, "max_queued_tokens": 10**9} | limits, clock=lambda: 1.0)
    gate.ask(Ticket("greedy", 2, 10, 10))
    tickets: list[Ticket] = []
    while True:
        ticket = Ticket("greedy", 2, 10, 10)
        try:
            gate.ask(ticket)
        except QueueFull:
            return gate, tickets
        tickets.append(ticket)


@pytest.mark.parametrize("limits", [{"max_queued": 10}, {"max_queued_tokens": 200}])
def test_one_key_cannot_fill_the_queue_for_all_others(limits: dict[str, int]) -> None:
    async def main() -> None:
        gate, tickets = full_gate(**limits)
        assert len(tickets) == 10
        mine = Ticket("modest", 2, 10, 10)
        assert not gate.ask(mine)  # queued: the newest request of the key that holds most of the queue gave way
        turn = tickets[-1].turn
        assert turn is not None and isinstance(turn.exception(), QueueFull)
        assert (gate.num_queued, gate.queued_tokens) == (10, 200)
        gate.leave(tickets[-1])  # its caller is told, and leaves
        assert (gate.num_queued, gate.num_inside) == (10, 1)
        for _ in range(4):
            gate.ask(Ticket("modest", 2, 10, 10))
        with pytest.raises(QueueFull):  # both hold five
            gate.ask(Ticket("modest", 2, 10, 10))

    asyncio.run(main())


def test_a_request_gives_way_to_none_of_lower_priority_and_to_none_that_is_larger() -> None:
    async def main() -> None:
        gate, _ = full_gate(max_queued=10)
        with pytest.raises(QueueFull):
            gate.ask(Ticket("later", 3, 10, 10))
        gate, tickets = full_gate(max_queued_tokens=200)
        assert gate.num_queued == 10
        with pytest.raises(QueueFull):
            gate.ask(Ticket("huge", 2, 10, 10**6))
        assert all(each.turn is not None and not each.turn.done() for each in tickets)

    asyncio.run(main())
