"""`Speculator`: guesses by suffix. What followed the last time that a request's text ended like this, in the text itself or in
recent answers of the same tenant, is likely to follow again: in quotations, code, tool calls, lists, loops.

Does: find, guess as long as a guess pays, learn from what came. Does not: change an answer. A guess that was wrong costs time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tonle.engine.plan import Plan
from tonle.engine.speculate.draft_cost import DraftCost, RelativeDraftCost
from tonle.engine.speculate.hit_rates import HitRates, OwnRates
from tonle.engine.speculate.look_gain import LookGain
from tonle.engine.speculate.recent_answers import RecentAnswers
from tonle.engine.speculate.text_index import Match, TextIndex

if TYPE_CHECKING:
    from tonle.engine.schedule.sequence import Sequence

_MAX_OWN = 16_384  # tokens of a request that are looked through: its last, up to twice as many
_MOST_AT_ONCE = 1024  # of them that are taken in for one step: a long prompt is followed step by step
_MIN_ANSWER = 8  # tokens of an answer that is kept for later requests
FEW_ROWS = 7  # with more than so many sequences in a step, what it takes to look for all of them counts:
_FEW_OF = 4  # a guess for one of so many sequences, until it is known that looking pays
_PATIENCE = ((32, 8), (12, 4))  # after so many looks in vain, a sequence is looked at again after so many tokens


class OwnText:
    """What the speculator knows of one sequence."""

    __slots__ = ("at", "guesses", "index", "length", "next_look", "num_in_vain", "num_passed", "rates",
                 "was_computed")  # fmt: skip

    def __init__(self, rates: OwnRates, num_passed: int) -> None:
        self.index = TextIndex()
        self.rates = rates
        self.num_passed = num_passed  # tokens at the beginning that are not in the index
        self.guesses: list[int] = []  # of the last time, from the place `at` on, whether or not a step computed them
        self.at = 0
        self.length = 0  # tokens that were equal then
        self.was_computed = False  # they were worth it
        self.num_in_vain = 0  # looks since the last one that brought a token
        self.next_look = 0  # not before it has so many tokens

    def learn(self, tokens: list[int]) -> None:
        """What came in place of the last guesses."""
        came = tokens[self.at : self.at + len(self.guesses)]
        if self.was_computed and came[:1] == self.guesses[:1]:
            self.num_in_vain = 0
        for number, (token, guess) in enumerate(zip(came, self.guesses, strict=False)):
            self.rates.learn(self.length + number, token == guess)
            if token != guess:
                break
        self.guesses = []

    def wait(self, num_tokens: int) -> None:
        """It was looked at once more. The next time when it has some tokens more, if looks were in vain so far."""
        self.num_in_vain += 1
        for looks, tokens in _PATIENCE:
            if self.num_in_vain >= looks:
                self.next_look = num_tokens + tokens
                break

    def catch_up(self, tokens: list[int]) -> bool:
        """Whether all tokens are in the index now. When they are twice what there may be, the index is made anew."""
        if len(self.index) >= 2 * _MAX_OWN:
            self.index, self.num_passed = TextIndex(), len(tokens) - _MAX_OWN
        if (have := self.num_passed + len(self.index)) < len(tokens):
            self.index.extend(tokens[have : have + _MOST_AT_ONCE])
        return have + _MOST_AT_ONCE >= len(tokens)


class Speculator:
    """The `Drafter` of a scheduler."""

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self.answers = RecentAnswers()
        # What few users have a machine copy says nothing of what many users ask for.
        self._rates_of_few, self._rates_of_many = HitRates(), HitRates()
        self._cost_with_few = DraftCost(max_rows, max_tokens)
        self._cost_with_many: dict[int, RelativeDraftCost] = {}  # by the bit length of the number of sequences
        self._gain = LookGain()
        self._has_many = False  # sequences in the step that is planned
        self._looks = False  # for guesses, in the step that is planned
        self._least_chance = 1.0  # of a guess in the step that is planned
        self._num_left: int | None = None  # guesses that it may still have; None: any number

    def begin_step(self, plan: Plan) -> bool:
        rows = len(plan.rows)
        self._has_many, self._looks = rows > FEW_ROWS, False
        if plan.prompts:  # a step with prompts is long anyway, and what guesses cost in it is not known
            return False
        if self._has_many:
            if not self._gain.looks(rows):
                return False
            self._least_chance, self._num_left, _ = self._cost_of_many(rows).worth(rows)
            if not self._gain.pays(rows):
                most = max(2, rows // _FEW_OF)
                self._num_left = most if self._num_left is None else min(self._num_left, most)
        else:
            self._least_chance, self._num_left, _ = self._cost_with_few.worth(rows, sum(plan.starts))
        self._looks = self._least_chance < 1.0
        return self._looks

    def _cost_of_many(self, rows: int) -> RelativeDraftCost:
        """A token more costs little where a step waits for memory, and much where it computes as fast as the machine can."""
        return self._cost_with_many.setdefault(rows.bit_length(), RelativeDraftCost())

    def propose_all(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self.propose(sequence, most) for sequence, most in wanted]

    def forget_texts(self) -> None:
        self.answers = RecentAnswers()

    def release_memory(self) -> None:
        """There is none but that of texts."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        own = self._look(sequence)
        match = None if own is None else self._find(sequence, own)
        if own is None or match is None:
            return []
        if self._num_left is not None:
            most = min(most, self._num_left)
        own.at, own.length = len(sequence.tokens), match.length
        guesses, own.guesses = self._guess(match, own.rates, most)
        own.was_computed = bool(guesses)
        if self._num_left is not None:
            self._num_left -= len(guesses)
        return guesses

    def _look(self, sequence: Sequence) -> OwnText | None:
        """What is known of it, up to its last token. None: it is not looked at this time."""
        tokens = sequence.tokens
        own: OwnText | None = sequence.own_text
        if own is None:
            rates = OwnRates(self._rates_of_many if self._has_many else self._rates_of_few)
            own = sequence.own_text = OwnText(rates, max(0, len(tokens) - _MAX_OWN))
        elif len(tokens) < own.next_look:
            return None
        elif own.guesses:
            own.learn(tokens)
        if not own.catch_up(tokens):
            return None  # not a look in vain: there was nothing to find yet
        if self._has_many:
            own.wait(len(tokens))
        return own

    def _find(self, sequence: Sequence, own: OwnText) -> Match | None:
        """The longest: of its own text, or of its tenant's answers."""
        found = own.index.find(sequence.tokens)
        if (others := self.answers.of(sequence.request.salt)) is not None:
            theirs = others.find(sequence.tokens)
            if theirs is not None and (found is None or theirs.length > found.length):
                found = theirs
        return found

    def _guess(self, match: Match, rates: OwnRates, most: int) -> tuple[list[int], list[int]]:
        """The tokens worth computing, and those to learn from: at least the first."""
        guesses: list[int] = []
        chance, length = 1.0, match.length
        for token, share in match.continuation():
            chance *= rates.rate(length + len(guesses)) * share
            if chance < self._least_chance or len(guesses) == most:
                return guesses, guesses or [token]
            guesses.append(token)
        return guesses, guesses

    def step_ended(self, plan: Plan, seconds: float, num_accepted: int) -> None:
        if plan.prompts:
            return
        rows, num_guesses = len(plan.rows), sum(plan.drafts.values())
        if rows <= FEW_ROWS:
            self._cost_with_few.learn(plan, seconds)
        elif plan.num_tokens == rows + num_guesses:  # with tokens that a grammar forced, it tells nothing of guesses
            self._cost_of_many(rows).learn(rows, num_guesses, seconds)
            self._gain.learn(rows, looked=self._looks, tokens=rows + num_accepted, seconds=seconds)
        self._looks = False  # a step that is full does not ask

    def ended(self, sequence: Sequence) -> None:
        sequence.own_text = None
        if sequence.num_output >= _MIN_ANSWER:
            self.answers.add(sequence.request.salt, sequence.output)
