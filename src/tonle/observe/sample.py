"""`Sample`: what happened in one second, or in more of them put together.

Does: hold sums, sketches and means, merge, give the figures that are shown. Does not: collect them (`sampler.py`) or keep
them (`history.py`).
"""

from __future__ import annotations

import msgspec

from tonle.observe.sketch import Sketch

_PERCENTS = (50, 95, 99)


class Mean(msgspec.Struct, array_like=True, frozen=True):
    """Of a figure that is read once a second."""

    total: float = 0.0
    count: int = 0  # readings

    def plus(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count) if other.count else self

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


def reading(value: float | None) -> Mean:
    """Of one second. None: it is not known."""
    return NO_READING if value is None else Mean(value, 1)


NO_READING = Mean()


class Sample(msgspec.Struct, array_like=True):
    """Encoded as an array: a change of the fields is a change of the file's version (`history_file.py`)."""

    t: int  # unix seconds; its beginning
    seconds: int = 1  # in it, without those in which the server did not run
    requests: int = 0  # that ended
    failed: int = 0
    refused: int = 0
    prompt_tokens: float = 0.0  # cached ones included
    output_tokens: float = 0.0
    cache_hits: int = 0  # of the response cache
    cache_lookups: int = 0
    prefix_hits: int = 0  # prompt tokens found in prefix caches,
    prefix_queries: int = 0  # of so many looked up
    accepted_tokens: int = 0  # of a draft,
    draft_tokens: int = 0  # of so many proposed
    cost: float = 0.0  # of the requests that ended,
    num_priced: int = 0  # of which so many have one
    machine_cost: float = 0.0  # of the time of all backends that were up, busy or idle
    ttft: Sketch = msgspec.field(default_factory=Sketch)
    itl: Sketch = msgspec.field(default_factory=Sketch)
    e2e: Sketch = msgspec.field(default_factory=Sketch)
    running: Mean = NO_READING
    waiting: Mean = NO_READING
    kv_usage: Mean = NO_READING
    gpu_utilization: Mean = NO_READING
    gpu_memory_used: Mean = NO_READING
    gpu_memory_total: Mean = NO_READING
    burn_rate: Mean = NO_READING

    def merge(self, other: Sample) -> None:
        self.t = min(self.t, other.t)
        for name in _SUMS:
            if added := getattr(other, name):
                setattr(self, name, getattr(self, name) + added)
        for name in _SKETCHES:
            if (theirs := getattr(other, name)).counts:
                getattr(self, name).merge(theirs)
        for name in _MEANS:
            if (read := getattr(other, name)).count:
                setattr(self, name, getattr(self, name).plus(read))

    def values(self) -> dict[str, float | None]:
        """The figures that are shown, by name. None: there is nothing to say."""
        seconds = self.seconds or 1
        shown: dict[str, float | None] = {
            "requests_per_s": self.requests / seconds,
            "output_tokens_per_s": self.output_tokens / seconds,
            "prompt_tokens_per_s": self.prompt_tokens / seconds,
            "failed_per_s": self.failed / seconds,
            "refused_per_s": self.refused / seconds,
        }
        for name in _SKETCHES:
            sketch: Sketch = getattr(self, name)
            for percent, value in zip(_PERCENTS, sketch.percentiles(*_PERCENTS), strict=True):
                shown[f"{name}_p{percent}"] = value
        for name in _MEANS:
            shown[name] = getattr(self, name).value
        shown["prefix_hit_rate"] = _share(self.prefix_hits, self.prefix_queries)
        shown["cache_hit_rate"] = _share(self.cache_hits, self.cache_lookups)
        shown["acceptance"] = _share(self.accepted_tokens, self.draft_tokens)
        shown["cost_per_request"] = self.cost / self.num_priced if self.num_priced else None
        priced = self.machine_cost > 0 and self.output_tokens > 0
        shown["cost_per_million_tokens"] = self.machine_cost / self.output_tokens * 1e6 if priced else None
        return shown


_SKETCHES = ("ttft", "itl", "e2e")
_MEANS = ("running", "waiting", "kv_usage", "gpu_utilization", "gpu_memory_used", "gpu_memory_total", "burn_rate")
_SUMS = tuple(name for name in Sample.__struct_fields__ if name not in (*_SKETCHES, *_MEANS, "t"))


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole else None


NAMES = tuple(Sample(0).values())  # of the figures
