"""Constraints without a grammar: what may follow is a function of the tokens so far."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from tonle.engine.constraint import Compiled, Constraint
from tonle.engine.request import Request

# Which tokens may follow these: a set, of which the empty one means the end; None: any; a text: an error.
Rule = Callable[[tuple[int, ...]], "frozenset[int] | str | None"]


class RuleConstraint:
    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.tokens: list[int] = []  # pushed
        self._error: str | None = None

    @property
    def allowed(self) -> frozenset[int] | str | None:
        return self.rule(tuple(self.tokens))

    def push(self, token: int) -> None:
        allowed = self.allowed
        if self._error is None and isinstance(allowed, frozenset) and token not in allowed:
            self._error = f"token {token} may not follow {self.tokens}"
        self.tokens.append(token)

    def forced(self, most: int, least: int = 1) -> list[int]:
        before = len(self.tokens)
        while len(self.tokens) - before < most and isinstance(self.allowed, frozenset) and len(self.allowed) == 1:
            self.tokens += self.allowed
        run = self.tokens[before:]
        if len(run) < least:
            del self.tokens[before:]
            return []
        return run

    def fits(self, tokens: list[int]) -> int:
        history = list(self.tokens)
        for count, token in enumerate(tokens):
            allowed = self.rule(tuple(history))
            if isinstance(allowed, str) or (allowed is not None and token not in allowed):
                return count
            history.append(token)
        return len(tokens)

    takes_guesses = True

    def save(self) -> tuple[list[int], str | None]:
        return list(self.tokens), self._error

    def restore(self, saved: tuple[list[int], str | None]) -> None:
        self.tokens, self._error = list(saved[0]), saved[1]

    def fill(self, mask: np.ndarray) -> bool:
        allowed = self.allowed
        if not isinstance(allowed, frozenset):
            return False
        mask[:] = 0
        for token in allowed:
            mask[token // 32] |= np.uint32(1 << token % 32).astype(np.int32)
        return True

    @property
    def is_complete(self) -> bool:
        return self.allowed == frozenset()

    @property
    def error(self) -> str | None:
        return self._error or (why if isinstance(why := self.allowed, str) else None)


class RuleCompiler:
    """Has the constraint of a request when it has been asked for it `delay` times. A rule that is a text: it is refused."""

    def __init__(
        self, rule: Callable[[Request], Rule | str], vocab_size: int, delay: int = 0, late: float = 0.0
    ) -> None:
        """`late`: share of masks that are not filled at once, where the loop does not wait for them."""
        self._late_share = late
        self._rng = random.Random(5)
        self.late: dict[int, int] = {}  # by the id of a constraint: how often it will still be late
        self.mask_words = -(-vocab_size // 32)
        self.made: dict[int, RuleConstraint] = {}
        self.num_filled: list[int] = []  # rows of each call
        self.is_closed = False
        self._rule = rule
        self._delay = delay
        self._asked: dict[int, tuple[Request, int]] = {}

    def ask(self, request: Request) -> None:
        self._asked[request.handle] = (request, self._delay)

    def forget(self, handle: int) -> None:
        del self._asked[handle]

    def take(self) -> list[Compiled]:
        done = [request for request, left in self._asked.values() if not left]
        self._asked = {handle: (request, left - 1) for handle, (request, left) in self._asked.items() if left}
        return [self._compile(request) for request in done]

    def _compile(self, request: Request) -> Compiled:
        rule = self._rule(request)
        if isinstance(rule, str):
            return Compiled(request, None, rule)
        self.made[request.handle] = RuleConstraint(rule)
        return Compiled(request, self.made[request.handle])

    @property
    def is_busy(self) -> bool:
        return bool(self._asked)

    def fill(self, constraints: list[Constraint], masks: np.ndarray, wait_s: float | None = None) -> list[bool | None]:
        self.num_filled.append(len(constraints))
        if wait_s is not None:
            for constraint in constraints:
                if id(constraint) not in self.late and self._rng.random() < self._late_share:
                    self.late[id(constraint)] = self._rng.randint(0, 3)
                    self.num_late += 1
        return [
            None if wait_s is not None and self.late.get(id(constraint), 0) else self._fill(constraint, mask)
            for constraint, mask in zip(constraints, masks, strict=True)
        ]

    def _fill(self, constraint: Constraint, mask: np.ndarray) -> bool:
        self.late.pop(id(constraint), None)
        return constraint.fill(mask)

    num_late = 0

    def is_late(self, constraint: Constraint) -> bool:
        left = self.late.get(id(constraint), 0)
        if left:
            self.late[id(constraint)] = left - 1
        return left > 0

    def drop_mask(self, constraint: Constraint) -> None:
        self.late.pop(id(constraint), None)

    def close(self) -> None:
        self.is_closed = True


def random_rule(
    seed: int, tokens: int, *, forced: float = 0.5, free: float = 0.1, end: float = 0.03, error: float = 0.0
) -> Rule:
    """Over tokens 1 up to `tokens`: shares of places where one is forced, where any may stand, where it ends or fails."""

    def rule(history: tuple[int, ...]) -> frozenset[int] | str | None:
        rng = random.Random(f"{seed} {history}")
        kind = rng.random()
        if kind < end:
            return frozenset()
        if kind < end + error:
            return "a rule of chance ends here"
        if kind < end + error + free:
            return None
        most = 1 if kind < end + error + free + forced else tokens
        return frozenset(rng.sample(range(1, tokens + 1), rng.randint(min(2, most), most)))

    return rule
