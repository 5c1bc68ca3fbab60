"""A page of the dashboard, as a person would open it.

Does: sign in through the form, collect what the browser complains about and where it sends requests. Does not: start servers
(`house.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTH, HEIGHT = 1400, 1000
# What a page shows when it has loaded; {id} is a request's.
READY = {
    "overview": "output-tokens", "requests": "requests-table", "backends": "backends", "models": "models", "keys": "keys",
    "usage": "usage-totals", "experiments": "experiment", "audit": "trail-state", "playground": "pane",
    "voice": "voice-disabled",
    "requests/{id}": "waterfall",
}  # fmt: skip


@contextmanager
def opened(
    browser: Browser, url: str, page_name: str = "overview", *, width: int = WIDTH, **how: Any
) -> Iterator[Page]:
    """Fails at the end if a script failed, the content security policy stopped something, or a request went elsewhere."""
    context = browser.new_context(viewport={"width": width, "height": HEIGHT}, **how)
    page = context.new_page()
    page.set_default_timeout(20_000)
    problems: list[str] = []
    elsewhere: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if is_problem(said.type, said.text) else None)
    page.on("request", lambda request: None if is_own(request.url, url) else elsewhere.append(request.url))
    try:
        page.goto(f"{url}/dashboard#/{page_name}")
        yield page
        assert problems == []
        assert elsewhere == []
    finally:
        context.close()


@contextmanager
def signed_in(
    browser: Browser, url: str, key: str, page_name: str = "overview", *, width: int = WIDTH, **how: Any
) -> Iterator[Page]:
    with opened(browser, url, page_name, width=width, **how) as page:
        sign_in(page, key)
        page.get_by_test_id(f"page-{page_name}").wait_for()
        yield page


def sign_in(page: Page, key: str) -> None:
    page.get_by_test_id("login-key").fill(key)
    page.get_by_test_id("login-submit").click()


def is_problem(kind: str, text: str) -> bool:
    """A refused request is written to the console by the browser itself, and shown by the page."""
    return kind == "error" and "Failed to load resource" not in text


def is_own(address: str, url: str) -> bool:
    return address.startswith((f"{url}/", "data:", "blob:"))


def go_to(page: Page, address: str) -> None:
    """`address` as after the #: requests, audit/ID."""
    page.evaluate("address => { window.location.hash = `#/${address}`; }", address)
    page.get_by_test_id(f"page-{address.partition('/')[0]}").wait_for()


def asked(page: Page, method: str, path: str, body: object = None) -> int:
    """The status of what a script of this page asks with its cookie, as the page itself would."""
    status: int = page.evaluate(
        """async ([method, path, body]) => (await fetch(path, {
             method, headers: {"X-Tonle-Dashboard": "1", "Content-Type": "application/json"},
             body: body === null ? undefined : JSON.stringify(body) })).status""",
        [method, path, body],
    )
    return status
