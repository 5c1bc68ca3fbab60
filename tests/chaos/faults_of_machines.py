"""What a process stands on goes bad: disk, clock, Redis, PostgreSQL.

Does: fill, lock, shift, kill and freeze what the gateway of that kind was given (`stack.py`). Does not: judge.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tests.chaos.disks import Disk
from tests.chaos.stack import Stack
from tests.chaos.trial import Effect, Fault, Scene
from tests.fakes.stores import Store

BAD_S = 6.0
HOUR_S = 3600


def _clock_jumps(scene: Scene) -> Effect:
    """Of the gateway and its writer."""
    clock = scene.stack.clock
    assert clock is not None
    for shift_s in (25 * HOUR_S, 0, -HOUR_S, 0):
        clock.shift(shift_s)
        scene.go_on()
    return Effect(note="25 hours ahead, back, one hour behind, back")


def _bad_for_a_while(
    begin: Callable[[Stack], None], end: Callable[[Stack], None], note: str
) -> Callable[[Scene], Effect]:
    def act(scene: Scene) -> Effect:
        begin(scene.stack)
        time.sleep(BAD_S)
        end(scene.stack)
        return Effect(note=f"{note}, for {BAD_S:.0f} s")

    return act


def _disk(stack: Stack) -> Disk:
    assert stack.disk is not None
    return stack.disk


def _store(stack: Stack) -> Store:
    assert stack.store is not None
    return stack.store


_full_disk = _bad_for_a_while(
    lambda stack: _disk(stack).fill(), lambda stack: _disk(stack).empty(), "the disk of the audit trail was full"
)
_read_only_disk = _bad_for_a_while(
    lambda stack: _disk(stack).make_read_only(),
    lambda stack: _disk(stack).make_writable(),
    "the disk of the audit trail was read-only",
)
_store_gone = _bad_for_a_while(
    lambda stack: _store(stack).kill(),
    lambda stack: asyncio.run(_store(stack).start()),
    "killed, then started again; keys that have limits are refused meanwhile",
)
_store_frozen = _bad_for_a_while(
    lambda stack: _store(stack).freeze(), lambda stack: _store(stack).thaw(), "it kept its connections and said nothing"
)


FAULTS = [
    Fault("disk-full", _full_disk, gateway="disk"),
    Fault("disk-read-only", _read_only_disk, gateway="disk"),
    Fault("clock-jumps", _clock_jumps, gateway="clock"),
    Fault("redis-gone", _store_gone, gateway="redis"),
    Fault("redis-frozen", _store_frozen, gateway="redis"),
    Fault("postgres-gone", _store_gone, gateway="postgres"),
    Fault("postgres-frozen", _store_frozen, gateway="postgres"),
]
