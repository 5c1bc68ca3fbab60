"""A team of threads: calls of two callers do not meet at one barrier."""

from __future__ import annotations

import threading

from tonle.models.cpu.team import Team


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
