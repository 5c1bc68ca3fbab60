"""`GrammarConstraint`: one sequence's place in a grammar, behind the protocol that the scheduler knows."""

from __future__ import annotations

import time
from collections.abc import Set

import numpy as np
from llguidance import LLMatcher

_MAX_MESSAGE_CHARS = 600
# A grammar may be slow now and then, not all the time: every other row of the batch waits for it. Usual ones take 0.05 ms.
_TOKEN_S = 0.002  # of the processor, per token
_BURST_S = 1.0  # beyond that, in all
_SLOW_S = 0.0003  # a mask that takes longer than what is spent on handing it to another thread
_NUM_KNOWN, _RARELY = 64, 500  # masks after which a grammar is known, and one slow mask of so many does no harm
_LONG_S = 0.002  # a mask that takes longer may be that of a long run without a choice
_TOO_SLOW = "it takes too long to find out what may come next; make the grammar less ambiguous, or its patterns simpler"

_COMPLEX = (
    "its patterns are too complex; make them simpler or shorter, above all what is repeated inside of repetitions"
)
_AMBIGUOUS = "it can go on in too many ways at once; write fewer alternatives, or say in fewer ways what means the same"


class Pace:
    """How long the masks of one grammar took. What threads count at the same time may be lost: it is an estimate."""

    __slots__ = ("num_filled", "num_slow")

    def __init__(self) -> None:
        self.num_filled = 0
        self.num_slow = 0

    def note(self, seconds: float) -> None:
        self.num_filled += 1
        self.num_slow += seconds > _SLOW_S

    @property
    def is_quick(self) -> bool:
        """A step can wait for its masks."""
        return self.num_filled >= _NUM_KNOWN and self.num_slow * _RARELY <= self.num_filled


class GrammarConstraint:
    __slots__ = ("_debt_s", "_ends", "_num_pushed", "_run", "matcher", "pace")

    def __init__(self, matcher: LLMatcher, ends: Set[int], pace: Pace | None = None) -> None:
        self.pace = pace or Pace()  # of all constraints that are copies of one
        self.matcher = matcher  # its own: a copy of the compiled one
        self._ends = ends  # tokens that end an answer
        self._debt_s = 0.0  # time it took beyond what its tokens allow
        self._num_pushed = 0  # tokens that the matcher has taken
        self._run: list[int] = []  # tokens without a choice that come next, the last one first; empty: not known

    def push(self, token: int) -> None:
        if self.matcher.is_stopped():
            return
        began = time.thread_time()
        self._num_pushed += self.matcher.consume_token(token)
        if self._run and self._run.pop() != token:
            self._run.clear()
        self.charge(time.thread_time() - began - _TOKEN_S)

    def forced(self, most: int, least: int = 1) -> list[int]:
        if most < max(least, 1) or self.matcher.is_stopped():
            return []
        began = time.thread_time()
        tokens = self.matcher.compute_ff_tokens()[:most]
        if not self._ends.isdisjoint(tokens):  # a grammar may name one: it is sampled, so that the answer ends with it
            tokens = tokens[: next(i for i, token in enumerate(tokens) if token in self._ends)]
        if len(tokens) >= max(least, 1):
            self.matcher.consume_tokens(tokens)
            self._num_pushed += len(tokens)
            self._run.clear()
        else:
            tokens = []
        self.charge(time.thread_time() - began - len(tokens) * _TOKEN_S)
        return tokens

    def fill(self, mask: np.ndarray) -> bool:
        if self._run:
            mask.fill(0)
            mask.view(np.uint8)[self._run[-1] >> 3] = 1 << (self._run[-1] & 7)
            return True
        began = time.thread_time()
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        took_s = time.thread_time() - began
        if took_s > _LONG_S:  # where runs are not jumped over, each of their tokens would take as long
            self._run = self.matcher.compute_ff_tokens()[::-1]
        self.charge(took_s)
        self.pace.note(took_s)
        return True

    def charge(self, seconds: float) -> None:
        self._debt_s = max(0.0, self._debt_s + seconds)

    def allows(self, token: int) -> bool:
        return self.matcher.validate_tokens([token]) == 1

    def fits(self, tokens: list[int]) -> int:
        if self.matcher.is_stopped():
            return 0
        began = time.thread_time()
        count = self.matcher.validate_tokens(tokens)
        self.charge(time.thread_time() - began)
        return count

    @property
    def takes_guesses(self) -> bool:
        return True

    def save(self) -> tuple[int, list[int]]:
        return self._num_pushed, list(self._run)

    def restore(self, saved: tuple[int, list[int]]) -> None:
        num_pushed, self._run = saved
        if (count := self._num_pushed - num_pushed) and not self.matcher.is_error():
            self.matcher.rollback(count)
        self._num_pushed = num_pushed

    def restart(self) -> None:
        """As if nothing had been pushed."""
        self.matcher.reset()
        self._num_pushed = 0
        self._run.clear()

    @property
    def is_complete(self) -> bool:
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why it cannot go on, in words for the caller."""
        if self.matcher.is_error():
            return f"the answer cannot go on as its grammar says: {in_words(self.matcher.get_error())}"
        return f"the answer cannot go on as its grammar says: {_TOO_SLOW}" if self._debt_s > _BURST_S else None


_IN_WORDS = {
    "NoExtensionBias": "no text at all fits it; does a rule or a $ref lead to nothing but itself?",
    "Unable to determine if regex is empty": "patterns and lengths that one string must fit are too complex together",
    "; ff_tokens)": (
        "what follows has too many alternatives, or leaves no choice without an end; does a required property lead to itself?"
    ),
    "too many expressions": _COMPLEX,
    "too many states": _COMPLEX,
    "lexer precomputation failed": _COMPLEX,
    "initial lexer configuration": _COMPLEX,
    "fuel exhausted": _COMPLEX,
    "Too many items": _AMBIGUOUS,
    "Current row has": _AMBIGUOUS,
    "schema too large": "with its alternatives multiplied out (allOf of anyOf, or many properties), it is too large",
}  # by what stands in llguidance's words, which speak of its own settings


def in_words(message: str) -> str:
    """llguidance's error for the caller: without its mark for what it left out, and not endless."""
    for found, words in _IN_WORDS.items():
        if found in message[:_MAX_MESSAGE_CHARS]:
            return words
    text = message.replace("<non-verbose/>", "").strip()
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[:_MAX_MESSAGE_CHARS] + " …"
