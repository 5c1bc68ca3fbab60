"""A page of another origin, open in a browser that is signed in to the dashboard, can read nothing and change nothing.

It comes from another port of the same host, where browsers send the cookie along (it is the same site to them), and from
another host name. The server without keys, which needs no cookie at all, is attacked in the same ways.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.house import House
from tests.browser.signed_in import asked, signed_in

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

HOSTS = ["127.0.0.1", "localhost"]
READ = ["/dashboard/api/session", "/dashboard/api/requests", "/dashboard/api/history?range=300", "/dashboard/api/usage",
        "/dashboard/api/usage.csv", "/dashboard/api/audit", "/admin/keys", "/admin/backends", "/v1/models",
        "/metrics", "/dashboard"]  # fmt: skip

# Tries to read `address` in every way a script has; returns what it got. /metrics is left out where it would be run as a
# script: it is none, and fails.
READER = """async (address) => {
  const got = [];
  for (const mode of ["cors", "no-cors"]) {
    try {
      const headers = mode === "cors" ? { "X-Tonle-Dashboard": "1" } : {};
      const response = await fetch(address, { mode, credentials: "include", headers });
      const text = await response.text();
      if (text) got.push(`${mode}: ${text.slice(0, 200)}`);
    } catch { /* refused */ }
  }
  const element = (tag, source) => new Promise((resolve) => {
    const made = document.createElement(tag);
    made.onload = () => resolve(`${tag} loaded`);
    made.onerror = () => resolve(null);
    made[source] = address;
    document.body.append(made);
  });
  got.push(await element("img", "src"));
  if (!address.endsWith("/metrics")) got.push(await element("script", "src"));
  return got.filter(Boolean);
}"""

# What a frame shows cannot be read: either it was refused or it is of another origin.
FRAME = """async (address) => {
  const frame = document.createElement("iframe");
  const loaded = new Promise((resolve) => { frame.onload = resolve; });
  frame.src = address;
  document.body.append(frame);
  await loaded;
  try { return frame.contentDocument === null ? null : frame.contentDocument.documentElement.innerHTML; } catch { return null; }
}"""

STREAM = """(address) => new Promise((resolve) => {
  const source = new EventSource(address, { withCredentials: true });
  source.onerror = () => { if (source.readyState === EventSource.CLOSED) resolve(null); };
  source.addEventListener("second", (event) => resolve(event.data));
})"""

# A form without a script's headers: the kind of request a page may send anywhere.
FORM = """([address, kind, name, value]) => {
  const form = document.createElement("form");
  Object.assign(form, { method: "POST", action: address, enctype: kind });
  const field = document.createElement("input");
  Object.assign(field, { name, value });
  form.append(field);
  document.body.append(form);
  form.submit();
}"""

SENDER = """async ([address, method, kind, body]) => {
  try {
    const simple = kind !== "application/json" && method === "POST";
    const response = await fetch(address, { method, credentials: "include", mode: simple ? "no-cors" : "cors",
      headers: { ...(kind ? { "Content-Type": kind } : {}), ...(simple ? {} : { "X-Tonle-Dashboard": "1" }) }, body });
    return response.type === "opaque" ? null : response.status;
  } catch { return null; }
}"""


class _Site(BaseHTTPRequestHandler):
    """A page without anything on it; what it does is told by a test."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>elsewhere</title><body>")

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site_port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture(scope="module")
def victim(browser: Browser, house: House) -> Iterator[Page]:
    """An admin who is signed in."""
    with signed_in(browser, house.url, house.admin_key) as page:
        yield page


