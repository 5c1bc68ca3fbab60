"""What a key may ask for, on a clock of the test's own."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from tonle.gateway.api_keys.key import Key, KeyLimits
from tonle.gateway.limits.limiter import Lease
from tonle.gateway.limits.memory_limiter import MemoryLimiter
from tonle.gateway.refusals import RateLimited


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.day = "2026-01-01"

    def limiter(self, **default: int) -> MemoryLimiter:
        return MemoryLimiter(KeyLimits(**default), clock=lambda: self.now_s, today=lambda: self.day)


def key(**limits: int) -> Key:
    return Key(id="k", name="", digest="", created=0, limits=KeyLimits(**limits))


def charge(limiter: MemoryLimiter, charged: Key, tokens: int) -> Lease:
    return asyncio.run(limiter.charge(charged, tokens))


def test_requests_per_minute_refill_steadily() -> None:
    clock = Clock()
    limiter = clock.limiter()
    for _ in range(6):
        charge(limiter, key(requests_per_minute=6), 1).settle(1)
    with pytest.raises(RateLimited) as refused:
        charge(limiter, key(requests_per_minute=6), 1)
    assert refused.value.retry_after_s == pytest.approx(10)
    clock.now_s += 10
    charge(limiter, key(requests_per_minute=6), 1)
    with pytest.raises(RateLimited):
        charge(limiter, key(requests_per_minute=6), 1)


def test_a_refused_request_costs_nothing() -> None:
    clock = Clock()
    limiter, limited = clock.limiter(), key(requests_per_minute=10, tokens_per_minute=100)
    charge(limiter, limited, 100).settle(100)
    for _ in range(20):
        with pytest.raises(RateLimited, match="tokens per minute"):
            charge(limiter, limited, 50)
    clock.now_s += 30
    charge(limiter, limited, 50)


def test_tokens_are_settled_by_what_was_used() -> None:
    clock = Clock()
    limiter, limited = clock.limiter(), key(tokens_per_minute=100)
    charge(limiter, limited, 80).settle(20)  # 80 are left
    charge(limiter, limited, 80).settle(180)  # overdrawn by 100
    with pytest.raises(RateLimited) as refused:
        charge(limiter, limited, 1)
    assert refused.value.retry_after_s == pytest.approx(60.6)


def test_a_request_larger_than_a_minute_waits_for_a_full_one() -> None:
    clock = Clock()
    limiter, limited = clock.limiter(), key(tokens_per_minute=100)
    charge(limiter, limited, 500).settle(500)
    clock.now_s += 60 * 5
    charge(limiter, limited, 500)


def test_requests_at_once() -> None:
    limiter, limited = Clock().limiter(), key(max_concurrent=2)
    first, _ = charge(limiter, limited, 1), charge(limiter, limited, 1)
    with pytest.raises(RateLimited, match="2 requests at once"):
        charge(limiter, limited, 1)
    first.settle(0)
    charge(limiter, limited, 1)


def test_tokens_per_day_end_with_the_day() -> None:
    clock = Clock()
    limiter, limited = clock.limiter(), key(tokens_per_day=100)
    limiter.load(clock.day, {"k": 60})
    charge(limiter, limited, 1).settle(40)
    with pytest.raises(RateLimited, match="per day"):
        charge(limiter, limited, 1)
    assert asyncio.run(limiter.used_today(["k"])) == {"k": 100}
    assert limiter.unsaved == {("2026-01-01", "k"): 40}
    clock.day = "2026-01-02"
    charge(limiter, limited, 1)
    assert asyncio.run(limiter.used_today(["k"])) == {}


def test_tokens_of_running_requests_count_towards_the_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonle.gateway.limits.memory_limiter.time", SimpleNamespace(time=lambda: 1_700_000_000.0))
    clock = Clock()
    limiter, limited = clock.limiter(), key(tokens_per_day=1000)
    running = [charge(limiter, limited, 600), charge(limiter, limited, 600)]  # 600 of 1000 were spoken for
    with pytest.raises(RateLimited, match="per day") as refused:
        charge(limiter, limited, 1)
    assert refused.value.retry_after_s == 1  # as soon as one of them has ended, not tomorrow
    running[0].settle(100)
    charge(limiter, limited, 200).settle(200)  # 300 used and 600 reserved
    assert asyncio.run(limiter.used_today(["k"])) == {"k": 300}
    running[1].settle(900)
    with pytest.raises(RateLimited, match="per day") as refused:
        charge(limiter, limited, 1)
    assert refused.value.retry_after_s == 86400 - 1_700_000_000 % 86400  # until midnight


def test_a_request_that_runs_into_the_next_day_is_reserved_and_counted_there() -> None:
    clock = Clock()
    limiter, limited = clock.limiter(), key(tokens_per_day=1000)
    running = charge(limiter, limited, 1000)
    clock.day = "2026-01-02"
    with pytest.raises(RateLimited, match="per day"):
        charge(limiter, limited, 1)
    running.settle(70)
    assert asyncio.run(limiter.used_today(["k"])) == {"k": 70}
    charge(limiter, limited, 1).settle(0)


def test_a_key_without_limits_has_the_default_and_its_own_win() -> None:
    limiter = Clock().limiter(requests_per_minute=1)
    charge(limiter, key(), 1)
    with pytest.raises(RateLimited):
        charge(limiter, key(), 1)
    other = Key(id="other", name="", digest="", created=0, limits=KeyLimits(requests_per_minute=2))
    charge(limiter, other, 1)
    charge(limiter, other, 1)
