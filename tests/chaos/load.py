"""Continuous load: callers in a closed loop, half of them streams, half of them on connections that stay open.

Does: ask without pause until stopped, keep every outcome. Does not: judge them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tests.chaos.client import Caller, Outcome, chat_body

REFUSED_PAUSE_S = 0.25  # a caller that was refused waits, as Retry-After asks of it
UNREACHED_PAUSE_S = 0.1
POLL_S = 0.02
WORDS = ["river", "stone", "market", "lantern", "monsoon", "temple", "rice", "fish", "boat", "paper", "silk", "drum"]


class Load:
    """`start`, do harm, `stop`. Ids of requests begin with `prefix`."""

    def __init__(self, port: int, prefix: str, *, num_callers: int = 8, max_tokens: int = 8) -> None:
        self.outcomes: list[Outcome] = []
        self._port = port
        self._prefix = prefix
        self._max_tokens = max_tokens
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(num_callers)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> list[Outcome]:
        """Lets every caller finish its last request."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        return self.outcomes

    def _run(self, number: int) -> None:
        caller = Caller(self._port, keep_alive=number % 4 >= 2)
        count = 0
        while not self._stopping.is_set():
            words = " ".join(WORDS[(number + count * step) % len(WORDS)] for step in range(1, 9))
            body = chat_body(f"{number} {count}: {words}", stream=number % 2 == 0, max_tokens=self._max_tokens)
            outcome = caller.ask(f"{self._prefix}-{number}-{count}", body)
            self.outcomes.append(outcome)  # atomic
            count += 1
            if outcome.kind in ("refused", "lost"):
                self._stopping.wait(REFUSED_PAUSE_S)
            elif outcome.kind == "unreached":
                self._stopping.wait(UNREACHED_PAUSE_S)
        caller.close()

    # -- what the trial waits for

    def wait_answered(self, count: int, timeout_s: float) -> bool:
        """Until so many are answered in all."""
        return wait_until(lambda: self.num_answered >= count, timeout_s)

    @property
    def num_answered(self) -> int:
        return sum(outcome.kind == "answered" for outcome in self.outcomes)

    def recovery_s(self, since_s: float, timeout_s: float) -> float | None:
        """From `since_s` to the first answer to a request that was sent after it. None: there was none in time."""

        def answered() -> list[float]:
            return [each.ended_s for each in self.outcomes if each.kind == "answered" and each.sent_s >= since_s]

        return min(answered()) - since_s if wait_until(lambda: bool(answered()), timeout_s) else None

    def latencies_s(self, start_s: float, end_s: float) -> list[float]:
        """Of answers to requests that were sent and answered in between."""
        return [
            each.latency_s for each in self.outcomes
            if each.kind == "answered" and each.sent_s >= start_s and each.ended_s <= end_s
        ]  # fmt: skip


def wait_until(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share / 100 * (len(ordered) - 1)))] if ordered else float("nan")