@pytest.fixture
def elsewhere(victim: Page, site_port: int, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A page of the other origin in the same browser."""
    page = victim.context.new_page()
    page.set_default_timeout(20_000)
    page.goto(f"http://{request.param}:{site_port}/")
    yield page
    page.close()


def state(house: House) -> dict[str, Any]:
    """What the attacks below would change."""
    return {
        "draining": [backend["draining"] for backend in house.told("admin/backends")["backends"]],
        "keys": [(key["id"], key["revoked"]) for key in house.told("admin/keys")["keys"]],
        "experiments": [each["running"] for each in house.told("admin/experiments")["experiments"]],
        "models": [model["id"] for model in house.told("v1/models")["data"]],
        "answered": [row["id"] for row in house.told("dashboard/api/requests?status=ok")["requests"]],
    }


def changes(house: House) -> list[tuple[str, str, str]]:
    """Method, path, body."""
    (user,) = [key["id"] for key in house.told("admin/keys")["keys"] if key["name"] == "user"]
    lora = f'{{"lora_name": "theirs", "lora_path": "{house.adapter("delta-adapter")}", "x": "="}}'
    chat = f'{{"model": "{house.model}", "max_tokens": 1, "messages": [{{"role": "user", "content": "="}}]}}'
    return [
        ("POST", "/admin/backends/replica-a/drain", ""),
        ("POST", "/admin/experiments/same-model/stop", ""),
        ("POST", "/admin/keys", '{"name": "=", "scopes": ["admin"]}'),
        ("DELETE", f"/admin/keys/{user}", ""),
        ("POST", "/v1/load_lora_adapter", lora),
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/dashboard/api/audit/verify", ""),
        ("POST", "/dashboard/api/login", f'{{"key": "{house.reader_key}", "x": "="}}'),
        ("POST", "/dashboard/api/logout", ""),
    ]


def is_signed_in(victim: Page) -> bool:
    """Still the admin, and not the key that the other page would have them be."""
    return asked(victim, "GET", "/dashboard/api/requests") == 200 and bool(
        victim.evaluate("async () => (await (await fetch('/dashboard/api/session')).json()).can_admin")
    )


def submitted(elsewhere: Page, address: str, body: str) -> int:
    """The status of a form's answer, in a tab of its own. `body` has one "=": a form sends name=value."""
    name, _, value = body.partition("=")
    tab = elsewhere.context.new_page()
    tab.goto(elsewhere.url)
    with tab.expect_navigation(url=address, timeout=20_000) as going:
        tab.evaluate(FORM, [address, "text/plain", name, value])
    assert going.value is not None
    status = going.value.status
    tab.close()
    return status


@pytest.mark.parametrize("elsewhere", HOSTS, indirect=True)
def test_it_reads_nothing(elsewhere: Page, house: House) -> None:
    for url in (house.url, house.backend_url):
        for path in READ:
            assert elsewhere.evaluate(READER, f"{url}{path}") == [], path
        assert elsewhere.evaluate(FRAME, f"{url}/dashboard") is None
        assert elsewhere.evaluate(STREAM, f"{url}/dashboard/api/live") is None


@pytest.mark.parametrize("elsewhere", HOSTS, indirect=True)
def test_it_changes_nothing_by_scripts(elsewhere: Page, victim: Page, house: House) -> None:
    before = state(house)
    for method, path, body in changes(house):
        for kind in ("", "text/plain", "application/x-www-form-urlencoded", "application/json"):
            sent = [f"{house.url}{path}", method, kind, body or None]
            assert elsewhere.evaluate(SENDER, sent) is None, (path, kind)
    assert state(house) == before
    assert is_signed_in(victim)


@pytest.mark.parametrize("elsewhere", HOSTS, indirect=True)
def test_it_changes_nothing_by_forms(elsewhere: Page, victim: Page, house: House) -> None:
    before = state(house)
    for method, path, body in changes(house):
        if method == "POST":
            assert submitted(elsewhere, f"{house.url}{path}", body) >= 400, path
    assert state(house) == before
    assert is_signed_in(victim)


@pytest.mark.parametrize("elsewhere", HOSTS, indirect=True)
def test_a_server_without_keys_is_as_safe(elsewhere: Page, house: House) -> None:
    url = house.backend_url
    for path, body in (
        ("/v1/chat/completions", '{"max_tokens": 1, "messages": [{"role": "user", "content": "="}]}'),
        (
            "/v1/load_lora_adapter",
            f'{{"lora_name": "theirs", "lora_path": "{house.adapter("delta-adapter")}", "x": "="}}',
        ),
    ):
        for kind in ("", "text/plain", "application/json"):
            assert elsewhere.evaluate(SENDER, [f"{url}{path}", "POST", kind, body]) is None
        assert submitted(elsewhere, f"{url}{path}", body) in (403, 415)


@pytest.mark.parametrize("elsewhere", HOSTS, indirect=True)
def test_a_window_it_opens_tells_it_nothing(elsewhere: Page, house: House) -> None:
    context: BrowserContext = elsewhere.context
    with context.expect_page() as opening:
        elsewhere.evaluate("address => { window.theirs = window.open(address); }", f"{house.url}/dashboard")
    opening.value.wait_for_load_state()
    elsewhere.wait_for_function("() => window.theirs.closed")  # Cross-Origin-Opener-Policy: they do not know each other
    read = "() => { try { return window.theirs.document.body.innerHTML; } catch { return ''; } }"
    assert not elsewhere.evaluate(read)
    assert opening.value.evaluate("window.opener") is None
    opening.value.close()
