"""Processes that die, stand still, fail or are told to stop.

Does: harm one process of the stack, and put it back where no part of Tonle does that. Does not: judge.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

from tests.chaos.load import wait_until
from tests.chaos.programs import Program
from tests.chaos.trial import Effect, Fault, Scene

ENGINE, FRONT_END, WRITER = "tonle.engine.process", "tonle.replica.frontend", "tonle.audit.writer_process"
BACK_S = 120.0
STOPPED_S = 30.0
RAISING_S = 2.0


def _kill_child(name: str, find: Callable[[Scene], Program], module: str) -> Callable[[Scene], Effect]:
    """kill -9 of a child that its parent must start again."""

    def act(scene: Scene) -> Effect:
        parent = find(scene)
        pid = parent.child(module)
        assert pid is not None, f"{parent.name} has no {name}"
        os.kill(pid, signal.SIGKILL)
        effect = Effect()
        is_back = wait_until(lambda: parent.child(module) not in (None, pid) and parent.is_ready(), BACK_S)
        effect.note = f"another {name} was there after {time.monotonic() - effect.ended_s:.1f} s"
        if not is_back:
            effect.red.append(f"there was no other {name} after {BACK_S:.0f} s")
        return effect

    return act


def _kill_backend(scene: Scene) -> Effect:
    """The whole server, which a service manager would start again."""
    scene.stack.first.kill()
    effect = Effect()
    scene.go_on()
    scene.stack.first.start()
    effect.note = f"the server was started again and ready after {time.monotonic() - effect.ended_s:.1f} s"
    return effect


def _kill_gateway(scene: Scene) -> Effect:
    """Callers talk to this very process: those in flight are cut off, and must be on record when it is back."""
    gateway = scene.stack.gateway
    killed_s = time.monotonic()
    gateway.kill()
    gone_s = time.monotonic()
    gateway.start()
    effect = Effect(killed_s=(killed_s, gone_s))
    effect.note = f"the gateway was ready {effect.ended_s - killed_s:.1f} s after the kill, its trail repaired"
    return effect


def _stop(find: Callable[[Scene], int | None]) -> Callable[[Scene], Effect]:
    """SIGSTOP, then SIGCONT."""

    def act(scene: Scene) -> Effect:
        pid = find(scene)
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        before = scene.load.num_answered
        time.sleep(STOPPED_S)
        meanwhile = scene.load.num_answered - before
        os.kill(pid, signal.SIGCONT)
        return Effect(note=f"{meanwhile} requests were answered while it stood still for {STOPPED_S:.0f} s")

    return act


def _raise_in_steps(scene: Scene) -> Effect:
    """In the engine of one server, for a moment."""
    scene.stack.raise_file.touch()
    time.sleep(RAISING_S)
    scene.stack.raise_file.unlink()
    return Effect(note=f"each step of one engine raised for {RAISING_S:.0f} s")


def _drain(find: Callable[[Scene], Program]) -> Callable[[Scene], Effect]:
    """SIGTERM, and started again once it has ended."""

    def act(scene: Scene) -> Effect:
        program, began_s = find(scene), time.monotonic()
        program.terminate()
        status = program.wait()
        drained_s = time.monotonic() - began_s
        program.start()
        red = [f"exit status {status}"] if status else []
        return Effect(note=f"it ended with status {status} after {drained_s:.1f} s", red=red)

    return act


FAULTS = [
    Fault("kill-engine", _kill_child("engine", lambda scene: scene.stack.first, ENGINE), short=True),
    Fault("kill-front-end", _kill_child("front end", lambda scene: scene.stack.second, FRONT_END)),
    Fault("kill-writer", _kill_child("writer", lambda scene: scene.stack.gateway, WRITER), short=True),
    Fault("kill-backend", _kill_backend, short=True),
    Fault("kill-gateway", _kill_gateway, short=True),
    Fault("stop-engine", _stop(lambda scene: scene.stack.first.child(ENGINE)), callers=16),
    Fault("stop-backend", _stop(lambda scene: scene.stack.first.pid), callers=16),
    Fault("stop-writer", _stop(lambda scene: scene.stack.gateway.child(WRITER))),
    Fault("stop-gateway", _stop(lambda scene: scene.stack.gateway.pid)),
    Fault("step-raises", _raise_in_steps),
    Fault("drain-backend", _drain(lambda scene: scene.stack.second)),
    Fault("drain-gateway", _drain(lambda scene: scene.stack.gateway), short=True),
]
