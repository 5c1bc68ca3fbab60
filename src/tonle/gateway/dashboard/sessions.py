"""`Sessions`: who is logged in to the dashboard. A session stands for the key it was made with, and ends with it.

Does: draw tokens, keep their SHA-256 in memory, end what is idle or old, remember why. Does not: check where a request comes from
(`web_pages.py`) or what the key may do (`auth.py`). A restart of the server ends all sessions.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

from tonle.edge.exchange import Exchange
from tonle.gateway.api_keys.key import Key, digest_of
from tonle.gateway.api_keys.ring import KeyRing

COOKIE = "tonle_session"
MAX_SESSIONS = 1000  # one more ends the one that was not used for longest, of the key that has most
IDLE_S = 12 * 3600.0
LIFE_S = 7 * 24 * 3600.0
TOKEN_BYTES = 32
_MAX_COOKIE_BYTES = 8192

# `revoked`: its key. `expired`: idle or old. `crowded`: there were too many. `unknown`: begun before a restart, or elsewhere.
Ending = Literal["revoked", "expired", "crowded", "unknown"]


class Session:
    __slots__ = ("began_s", "key", "used_s")

    def __init__(self, key: Key, now_s: float) -> None:
        self.key = key
        self.began_s = self.used_s = now_s


class Sessions:
    def __init__(self, ring: KeyRing, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ring = ring
        self._clock = clock
        self._sessions: dict[str, Session] = {}  # by the token's digest; the one used last is last
        self._ended: dict[str, Ending] = {}  # the latest, by the same

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, key: Key) -> str:
        """A new token, which is sent to the browser and never kept."""
        now_s = self._clock()
        for name in [name for name, each in self._sessions.items() if _is_over(each, now_s)]:
            self._end(name, "expired")
        while len(self._sessions) >= MAX_SESSIONS:
            self._end(self._least_missed(), "crowded")
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._sessions[digest_of(token)] = Session(key, now_s)
        return token

    def key_of(self, token: str) -> Key | None:
        """The key as it is now; None: there is no such session any more. This counts as a use."""
        name, now_s = digest_of(token), self._clock()
        session = self._sessions.get(name)
        if session is None:
            return None
        if _is_over(session, now_s):
            self._end(name, "expired")
            return None
        key = self._ring.current(session.key)
        if key is None:
            self._end(name, "revoked")
            return None
        session.used_s = now_s
        self._sessions[name] = self._sessions.pop(name)
        return key

    def why_ended(self, token: str) -> Ending:
        return self._ended.get(digest_of(token), "unknown")

    def _end(self, name: str, why: Ending) -> None:
        del self._sessions[name]
        self._ended[name] = why
        if len(self._ended) > MAX_SESSIONS:
            del self._ended[next(iter(self._ended))]

    def _least_missed(self) -> str:
        """A key that logs in again and again ends its own sessions, and not those of others."""
        counts = Counter(each.key.id for each in self._sessions.values())
        most = max(counts.values())
        return next(name for name, each in self._sessions.items() if counts[each.key.id] == most)

    def end(self, token: str) -> None:
        self._sessions.pop(digest_of(token), None)


def _is_over(session: Session, now_s: float) -> bool:
    return now_s - session.used_s > IDLE_S or now_s - session.began_s > LIFE_S


def token_of(exchange: Exchange) -> str:
    """Empty: the request has none."""
    text = exchange.header("cookie")
    if COOKIE not in text or len(text) > _MAX_COOKIE_BYTES:
        return ""
    for part in text.split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value
    return ""


def cookie(token: str, *, secure: bool) -> tuple[str, str]:
    """The header that gives it to the browser; an empty token takes it away."""
    life_s = int(LIFE_S) if token else 0
    flags = "; Secure" if secure else ""
    return "set-cookie", f"{COOKIE}={token}; Path=/; Max-Age={life_s}; HttpOnly; SameSite=Strict{flags}"
