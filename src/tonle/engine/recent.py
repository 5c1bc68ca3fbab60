"""What the last steps and requests of an engine took, for `InferenceEngine.get_stats`.

Does: remember a bounded number of both, and sum them up when asked. Does not: time anything; steps and requests carry
their own times. One thread adds, any thread asks.
"""

from __future__ import annotations

from collections import deque

from tonle.engine.messages import LoopStats
from tonle.engine.request import Timings
from tonle.telemetry.percentile import percentile

_WINDOW = 1_000  # steps, and requests, that are looked back on

Summary = dict[str, float]


class Recent:
    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=_WINDOW)  # seconds, tokens generated
        self._requests: deque[Timings] = deque(maxlen=_WINDOW)

    def add_step(self, seconds: float, num_tokens: int) -> None:
        self._steps.append((seconds, num_tokens))

    def add_request(self, timings: Timings) -> None:
        """Of a request that has ended."""
        self._requests.append(timings)

    def metrics(self) -> dict[str, Summary]:
        """By name: mean, min, max, p50, p95, p99 and count. Seconds, tokens per second, or rows. Names without data are
        left out."""
        steps, requests = list(self._steps), list(self._requests)
        rates = [tokens / seconds for seconds, tokens in steps if seconds > 0]
        found: dict[str, list[float]] = {
            "batch_processing_time": [seconds for seconds, _ in steps],  # of a step
            "tokens_per_second": rates,
            "batch_size": [float(tokens) for _, tokens in steps if tokens],  # rows that got a token in a step
            "queue_time": [each.queue_s for each in requests if each.queue_s is not None],
            "time_to_first_token": [each.ttft_s for each in requests if each.ttft_s is not None],
            "request_latency": [each.latency_s for each in requests if each.latency_s is not None],
        }
        metrics = {name: _summary(sorted(values)) for name, values in found.items() if values}
        if rates:  # of all steps together: long ones, which are those with prompts, weigh as much as they last
            metrics["tokens_per_second"]["mean"] = sum(tokens for _, tokens in steps) / sum(s for s, _ in steps)
        return metrics


def profile(stats: LoopStats) -> dict[str, Summary]:
    """Where the time of steps went, part by part: seconds in all, milliseconds per step, share. `rest` is planning,
    reading results back and handing them over."""
    parts = dict(stats.profile)
    whole = max(stats.busy_s, sum(parts.values()))  # the last step may not be in `busy_s` yet
    parts["rest"] = whole - sum(parts.values())
    return {
        part: {
            "seconds": seconds,
            "ms_per_step": seconds / max(1, stats.num_steps) * 1e3,
            "share": seconds / whole if whole else 0.0,
        }
        for part, seconds in parts.items()
    }


def _summary(ordered: list[float]) -> Summary:
    p50, p95, p99 = (percentile(ordered, percent) for percent in (50, 95, 99))
    return {"mean": sum(ordered) / len(ordered), "min": ordered[0], "max": ordered[-1], "p50": p50, "p95": p95, "p99": p99,
            "count": float(len(ordered))}  # fmt: skip
