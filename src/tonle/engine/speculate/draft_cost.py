"""`DraftCost` and `RelativeDraftCost`: how likely a guess must be right for it to pay, by what steps were measured to take.

A step of R sequences that takes T seconds brings R tokens, so a token is worth T / R seconds. One more token in the step takes c
seconds. A guess pays if its chance of becoming a token is more than c / (T / R). With one user on a machine that waits for memory
that is little; with as many users as the machine can compute for, T / R is about c, and no guess pays.

For few sequences, c is so far below T / R that `DraftCost` can take both from one fit to steps of all sizes. For many, they are
close, steps with guesses are rare, and a machine that others slow down would make a fit to earlier steps believe that guesses are
cheap: `RelativeDraftCost` learns their ratio, from steps with guesses and the plain ones right before them.

Does: learn from steps. Does not: read a clock.
"""

from __future__ import annotations

from typing import NamedTuple

from tonle.engine.plan import Plan
from tonle.engine.schedule.step_cost import StepCost, Work

_MARGIN = 1.1  # a guess must be worth so many times what it takes
_MIN_CHANCE = 0.1  # below that nothing is learnt of the guess, and every guess has a cost on the host
_TRIAL_CHANCE = 0.5  # of guesses in steps that are made to learn what they cost
_NUM_TRIALS = 8  # such steps at the start
_TRIAL_EVERY = 128  # steps without guesses after which there is another one: machines change
_MAX_READS = 512 * 4096  # a scale alone
_NUM_RELATIVE_TRIALS = 4  # trials with many sequences
_RECENT = 16  # steps with guesses that count there,
_RECENT_PLAIN = 8  # steps without,
_LONGEST = 2.0  # and so long at most, to those: a step may be long because the machine is busy


class Worth(NamedTuple):
    """Which guesses a step is to have."""

    least_chance: float  # that a guess is right; 1 or more: none pays
    most: int | None  # guesses; None: as many as there are
    is_trial: bool  # there were none for a while, and what they cost and how often they are right may have changed


class DraftCost:
    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self._cost = StepCost(max_rows, max_tokens, max(1, _MAX_READS // max_tokens))
        self._num_without = 0  # steps since the last one with guesses

    def worth(self, rows: int, reads: int, making_s: float = 0.0) -> Worth:
        """Of guesses in a step of `rows` sequences that read `reads` earlier tokens. `making_s`: that it takes to make one,
        besides what it takes in the step."""
        trial = Worth(_TRIAL_CHANCE, 4 + rows // 4, is_trial=True)
        if self._cost.num_prompt_steps < _NUM_TRIALS:
            return trial
        token_s = self.token_s(rows, reads)
        least = 1.0
        if token_s > 0:
            least = max(_MIN_CHANCE, _MARGIN * self._cost.per_token_s / token_s) + making_s / token_s
        is_trial = self._num_without >= _TRIAL_EVERY
        return trial if is_trial and least > _TRIAL_CHANCE else Worth(least, None, is_trial)

    def token_s(self, rows: int, reads: int) -> float:
        """What a token is worth: seconds that steps without guesses take for one. 0: not known."""
        return self._cost.expected_s(Work(rows, 0, reads)) / rows

    def learn(self, plan: Plan, seconds: float) -> None:
        """A step without prompts."""
        self._num_without = 0 if plan.drafts else self._num_without + 1
        if seconds > 0:
            more = plan.num_tokens - len(plan.rows)  # guesses, and tokens that a grammar forced
            self._cost.learn(Work(len(plan.rows), more, sum(plan.starts)), seconds)


class RelativeDraftCost:
    """For steps of many sequences, of about as many each."""

    def __init__(self) -> None:
        self._cost = 0.0  # of a guess, in tokens: c / (T / R)
        self._num_drafted = 0  # steps with guesses that were learnt from
        self._plain_s = 0.0  # per sequence, of steps without
        self._num_plain = 0
        self._num_without = 0  # steps since the last one with guesses

    def worth(self, rows: int) -> Worth:
        """Of guesses in a step of `rows` sequences. Trials have few, as steps there do: what a step takes rises in stages."""
        trial = Worth(_TRIAL_CHANCE, max(2, rows // 8), is_trial=True)
        if self._num_drafted < _NUM_RELATIVE_TRIALS:
            return trial
        least = max(_MIN_CHANCE, _MARGIN * self._cost)
        is_trial = self._num_without >= _TRIAL_EVERY
        return trial if is_trial and least > _TRIAL_CHANCE else Worth(least, None, is_trial)

    def learn(self, rows: int, num_guesses: int, seconds: float) -> None:
        """A step without prompts, and without forced tokens."""
        if seconds <= 0:
            return
        if not num_guesses:
            self._num_without += 1
            per_row_s = seconds / rows
            if self._num_plain > 2:
                per_row_s = min(per_row_s, _LONGEST * self._plain_s)
            self._num_plain = min(self._num_plain + 1, _RECENT_PLAIN)
            self._plain_s += (per_row_s - self._plain_s) / self._num_plain
        elif self._num_plain:
            self._num_without = 0
            times = min(seconds / (rows * self._plain_s), _LONGEST)
            self._num_drafted = min(self._num_drafted + 1, _RECENT)
            # Below 0 too, by chance: the mean is what counts.
            self._cost += ((times - 1) * rows / num_guesses - self._cost) / self._num_drafted
