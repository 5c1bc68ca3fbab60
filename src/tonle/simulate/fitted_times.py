"""`FittedTimes`: how long steps take, as measured on one device. A `StepTimes` that a profile holds.

Does: answer for any `StepWork` in about a microsecond. Does not: fit (`fit_times.py`).

The expected time is a median: half of the measured steps of that kind took longer. `ratios` says how far steps scatter around it;
their mean carries what slow steps cost on average. Short steps are held up by other programs more often than long ones in
proportion, and prompts beside rows scatter more than prompts alone: so each kind of step has its own (`kind_ratios`). Steps
scatter independently of each other: a shared machine that is slow for seconds on end is not modelled.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property
from itertools import pairwise
from statistics import fmean

import msgspec

from tonle.engine.schedule.step_facts import StepWork


class Curve(msgspec.Struct, frozen=True):
    """Seconds by a size: straight between sizes. Up to `padded_to` a step costs what the next size costs, as with
    CUDA graphs."""

    sizes: list[int]  # ascending, at least one
    seconds: list[float]
    padded_to: int = 0

    def __post_init__(self) -> None:
        """Raises `ValueError`, which a decoder completes with the place in the file."""
        if not self.sizes:
            raise ValueError("a curve needs sizes")
        if len(self.seconds) != len(self.sizes):
            raise ValueError("a curve has one number of seconds for each size")
        if any(before >= after for before, after in pairwise(self.sizes)):
            raise ValueError("the sizes of a curve ascend")
        if min(self.seconds) < 0:
            raise ValueError("the seconds of a curve are not below 0")

    def at(self, size: int) -> float:
        """Beyond the last size it goes on as steeply as over the last half of the sizes."""
        sizes, seconds = self.sizes, self.seconds
        if size > sizes[-1]:
            middle = bisect_left(sizes, sizes[-1] / 2)
            run = sizes[-1] - sizes[middle]
            slope = (seconds[-1] - seconds[middle]) / run if run else seconds[-1] / sizes[-1]
            return seconds[-1] + max(0.0, slope) * (size - sizes[-1])
        place = bisect_left(sizes, size)
        if size <= self.padded_to or place == 0 or sizes[place] == size:
            return seconds[place]
        low, high = sizes[place - 1], sizes[place]
        return seconds[place - 1] + (seconds[place] - seconds[place - 1]) * (size - low) / (high - low)


class _Cached(dict[int, float]):
    """A curve's values, computed when they are first asked for, each with so much more."""

    def __init__(self, curve: Curve, more: float = 0.0) -> None:
        self._curve, self._more = curve, more

    def __missing__(self, size: int) -> float:
        value = self[size] = self._curve.at(size) + self._more
        return value


WITH_PROMPTS = 0  # all of them: for kinds of steps with prompts that were too few, and in older profiles
_ALONE, _BESIDE_ROWS = -1, -2


def scatter_kind(work: StepWork) -> int:
    """Of a step without prompts: its rows, rounded up to a power of two. Below 0: it has prompts."""
    if work.prompts:
        return _BESIDE_ROWS if work.rows else _ALONE
    return 1 << (work.rows - 1).bit_length()


class FittedTimes(msgspec.Struct, kw_only=True, dict=True):
    """Seconds, unless it says otherwise."""

    lag: int
    front_s: float
    back_s: float
    front_gap_s: float = 0.0  # what lies between two requests that are sent at once when they reach the loop
    back_row_s: float = 0.0  # in addition to `back_s`, per token drawn in the same step
    front_scatter_s: list[float] = []  # by how much requests exceed `front_s`: means of equal shares of them, ascending
    turns_s: list[float] = []  # of a user, from its last token to its next request: likewise
    decode: Curve  # of a step without prompts, by its rows
    mixed: Curve  # of a step with prompts, by its tokens, one for each row that decodes
    draw: Curve  # of a step with prompts, in addition: by the tokens drawn in it
    chunk_s: float  # per chunk of a prompt
    decode_read_s: float  # per earlier token that attention reads for a row,
    few_rows_read_s: Curve | None = None  # and in addition, in a step without prompts that has few rows: by its rows
    prompt_read_s: float  # the same for a token of a chunk
    host_step_s: float  # of the host, per step,
    host_row_s: float  # per row or chunk in it,
    host_token_s: float  # per token of its chunks,
    host_mixed_s: float = 0.0  # and for a step with prompts
    commit_step_s: float = 0.0  # of that, once its tokens are there (commit, publish), until mail is taken: per step
    commit_row_s: float = 0.0  # and per row or chunk
    wake_s: float = 0.0  # of the host, in addition: for the first step after it had nothing to do
    launch_large_s: float = 0.0  # of the host, for a step of more tokens than there are graphs for: `launching_s`
    ratios: list[float] = []  # measured / expected, of equal shares of the expected time of all steps, ascending
    # The same by `scatter_kind` and `WITH_PROMPTS`, where there were enough steps.
    kind_ratios: dict[int, list[float]] = {}

    def device_s(self, work: StepWork) -> float:
        rows, prompts, tokens, decode_reads, prompt_reads, samples = work
        if not prompts:
            return self._decode[rows] + self._decode_read[rows] * decode_reads
        return (
            self._mixed[rows + tokens]
            + self._draw[samples]
            + self.chunk_s * prompts
            + self.decode_read_s * decode_reads
            + self.prompt_read_s * prompt_reads
        )

    def host_s(self, work: StepWork) -> float:
        if not work.prompts:
            return self.host_step_s + self.host_row_s * work.rows
        rows_s = self.host_row_s * (work.rows + work.prompts)
        return self.host_step_s + self.host_mixed_s + rows_s + self.host_token_s * work.tokens

    def commit_s(self, work: StepWork) -> float:
        """The part of `host_s` that follows a step's tokens; the rest lies before its launch."""
        return self.commit_step_s + self.commit_row_s * (work.rows + work.prompts)

    def launching_s(self, work: StepWork) -> float:
        """Of the host after `host_s`: launching kernels one by one while the device computes those before. The step does not end
        earlier."""
        return self.launch_large_s if work.prompts and work.rows + work.tokens > self.mixed.padded_to else 0.0

    def jitter(self, work: StepWork, u: float) -> float:
        """The factor by which a step exceeds its expected time, for a `u` drawn evenly from [0, 1)."""
        ratios = self._ratios_of(work)
        return ratios[int(u * len(ratios))] if ratios else 1.0

    def mean_s(self, work: StepWork) -> float:
        """What such steps take on average, scatter included."""
        return self.device_s(work) * fmean(self._ratios_of(work) or [1.0])

    def _ratios_of(self, work: StepWork) -> list[float]:
        own = self.kind_ratios.get(scatter_kind(work))
        if own is None and work.prompts:
            own = self.kind_ratios.get(WITH_PROMPTS)
        return self.ratios if own is None else own

    @cached_property
    def _decode(self) -> dict[int, float]:
        return _Cached(self.decode)

    @cached_property
    def _decode_read(self) -> dict[int, float]:
        return _Cached(self.few_rows_read_s or Curve([1], [0.0]), self.decode_read_s)

    @cached_property
    def _mixed(self) -> dict[int, float]:
        return _Cached(self.mixed)

    @cached_property
    def _draw(self) -> dict[int, float]:
        return _Cached(self.draw)
