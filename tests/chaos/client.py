"""One request by a client that is not ours (`http.client`), and what became of it.

Does: send, read to the end, say in one word how it ended. Does not: repeat a request, or decide how many there are.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any, Literal

KEY, WRONG_KEY = "chaos-key", "not-the-key"
CHAT = "/v1/chat/completions"
HANG_S = 90.0  # without a byte for this long, a request counts as lost

# answered: in full · refused: with a reason, a body or an event of type error · lost: neither, or nothing for HANG_S
# cut: in flight in the very process that was killed · left: the caller itself went away
# stale: sent on a connection that the server had just closed for being idle · unreached: no connection could be made
Kind = Literal["answered", "refused", "lost", "cut", "left", "stale", "unreached"]


@dataclass(slots=True)
class Outcome:
    """Times are monotonic seconds."""

    request_id: str
    kind: Kind
    detail: str = ""  # of a refusal "503 no_backend", of a loss what was seen
    sent_s: float = 0.0
    ended_s: float = 0.0
    began: bool = False  # at least one byte of the answer came

    @property
    def latency_s(self) -> float:
        return self.ended_s - self.sent_s


@dataclass(slots=True)
class Caller:
    """One connection at a time; kept open between requests, or not."""

    port: int
    keep_alive: bool = False
    key: str = KEY
    timeout_s: float = HANG_S
    _connection: http.client.HTTPConnection | None = field(default=None, init=False)

    def ask(self, request_id: str, body: Any, *, path: str = CHAT, headers: dict[str, str] | None = None) -> Outcome:
        """`body` is JSON, or bytes as they are. Never raises."""
        outcome = Outcome(request_id, "lost", sent_s=time.monotonic())
        reused = self._connection is not None
        try:
            connection = self._connect()
        except OSError as error:
            return _ended(outcome, "unreached", str(error))
        own = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json", "X-Request-ID": request_id}
        try:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, data, {**own, **(headers or {})})
            reply = connection.getresponse()
            outcome.began = True
            read_reply(reply, outcome)
        except (OSError, http.client.HTTPException) as error:
            dropped = isinstance(error, ConnectionError)  # http.client's RemoteDisconnected is one
            kind: Kind = "stale" if reused and dropped and not outcome.began else "lost"
            _ended(outcome, kind, f"{type(error).__name__}: {error}")
        if not self.keep_alive or outcome.kind != "answered":
            self.close()
        return outcome

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> http.client.HTTPConnection:
        if self._connection is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.timeout_s)
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._connection = connection
        return self._connection


def read_reply(reply: http.client.HTTPResponse, outcome: Outcome) -> None:
    """To its end. Raises what `http.client` raises for an answer that broke off."""
    if reply.status != 200:
        _ended(outcome, *_refusal(reply.status, reply.read()))
    elif "text/event-stream" in (reply.getheader("content-type") or ""):
        _read_events(reply, outcome)
    else:
        body = reply.read()
        try:
            whole = bool(json.loads(body).get("choices"))
        except ValueError:
            whole = False
        _ended(outcome, "answered" if whole else "lost", "" if whole else f"no answer in {body[:80]!r}")


def _read_events(reply: http.client.HTTPResponse, outcome: Outcome) -> None:
    last = b""
    while line := reply.readline():
        if line.startswith(b"data: [DONE]"):
            reply.read()
            _ended(outcome, "answered", "")
            return
        if line.startswith(b'data: {"error"'):
            reply.read()
            _ended(outcome, *_refusal(200, line.removeprefix(b"data: ")))
            return
        last = line.strip() or last
    _ended(outcome, "lost", f"the stream ended without [DONE] or an error, after {last[:80]!r}")


def _refusal(status: int, body: bytes) -> tuple[Kind, str]:
    """A refusal must say why."""
    try:
        error = json.loads(body)["error"]
        if error["message"] and error["type"]:
            return "refused", f"{status} {error.get('code') or error['type']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return "lost", f"{status} without a reason: {body[:80]!r}"


def _ended(outcome: Outcome, kind: Kind, detail: str) -> Outcome:
    outcome.kind, outcome.detail, outcome.ended_s = kind, detail, time.monotonic()
    return outcome


def chat_body(text: str, *, stream: bool, max_tokens: int = 16, **fields: Any) -> dict[str, Any]:
    """Never answered from a cache: its temperature is not 0."""
    messages = [{"role": "user", "content": text}]
    return {
        "model": "m",
        "messages": messages,
        "stream": stream,
        "max_tokens": max_tokens,
        "temperature": 0.7,
        **fields,
    }


def head(path: str, request_id: str, num_bytes: int, *, key: str = KEY) -> bytes:
    """The head of a POST for clients that write their own bytes."""
    return (f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
            f"X-Request-ID: {request_id}\r\nContent-Length: {num_bytes}\r\n\r\n").encode()  # fmt: skip
