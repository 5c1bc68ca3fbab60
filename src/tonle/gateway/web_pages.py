"""What web pages may do: a browser on this machine can reach a server that has no keys, and runs any site's scripts.

Does: refuse, where there are no keys, what a page of another site asks (`Host`, `Origin`, `Sec-Fetch-Site`); answer CORS;
require JSON, which a page cannot send elsewhere without a preflight. Does not: know keys or paths.

Where there are keys, a page of another site cannot know one, and the first three are not checked. A browser sends the
cookie of the dashboard by itself, so a request that relies on it must come from a page of this server (`check_own_page`). It
takes a site whose name leads to this machine for this server, so `Host` is checked on the dashboard's paths, keys or not.
"""

from __future__ import annotations

import functools
import ipaddress

from tonle.config.server import HOST_NAME, ServerConfig
from tonle.edge.exchange import JSON, Exchange
from tonle.gateway.refusals import ForeignPage, NoLength, NotForm, NotJson
from tonle.protocol.multipart import FORM_TYPE, is_form

# Headers of replies that scripts of other origins may read.
EXPOSED = "x-request-id, x-cache, x-tonle-warnings, x-tonle-max-tokens, x-tonle-backend, x-tonle-chain, retry-after"

DASHBOARD_HEADER = "x-tonle-dashboard"  # a page of another origin cannot send it without a preflight, which is refused
READING = ("GET", "HEAD", "OPTIONS")  # change nothing, and a page of another site cannot read what they return
_MAX_SHOWN = 100  # letters of a header in a message
_CACHED = 256  # names that are remembered


class WebPages:
    def __init__(self, config: ServerConfig) -> None:
        self._origins = frozenset(config.cors_origins)
        self._hosts = frozenset(host.lower() for host in config.allowed_hosts)
        self._own_host = config.host.lower()
        self._loopback = config.loopback
        self._knows = functools.lru_cache(_CACHED)(self._is_known)

    @property
    def checks_hosts(self) -> bool:
        """Also where there are keys; then nothing else is checked."""
        return bool(self._hosts)

    def check(self, exchange: Exchange, *, has_keys: bool, is_dashboard: bool = False) -> None:
        """`is_dashboard`: the path is one of the dashboard's. Raises `ForeignPage`."""
        if self._hosts or (self._loopback and (is_dashboard or not has_keys)):
            self._check_host(exchange.header("host"), has_keys=has_keys)
        if not has_keys and exchange.method not in READING:
            self._check_origin(exchange)

    def _check_host(self, host: str, *, has_keys: bool) -> None:
        """A site may have its own name lead to this machine, so that its pages and this server have one origin."""
        if self._knows(host) or "*" in self._hosts:
            return
        name = _name(host)[:_MAX_SHOWN]
        shown, flag = (name, name) if HOST_NAME.fullmatch(name) else ("in its Host header", "NAME")
        instead = "" if has_keys or self._hosts else ", or give it a key (--api-key KEY)"
        raise ForeignPage(
            f"this server does not answer to the name {shown}: start it with --allowed-hosts {flag} if it should{instead}"
        )

    def _is_known(self, host: str) -> bool:
        name = _name(host)
        known = not name or name == "localhost" or name.endswith(".localhost") or name == self._own_host
        return known or name in self._hosts or _is_address(name)

    def _check_origin(self, exchange: Exchange) -> None:
        """Browsers name the page's origin in each request that may change something."""
        origin = exchange.headers.get("origin")
        if origin is None:
            if exchange.header("sec-fetch-site") in ("cross-site", "same-site"):
                raise ForeignPage("web pages of other sites may not ask this: this server has no keys")
            return
        if self._allows(origin) or origin.partition("://")[2].lower() == exchange.header("host").lower():
            return
        raise ForeignPage(
            f"web pages of {origin[:_MAX_SHOWN]} may not ask this: this server has no keys. Start it with --cors-origins "
            f"{origin[:_MAX_SHOWN]} if they may"
        )

    def _allows(self, origin: str) -> bool:
        return origin in self._origins or "*" in self._origins

    def answer_origin(self, exchange: Exchange) -> None:
        """CORS: the headers that let the page read the reply, and a preflight's."""
        origin = exchange.header("origin")
        if not self._allows(origin):
            return
        exchange.extra_headers += [
            ("access-control-allow-origin", origin), ("access-control-expose-headers", EXPOSED), ("vary", "Origin"),
        ]  # fmt: skip
        if exchange.method == "OPTIONS":
            exchange.extra_headers += [
                ("access-control-allow-methods", "GET, POST, PUT, PATCH, DELETE, OPTIONS"),
                ("access-control-allow-headers", exchange.header("access-control-request-headers") or "*"),
                ("access-control-max-age", "600"),
            ]


def check_own_page(exchange: Exchange) -> None:
    """For a request that relies on a cookie. Raises `ForeignPage`."""
    if not is_from_own_page(exchange):
        raise ForeignPage(
            "the session of the dashboard counts only for requests of its own page; programs send a key, as "
            "`Authorization: Bearer KEY`"
        )
    if exchange.method not in READING and exchange.header(DASHBOARD_HEADER) != "1":
        raise ForeignPage("with the session of the dashboard, this needs the header X-Tonle-Dashboard: 1")


def is_from_own_page(exchange: Exchange) -> bool:
    """Whether the browser says so. Only browsers are asked: other programs have no cookie unless they are given one."""
    site = exchange.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin" or (site == "none" and exchange.method in READING)
    # Over plain HTTP, browsers send it to this machine only. Then they name the page's origin in each request that may
    # change something, and the page itself (the dashboard's policy has them do so) in the others.
    origin = exchange.headers.get("origin")
    if origin is None and exchange.method in READING:
        scheme, _, rest = exchange.header("referer").partition("://")
        origin = f"{scheme}://{rest.partition('/')[0]}"
    return origin is not None and is_own_origin(origin, exchange)


def is_own_origin(origin: str, exchange: Exchange) -> bool:
    host = exchange.header("host").lower()
    return bool(host) and origin.partition("://")[2].lower() == host


def _length(exchange: Exchange) -> str:
    length = exchange.headers.get("content-length") or exchange.headers.get("transfer-encoding")
    if length is None:
        exchange.keep_alive = False  # what follows is perhaps the body, and no request
        raise NoLength("send the body with its length, in the header Content-Length, or chunked")
    return length


def check_form(exchange: Exchange) -> None:
    """For a path that takes files. A page can send a form elsewhere without a preflight, so there `WebPages.check` and the
    key must stop it. Raises `NoLength`, `NotForm`."""
    _length(exchange)
    kind = exchange.header("content-type")
    if not is_form(kind):
        told = f", not {kind.partition(';')[0].strip().lower()[:_MAX_SHOWN]}" if kind else ""
        raise NotForm(f"send a form with the file in it: with the header Content-Type: {FORM_TYPE}{told}")


def check_json(exchange: Exchange) -> None:
    """For a path that takes a JSON body. Raises `NoLength`, `NotJson`."""
    length, kind = _length(exchange), exchange.header("content-type")
    if kind == JSON or length == "0":
        return
    kind = kind.partition(";")[0].strip().lower()
    if kind != JSON and not (kind.startswith("application/") and kind.endswith("+json")):
        told = f", not {kind[:_MAX_SHOWN]}" if kind else ""
        raise NotJson(f"send JSON, and say so: with the header Content-Type: application/json{told}")


def _name(host: str) -> str:
    """Without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name, colon, _ = host.rpartition(":")
    return (name if colon else host).lower().removesuffix(".")


def _is_address(name: str) -> bool:
    """A site cannot have another address than its own as its name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
