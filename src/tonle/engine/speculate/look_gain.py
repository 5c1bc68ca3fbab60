"""`LookGain`: whether looking for guesses pays in steps of many sequences, as measured with and without.

With many sequences a look at all of them takes the host some percent of a step, and what a guess more takes is near what it can
bring. An estimate of both is not exact enough to tell, so steps that look are compared with steps next to them that do not:
tokens per second, in pairs. Where looking does not pay it stops, and is tried again after a while.

Does: say whether a step looks; learn from its time and its tokens. Does not: read a clock, or weigh single guesses.
"""

from __future__ import annotations

import math
from enum import Enum
from statistics import fmean, median, stdev
from typing import NamedTuple

_TRIAL_PAIRS = 24  # of a step that looks and one that does not: no single one of them decides
_EARLY_PAIRS = 8  # after so many a trial can end without success
_TRIAL_LOOKS = 4 * _TRIAL_PAIRS  # at most, where numbers of sequences differ from step to step
_LEAST = 0.01  # of its tokens per second a trial must gain, and its standard error
_RUN = 15  # steps that look between two that do not, where it pays
_KEEP = 7 / 8  # of what earlier comparisons have shown, where looking pays
_MOST = 0.2  # that one pair says, as a logarithm: a step may be long because the machine is busy,
_LONGEST = 2.0  # and counts as so many times the median of those around it
_REST, _MOST_REST = 32, 256  # steps until the next trial: twice as many after each one in vain


class _State(Enum):
    TRIAL = 1
    PAYS = 2
    RESTS = 3


class _Step(NamedTuple):
    looked: bool
    rows: int
    tokens: int
    seconds: float


class _Class:
    """Steps of about as many sequences: up to twice as many."""

    __slots__ = ("gains", "looks", "num_looked", "plain_first", "rest", "rest_left", "run", "state", "sums",
                 "unpaired")  # fmt: skip

    def __init__(self, *, rests: bool) -> None:
        """`rests`: looking does not pay with about as many sequences."""
        self.rest = self.rest_left = _REST
        self.state = _State.RESTS
        self.looks = False  # the next step
        if not rests:
            self._begin_trial()

    def _begin_trial(self) -> None:
        self.state, self.looks = _State.TRIAL, True
        self.num_looked = 0  # steps of the trial; the first looks at much that was long not looked at, and says nothing
        self.gains: list[float] = []  # by pair: logarithm of tokens per second with a look to those without
        self.unpaired: _Step | None = None
        self.plain_first = False  # in the next pair: batches that shrink would seem to gain by what comes first

    def learn(self, step: _Step) -> None:
        if self.state is _State.TRIAL:
            self._try(step)
        elif self.state is _State.PAYS:
            self._follow(step)
        elif not step.looked:
            self.rest_left -= 1
            if self.rest_left <= 0:
                self._begin_trial()

    # -- trials: pairs of neighbours

    def _try(self, step: _Step) -> None:
        self.num_looked += step.looked
        if step.looked and self.num_looked == 1:
            return
        other = self.unpaired
        if other is None or abs(step.rows - other.rows) > 1 or step.looked == other.looked:
            self.unpaired = step
            self.looks = not step.looked
        else:
            self.unpaired = None
            self.plain_first = not self.plain_first
            self.looks = not self.plain_first
            looked, plain = (step, other) if step.looked else (other, step)
            gain = math.log(looked.tokens / looked.seconds) - math.log(plain.tokens / plain.seconds)
            self.gains.append(max(-_MOST, min(_MOST, gain)))
        self._judge()

    def _judge(self) -> None:
        gains = self.gains
        if len(gains) < _EARLY_PAIRS:
            if self.num_looked >= _TRIAL_LOOKS:
                self._begin_rest()
            return
        gain, error = fmean(gains), stdev(gains) / math.sqrt(len(gains))
        if gain + error < _LEAST:
            self._begin_rest()
        elif len(gains) >= _TRIAL_PAIRS or self.num_looked >= _TRIAL_LOOKS:
            if gain >= max(_LEAST, error):
                self._begin_looking(gain)
            else:
                self._begin_rest()

    def _begin_rest(self) -> None:
        self.state, self.looks = _State.RESTS, False
        self.rest_left = self.rest
        self.rest = min(2 * self.rest, _MOST_REST)

    # -- where it pays: one step without a look after each run of steps with one

    def _begin_looking(self, gain: float) -> None:
        self.state, self.looks = _State.PAYS, True
        self.rest = max(_REST, self.rest // 2)
        self.run: list[_Step] = []
        # Tokens and seconds per sequence with looks, then without, of the latest comparisons. The trial counts as all before.
        weight = 1 / (1 - _KEEP)
        self.sums = [weight, weight, weight * math.exp(-gain), weight]

    def _follow(self, step: _Step) -> None:
        if step.looked:
            self.run.append(step)
        else:
            # With one sequence less, a step brings fewer tokens per second by itself.
            if alike := [each for each in self.run if each.rows == step.rows]:
                self._compare(alike, step)
            self.run = []
            if self.sums[0] * self.sums[3] < self.sums[2] * self.sums[1]:
                self._begin_rest()
                return
        self.looks = len(self.run) < _RUN

    def _compare(self, looked: list[_Step], plain: _Step) -> None:
        """Seconds are relative to the median of those with a look: machines change their speed."""
        usual = median(each.seconds / each.rows for each in looked)
        looked_s = fmean(min(each.seconds / each.rows / usual, _LONGEST) for each in looked)
        plain_s = min(plain.seconds / plain.rows / usual, _LONGEST)
        now = (fmean(each.tokens / each.rows for each in looked), looked_s, plain.tokens / plain.rows, plain_s)
        self.sums = [_KEEP * before + value for before, value in zip(self.sums, now, strict=True)]


class LookGain:
    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}  # by the bit length of the number of sequences

    def looks(self, rows: int) -> bool:
        """Whether a step of so many sequences is to look for guesses."""
        return self._of(rows).looks

    def pays(self, rows: int) -> bool:
        """Whether that has been shown. Until then few guesses are enough to show it, and lose little."""
        return self._of(rows).state is _State.PAYS

    def learn(self, rows: int, *, looked: bool, tokens: int, seconds: float) -> None:
        """A step without prompts took so long and brought so many tokens."""
        if seconds > 0 and tokens > 0:
            self._of(rows).learn(_Step(looked, rows, tokens, seconds))

    def _of(self, rows: int) -> _Class:
        bits = rows.bit_length()
        if (known := self._classes.get(bits)) is None:
            near = [self._classes[each] for each in (bits - 1, bits + 1) if each in self._classes]
            known = self._classes[bits] = _Class(rests=any(each.state is _State.RESTS for each in near))
        return known
