"""`LookGain`: whether looking for guesses pays in steps of many sequences, as measured with and without.

With many sequences a look at all of them takes the host some percent of a step, and what a guess more takes is near what it can
bring. An estimate of both is not exact enough to tell, so steps that look are compared with steps next to them that do not:
seconds per token, in turns. Where looking does not pay it stops, and is tried again after a while.

Does: say whether a step looks; learn from its time and its tokens. Does not: read a clock, or weigh single guesses.
"""

from __future__ import annotations

import math
from enum import Enum
from statistics import median

_TRIAL_PAIRS = 24  # of a step that looks and one that does not: no single one of them decides
_LEAST = 0.01  # of its tokens per second a trial must gain
_RUN = 15  # steps that look between two that do not, where it pays
_WEIGHT = 1 / 8  # of the latest comparison in the mean, where looking pays
_MOST = 0.2  # that one comparison says, as a logarithm: a step may be long because the machine is busy,
_MOST_TIMES = 2.0  # and counts as so many times the median of those with a look
_REST, _MOST_REST = 32, 256  # steps until the next trial: twice as many after each one in vain


class _State(Enum):
    TRIAL = 1
    PAYS = 2
    RESTS = 3


class _Class:
    """Steps of about as many sequences: up to twice as many."""

    __slots__ = ("gain", "looked_rows", "looked_s", "looked_tokens", "num_pairs", "rest", "rest_left", "since_plain",
                 "state")  # fmt: skip

    def __init__(self) -> None:
        self.rest = _REST
        self.begin_trial()

    def begin_trial(self) -> None:
        self.state = _State.TRIAL
        self.gain = 0.0  # mean logarithm of tokens per second with looks to those without
        self.num_pairs = 0
        self.rest_left = 0
        self.since_plain = 0  # steps with a look since the last one without
        self._forget_looks(0)

    def _forget_looks(self, rows: int) -> None:
        """Of those that the next step without is compared with: sequences, what each took, what they brought."""
        self.looked_rows = rows
        self.looked_s: list[float] = []
        self.looked_tokens = 0

    @property
    def looks(self) -> bool:
        if self.state is _State.RESTS:
            return False
        return self.since_plain < (_RUN if self.state is _State.PAYS else 1)

    def learn(self, rows: int, looked: bool, tokens: int, seconds: float) -> None:
        if abs(rows - self.looked_rows) > 1:
            self._forget_looks(rows)  # those steps computed something else
        if looked:
            self.since_plain += 1
            self.looked_s.append(seconds)
            self.looked_tokens += tokens
            return
        self.since_plain = 0
        if self.state is _State.RESTS:
            self.rest_left -= 1
            if self.rest_left == 0:
                self.begin_trial()
        elif self.looked_s:
            most_s = _MOST_TIMES * median(self.looked_s)
            looked_s = sum(min(each, most_s) for each in self.looked_s)
            self._compare(self.looked_tokens / looked_s, tokens / seconds)
            self._forget_looks(rows)

    def _compare(self, looked_rate: float, plain_rate: float) -> None:
        self.num_pairs += 1
        found = max(-_MOST, min(_MOST, math.log(looked_rate / plain_rate)))
        weight = _WEIGHT if self.state is _State.PAYS else 1 / self.num_pairs
        self.gain += (found - self.gain) * weight
        if self.state is _State.TRIAL and self.num_pairs == _TRIAL_PAIRS:
            if self.gain >= _LEAST:
                self.state, self.rest = _State.PAYS, _REST
            else:
                self._begin_rest()
        elif self.state is _State.PAYS and self.gain < 0:
            self._begin_rest()

    def _begin_rest(self) -> None:
        self.state, self.rest_left = _State.RESTS, self.rest
        self.rest = min(2 * self.rest, _MOST_REST)


class LookGain:
    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}  # by the bit length of the number of sequences

    def looks(self, rows: int) -> bool:
        """Whether a step of so many sequences is to look for guesses."""
        return self._of(rows).looks

    def learn(self, rows: int, *, looked: bool, tokens: int, seconds: float) -> None:
        """A step without prompts took so long and brought so many tokens."""
        if seconds > 0 and tokens > 0:
            self._of(rows).learn(rows, looked, tokens, seconds)

    def _of(self, rows: int) -> _Class:
        if (known := self._classes.get(rows.bit_length())) is None:
            known = self._classes[rows.bit_length()] = _Class()
        return known
