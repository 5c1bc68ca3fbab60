"""What a process stands on goes bad: disk, clock, Redis, PostgreSQL.

Does: fill, lock, shift, kill and freeze what the gateway of that kind was given (`stack.py`). Does not: judge.
"""

from __future__ import annotations

import asyncio
import time

from tests.chaos.trial import Effect, Fault, Scene

BAD_S = 6.0
HOUR_S = 3600


def _full_disk(scene: Scene) -> Effect:
    disk = scene.stack.disk
    assert disk is not None
    disk.fill()
    time.sleep(BAD_S)
    disk.empty()
    return Effect(note=f"the disk of the audit trail was full for {BAD_S:.0f} s")


def _read_only_disk(scene: Scene) -> Effect:
    disk = scene.stack.disk
    assert disk is not None
    disk.make_read_only()
    time.sleep(BAD_S)
    disk.make_writable()
    return Effect(note=f"the disk of the audit trail was read-only for {BAD_S:.0f} s")


def _clock_jumps(scene: Scene) -> Effect:
    """Of the gateway and its writer."""
    clock = scene.stack.clock
    assert clock is not None
    for shift_s in (25 * HOUR_S, 0, -HOUR_S, 0):
        clock.shift(shift_s)
        scene.go_on()
    return Effect(note="25 hours ahead, back, one hour behind, back")


def _store_gone(scene: Scene) -> Effect:
    store = scene.stack.store
    assert store is not None
    store.kill()
    time.sleep(BAD_S)
    asyncio.run(store.start())
    return Effect(note=f"killed, and started again after {BAD_S:.0f} s; keys that have limits are refused meanwhile")


def _store_frozen(scene: Scene) -> Effect:
    store = scene.stack.store
    assert store is not None
    store.freeze()
    time.sleep(BAD_S)
    store.thaw()
    return Effect(note=f"it kept its connections and said nothing for {BAD_S:.0f} s")


FAULTS = [
    Fault("disk-full", _full_disk, gateway="disk"),
    Fault("disk-read-only", _read_only_disk, gateway="disk"),
    Fault("clock-jumps", _clock_jumps, gateway="clock"),
    Fault("redis-gone", _store_gone, gateway="redis"),
    Fault("redis-frozen", _store_frozen, gateway="redis"),
    Fault("postgres-gone", _store_gone, gateway="postgres"),
    Fault("postgres-frozen", _store_frozen, gateway="postgres"),
]
