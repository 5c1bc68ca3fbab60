"""`Dashboard`: the table of the paths below /dashboard, the page and its files.

Does: find the handler of a path, give every reply its security headers, decide who may see a server without keys, refuse where
several processes share one port. Does not: check keys (`auth.py`) or read what is shown (`data.py`, `audit_pages.py`, `live.py`).
"""

from __future__ import annotations

from tonle.edge.exchange import Exchange
from tonle.errors import NotFound, TonleError
from tonle.gateway.api_keys.key import ANONYMOUS_CALLER, LOCAL_CALLER
from tonle.gateway.dashboard.audit_pages import AuditPages
from tonle.gateway.dashboard.data import DataPages
from tonle.gateway.dashboard.files import INDEX, StaticFiles
from tonle.gateway.dashboard.live import Live
from tonle.gateway.dashboard.login import LoginPages
from tonle.gateway.entry import NOTHING, Entry, Found, Handle
from tonle.gateway.explain_page import ExplainPage
from tonle.gateway.refusals import Forbidden, ForeignPage, NotServedHere
from tonle.gateway.services import Services
from tonle.gateway.web_pages import is_from_own_page

PREFIX = "/dashboard"
API = f"{PREFIX}/api"
STATIC = f"{PREFIX}/static/"
REQUEST = f"{API}/requests/"
RECORD = f"{API}/audit/"

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; font-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = (
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    (
        "referrer-policy",
        "same-origin",
    ),  # to this server only: it is how a GET over plain HTTP shows where it comes from
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
)
DATA_HEADERS = (*HEADERS, ("cache-control", "no-store"))
# What proxies and tunnels add; beginnings of names.
PROXY_HEADERS = ("forwarded", "x-forwarded-", "x-real-ip", "via", "cf-connecting-ip", "true-client-ip", "x-client-ip")

NO_FILES = "this installation lacks the files of the dashboard: install the package again"
NEEDS_KEY = (
    "the dashboard of a server that other machines can reach needs a key to log in with, and this server has none: start it "
    "with --admin-key KEY"
)
NEEDS_KEY_HERE = (
    "the dashboard of a server without keys is for this machine only: start the server with --admin-key KEY"
)
FOREIGN = "web pages of other sites may not see the dashboard"


class Dashboard:
    def __init__(self, services: Services, explain: ExplainPage) -> None:
        self._services = services
        self._is_on = services.config.dashboard
        local = services.local_metrics
        self._is_one_of_several = local is not None and local.shared
        self._files = StaticFiles() if self._is_on else None
        self.live = Live(services)
        self._login = LoginPages(services, self.admit_without_key)
        self._audit = AuditPages(services)
        self._data = DataPages(services, self._audit, explain)
        self._exact = self._table()
        self._static = Found(f"{STATIC}{{path}}", {"GET": Entry(None, self._file, is_probe=True)}, HEADERS)
        self._request = _data(f"{REQUEST}{{id}}", self._data.request)
        self._record = _data(f"{RECORD}{{id}}", self._audit.record)
        self._elsewhere = Found(PREFIX, {"GET": Entry(None, self._refuse), "POST": Entry(None, self._refuse)}, HEADERS)

    def _table(self) -> dict[str, Found]:
        login, data, audit = self._login, self._data, self._audit
        page = {"GET": Entry(None, self._page, is_probe=True)}
        found = [
            Found(PREFIX, page, HEADERS),
            Found(f"{PREFIX}/", page, HEADERS),
            Found(f"{API}/login", {"POST": Entry(None, login.log_in, takes_json=True)}, DATA_HEADERS),
            Found(f"{API}/logout", {"POST": Entry(None, login.log_out)}, DATA_HEADERS),
            Found(f"{API}/session", {"GET": Entry(None, login.session, is_probe=True)}, DATA_HEADERS),
            _data(f"{API}/live", self.live.stream),
            _data(f"{API}/history", data.history),
            _data(f"{API}/requests", data.requests),
            _data(f"{API}/usage", data.usage),
            _data(f"{API}/usage.csv", data.usage_csv),
            _data(f"{API}/audit", audit.search),
            Found(f"{API}/audit/verify", {"POST": Entry("dashboard", audit.verify, unless_keys=None)}, DATA_HEADERS),
        ]
        return {each.pattern: each for each in found}

    def find(self, path: str) -> Found:
        """`path` begins with `PREFIX`."""
        if not self._is_on:
            return NOTHING
        if self._is_one_of_several:
            return self._elsewhere
        if (found := self._exact.get(path)) is not None:
            return found
        if path.startswith(STATIC):
            return self._static
        if path.startswith(REQUEST):
            return self._request
        return self._record if path.startswith(RECORD) else NOTHING

    def admit_without_key(self, exchange: Exchange) -> None:
        """On a server that has no keys. Raises `Forbidden`, `ForeignPage`."""
        if not self._services.config.loopback:
            raise Forbidden(NEEDS_KEY)
        if not exchange.loopback or any(name.startswith(PROXY_HEADERS) for name in exchange.headers):
            raise Forbidden(NEEDS_KEY_HERE)
        headers = exchange.headers
        if ("sec-fetch-site" in headers or "origin" in headers) and not is_from_own_page(exchange):
            raise ForeignPage(FOREIGN)
        exchange.key = ANONYMOUS_CALLER if self._services.is_local else LOCAL_CALLER

    def stop(self) -> None:
        """The server takes nothing new: streams end."""
        self.live.stop()

    # -- the page

    async def _page(self, exchange: Exchange) -> None:
        try:
            if not self._services.auth.has_keys and not self._services.config.loopback:
                raise Forbidden(NEEDS_KEY)
            self._send_file(exchange, INDEX)
        except TonleError as error:  # a person reads it
            exchange.problem = error.message
            exchange.reply(f"{error.message}\n".encode(), status=error.status, content_type="text/plain; charset=utf-8")

    async def _file(self, exchange: Exchange) -> None:
        self._send_file(exchange, exchange.path.removeprefix(STATIC))

    def _send_file(self, exchange: Exchange, name: str) -> None:
        file = None if self._files is None else self._files.get(name)
        if file is None:
            raise NotFound(NO_FILES if name == INDEX else "the dashboard has no such file")
        file.reply(exchange)

    async def _refuse(self, exchange: Exchange) -> None:
        config = self._services.config
        raise NotServedHere(
            "this server has several front ends, and each sees only a part of the requests: the dashboard is served by a "
            f"gateway in front of it. Start one with `tonle gateway --backend http://127.0.0.1:{config.port}` and open its "
            "/dashboard"
        )


def _data(path: str, handle: Handle) -> Found:
    return Found(path, {"GET": Entry("dashboard", handle, is_probe=True, unless_keys=None)}, DATA_HEADERS)
