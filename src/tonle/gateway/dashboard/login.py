"""Logging in to the dashboard and out of it, and what the page is told about its session.

Does: exchange a key for a cookie, end sessions, slow down addresses that try keys. Does not: keep sessions (`sessions.py`).
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from tonle import __version__
from tonle.edge.exchange import Exchange
from tonle.errors import InvalidRequest, TonleError, TooLarge
from tonle.gateway.api_keys.key import Key
from tonle.gateway.dashboard.failed_logins import FailedLogins
from tonle.gateway.dashboard.sessions import cookie, token_of
from tonle.gateway.refusals import Forbidden, ForeignPage, RateLimited, Unauthorized
from tonle.gateway.services import Services
from tonle.gateway.web_pages import check_own_page, is_from_own_page
from tonle.protocol.parse import parse

log = logging.getLogger("tonle.gateway")

MAX_LOGIN_BYTES = 4096


class LoginRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /dashboard/api/login."""

    key: Annotated[str, Meta(min_length=1)]


class LoginPages:
    def __init__(self, services: Services, admit_without_key: Callable[[Exchange], None]) -> None:
        self._services = services
        self._admit_without_key = admit_without_key
        self._failed = FailedLogins()
        self._started = time.time()

    async def log_in(self, exchange: Exchange) -> None:
        services, client = self._services, exchange.client
        _refuse_other_pages(exchange, "log in")
        if len(exchange.body) > MAX_LOGIN_BYTES:
            raise TooLarge(f"a login has at most {MAX_LOGIN_BYTES} bytes")
        if not services.auth.has_keys:
            raise InvalidRequest("this server has no keys, so there is nothing to log in with")
        if wait_s := self._failed.wait_s(client):
            raise RateLimited("too many wrong keys came from this address", retry_after_s=wait_s)
        wanted, _ = parse(exchange.body, LoginRequest)
        key = services.ring.find(wanted.key.strip())
        if key is None:
            count = self._failed.add(client)
            log.warning("a wrong key was given at /dashboard by %s; it was its wrong key number %d", client, count)
            raise Unauthorized("this key is unknown or was revoked", param="key")
        if not key.may("dashboard"):
            raise Forbidden("this key may not see the dashboard: it needs the scope dashboard or admin", param="key")
        services.sessions.end(token_of(exchange))  # of the same browser
        token = services.sessions.begin(key)
        exchange.reply(b"", status=204, headers=[cookie(token, secure=self._is_https(exchange))])

    async def log_out(self, exchange: Exchange) -> None:
        _refuse_other_pages(exchange, "log out")  # it comes without the cookie, and the reply would still take it away
        if token := token_of(exchange):
            check_own_page(exchange)
            self._services.sessions.end(token)
        exchange.reply(b"", status=204, headers=[cookie("", secure=self._is_https(exchange))])

    async def session(self, exchange: Exchange) -> None:
        """What the page may show. Whether it must ask for a key first, and why again, is told to every caller."""
        if not self._services.auth.has_keys:
            self._admit_without_key(exchange)
        else:
            try:
                self._services.auth.admit(exchange, "dashboard")
            except (Unauthorized, Forbidden) as error:
                if exchange.header("authorization"):
                    raise
                exchange.reply(msgspec.json.encode(self._needs_login(token_of(exchange), error)))
                return
        exchange.reply(msgspec.json.encode(self._facts(exchange.key)))

    def _needs_login(self, token: str, error: TonleError) -> dict[str, Any]:
        has_ended = bool(token) and isinstance(error, Unauthorized)
        return {"needs_login": True} | ({"ended": self._services.sessions.why_ended(token)} if has_ended else {})

    def _facts(self, key: Key) -> dict[str, Any]:
        services, config = self._services, self._services.config
        has_keys, is_local = services.auth.has_keys, services.is_local
        can_admin = key.may("admin")
        return {
            "needs_login": False,
            "key": {"id": key.id, "name": key.name} if has_keys else None,
            "can_admin": can_admin,
            "can_use_models": key.may("models"),
            "can_load_adapters": can_admin or (not has_keys and is_local and services.enable_lora),
            "server": {
                "kind": "serve" if is_local else "gateway",
                "version": __version__,
                "name": socket.gethostname(),
                "started": self._started,
                "models": [name for name in services.router.public_models() if key.may_use(name)],
            },
            "has": {
                "keys": services.ring.store is not None,
                "audit": services.trail is not None,
                "experiments": bool(config.experiments),
                "adapters": has_keys or not is_local or services.enable_lora,
                "price": any(backend.price_per_hour is not None for backend in services.pool.backends),
                "history": "memory" if services.observed is None else services.observed.history.kind,
            },
        }

    def _is_https(self, exchange: Exchange) -> bool:
        return self._services.config.ssl_certfile is not None or exchange.forwarded_https


def _refuse_other_pages(exchange: Exchange, what: str) -> None:
    """Programs, which name no page, may. Raises `ForeignPage`."""
    headers = exchange.headers
    if ("sec-fetch-site" in headers or "origin" in headers) and not is_from_own_page(exchange):
        raise ForeignPage(f"only the dashboard's own page may {what}")
