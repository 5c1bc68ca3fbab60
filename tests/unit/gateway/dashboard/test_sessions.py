"""How long a session lives, and how wrong keys are slowed down."""

from __future__ import annotations

import pytest

from tonle.gateway.api_keys.key import draw
from tonle.gateway.api_keys.ring import KeyRing
from tonle.gateway.dashboard import failed_logins, sessions
from tonle.gateway.dashboard.failed_logins import FailedLogins
from tonle.gateway.dashboard.sessions import IDLE_S, LIFE_S, Sessions

HOUR_S = 3600.0


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


KEY, SECRET = draw("someone", scopes=("dashboard",))


def test_a_session_ends_when_it_is_idle_or_old(clock: Clock) -> None:
    found = Sessions(KeyRing([KEY]), clock=clock)
    idle, busy = found.begin(KEY), found.begin(KEY)
    assert idle != busy and len(idle) == 43
    began_s = clock.now_s
    while clock.now_s + HOUR_S <= began_s + LIFE_S:
        clock.now_s += HOUR_S
        assert found.key_of(busy) == KEY
        if clock.now_s == began_s + IDLE_S + HOUR_S:
            assert found.key_of(idle) is None and found.why_ended(idle) == "expired"
    clock.now_s += HOUR_S
    assert found.key_of(busy) is None and len(found) == 0


def test_a_session_is_its_key_as_it_is_now(clock: Clock) -> None:
    ring = KeyRing([KEY])
    found = Sessions(ring, clock=clock)
    token = found.begin(KEY)
    assert found.key_of(token) == KEY and found.key_of(token[:-1]) is None and found.key_of("") is None
    ring._by_digest = {}  # revoked
    assert found.key_of(token) is None and found.why_ended(token) == "revoked"
    ring._by_digest = {KEY.digest: KEY}
    assert found.key_of(token) is None, "a session came back"


def test_tokens_are_not_kept(clock: Clock) -> None:
    found = Sessions(KeyRing([KEY]), clock=clock)
    token = found.begin(KEY)
    found._end(next(iter(found._sessions)), "expired")
    assert token not in str(vars(found)) and SECRET not in str(vars(found))


def test_there_are_only_so_many(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 3)
    found = Sessions(KeyRing([KEY]), clock=clock)
    first, second, third = (found.begin(KEY) for _ in range(3))
    assert found.key_of(first) == KEY  # used last
    fourth = found.begin(KEY)
    assert [found.key_of(token) is not None for token in (first, second, third, fourth)] == [True, False, True, True]
    assert found.why_ended(second) == "crowded" and found.why_ended("another server's") == "unknown"
    clock.now_s += IDLE_S + 1
    found.begin(KEY)
    assert len(found) == 1, "sessions that are over take no place"
    for _ in range(10):
        found.begin(KEY)
    assert len(found._ended) == 3, "what is remembered of them has an end, too"


def test_a_key_that_logs_in_again_and_again_ends_its_own_sessions(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 5)
    other, _ = draw("another", scopes=("admin",))
    found = Sessions(KeyRing([KEY, other]), clock=clock)
    tokens = [found.begin(other) for _ in range(2)]
    for _ in range(20):
        found.begin(KEY)
    assert all(found.key_of(token) == other for token in tokens) and len(found) == 5


def test_wrong_keys_make_an_address_wait(clock: Clock) -> None:
    failed = FailedLogins(clock)
    for _ in range(failed_logins.FREE - 1):
        failed.add("203.0.113.7")
        assert failed.wait_s("203.0.113.7") == 0
    waits = []
    for _ in range(10):
        failed.add("203.0.113.7")
        waits.append(failed.wait_s("203.0.113.7"))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert failed.wait_s("203.0.113.8") == 0
    clock.now_s += 60
    assert failed.wait_s("203.0.113.7") == 0
    clock.now_s += failed_logins.FORGET_S
    assert failed.add("203.0.113.7") == 1


def test_addresses_of_one_network_count_together_and_memory_is_bounded(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_logins, "MAX_ADDRESSES", 10)
    failed = FailedLogins(clock)
    for number in range(failed_logins.FREE):
        failed.add(f"2001:db8:1:2::{number}")
    assert failed.wait_s("2001:db8:1:2:ffff::1") > 0 and failed.wait_s("2001:db8:1:3::1") == 0
    for _ in range(failed_logins.FREE):
        failed.add("::ffff:203.0.113.7")  # IPv4 at a socket for both
    assert failed.wait_s("::ffff:203.0.113.7") > 0 and failed.wait_s("::ffff:203.0.113.8") == 0
    for number in range(100):
        failed.add(f"203.0.113.{number}")
    assert len(failed._failures) == 10
    failed.add("")  # a unix socket has none
    assert failed.wait_s("fe80::1%eth0") == 0
