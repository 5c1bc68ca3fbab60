"""A team of threads: calls of two callers do not meet at one barrier, and who waits long at it sleeps."""

from __future__ import annotations

import threading
import time

import pytest
from numba import njit

from tonle.models.cpu.team import _ASLEEP, _FUTEX, Team, barrier


def test_two_callers_take_turns() -> None:
    team, inside, most, lock = Team(2), 0, 0, threading.Lock()
    first_in, go_on = threading.Event(), threading.Event()

    def work(member: int) -> None:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        first_in.set()
        go_on.wait(120)
        with lock:
            inside -= 1

    callers = [threading.Thread(target=team.run, args=(work,)) for _ in range(2)]
    for caller in callers:
        caller.start()
    assert first_in.wait(120)
    for _ in range(50):  # the second caller has every chance to get in
        with lock:
            if inside > 2:
                break
        threading.Event().wait(0.002)
    go_on.set()
    for caller in callers:
        caller.join(120)
        assert not caller.is_alive()
    assert most == 2  # the members of one call


@njit(nogil=True)
def _meet(counter, size):  # type: ignore[no-untyped-def]
    return barrier(counter, barrier(counter, 0, size), size)


@pytest.mark.skipif(_FUTEX is None, reason="threads do not sleep at barriers here")
def test_who_waits_long_for_the_last_one_sleeps_and_is_woken() -> None:
    team, met = Team(3), []
    asleep = []

    def work(member: int) -> None:
        if member == 0:
            end = time.monotonic() + 120
            while team.counter[_ASLEEP] < 2 and time.monotonic() < end:
                time.sleep(0.001)
            asleep.append(int(team.counter[_ASLEEP]))
        met.append(_meet(team.counter, team.size))

    running = threading.Thread(target=team.run, args=(work,), daemon=True)
    running.start()
    running.join(120)
    assert not running.is_alive(), "nobody was woken"
    assert asleep == [2] and met == [6, 6, 6]
    assert team.counter[_ASLEEP] == 0
