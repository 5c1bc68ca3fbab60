"""What it costs a server to remember its requests and its load: `python -m benchmarks.observing`.

Does: time what runs on the event loop (a request that ends, a second that is closed) and what runs on a thread (saving, series
for charts), with a busy month in the file. Does not: serve; `benchmarks.gateway` measures a whole gateway.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tonle.observe.history import History
from tonle.observe.observed import Observed
from tonle.observe.sample import Sample
from tonle.observe.sampler import Sampler
from tonle.observe.seen_request import SeenRequest
from tonle.observe.sla import Sla
from tonle.telemetry.time_spent import TimeSpent, Wait

RATE = 50  # requests per second
RANGES = {"5 minutes": 300, "hour": 3600, "day": 86_400, "month": 2_592_000}


def each_us(what: Callable[[], object], count: int) -> float:
    """Mean CPU time of this thread, in microseconds."""
    began_s = time.thread_time()
    for _ in range(count):
        what()
    return (time.thread_time() - began_s) / count * 1e6


def a_request(number: int) -> SeenRequest:
    total_s = random.lognormvariate(0, 1)
    spent = TimeSpent(queue_s=0.01, prefill_s=0.1, decode_s=total_s, waits=[Wait("step", 0.01)], device_s=0.1)
    return SeenRequest(
        id=f"req-{number:024d}", arrived=time.time(), path="/v1/chat/completions", model="m", key_id="k", key_name="a key",
        status="ok", http_status=200, stream=True, prompt_tokens=300, completion_tokens=100, backend="b0", accepted_s=0.001,
        sent_s=0.002, first_byte_s=0.1, ttft_s=0.1, last_s=total_s, total_s=total_s, spent=spent, device_s=0.1, cost=0.001,
    )  # fmt: skip


def a_busy_sample(t: int, seconds: int) -> Sample:
    sample = Sample(t, seconds=seconds, requests=RATE * seconds)
    for _ in range(min(RATE * seconds, 200)):
        sample.e2e.add(random.lognormvariate(0, 1), seconds)
        sample.ttft.add(random.lognormvariate(-2, 1), seconds)
        sample.itl.add(random.lognormvariate(-4, 0.5), 100 * seconds)
    return sample


def ended_us(requests: list[SeenRequest], *, keeps: bool) -> float:
    """Of one request, the least of several passes: whatever else runs on the machine only adds to it. `keeps`: with what is
    counted for the dashboard, many requests at a time."""

    def once() -> float:
        observed = Observed(sla=Sla(2.0, ttft_p95_s=0.2), sampler=Sampler(), history=History(None), keeps=keeps)
        place = iter(requests)
        return each_us(lambda: observed.ended(next(place)), len(requests))

    return min(once() for _ in range(7))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        history, sampler = History(Path(folder) / "history.db"), Sampler()
        history.open()
        now = int(time.time())
        for t in range(now - now % 60 - 30 * 86_400, now - 3600, 60):
            history.add(a_busy_sample(t, 60))
        for t in range(now - 3600, now):
            history.add(a_busy_sample(t, 1))
        history.save()
        requests = [a_request(number) for number in range(10_000)]
        off_us, on_us = (ended_us(requests, keeps=keeps) for keeps in (False, True))
        print(f"a request that ends     {on_us:8.1f} us, of it for the dashboard {on_us - off_us:.1f}")
        seconds = iter(range(now + 10, now + 1000))
        sampler.listen(history.add)

        def second() -> None:
            sampler.count(requests[:RATE])
            sampler.close_until(next(seconds))

        adding_us = each_us(lambda: sampler.count(requests[:RATE]), 100)
        print(f"a second that is closed {each_us(second, 100) - adding_us:8.1f} us")
        print(f"saving ten seconds      {each_us(history.save, 1) / 1e3:8.1f} ms on a thread")
        for name, range_s in RANGES.items():
            print(
                f"series of {name:13} {each_us(lambda range_s=range_s: history.series(range_s), 3) / 1e3:8.1f} ms on a thread"
            )
        history.file.close()
        print(f"the file                {(Path(folder) / 'history.db').stat().st_size / 1e6:8.1f} MB")


if __name__ == "__main__":
    main()
