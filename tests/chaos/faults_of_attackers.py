"""Callers that want to do harm: bodies that are deep, huge or unfinished, with a wrong key or a right one.

Does: attack the gateway beside an honest load, and measure what that costs. Does not: judge, except where the limits are
numbers: memory, disk and the honest callers' p99 during a flood.
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import time

from tests.chaos.client import CHAT, WRONG_KEY, Caller, Outcome, chat_body, head
from tests.chaos.load import percentile
from tests.chaos.programs import Peak
from tests.chaos.trial import Effect, Fault, Scene

DEPTHS = (200, 2_000, 100_000, 1_000_000)
BODY_BYTES = 8 * 1024**2 - 1024  # within the gateway's limit, 8 MiB
NUM_FLOOD, NUM_SHORT_FLOOD = 1000, 30
MAX_MEMORY_MB, MAX_DISK_MB, MAX_P99_RATIO = 200, 20, 3.0
GIVE_UP_DISK_MB, GIVE_UP_MEMORY_MB = 1000, 3000  # the machine is needed for the other rows
CALM_S, FLOOD_S = 10.0, 150.0
NUM_HALF_OPEN, HALF_OPEN_S = 400, 8.0


def _deep_json(scene: Scene) -> Effect:
    """With a wrong key and with a right one."""
    outcomes = []
    for key in (WRONG_KEY, None):
        caller = Caller(scene.stack.gateway.port, **({} if key is None else {"key": key}))
        for depth in DEPTHS:
            for number, body in enumerate(_deep_bodies(depth)):
                name = f"{scene.name}-{'wrong' if key else 'right'}-{depth}-{number}"
                outcomes.append(caller.ask(name, body))
    note = f"objects and arrays {', '.join(f'{depth:,}' for depth in DEPTHS)} deep, with a wrong and a right key"
    return Effect(outcomes=outcomes, note=note, red=_blamed(outcomes))


def _blamed(outcomes: list[Outcome]) -> list[str]:
    """A caller's fault that the server takes for its own."""
    blamed = [outcome for outcome in outcomes if outcome.detail.startswith("5")]
    return (
        [f"{len(blamed)} bad requests were answered as if the server were at fault: {blamed[0].detail}"]
        if blamed
        else []
    )


def _deep_bodies(depth: int) -> list[bytes]:
    """Closed and not closed, as the body and inside a message."""
    arrays = b"[" * depth + b"]" * depth
    message = b'{"model":"m","max_tokens":1,"messages":[{"role":"user","content":%b}]}'
    return [b'{"a":' * depth + b"1" + b"}" * depth, b"[" * depth, message % arrays, b'{"x":%b}' % arrays]


def _tool_arguments(scene: Scene) -> Effect:
    """What a model once said comes back in a conversation, and templates parse it."""
    outcomes = []
    caller = Caller(scene.stack.gateway.port)
    for number, arguments in enumerate(("[" * 2000, '{"a":' * 2000, "[" * 200_000, "{", "\\", '"\ud800"')):
        for stream in (False, True):
            body = chat_body("go on", stream=stream, max_tokens=4)
            call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
            body["messages"] = [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "done"},
                *body["messages"],
            ]
            outcomes.append(caller.ask(f"{scene.name}-tool-{number}-{stream:d}", body))
    return Effect(outcomes=outcomes, note="arguments that are no JSON, or thousands deep", red=_blamed(outcomes))


# -- a flood of large bodies


def _flood(scene: Scene) -> Effect:
    return _flood_of(scene, NUM_FLOOD, CALM_S)


def _short_flood(scene: Scene) -> Effect:
    effect = _flood_of(scene, NUM_SHORT_FLOOD, scene.seconds)
    effect.red = [reason for reason in effect.red if "p99" not in reason]  # too few requests to tell
    return effect


