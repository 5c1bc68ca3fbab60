"""A page of the dashboard for one key, as a person would open it.

Does: sign in through the form, collect what the browser complains about. Does not: start servers (`conftest.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTH, HEIGHT = 1400, 1000


@contextmanager
def signed_in(
    browser: Browser, url: str, key: str, page_name: str = "overview", *, width: int = WIDTH
) -> Iterator[Page]:
    """Fails at the end if a script failed, or the content security policy stopped something."""
    context = browser.new_context(viewport={"width": width, "height": HEIGHT})
    page = context.new_page()
    page.set_default_timeout(20_000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if is_problem(said.type, said.text) else None)
    try:
        page.goto(f"{url}/dashboard#/{page_name}")
        page.get_by_test_id("login-key").fill(key)
        page.get_by_test_id("login-submit").click()
        page.get_by_test_id(f"page-{page_name}").wait_for()
        yield page
        assert problems == []
    finally:
        context.close()


def is_problem(kind: str, text: str) -> bool:
    """A refused request is written to the console by the browser itself, and shown by the page."""
    return kind == "error" and "Failed to load resource" not in text


def go_to(page: Page, address: str) -> None:
    """`address` as after the #: requests, audit/ID."""
    page.evaluate("address => { window.location.hash = `#/${address}`; }", address)
    page.get_by_test_id(f"page-{address.partition('/')[0]}").wait_for()
