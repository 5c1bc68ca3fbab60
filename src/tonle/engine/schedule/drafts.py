"""`Drafts`: guesses that a step computes behind a sequence's last token, and what its commit keeps of them.

A step samples at the place of every guess, with that place's own number. As long as what was sampled equals the guess, the sample
after it counts, too: tokens are those that would have been drawn one by one, and a step brings several of them.

Does: choose which entries of a plan get drafts, within the step's tokens and the blocks that are free; take the tokens in; count.
Does not: guess, or say what pays (a `Drafter` does).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tonle.config.engine import MAX_DRAFT
from tonle.engine.plan import Plan, StepResult, num_equal
from tonle.engine.request import ResolvedConfig
from tonle.engine.schedule.bound import ending, push
from tonle.engine.schedule.bound_drafts import peek_forced
from tonle.engine.schedule.guarded_drafter import AheadDrafter, Drafter, GuardedDrafter
from tonle.engine.schedule.outcome import Ending, StepOutcome
from tonle.engine.schedule.sequence import Sequence
from tonle.engine.schedule.step_notes import StepNotes

# A sequence, a number of draft tokens, the plan: how many of them have room.
Grow = Callable[[Sequence, int, Plan], int]
MayCheck = Callable[[ResolvedConfig], bool]


class Drafts:
    """Of one scheduler. Counters only grow."""

    def __init__(
        self,
        drafter: Drafter,
        max_draft: int = MAX_DRAFT,
        *,
        ahead: AheadDrafter | None = None,
        may_check: MayCheck | None = None,
        max_entries: int | None = None,
    ) -> None:
        """`ahead`: the drafter, if steps are launched before the one ahead is read. `may_check`: whether the runner can check
        guesses of such requests; None: of all. `max_entries`: sequences and guesses of a step together; None: any number."""
        self.num_drafts = 0  # times that a step had guesses for a sequence
        self.num_tokens = 0  # guesses
        self.num_accepted = 0
        self.accepted_at = [0] * max_draft  # by their place among the guesses of a step
        self.some_wait = False  # of the sequences that run, perhaps
        self._accepted_before = 0  # when the last step ended
        self._drafter = GuardedDrafter(drafter, ahead)
        self._max_draft = max_draft
        self.are_ahead = ahead is not None  # steps are launched before the one ahead of them is read
        self._may_check = may_check
        self._max_entries = max_entries

    def add(self, plan: Plan, budget: int, grow: Grow) -> None:
        """Guesses for the sequences of the plan that decode: at most `budget` tokens."""
        if not plan.rows:
            return
        if self._max_entries is not None:
            budget = min(budget, self._max_entries - len(plan.rows))
        if self.are_ahead and (budget <= 0 or plan.chunks.count(None) == len(plan.chunks)):
            return  # no last token is known
        may_pay = self._drafter.begin_step(plan)
        if not may_pay and not plan.bound:
            return
        certain: list[tuple[int, list[int]]] = []  # place in the plan, guesses
        wanted: list[tuple[int, tuple[Sequence, int]]] = []
        for i, most in self._candidates(plan, budget):
            if forced := _certain(plan.sequences[i], most):
                certain.append((i, forced))
            elif may_pay:
                wanted.append((i, (plan.sequences[i], most)))
        found = self._drafter.propose_all([each for _, each in wanted]) if wanted else []
        for i, guesses in [*certain, *((i, guesses) for (i, _), guesses in zip(wanted, found, strict=True))]:
            constraint, chunk = plan.sequences[i].constraint, plan.chunks[i]
            if guesses and constraint is not None:
                guesses = guesses[: constraint.fits(guesses)]
            if count := grow(plan.sequences[i], min(budget, len(guesses)), plan):
                assert chunk is not None
                plan.chunks[i] = chunk + guesses[:count]
                plan.drafts[i] = count
                plan.sequences[i].waits = self.some_wait = self.are_ahead
                budget -= count

    def _candidates(self, plan: Plan, budget: int) -> Iterator[tuple[int, int]]:
        """Places in the plan whose sequences may have guesses, and how many at most."""
        prompts = set(plan.prompts)
        for i, sequence in enumerate(plan.sequences):
            chunk = plan.chunks[i]
            if chunk is None or not plan.samples[i] or i in prompts or not self._may_draft(sequence):
                continue
            if self.are_ahead and len(chunk) > 1:
                continue  # computed again after it was preempted
            # One token at least is drawn without a guess, and may be the last.
            most = min(self._max_draft, budget, sequence.max_tokens - len(sequence.tokens) - 1)
            if most > 0:
                yield i, most

    def take_bound(
        self,
        sequence: Sequence,
        token: int,
        guesses: list[int],
        least: int,
        result: StepResult,
        i: int,
        outcome: StepOutcome,
    ) -> bool:
        """As `take`, for a sequence that is bound and has got `token`. Whether it ends. Forced tokens are not counted as
        guesses, though a step may have computed them as such."""
        place, num_forced, handle = len(sequence.tokens) - 1, sequence.num_forced, sequence.request.handle
        ends = push(sequence, token, least, outcome, result.more.get(i, ()))
        num_right = min(num_equal(guesses, sequence.tokens[place:]), len(sequence.tokens) - 1 - place)
        if sequence.row is not None:
            sequence.num_computed += num_right
        num_forced = sequence.num_forced - num_forced
        num_taken = len(sequence.tokens) - 1 - place - num_forced
        if i in result.logprobs:
            outcome.logprobs[handle] = [result.logprobs[i], *result.more_logprobs.get(i, ())][: 1 + num_taken]
        self._count(sequence, max(num_taken, len(guesses) - num_forced), num_taken, outcome)
        return ends

    def take(
        self, sequence: Sequence, num_drafted: int, end: Ending | None, result: StepResult, i: int, outcome: StepOutcome
    ) -> Ending | None:
        """The sequence has got its first token of the step, and ends with it if `end` says so. Append those that follow, up to an
        end, and tell the caller of all. Returns why it ends, if it does."""
        first, num_taken, handle = len(sequence.tokens) - 1, 0, sequence.request.handle
        for token in result.more.get(i, ()):
            if end is not None:
                break
            sequence.tokens.append(token)
            num_taken += 1
            end = ending(sequence, token)
        if sequence.row is not None:
            sequence.num_computed += num_taken  # keys and values of the guesses before these tokens
        outcome.add(handle, sequence.tokens[first:])
        if i in result.logprobs:
            outcome.logprobs[handle] = [result.logprobs[i], *result.more_logprobs.get(i, ())][: 1 + num_taken]
        self._count(sequence, num_drafted, num_taken, outcome)
        return end

    def _count(self, sequence: Sequence, num_drafted: int, num_accepted: int, outcome: StepOutcome) -> None:
        outcome.guesses[sequence.request.handle] = num_drafted, num_accepted
        sequence.num_drafted += num_drafted
        sequence.num_accepted += num_accepted
        self.num_drafts += 1
        self.num_tokens += num_drafted
        self.num_accepted += num_accepted
        for place in range(num_accepted):
            self.accepted_at[place] += 1

    def look_ahead(self, plan: Plan) -> None:
        """The step was committed, and the next one is under way."""
        chosen = [s for s in self._drafter.choose(plan.sequences) if s.num_pending and self._may_draft(s)]
        if chosen:
            for sequence in self._drafter.look_ahead(chosen, len(plan.rows)):
                sequence.waits = self.some_wait = True

    def all_wait(self, running: list[Sequence]) -> bool:
        """Some sequences wait for a step that is under way, and no other goes ahead of it: once it is read, all go on in one."""
        self.some_wait = any(s.waits and s.num_pending for s in running)
        return self.some_wait and all(s.waits or (not s.num_pending and s.num_remaining == 1) for s in running)

    def step_ended(self, plan: Plan, notes: StepNotes) -> None:
        """The step was committed."""
        is_turn = self.are_ahead and bool(plan.drafts)  # the device may have waited for the host before it
        num_accepted, self._accepted_before = self.num_accepted - self._accepted_before, self.num_accepted
        self._drafter.step_ended(plan, notes.turn_s if is_turn else notes.step_s, num_accepted)

    def forget_texts(self) -> None:
        """Of requests that have ended: guesses do not come from them any more."""
        self._drafter.forget_texts()

    def release_memory(self) -> None:
        self._drafter.release_memory()

    def ended(self, sequence: Sequence) -> None:
        if _takes_guesses(sequence):
            self._drafter.ended(sequence)

    def _may_draft(self, sequence: Sequence) -> bool:
        if self.are_ahead and (sequence.constraint is not None or sequence.done or sequence.row is None):
            return False
        return _takes_guesses(sequence) and (self._may_check is None or self._may_check(sequence.request.config))


def _takes_guesses(sequence: Sequence) -> bool:
    return sequence.request.config.speculate and not sequence.pooling


def _certain(sequence: Sequence, most: int) -> list[int]:
    """Tokens without a choice that are drawn all the same, for their log-probabilities: what is drawn is known."""
    constraint = sequence.constraint
    if constraint is None or sequence.request.config.logprobs is None or not constraint.takes_guesses:
        return []
    return peek_forced(constraint, most)
