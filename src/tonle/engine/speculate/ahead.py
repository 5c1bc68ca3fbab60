"""`AheadSpeculator`: guesses by suffix where steps are launched before the one ahead of them is read, as on a GPU.

Such a step does not know the last token of its sequences, so it can have no guesses after them. A sequence that is to have
guesses first waits until its last step is read, and after a step with guesses it waits again: while others go on it is in every
second step only, and if it is alone the device waits for the host meanwhile. So the question is not what a guess more costs, but
whether to leave the pipeline: it is answered for all sequences of a step together, by how many tokens guesses are expected to
bring and how much longer a step takes.

Does: look where a step ahead may be worth giving up; choose the guesses of a step; learn from both. Does not: change an answer.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from tonle.config.engine import MAX_DRAFT
from tonle.engine.plan import Plan
from tonle.engine.speculate.draft_times import DraftTimes, size_class
from tonle.engine.speculate.hit_rates import OwnRates
from tonle.engine.speculate.speculator import FEW_ROWS, Speculator
from tonle.engine.speculate.text_index import Match

if TYPE_CHECKING:
    from tonle.engine.schedule.sequence import Sequence

_MIN_CHANCE = 0.03  # of a guess. Low: up to the next size of a graph one more costs nothing
_MARGIN = 1.05  # by so much more tokens per second at least
_RETURN = 0.25  # tokens of each sequence that leaving the pipeline and coming back take, besides the steps themselves,
_STAY = 2.0  # which have guesses for so many steps, as a rule
_MANY_ROWS = 32  # with more than so many sequences only some are looked at,
_LEAST_SAMPLE, _MOST_LOOKS = 8, 8  # one of so many at least, and about so many of them at most,
_ALL_FOR = 64  # and all of them, for so many steps, where guesses would pay if the others were like these

Weighed = tuple[list[int], list[float]]  # guesses, and for each the chance that it and all before it are right


class _Promise(NamedTuple):
    """What waiting may bring."""

    sequence: Sequence
    chance: float  # that the token in flight is the one expected, so that there is something to guess
    expected: float  # tokens that guesses bring then
    num_guesses: int


def _sample(num_rows: int) -> int:
    """Of so many sequences one is looked at."""
    return max(_LEAST_SAMPLE, num_rows // _MOST_LOOKS)


class AheadSpeculator(Speculator):
    """The `AheadDrafter` of a scheduler."""

    def __init__(self, max_rows: int, max_tokens: int, max_draft: int = MAX_DRAFT) -> None:
        super().__init__(max_rows, max_tokens)
        self._max_draft = max_draft  # guesses for one sequence in a step
        self.times = DraftTimes()
        self._num_rows = 0  # of the step that is planned
        self._look_at_all = 0  # for so many steps

    # -- whether to wait

    def choose(self, sequences: list[Sequence]) -> list[Sequence]:
        if len(sequences) <= _MANY_ROWS or self._look_at_all > 0:
            return sequences
        sample = _sample(len(sequences))
        return [sequence for sequence in sequences if not sequence.request.handle % sample]

    def look_ahead(self, sequences: list[Sequence], num_rows: int) -> list[Sequence]:
        """The token in flight is the first guess of each: those after it are what waiting would bring."""
        self._has_many = num_rows > FEW_ROWS
        found = []
        for sequence in sequences:
            most = min(self._max_draft, sequence.max_tokens - len(sequence.tokens) - 2)
            if most > 0:
                _, chances = self.weigh(sequence, most + 1)
                if len(chances) > 1:
                    found.append(_Promise(sequence, chances[0], sum(chances[1:]) / chances[0], len(chances) - 1))
        is_sample = num_rows > _MANY_ROWS and self._look_at_all == 0
        self._look_at_all = max(0, self._look_at_all - 1)
        if is_sample:
            if self._worth_it(found * _sample(num_rows), num_rows):
                self._look_at_all = _ALL_FOR
            return []
        waiting = [each.sequence for each in self._worth_it(found, num_rows)]
        for sequence in waiting:
            # It gave up a step for its guesses: it is looked at again for them, however rarely others are.
            sequence.own_text.next_look = 0
        return waiting

    def _worth_it(self, found: list[_Promise], num_rows: int) -> list[_Promise]:
        """Those that should wait; none, if they bring less than all sequences of the steps lose by it."""
        lost = 0.0 if len(found) >= num_rows else 1.0  # the others go on: one that waits gives up a token
        if lost:
            found = [each for each in found if _STAY * each.chance * (each.expected - lost) > _RETURN]
        if not found:
            return found
        num_tokens = num_rows + sum(each.num_guesses for each in found)
        factor = min(self.times.factor(num_rows, n) for n in (num_tokens, num_rows + 1))
        slower = (_MARGIN * factor - 1) * num_rows * max(each.chance for each in found)  # in tokens
        gain = sum(each.chance * (each.expected - lost) for each in found) - slower
        return found if _STAY * gain > _RETURN * len(found) else []

    # -- guesses

    def begin_step(self, plan: Plan) -> bool:
        self._num_rows = len(plan.rows)
        self._has_many = self._num_rows > FEW_ROWS
        return not plan.prompts  # a step with prompts is long anyway, and what guesses cost in it is not known

    def propose_all(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        weighed = [self.weigh(sequence, most) for sequence, most in wanted]
        least = self._least_worth_it([chance for _, chances in weighed for chance in chances])
        # Chances fall from guess to guess, so these are the first ones of each.
        return [guesses[: sum(chance >= least for chance in chances)] for guesses, chances in weighed]

    def _least_worth_it(self, chances: list[float]) -> float:
        """Of all guesses there could be, those at least so likely make the most tokens per second; more than 1: none pays."""
        best, least = _MARGIN, 2.0
        rows, expected = self._num_rows, 0.0
        ordered = sorted(chances, reverse=True)
        for number, chance in enumerate(ordered, 1):
            expected += chance
            is_full = rows + number == size_class(rows + number)  # one more, and the step is of the next size
            if is_full or number == len(ordered):
                rate = (rows + expected) / (rows * self.times.factor(rows, rows + number))
                if rate > best:
                    best, least = rate, chance
        return least

    def weigh(self, sequence: Sequence, most: int) -> Weighed:
        """At most so many tokens that may follow."""
        own = self._look(sequence)
        match = None if own is None else self._find(sequence, own)
        if own is None or match is None:
            return [], []
        own.at, own.length = len(sequence.tokens), match.length
        guesses, chances = self._follow(match, own.rates, most)
        own.was_computed = bool(guesses)
        own.guesses = guesses or [token for token, _ in islice(match.continuation(), 1)]
        return guesses, chances

    @staticmethod
    def _follow(match: Match, rates: OwnRates, most: int) -> Weighed:
        guesses: list[int] = []
        chances: list[float] = []
        chance = 1.0
        for token, share in match.continuation():
            chance *= rates.rate(match.length + len(guesses)) * share
            if chance < _MIN_CHANCE or len(guesses) == most:
                break
            guesses.append(token)
            chances.append(chance)
        return guesses, chances

    def ended(self, sequence: Sequence) -> None:
        """With many sequences, the answers of those that were looked at are kept, and no others: to index one takes time, too."""
        if sequence.own_text is not None:
            super().ended(sequence)

    # -- times

    def step_ended(self, plan: Plan, seconds: float, num_accepted: int) -> None:
        if plan.prompts:
            return
        if plan.drafts:
            self.times.learn_drafted(len(plan.rows), plan.num_tokens, seconds)
        elif plan.chunks.count(None) == len(plan.chunks):  # launched before the one ahead was read
            self.times.learn_plain(len(plan.rows), seconds)
