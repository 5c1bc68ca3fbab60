"""What a step costs: seconds as a function of the work in it, learnt from steps as they are measured.

Does: least squares over recent steps, and how far steps exceed what was expected of them; start over when the machine has become
much faster. Does not: know a clock, or decide.
"""

from __future__ import annotations

from dataclasses import dataclass

_MEMORY = 0.98  # weight of a step once another one of its kind was seen: about the last fifty count
_SWEEPS = 4  # of coordinate descent per step
_RIDGE = 1e-9
_MUCH_FASTER = 0.5  # of the time that recent steps took: steps below that,
_FASTER_STEPS = 4  # and so many in a row, say that the machine has become faster
_PACE_MEMORY = 0.9
_PART = 0.99  # of steps take at most `Margin.value` times what was expected
_MARGIN_STEP = 0.05
_MAX_MARGIN = 4.0


@dataclass(frozen=True, slots=True)
class Work:
    """What a step computes."""

    rows: int  # sequences that decode
    tokens: int  # of prompts
    reads: int  # earlier tokens that attention reads, over all tokens of the step


class StepCost:
    """seconds = fixed + per_row · rows + per_token · tokens + per_read · reads, no coefficient below 0.

    Least squares over relative errors: a step of 5 ms counts as much as one of 500 ms, and a step that took ten times as
    long because the machine was busy counts a hundredth. Steps forget earlier ones of their kind only, with prompts or
    without: a minute of decoding does not undo what is known about prompts.

    A busy machine makes steps slower, never faster. When several in a row take less than half as long as those before with
    as much work, those were slow for a reason that is gone (cold caches, kernels that were still being compiled): all is
    forgotten, about prompts too.
    """

    def __init__(self, max_rows: int, max_tokens: int, context_length: int) -> None:
        # Features are scaled to about 1, so that what a few steps cannot tell apart goes to the fixed part first.
        self._scale = (1.0, 1 / max_rows, 1 / max_tokens, 1 / (max_tokens * context_length))
        self._forget()

    @property
    def fixed_s(self) -> float:
        return self._theta[0] * self._scale[0]

    @property
    def per_row_s(self) -> float:
        return self._theta[1] * self._scale[1]

    @property
    def per_token_s(self) -> float:
        return self._theta[2] * self._scale[2]

    @property
    def per_read_s(self) -> float:
        return self._theta[3] * self._scale[3]

    @property
    def num_steps(self) -> int:
        """Learnt from, since the start or since all was forgotten."""
        return self._decode.num_steps + self._prompts.num_steps

    @property
    def num_prompt_steps(self) -> int:
        """Of those, steps with prompts."""
        return self._prompts.num_steps

    def expected_s(self, work: Work) -> float:
        scale, theta = self._scale, self._theta
        return (
            theta[0]
            + theta[1] * scale[1] * work.rows
            + theta[2] * scale[2] * work.tokens
            + theta[3] * scale[3] * work.reads
        )

    def learn(self, work: Work, seconds: float) -> bool:
        """`seconds` > 0. True if the machine has become much faster, and all is forgotten."""
        _, rows, tokens, reads = self._scale
        sums = self._prompts if work.tokens else self._decode
        if sums.pace.has_become_faster(work, seconds):
            self._forget()
            return True
        sums.add(
            (1 / seconds, work.rows * rows / seconds, work.tokens * tokens / seconds, work.reads * reads / seconds)
        )
        self._solve()
        return False

    def _forget(self) -> None:
        self._theta = [0.0] * 4
        self._decode, self._prompts = _Sums(), _Sums()

    def _solve(self) -> None:
        """The least sum of squares with no coefficient below 0, by coordinate descent from the last solution."""
        theta, decode, prompts = self._theta, self._decode, self._prompts
        rows = [
            [p + q for p, q in zip(left, right, strict=True)]
            for left, right in zip(decode.products, prompts.products, strict=True)
        ]
        wanted = [p + q for p, q in zip(decode.sums, prompts.sums, strict=True)]
        for _ in range(_SWEEPS):
            for i, (a, b, c, d) in enumerate(rows):
                miss = wanted[i] - a * theta[0] - b * theta[1] - c * theta[2] - d * theta[3]
                theta[i] = max(0.0, theta[i] + miss / (rows[i][i] + _RIDGE))


class _Sums:
    """Of one kind of steps: Σ u uᵀ and Σ u, where u are features per second, so that 1 is to be explained."""

    def __init__(self) -> None:
        self.products = [[0.0] * 4 for _ in range(4)]
        self.sums = [0.0] * 4
        self.num_steps = 0
        self.pace = _Pace()

    def add(self, u: tuple[float, float, float, float]) -> None:
        u0, u1, u2, u3 = u
        self.num_steps += 1
        for i, own in enumerate(u):
            row = self.products[i]
            row[0] = _MEMORY * row[0] + own * u0
            row[1] = _MEMORY * row[1] + own * u1
            row[2] = _MEMORY * row[2] + own * u2
            row[3] = _MEMORY * row[3] + own * u3
            self.sums[i] = _MEMORY * self.sums[i] + own


class _Pace:
    """What recent steps of a kind took, to tell when the machine has become much faster.

    A step with at least a third of the work in every respect takes at least a third of the time, whatever each part costs.
    """

    def __init__(self) -> None:
        self._rows = self._tokens = self._reads = self._per_s = 0.0  # means; the last one of steps per second
        self._num_faster = 0  # in a row; they do not move the means

    def has_become_faster(self, work: Work, seconds: float) -> bool:
        if seconds * self._per_s < _MUCH_FASTER * self._part(work):
            self._num_faster += 1
            return self._num_faster == _FASTER_STEPS
        keep = _PACE_MEMORY if self._per_s else 0.0
        self._rows = keep * self._rows + (1 - keep) * work.rows
        self._tokens = keep * self._tokens + (1 - keep) * work.tokens
        self._reads = keep * self._reads + (1 - keep) * work.reads
        self._per_s = keep * self._per_s + (1 - keep) / seconds
        self._num_faster = 0
        return False

    def _part(self, work: Work) -> float:
        """Of the mean work, that is surely in this step: 0 to 1."""
        if not self._per_s:
            return 0.0
        pairs = ((work.rows, self._rows), (work.tokens, self._tokens), (work.reads, self._reads))
        return min([1.0, *(own / mean for own, mean in pairs if mean)])


class Margin:
    """By what factor 99 of 100 steps stay below, over what was expected of them: a quantile, followed step by step."""

    def __init__(self, value: float = 1.15) -> None:
        self.value = value

    def learn(self, expected_s: float, seconds: float) -> None:
        if seconds > self.value * expected_s:
            self.value = min(_MAX_MARGIN, self.value + _MARGIN_STEP * _PART)
        else:
            self.value = max(1.0, self.value - _MARGIN_STEP * (1 - _PART))
