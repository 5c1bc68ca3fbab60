"""Admission to one backend: so many requests at once, the rest in a bounded queue that is fair by tokens.

Does: let in, queue, refuse with the time to try again. Does not: know backends or HTTP.

Fair means: of the keys with queued requests, the one that has been served the fewest tokens is next (a virtual token
counter). A key that was idle saves nothing up: when it returns, it starts level with the least served key present.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from tonle.gateway.refusals import DeadlinePassed, QueueFull

EWMA = 0.1  # weight of the newest observation
FIRST_GUESS_S = 1.0  # how long an answer takes, before one has been seen
MAX_USED_TOKENS = 2**31 - 1  # by one request; a larger count from a backend is cut to this
OUTPUT_WEIGHT = 2  # a token written costs about this much more than one read


class Ticket:
    """One request's place: queued, then inside. Leave exactly once."""

    __slots__ = ("begun_s", "cost", "key_id", "priority", "tokens", "turn")

    def __init__(self, key_id: str, priority: int, prompt_tokens: int, new_tokens: int) -> None:
        self.key_id = key_id
        self.priority = priority
        self.tokens = prompt_tokens + new_tokens
        self.cost = float(prompt_tokens + OUTPUT_WEIGHT * new_tokens)  # what is too large fails here, uncounted
        self.turn: asyncio.Future[None] | None = None
        self.begun_s = 0.0


class Gate:
    """Owns the queue in front of one backend."""

    def __init__(self, *, max_concurrent: int, max_queued: int, max_queued_tokens: int,
                 clock: Callable[[], float] = time.monotonic) -> None:  # fmt: skip
        self.max_concurrent = max_concurrent
        self.max_queued = max_queued
        self.max_queued_tokens = max_queued_tokens
        self._clock = clock
        self.num_inside = 0
        self.num_queued = 0
        self.queued_tokens = 0
        self.service_s = FIRST_GUESS_S  # smoothed: how long an answer takes
        self._queues: dict[tuple[int, str], deque[Ticket]] = {}  # by (priority, key)
        self._served: dict[str, float] = {}  # virtual tokens by key
        self._inside: dict[str, int] = {}  # requests by key

    def wait_estimate_s(self) -> float:
        """For one more request, at the rate measured."""
        if self.num_inside < self.max_concurrent and not self.num_queued:
            return 0.0
        return (self.num_queued + 1) * self.service_s / self.max_concurrent

    def ahead_of(self, ticket: Ticket) -> int:
        """How many others are queued; an upper bound of those before it."""
        return max(0, self.num_queued - 1)

    def ask(self, ticket: Ticket, *, time_left_s: float | None = None) -> bool:
        """True: it is inside. False: it is queued until its `turn` is set. Raises `QueueFull`, `DeadlinePassed`."""
        if self.num_inside < self.max_concurrent and not self.num_queued:
            self._let_in(ticket)
            return True
        wait_s = self.wait_estimate_s()
        if self.num_queued >= self.max_queued:
            raise QueueFull(f"the queue is full: {self.num_queued} requests are waiting", retry_after_s=wait_s)
        if self.queued_tokens and self.queued_tokens + ticket.tokens > self.max_queued_tokens:
            raise QueueFull(
                f"the queue is full: requests with {self.queued_tokens} tokens are waiting", retry_after_s=wait_s
            )
        if time_left_s is not None and wait_s > time_left_s:
            raise DeadlinePassed(f"the queue takes about {wait_s:.1f} s, longer than the request's deadline allows",
                                 retry_after_s=wait_s)  # fmt: skip
        ticket.turn = asyncio.get_running_loop().create_future()
        self._level(ticket.key_id)
        self._queues.setdefault((ticket.priority, ticket.key_id), deque()).append(ticket)
        self.num_queued += 1
        self.queued_tokens += ticket.tokens
        return False

    @property
    def has_room(self) -> bool:
        """A request that asks now is let in at once."""
        return self.num_inside < self.max_concurrent and not self.num_queued

    def leave(self, ticket: Ticket, *, used_tokens: int | None = None) -> None:
        """The answer has ended, or the request was given up."""
        if ticket.turn is not None and not ticket.turn.done():
            self._withdraw(ticket)
            return
        if not ticket.begun_s:
            return
        took_s = self._clock() - ticket.begun_s
        self.service_s += EWMA * (took_s - self.service_s)
        self.num_inside -= 1
        self._inside[ticket.key_id] -= 1
        if not self._inside[ticket.key_id]:
            del self._inside[ticket.key_id]
        if used_tokens is not None:
            used = min(used_tokens, MAX_USED_TOKENS)
            self._served[ticket.key_id] = self._served.get(ticket.key_id, 0.0) + used - ticket.tokens
        self._forget_absent()
        self._admit_next()

    def _let_in(self, ticket: Ticket) -> None:
        self._level(ticket.key_id)
        self.num_inside += 1
        self._inside[ticket.key_id] = self._inside.get(ticket.key_id, 0) + 1
        self._served[ticket.key_id] += ticket.cost
        ticket.begun_s = self._clock()

    def _admit_next(self) -> None:
        while self._queues and self.num_inside < self.max_concurrent:
            # Priority first; within it, the key served least.
            place = min(self._queues, key=lambda each: (each[0], self._served.get(each[1], 0.0)))
            ticket = self._queues[place].popleft()
            self._drop_empty(place)
            self._count_out(ticket)
            self._let_in(ticket)
            assert ticket.turn is not None
            ticket.turn.set_result(None)

    def _withdraw(self, ticket: Ticket) -> None:
        place = (ticket.priority, ticket.key_id)
        self._queues[place].remove(ticket)
        self._drop_empty(place)
        self._count_out(ticket)
        if ticket.turn is not None:
            ticket.turn.cancel()

    def _drop_empty(self, place: tuple[int, str]) -> None:
        if not self._queues[place]:
            del self._queues[place]

    def _count_out(self, ticket: Ticket) -> None:
        self.num_queued -= 1
        self.queued_tokens -= ticket.tokens

    def _level(self, key_id: str) -> None:
        """A key that has just arrived starts level with the least served of those present."""
        if key_id in self._inside:
            return
        present = {key for _, key in self._queues} | set(self._inside)
        if key_id not in present:
            least = min((self._served.get(key, 0.0) for key in present), default=0.0)
            self._served[key_id] = max(self._served.get(key_id, 0.0), least)

    def _forget_absent(self) -> None:
        if not self.num_inside and not self._queues:
            self._served.clear()
