"""`GuardedDrafter`: a drafter whose faults cost its guesses and nothing else. Answers do not depend on guesses, so an exception
in it must end no request and no engine.

Does: pass calls on; log the first exception, and make no guesses from then on. Does not: check what it guesses (steps do).
"""

from __future__ import annotations

import logging
from typing import Protocol

from tonle.engine.plan import Plan
from tonle.engine.schedule.sequence import Sequence

log = logging.getLogger("tonle.engine")


class Drafter(Protocol):
    """Guesses what comes next, as far as it pays."""

    def begin_step(self, plan: Plan) -> bool:
        """This step is to be computed. Whether drafts may pay in it; if not, nothing is asked about its sequences."""

    def propose_all(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """For each sequence, at most so many tokens that may follow its `tokens`."""

    def step_ended(self, plan: Plan, seconds: float, num_accepted: int) -> None:
        """A step has been computed, and so many of its guesses were right."""

    def ended(self, sequence: Sequence) -> None:
        """It gets no more tokens."""

    def forget_texts(self) -> None:
        """Of requests that have ended."""

    def release_memory(self) -> None:
        """Nothing runs: what can be computed again need not be kept."""


class AheadDrafter(Drafter, Protocol):
    """For a runner that launches a step before the one ahead of it is read. Of a sequence in two steps no one knows the last
    token, so none can be guessed after it: it has to wait for a step to be read first, which costs it a step."""

    def choose(self, sequences: list[Sequence]) -> list[Sequence]:
        """Of the sequences of a step, those to be looked at now."""

    def look_ahead(self, sequences: list[Sequence], num_rows: int) -> list[Sequence]:
        """A step of `num_rows` sequences was read, and these are in the next one already. Those that should wait for that, and
        not go into a third: guesses are expected to bring more."""


class GuardedDrafter:
    """An `AheadDrafter`, if it was made with one. `try` costs nothing where nothing is raised, so each call has its own."""

    def __init__(self, drafter: Drafter, ahead: AheadDrafter | None = None) -> None:
        """`ahead`: the same drafter, if it is one."""
        self.drafter: Drafter | None = drafter  # None: it has failed, and its memory is free
        self._ahead = ahead

    def begin_step(self, plan: Plan) -> bool:
        try:
            return self.drafter is not None and self.drafter.begin_step(plan)
        except Exception:
            self._stop()
            return False

    def propose_all(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        try:
            if self.drafter is not None:
                return self.drafter.propose_all(wanted)
        except Exception:
            self._stop()
        return [[] for _ in wanted]

    def step_ended(self, plan: Plan, seconds: float, num_accepted: int) -> None:
        try:
            if self.drafter is not None:
                self.drafter.step_ended(plan, seconds, num_accepted)
        except Exception:
            self._stop()

    def ended(self, sequence: Sequence) -> None:
        try:
            if self.drafter is not None:
                self.drafter.ended(sequence)
        except Exception:
            self._stop()

    def forget_texts(self) -> None:
        try:
            if self.drafter is not None:
                self.drafter.forget_texts()
        except Exception:
            self._stop()

    def release_memory(self) -> None:
        try:
            if self.drafter is not None:
                self.drafter.release_memory()
        except Exception:
            self._stop()

    def choose(self, sequences: list[Sequence]) -> list[Sequence]:
        try:
            return [] if self._ahead is None else self._ahead.choose(sequences)
        except Exception:
            self._stop()
            return []

    def look_ahead(self, sequences: list[Sequence], num_rows: int) -> list[Sequence]:
        try:
            return [] if self._ahead is None else self._ahead.look_ahead(sequences, num_rows)
        except Exception:
            self._stop()
            return []

    def _stop(self) -> None:
        """While an exception is handled."""
        self.drafter = self._ahead = None
        log.exception(
            "speculative decoding failed and is off until the engine is started again; requests go on without it"
        )
