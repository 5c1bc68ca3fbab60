"""`ThinkingConstraint`: thoughts first, then what the grammar says.

Does: tell where thinking begins and ends by its tokens, count it, write its end when the budget is spent, hand over to the
grammar of the answer. Does not: bind the thoughts themselves.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from tonle.engine.grammar.matcher import GrammarConstraint
from tonle.engine.request import Thinking


class _Phase(enum.Enum):
    STARTING = enum.auto()  # the next tokens are those that open a thought, or already the answer
    THINKING = enum.auto()
    CLOSING = enum.auto()  # the budget is spent: the end is being written
    ANSWER = enum.auto()


class ThinkingConstraint:
    """`answer` binds what comes after the thoughts; None: nothing does."""

    __slots__ = ("_answer_fits", "_due", "_error", "_left", "_phase", "_recent", "_thinking", "answer")

    def __init__(self, thinking: Thinking, answer: GrammarConstraint | None) -> None:
        self.answer = answer
        self._thinking = thinking
        self._left = thinking.budget  # tokens of thought that may still come
        self._recent: list[int] = []  # as many last thoughts as `end` has tokens
        self._due: list[int] = []  # while starting or closing: the tokens that would be next
        self._answer_fits = answer is not None  # what came while starting may be the answer as well
        self._error: str | None = None
        self._phase = _Phase.STARTING
        if thinking.is_open:
            self._think()
        elif not thinking.start:
            self._phase = _Phase.ANSWER
        else:
            self._due = list(thinking.start)

    # -- tokens that came

    def push(self, token: int) -> None:
        match self._phase:
            case _Phase.ANSWER:
                if self.answer is not None:
                    self.answer.push(token)
            case _Phase.STARTING:
                self._push_start(token)
            case _Phase.THINKING:
                self._push_thought(token)
            case _Phase.CLOSING:
                if token == self._due[0]:
                    self._advance_closing(1)
                else:
                    self._error = "the thought cannot end: min_tokens forbids its last token"

    def _push_start(self, token: int) -> None:
        if self.answer is not None and self._answer_fits:
            is_start = token == self._due[0]
            self._answer_fits = not is_start or self.answer.allows(token)
            if self._answer_fits:
                self.answer.push(token)
        if token != self._due[0]:
            self._phase = _Phase.ANSWER  # it does not think
            return
        self._due = self._due[1:]
        if not self._due:
            if self.answer is not None:
                self.answer.restart()
            self._think()

    def _think(self) -> None:
        self._phase = _Phase.THINKING
        self._close_if_spent()

    def _push_thought(self, token: int) -> None:
        end = self._thinking.end
        self._recent = [*self._recent, token][-len(end) :]
        if self._recent == end:
            self._phase = _Phase.ANSWER
        elif self._left is not None:
            self._left -= 1
            self._close_if_spent()

    def _close_if_spent(self) -> None:
        if self._left is not None and self._left <= 0:
            self._phase, self._due = _Phase.CLOSING, list(self._thinking.closing or self._thinking.end)

    def _advance_closing(self, count: int) -> None:
        self._due = self._due[count:]
        if not self._due:
            self._phase = _Phase.ANSWER

    # -- tokens that may come

    def forced(self, most: int, least: int = 1) -> list[int]:
        match self._phase:
            case _Phase.ANSWER:
                return [] if self.answer is None else self.answer.forced(most, least)
            case _Phase.THINKING:
                return []
        is_start = self._phase is _Phase.STARTING
        if is_start and (self.answer is None or self._answer_fits):
            return []  # it may still be the answer
        tokens = self._due[:most]
        if len(tokens) < max(least, 1):
            return []
        if is_start:
            for token in tokens:
                self._push_start(token)
        else:
            self._advance_closing(len(tokens))
        return tokens

    def fill(self, mask: np.ndarray) -> bool:
        match self._phase:
            case _Phase.ANSWER:
                return self.answer is not None and self.answer.fill(mask)
            case _Phase.THINKING:
                return False
            case _Phase.STARTING if self.answer is None:
                return False
            case _Phase.STARTING if self._answer_fits:
                assert self.answer is not None
                self.answer.fill(mask)
            case _:
                mask[:] = 0
        word, bit = divmod(self._due[0], 32)
        mask.view(np.uint32)[word] |= np.uint32(1 << bit)
        return True

    def fits(self, tokens: list[int]) -> int:
        match self._phase:
            case _Phase.ANSWER:
                return len(tokens) if self.answer is None else self.answer.fits(tokens)
            case _Phase.THINKING:  # any thought may come, and be its last
                return len(tokens)
        return 0

    @property
    def takes_guesses(self) -> bool:
        """Not while what comes may open a thought or be the answer: the answer may have to begin anew then, for good."""
        return self._phase in (_Phase.ANSWER, _Phase.THINKING)

    def save(self) -> tuple[Any, ...]:
        answer = None if self.answer is None else self.answer.save()
        return self._phase, self._left, self._recent, self._due, self._answer_fits, self._error, answer

    def restore(self, saved: tuple[Any, ...]) -> None:
        self._phase, self._left, self._recent, self._due, self._answer_fits, self._error, answer = saved
        if self.answer is not None:
            self.answer.restore(answer)

    @property
    def binds_now(self) -> GrammarConstraint | None:
        """The constraint whose mask is the whole mask of the next token, if there is one."""
        return self.answer if self._phase is _Phase.ANSWER else None

    @property
    def is_complete(self) -> bool:
        return self._phase is _Phase.ANSWER and self.answer is not None and self.answer.is_complete

    @property
    def error(self) -> str | None:
        return self._error or (None if self.answer is None else self.answer.error)
