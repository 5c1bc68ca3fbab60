"""Admission to one backend: so many requests at once, the rest in a bounded queue that is fair by tokens.

Does: let in, queue, refuse with the time to try again. Does not: know backends or HTTP.

Fair means: of the keys with queued requests, the one that has been served the fewest tokens is next (a virtual token
counter). A token written counts `OUTPUT_WEIGHT` times one read. What a request will write is not known when it is let in,
and its `max_tokens` says little: it is charged what the key's answers were long lately, and corrected when it ends, both by
`cost_of`. A key that was idle saves nothing up: when it returns, it starts level with the least served key present. A
full queue is shared, too: the key that holds most of it gives way to one that would hold less.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from tonle.gateway.refusals import DeadlinePassed, QueueFull

EWMA = 0.1  # weight of the newest observation
FIRST_GUESS_S = 1.0  # how long an answer takes, before one has been seen
FIRST_GUESS_TOKENS = 256.0  # how long an answer is, before one has been seen
MAX_USED_TOKENS = 2**31 - 1  # by one request; a larger count from a backend is cut to this
OUTPUT_WEIGHT = 2  # a token written costs about this much more than one read


def cost_of(prompt_tokens: float, new_tokens: float) -> float:
    """What a request counts for in the sharing of a backend."""
    return float(prompt_tokens + OUTPUT_WEIGHT * new_tokens)


class Ticket:
    """One request's place: queued, then inside. Leave exactly once. A simulation has tickets that wait in no event loop."""

    __slots__ = ("begun_s", "cost", "key_id", "new_tokens", "priority", "prompt_tokens", "tokens", "turn")

    def __init__(self, key_id: str, priority: int, prompt_tokens: int, new_tokens: int) -> None:
        """`new_tokens`: the most that may be written."""
        self.key_id = key_id
        self.priority = priority
        self.prompt_tokens = prompt_tokens
        self.new_tokens = new_tokens
        self.tokens = prompt_tokens + new_tokens
        self.cost = cost_of(
            prompt_tokens, new_tokens
        )  # at most, until it is let in; what is too large fails here, uncounted
        self.turn: asyncio.Future[None] | None = None  # its caller waits for it; the four methods below set it
        self.begun_s = 0.0

    @property
    def is_queued(self) -> bool:
        return self.turn is not None and not self.turn.done()

    def queue(self) -> None:
        self.turn = asyncio.get_running_loop().create_future()

    def let_in(self) -> None:
        assert self.turn is not None
        self.turn.set_result(None)

    def displace(self, error: Exception) -> None:
        assert self.turn is not None
        self.turn.set_exception(error)
        self.turn.exception()  # seen: its caller may be gone

    def withdraw(self) -> None:
        if self.turn is not None:
            self.turn.cancel()


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
        self.token_s: float | None = None  # smoothed: how long one token of an answer takes; None: none has been seen
        self._queues: dict[tuple[int, str], deque[Ticket]] = {}  # by (priority, key)
        self._served: dict[str, float] = {}  # cost by key, of requests that have ended
        self._charged: dict[str, float] = {}  # cost by key, expected of those inside
        self._written: dict[str, float] = {}  # new tokens of a request by key, smoothed
        self._written_by_all = FIRST_GUESS_TOKENS  # for a key that has had no answer yet
        self._inside: dict[str, int] = {}  # requests by key

    def resize(self, *, max_concurrent: int, max_queued: int) -> None:
        """More places are filled at once; fewer only bound what comes."""
        self.max_concurrent = max_concurrent
        self.max_queued = max_queued
        self._admit_next()

    def displace_all(self, why: Callable[[], Exception]) -> None:
        """Nobody waits here any longer: each that is queued fails with an error of its own."""
        queued = [ticket for queue in self._queues.values() for ticket in queue]
        self._queues.clear()
        for ticket in queued:
            self._count_out(ticket)
            ticket.displace(why())

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
        if time_left_s is not None and wait_s > time_left_s:
            raise DeadlinePassed(f"the queue takes about {wait_s:.1f} s, longer than the request's deadline allows",
                                 retry_after_s=wait_s)  # fmt: skip
        self._make_room(ticket, wait_s)
        ticket.queue()
        self._level(ticket.key_id)
        self._queues.setdefault((ticket.priority, ticket.key_id), deque()).append(ticket)
        self.num_queued += 1
        self.queued_tokens += ticket.tokens
        return False

    @property
    def has_room(self) -> bool:
        """A request that asks now is let in at once."""
        return self.num_inside < self.max_concurrent and not self.num_queued

    def leave(self, ticket: Ticket, *, used_tokens: int | None = None, new_tokens: int | None = None) -> None:
        """The answer has ended, or the request was given up.

        `used_tokens`: read and written together; None: not known, it stays charged as it is. `new_tokens`: those of them
        that were written; None: all beyond the prompt's estimate.
        """
        if ticket.is_queued:
            self._withdraw(ticket)
            return
        if not ticket.begun_s:
            return
        took_s = self._clock() - ticket.begun_s
        self.service_s += EWMA * (took_s - self.service_s)
        self.num_inside -= 1
        self._count_down(ticket, used_tokens, new_tokens)
        self._forget_absent()
        self._admit_next()

    def observe_pace(self, took_s: float, new_tokens: int) -> None:
        """An answer of so many tokens took so long."""
        if new_tokens > 0:
            token_s = took_s / new_tokens
            self.token_s = token_s if self.token_s is None else self.token_s + EWMA * (token_s - self.token_s)

    def _count_down(self, ticket: Ticket, used_tokens: int | None, new_tokens: int | None) -> None:
        """What was expected of a request is no longer charged, what it used is."""
        key_id, cost = ticket.key_id, ticket.cost
        self._inside[key_id] -= 1
        self._charged[key_id] -= cost
        if not self._inside[key_id]:
            del self._inside[key_id], self._charged[key_id]
        if used_tokens is not None:
            used = min(used_tokens, MAX_USED_TOKENS)
            new = min(max(0, used - ticket.prompt_tokens) if new_tokens is None else new_tokens, used)
            cost = cost_of(used - new, new)
            if used:  # else it says nothing about the length of answers
                self._written[key_id] = smoothed = new + (1 - EWMA) * (self._written.get(key_id, new) - new)
                self._written_by_all += EWMA * (smoothed - self._written_by_all)
        self._served[key_id] = self._served.get(key_id, 0.0) + cost

    def _let_in(self, ticket: Ticket) -> None:
        self._level(ticket.key_id)
        self.num_inside += 1
        self._inside[ticket.key_id] = self._inside.get(ticket.key_id, 0) + 1
        expected = self._written.get(ticket.key_id, self._written_by_all)
        ticket.cost = cost_of(ticket.prompt_tokens, min(ticket.new_tokens, expected))
        self._charged[ticket.key_id] = self._charged.get(ticket.key_id, 0.0) + ticket.cost
        ticket.begun_s = self._clock()

    def _admit_next(self) -> None:
        while self._queues and self.num_inside < self.max_concurrent:
            # Priority first; within it, the key served least.
            place = min(self._queues, key=self._rank)
            ticket = self._queues[place].popleft()
            self._drop_empty(place)
            self._count_out(ticket)
            self._let_in(ticket)
            ticket.let_in()

    def _rank(self, place: tuple[int, str]) -> tuple[int, float]:
        priority, key_id = place
        return priority, self._served.get(key_id, 0.0) + self._charged.get(key_id, 0.0)

    # -- a full queue

    def _make_room(self, ticket: Ticket, wait_s: float) -> None:
        """Raises `QueueFull` if there is none; then no request was displaced."""
        if self._is_full(ticket, self.num_queued, self.queued_tokens) is None:
            return
        for displaced in self._displaced_by(ticket, wait_s):
            place = (displaced.priority, displaced.key_id)
            self._queues[place].remove(displaced)
            self._drop_empty(place)
            self._count_out(displaced)
            displaced.displace(
                QueueFull("the queue is full, and this key holds the largest part of it", retry_after_s=wait_s)
            )

    def _is_full(self, ticket: Ticket, num_queued: int, queued_tokens: int) -> str | None:
        """Of what there is too much, with this request: requests, tokens, or nothing."""
        if num_queued >= self.max_queued:
            return f"{self.num_queued} requests"
        if queued_tokens and queued_tokens + ticket.tokens > self.max_queued_tokens:
            return f"requests with {self.queued_tokens} tokens"
        return None

    def _displaced_by(self, ticket: Ticket, wait_s: float) -> list[Ticket]:
        """The newest requests of the keys that hold most, none of which then holds less than this one's key would."""
        held: dict[str, list[Ticket]] = {}
        for place in sorted(self._queues):  # of each key: those of the lowest priority last
            held.setdefault(place[1], []).extend(self._queues[place])
        own = [*held.pop(ticket.key_id, []), ticket]
        num_queued, queued_tokens, displaced = self.num_queued, self.queued_tokens, list[Ticket]()
        while (excess := self._is_full(ticket, num_queued, queued_tokens)) is not None:
            size = len if num_queued >= self.max_queued else _tokens_of
            largest = max((each for each in held.values() if each and each[-1].priority >= ticket.priority),
                          key=size, default=own)  # fmt: skip
            if size(largest) <= size(own):
                raise QueueFull(f"the queue is full: {excess} are waiting", retry_after_s=wait_s)
            displaced.append(largest.pop())
            num_queued, queued_tokens = num_queued - 1, queued_tokens - displaced[-1].tokens
        return displaced

    # -- counts

    def _withdraw(self, ticket: Ticket) -> None:
        place = (ticket.priority, ticket.key_id)
        self._queues[place].remove(ticket)
        self._drop_empty(place)
        self._count_out(ticket)
        ticket.withdraw()

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
            self._written.clear()


def _tokens_of(tickets: list[Ticket]) -> int:
    return sum(ticket.tokens for ticket in tickets)
