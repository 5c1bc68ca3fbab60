"""Callers that are slow, careless or in a hurry, on purpose or not; and a backend's event that is too large.

Does: send such requests beside the load, with an id each, and say what became of them. Does not: judge.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable

import h11

from tests.chaos.client import CHAT, Caller, Outcome, chat_body, head
from tests.chaos.programs import Peak
from tests.chaos.trial import Effect, Fault, Scene

TIMEOUT_S = 90.0
NUM_SLOW, NUM_NEVER, NUM_LEAVING, NUM_PIPELINES, PIPELINE = 30, 30, 200, 10, 6
NEVER_S = 12.0  # the gateway gives up on a caller that reads nothing after 5 s (write_timeout)


def _in_threads(count: int, one: Callable[[int], list[Outcome]]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    threads = [threading.Thread(target=lambda n=n: outcomes.extend(one(n))) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def _opened(scene: Scene, *, receive_bytes: int | None = None) -> socket.socket:
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(TIMEOUT_S)
    sock.connect(("127.0.0.1", scene.stack.gateway.port))
    return sock


def _request(request_id: str, body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    return head(CHAT, request_id, len(data)) + data


def _slow_clients(scene: Scene) -> Effect:
    """They read 512 bytes, ten times a second."""

    def one(number: int) -> list[Outcome]:
        outcome = Outcome(f"{scene.name}-slow-{number}", "lost", sent_s=time.monotonic())
        with _opened(scene, receive_bytes=2048) as sock:
            sock.sendall(_request(outcome.request_id, chat_body("hello", stream=True, max_tokens=24)))
            seen = b""
            while piece := sock.recv(512):
                seen, outcome.began = seen[-64:] + piece, True
                if b"data: [DONE]" in seen:
                    outcome.kind = "answered"
                    break
                time.sleep(0.1)
        outcome.ended_s = time.monotonic()
        outcome.detail = "" if outcome.kind == "answered" else f"ended after {seen[-60:]!r}"
        return [outcome]

    return Effect(outcomes=_in_threads(NUM_SLOW, one), note=f"{NUM_SLOW} callers read 5 kB per second")


def _never_reading(scene: Scene) -> Effect:
    """They ask for 32 MiB each, and read nothing."""
    peak = Peak(scene.stack.gateway)
    socks, outcomes = [], []
    for number in range(NUM_NEVER):
        sock = _opened(scene, receive_bytes=2048)
        request_id = f"{scene.name}-never-{number}"
        sock.sendall(_request(request_id, chat_body("hello", stream=True) | {"model": "endless"}))
        outcomes.append(Outcome(request_id, "left", "read nothing", sent_s=time.monotonic(), began=True))
        socks.append(sock)
    until_s = time.monotonic() + NEVER_S
    while time.monotonic() < until_s:
        peak.sample()
        time.sleep(0.1)
    for sock in socks:
        sock.close()
    note = f"{NUM_NEVER} callers that read nothing; the gateway grew by {peak.sample():.0f} MB meanwhile"
    return Effect(outcomes=outcomes, note=note)


def _disconnect_storm(scene: Scene) -> Effect:
    """They leave with the first byte: one half by closing, the other half by a reset."""

    def some(first: int) -> list[Outcome]:
        outcomes = []
        for number in range(first, NUM_LEAVING, 20):
            outcome = Outcome(f"{scene.name}-left-{number}", "left", sent_s=time.monotonic())
            sock = _opened(scene)
            sock.sendall(_request(outcome.request_id, chat_body("hello", stream=True, max_tokens=200)))
            outcome.began = bool(sock.recv(1))
            if number % 2:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
            outcome.ended_s = time.monotonic()
            outcomes.append(outcome)
        return outcomes

    return Effect(outcomes=_in_threads(20, some), note=f"{NUM_LEAVING} streams left by their callers")


def _short_deadlines(scene: Scene) -> Effect:
    def some(first: int) -> list[Outcome]:
        caller = Caller(scene.stack.gateway.port)
        return [
            caller.ask(f"{scene.name}-late-{first}-{number}", chat_body("hello", stream=bool(number % 2)),
                       headers={"X-Request-Deadline-Ms": "20"})
            for number in range(12)
        ]  # fmt: skip

    outcomes = _in_threads(8, some)
    late = sum("504" in outcome.detail or "deadline" in outcome.detail for outcome in outcomes)
    return Effect(
        outcomes=outcomes, note=f"{len(outcomes)} requests with 20 ms to begin; {late} were told that it passed"
    )


def _pipelined(scene: Scene) -> Effect:
    """Six requests in one write; the answers must come in that order."""

    def one(number: int) -> list[Outcome]:
        ids = [f"{scene.name}-pipe-{number}-{place}" for place in range(PIPELINE)]
        with _opened(scene) as sock:
            sent_s = time.monotonic()
            sock.sendall(b"".join(_request(each, chat_body("hello", stream=bool(place % 2), max_tokens=8))
                                  for place, each in enumerate(ids)))  # fmt: skip
            rest, outcomes = b"", []
            for each in ids:
                outcome = Outcome(each, "lost", sent_s=sent_s)
                try:
                    answered_id, done, rest = _read_one(sock, rest)
                    outcome.began = True
                    outcome.kind = "answered" if done and answered_id == each else "lost"
                    outcome.detail = "" if outcome.kind == "answered" else f"answer {answered_id}, complete: {done}"
                except (OSError, h11.ProtocolError) as error:
                    outcome.detail = f"{type(error).__name__}: {error}"
                outcome.ended_s = time.monotonic()
                outcomes.append(outcome)
        return outcomes

    return Effect(outcomes=_in_threads(NUM_PIPELINES, one), note=f"{NUM_PIPELINES} connections × {PIPELINE} requests")


def _read_one(sock: socket.socket, data: bytes) -> tuple[str, bool, bytes]:
    """The next answer on a connection: its request id, whether it is a whole one, and what came after it."""
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="GET", target="/", headers=[("host", "x")]))
    parser.send(h11.EndOfMessage())
    parser.receive_data(data) if data else None
    request_id, body = "", b""
    while True:
        event = parser.next_event()
        if event is h11.NEED_DATA:
            parser.receive_data(sock.recv(65536))
        elif isinstance(event, h11.Response):
            request_id = dict(event.headers).get(b"x-request-id", b"").decode()
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            rest = bytes(parser.trailing_data[0])
            return request_id, b"data: [DONE]" in body or b'"choices"' in body, rest
        else:
            raise h11.RemoteProtocolError(f"{event!r} before the end of an answer")


def _huge_event(scene: Scene) -> Effect:
    """Passed on or refused, it must not stay."""
    peak = Peak(scene.stack.gateway)
    outcomes = []
    for number in range(3):
        body = chat_body("hello", stream=True) | {"model": "one-event"}
        outcomes.append(Caller(scene.stack.gateway.port).ask(f"{scene.name}-event-{number}", body))
        peak.sample()
    note = f"three events of 48 MiB, one after the other; the gateway grew by {peak.sample():.0f} MB meanwhile"
    return Effect(outcomes=outcomes, note=note)


FAULTS = [
    Fault("slow-clients", _slow_clients, spares=True),
    Fault("never-reading-clients", _never_reading, spares=True),
    Fault("disconnect-storm", _disconnect_storm, spares=True),
    Fault("short-deadlines", _short_deadlines, spares=True),
    Fault("pipelined-requests", _pipelined, spares=True),
    Fault("huge-event-from-a-backend", _huge_event, spares=True),
]