def _flood_of(scene: Scene, count: int, calm_s: float) -> Effect:
    """From a process of its own, so that the honest callers, which are ours, do not compete with it for the interpreter."""
    peak, trail = Peak(scene.stack.gateway), scene.stack.trail
    start_s = time.monotonic()
    scene.go_on(calm_s)
    disk_before, flood_s = trail.num_bytes, time.monotonic()
    command = [sys.executable, "-m", "tests.chaos.flood", str(scene.stack.gateway.port), scene.name, str(count),
               str(BODY_BYTES)]  # fmt: skip
    flood = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    gave_up = ""
    while flood.poll() is None and not gave_up:
        disk_mb = (trail.num_bytes - disk_before) / 1e6
        if peak.sample() > GIVE_UP_MEMORY_MB or disk_mb > GIVE_UP_DISK_MB or time.monotonic() > flood_s + FLOOD_S:
            gave_up = f"given up after {time.monotonic() - flood_s:.0f} s"
            flood.kill()
        time.sleep(0.2)
    text, _ = flood.communicate()
    end_s = time.monotonic()
    outcomes = [Outcome(*line.split("\t", 2), sent_s=flood_s, ended_s=end_s) for line in text.splitlines()]  # type: ignore[arg-type]
    trail.settle([each.request_id for each in outcomes if each.kind == "refused"], 10.0)
    disk_mb = (trail.num_bytes - disk_before) / 1e6
    calm, during = scene.load.latencies_s(start_s, flood_s), scene.load.latencies_s(flood_s, end_s)
    p99s = percentile(calm, 99) * 1000, percentile(during, 99) * 1000
    effect = Effect(outcomes=outcomes)
    effect.note = (
        f"{len(outcomes)} bodies of 8 MiB with a wrong key in {end_s - flood_s:.0f} s; memory +{peak.sample():.0f} MB, "
        f"disk +{disk_mb:.1f} MB; honest p99 {p99s[0]:.0f} ms calm ({len(calm)} answers), {p99s[1]:.0f} ms in the flood "
        f"({len(during)})"
    )
    effect.red = [f"the flood was {gave_up}"] if gave_up else []
    effect.red += [f"memory grew by more than {MAX_MEMORY_MB} MB"] if peak.sample() >= MAX_MEMORY_MB else []
    effect.red += [f"disk grew by more than {MAX_DISK_MB} MB"] if disk_mb >= MAX_DISK_MB else []
    if not p99s[1] < MAX_P99_RATIO * p99s[0]:
        effect.red.append(f"the honest p99 is more than {MAX_P99_RATIO:.0f} times its calm value")
    return effect


# -- requests that never end


def _one_byte_short(scene: Scene) -> Effect:
    body = b"x" * 1024
    sent = head(CHAT, f"{scene.name}-short", len(body)) + body[:-1]
    return _hold(scene, [sent], "that lack the last byte")


def _slow_heads(scene: Scene) -> Effect:
    text = head(CHAT, f"{scene.name}-slow", 10)
    return _hold(scene, [text[n : n + 1] for n in range(len(text) - 4)], "that send a head byte by byte")


def _hold(scene: Scene, pieces: list[bytes], words: str) -> Effect:
    """Connections with an unfinished request. They are not requests yet: no answer and no record is owed to them."""
    peak = Peak(scene.stack.gateway)
    socks: list[socket.socket] = []
    for _ in range(NUM_HALF_OPEN):
        with contextlib.suppress(OSError):  # refused: as good
            socks.append(socket.create_connection(("127.0.0.1", scene.stack.gateway.port), timeout=120))
    until_s, waiting = time.monotonic() + HALF_OPEN_S, list(pieces)
    while time.monotonic() < until_s:
        piece = waiting.pop(0) if waiting else b""
        for sock in socks if piece else []:
            with contextlib.suppress(OSError):  # the server has ended it
                sock.send(piece)
        peak.sample()
        time.sleep(0.25)
    poll = select.poll()
    for sock in socks:
        poll.register(sock, select.POLLIN)
    num_ended = len(poll.poll(0))
    for sock in socks:
        sock.close()
    note = f"{len(socks)} connections {words}, for {HALF_OPEN_S:.0f} s; the gateway grew by {peak.sample():.0f} MB "
    return Effect(note=note + f"and ended {num_ended} of them itself")


FAULTS = [
    Fault("deep-json", _deep_json, short=True, spares=True),
    Fault("tool-arguments", _tool_arguments, spares=True),
    Fault("wrong-key-flood", _flood, callers=2, spares=True),
    Fault("one-byte-short", _one_byte_short, spares=True),
    Fault("slow-heads", _slow_heads, spares=True),
]
SHORT_FLOOD = Fault("wrong-key-flood", _short_flood, callers=2, short=True, spares=True)
