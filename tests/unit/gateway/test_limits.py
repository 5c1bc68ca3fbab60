"""What a key may ask for, on a clock of the test's own."""

from __future__ import annotations

import asyncio

import pytest

from tonle.gateway.keys.key import Key, Limits
from tonle.gateway.limits.charging import Lease
from tonle.gateway.limits.ledger import Ledger
from tonle.gateway.refusals import RateLimited


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.day = "2026-01-01"

    def ledger(self, **default: int) -> Ledger:
        return Ledger(Limits(**default), clock=lambda: self.now_s, today=lambda: self.day)


def key(**limits: int) -> Key:
    return Key(id="k", name="", digest="", created=0, limits=Limits(**limits))


def charge(ledger: Ledger, charged: Key, tokens: int) -> Lease:
    return asyncio.run(ledger.charge(charged, tokens))


def test_requests_per_minute_refill_steadily() -> None:
    clock = Clock()
    ledger = clock.ledger()
    for _ in range(6):
        charge(ledger, key(requests_per_minute=6), 1).settle(1)
    with pytest.raises(RateLimited) as refused:
        charge(ledger, key(requests_per_minute=6), 1)
    assert refused.value.retry_after_s == pytest.approx(10)
    clock.now_s += 10
    charge(ledger, key(requests_per_minute=6), 1)
    with pytest.raises(RateLimited):
        charge(ledger, key(requests_per_minute=6), 1)


def test_a_refused_request_costs_nothing() -> None:
    clock = Clock()
    ledger, limited = clock.ledger(), key(requests_per_minute=10, tokens_per_minute=100)
    charge(ledger, limited, 100).settle(100)
    for _ in range(20):
        with pytest.raises(RateLimited, match="tokens per minute"):
            charge(ledger, limited, 50)
    clock.now_s += 30
    charge(ledger, limited, 50)


def test_tokens_are_settled_by_what_was_used() -> None:
    clock = Clock()
    ledger, limited = clock.ledger(), key(tokens_per_minute=100)
    charge(ledger, limited, 80).settle(20)  # 80 are left
    charge(ledger, limited, 80).settle(180)  # overdrawn by 100
    with pytest.raises(RateLimited) as refused:
        charge(ledger, limited, 1)
    assert refused.value.retry_after_s == pytest.approx(60.6)


def test_a_request_larger_than_a_minute_waits_for_a_full_one() -> None:
    clock = Clock()
    ledger, limited = clock.ledger(), key(tokens_per_minute=100)
    charge(ledger, limited, 500).settle(500)
    clock.now_s += 60 * 5
    charge(ledger, limited, 500)


def test_requests_at_once() -> None:
    ledger, limited = Clock().ledger(), key(max_concurrent=2)
    first, _ = charge(ledger, limited, 1), charge(ledger, limited, 1)
    with pytest.raises(RateLimited, match="2 requests at once"):
        charge(ledger, limited, 1)
    first.settle(0)
    charge(ledger, limited, 1)


def test_tokens_per_day_end_with_the_day() -> None:
    clock = Clock()
    ledger, limited = clock.ledger(), key(tokens_per_day=100)
    ledger.load(clock.day, {"k": 60})
    charge(ledger, limited, 1).settle(40)
    with pytest.raises(RateLimited, match="per day"):
        charge(ledger, limited, 1)
    assert asyncio.run(ledger.used_today(["k"])) == {"k": 100}
    assert ledger.unsaved == {("2026-01-01", "k"): 40}
    clock.day = "2026-01-02"
    charge(ledger, limited, 1)
    assert asyncio.run(ledger.used_today(["k"])) == {}


def test_a_key_without_limits_has_the_default_and_its_own_win() -> None:
    ledger = Clock().ledger(requests_per_minute=1)
    charge(ledger, key(), 1)
    with pytest.raises(RateLimited):
        charge(ledger, key(), 1)
    other = Key(id="other", name="", digest="", created=0, limits=Limits(requests_per_minute=2))
    charge(ledger, other, 1)
    charge(ledger, other, 1)
