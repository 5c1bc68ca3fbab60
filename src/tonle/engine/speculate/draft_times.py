"""`DraftTimes`: how much longer steps with guesses take than those without, as it was measured.

Where steps run from CUDA graphs, a step of 16 tokens takes about as long as one of 2, and the first guess costs most: a graph for
several tokens per sequence instead of the one for decoding, and a device that waits for the host, which reads the tokens of one
step before it launches the next. So what is learnt is not seconds per token but a factor, by the number of sequences and of
tokens, over the time of a step with as many sequences and no guesses.

Does: learn from steps, forget what is old. Does not: read a clock.
"""

from __future__ import annotations

from tonle.engine.speculate.recent_mean import RecentMean

_FIRST = 1.5  # before anything was measured
_SMALLEST = 16  # tokens: smaller steps are padded to that
_HOLDS = 64  # steps that a factor holds for each measurement it is made of, 1024 at most; then it is tried again


class _Factor(RecentMean):
    """Where guesses do not pay, nothing more is measured: a single step that was held up must not decide that for long."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        super().__init__()
        self.at = 0  # step of the last measurement

    def holds(self, at: int) -> bool:
        return at - self.at < _HOLDS * self.count

    def measured(self, value: float, at: int) -> None:
        if self.count and not self.holds(at):
            self.value = value  # what was so long ago does not count
        self.add(value)
        self.at = at


def size_class(num_tokens: int) -> int:
    """Steps up to this many tokens take about as long: a power of two."""
    size = _SMALLEST
    while size < num_tokens:
        size *= 2
    return size


class DraftTimes:
    def __init__(self) -> None:
        self._plain: dict[int, RecentMean] = {}  # rows -> seconds of steps without guesses
        self._factors: dict[tuple[int, int], _Factor] = {}  # bits of rows, size -> times that of steps with guesses
        self._num_steps = 0

    def learn_plain(self, rows: int, seconds: float) -> None:
        self._num_steps += 1
        if seconds > 0:
            self._plain.setdefault(rows, RecentMean()).add(seconds)

    def learn_drafted(self, rows: int, num_tokens: int, seconds: float) -> None:
        self._num_steps += 1
        plain_s = self._plain_s(rows)
        if seconds > 0 and plain_s > 0:
            key = rows.bit_length(), size_class(num_tokens)
            self._factors.setdefault(key, _Factor()).measured(seconds / plain_s, self._num_steps)

    def factor(self, rows: int, num_tokens: int) -> float:
        """Times that a step of `rows` sequences takes with guesses, `num_tokens` in all, to one without."""
        bits, size = rows.bit_length(), size_class(num_tokens)
        now = self._num_steps
        known = {s: factor.value for (b, s), factor in self._factors.items() if b == bits and factor.holds(now)}
        if size in known:
            return known[size]
        smaller = [value for s, value in known.items() if s < size]
        return max([_FIRST, *smaller]) if smaller or not known else min(known.values())

    def _plain_s(self, rows: int) -> float:
        """Of as many rows, or about as many; 0: not known."""
        if (mean := self._plain.get(rows)) is not None:
            return mean.value
        nearest = min(self._plain, key=lambda known: abs(known - rows), default=None)
        return 0.0 if nearest is None else self._plain[nearest].value
