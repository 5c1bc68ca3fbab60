"""Admit: which key a request has, and what that key may do.

Does: find the key of a request, check scopes and models. Does not: count (`limits/`) or make keys (`api_keys/`).
"""

from __future__ import annotations

from tonle.edge.exchange import Exchange
from tonle.errors import TonleError, UnknownModel
from tonle.gateway.api_keys.key import LOCAL_CALLER, Key, Scope
from tonle.gateway.api_keys.ring import KeyRing
from tonle.gateway.backends.transport import SALT_HEADER
from tonle.gateway.dashboard.sessions import Sessions, token_of
from tonle.gateway.refusals import Forbidden, Unauthorized
from tonle.gateway.web_pages import check_own_page

_BEARER = "bearer "
_WORDS: dict[Scope, str] = {
    "models": "use models",
    "metrics": "read metrics",
    "priority": "ask for priority",
    "gateway": "ask for the callers of another gateway",
    "dashboard": "see the dashboard",
    "admin": "manage this server",
}


class Auth:
    def __init__(
        self, ring: KeyRing, *, sessions: Sessions | None = None, anonymous: Key = LOCAL_CALLER, anywhere: bool = False
    ) -> None:
        """`anonymous` is the key of callers while there are no keys; `anywhere`: even from other machines. `sessions`: of
        the dashboard, whose cookie stands for a key."""
        self._ring = ring
        self._sessions = sessions
        self._anonymous = anonymous
        self._anywhere = anywhere

    @property
    def has_keys(self) -> bool:
        return not self._ring.empty

    def admit(self, exchange: Exchange, scope: Scope) -> None:
        """Find the caller's key and keep it with the exchange. Raises `Unauthorized`, `Forbidden`."""
        exchange.key = self._find(exchange, scope)

    def admits_still(self, exchange: Exchange, scope: Scope) -> bool:
        """For a reply that goes on: its key was not revoked, its session has not ended."""
        try:
            self._find(exchange, scope)
        except TonleError:
            return False
        return True

    def _find(self, exchange: Exchange, scope: Scope) -> Key:
        if self._ring.empty:
            if not exchange.loopback and not self._anywhere:  # the settings forbid it too; this is a second check
                raise Unauthorized("this gateway has no API keys yet, so it answers only requests from its own machine")
            return _checked(self._anonymous, scope)
        secret = _secret(exchange)
        if not secret:
            return _checked(self._of_session(exchange), scope)
        key = self._ring.find(secret)
        if key is None:
            raise Unauthorized("this API key is unknown or was revoked")
        return _checked(key, scope)

    def _of_session(self, exchange: Exchange) -> Key:
        """The key that a page of the dashboard logged in with."""
        token = token_of(exchange) if self._sessions is not None else ""
        if self._sessions is None or not token:
            raise Unauthorized("an API key is required: send it as `Authorization: Bearer KEY`")
        check_own_page(exchange)
        key = self._sessions.key_of(token)
        if key is None:
            raise Unauthorized("this session has ended: log in again at /dashboard")
        return key


def _checked(key: Key, scope: Scope) -> Key:
    if not key.may(scope):
        raise Forbidden(f"this key may not {_WORDS[scope]}; its scopes are: {', '.join(key.scopes) or 'none'}")
    return key


def owner_of(exchange: Exchange, key: Key, *, trust_salt: bool) -> str:
    """Whose cached answers and prefixes and stored responses a request may see. `trust_salt`: its header may say so. With a
    gateway's key it may, too, but only among the owners behind that key: it cannot name one of ours."""
    salt = exchange.header(SALT_HEADER) if trust_salt or key.is_gateway else ""
    return (salt if trust_salt else f"{key.owner}\0{salt}") if salt else key.owner


def check_model(key: Key, model: str) -> None:
    """A model that the key may not use does not exist for its holder."""
    if not key.may_use(model):
        raise UnknownModel(f"there is no model {model!r} for this key; GET /v1/models lists the models",
                           param="model")  # fmt: skip


def _secret(exchange: Exchange) -> str:
    value = exchange.header("authorization")
    if value[: len(_BEARER)].lower() == _BEARER:
        return value[len(_BEARER) :].strip()
    return exchange.header("x-api-key") or exchange.header("api-key")
