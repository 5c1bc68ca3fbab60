"""What a transport hands to a sink, as one reply."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from tonle.protocol.answers import Answer
from tonle.workers.transport import WorkersTransport


class Reply:
    """A `Sink`. Presses after each piece if it is slow, and goes on when told."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.pieces: list[bytes] = []
        self.press: Callable[[bool], None] = lambda is_full: None
        self.is_slow = False

    def attach(self, press: Callable[[bool], None]) -> None:
        self.press = press

    def know(self, answer: Answer) -> None:
        raise AssertionError("pools know nothing of chats")

    def head(self, status: int, headers: dict[str, str]) -> None:
        assert not self.status
        self.status, self.headers = status, headers

    def data(self, piece: bytes) -> None:
        assert self.status
        self.pieces.append(piece)
        if self.is_slow:
            self.press(True)

    @property
    def json(self) -> Any:
        return json.loads(b"".join(self.pieces))


async def ask(
    transport: WorkersTransport,
    method: str,
    path: str,
    body: object = None,
    *,
    headers: dict[str, str] | None = None,
    first_s: float = math.inf,
    silence_s: float = math.inf,
    reply: Reply | None = None,
) -> Reply:
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    reply = reply or Reply()
    sent = {"Content-Type": "application/json"} if headers is None else headers
    await transport.send(method, path, raw, sent, reply, first_s=first_s, silence_s=silence_s)
    return reply
