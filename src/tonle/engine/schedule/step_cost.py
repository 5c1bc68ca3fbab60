"""What a step costs: seconds as a function of the work in it, learnt from steps as they are measured.

Does: least squares over recent steps, and how far steps exceed what was expected of them. Does not: know a clock, or decide.
"""

from __future__ import annotations

from dataclasses import dataclass

_MEMORY = 0.98  # weight of a step once another one of its kind was seen: about the last fifty count
_SWEEPS = 4  # of coordinate descent per step
_RIDGE = 1e-9
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
    """

    def __init__(self, max_rows: int, max_tokens: int, context_length: int) -> None:
        # Features are scaled to about 1, so that what a few steps cannot tell apart goes to the fixed part first.
        self._scale = (1.0, 1 / max_rows, 1 / max_tokens, 1 / (max_tokens * context_length))
        self._theta = [0.0] * 4
        self._decode, self._prompts = _Sums(), _Sums()
        self.num_steps = 0

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

    def expected_s(self, work: Work) -> float:
        scale, theta = self._scale, self._theta
        return (
            theta[0]
            + theta[1] * scale[1] * work.rows
            + theta[2] * scale[2] * work.tokens
            + theta[3] * scale[3] * work.reads
        )

    def learn(self, work: Work, seconds: float) -> None:
        """`seconds` > 0."""
        _, rows, tokens, reads = self._scale
        sums = self._prompts if work.tokens else self._decode
        sums.add(
            (1 / seconds, work.rows * rows / seconds, work.tokens * tokens / seconds, work.reads * reads / seconds)
        )
        self._solve()
        self.num_steps += 1

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

    def add(self, u: tuple[float, float, float, float]) -> None:
        u0, u1, u2, u3 = u
        for i, own in enumerate(u):
            row = self.products[i]
            row[0] = _MEMORY * row[0] + own * u0
            row[1] = _MEMORY * row[1] + own * u1
            row[2] = _MEMORY * row[2] + own * u2
            row[3] = _MEMORY * row[3] + own * u3
            self.sums[i] = _MEMORY * self.sums[i] + own


class Margin:
    """By what factor 99 of 100 steps stay below, over what was expected of them: a quantile, followed step by step."""

    def __init__(self, value: float = 1.15) -> None:
        self.value = value

    def learn(self, expected_s: float, seconds: float) -> None:
        if seconds > self.value * expected_s:
            self.value = min(_MAX_MARGIN, self.value + _MARGIN_STEP * _PART)
        else:
            self.value = max(1.0, self.value - _MARGIN_STEP * (1 - _PART))
